"""Running deployments: workers, the channels between them, and the supervisor.

The door to this folder: `serve_deployment` in ``flashrt.runtime.serve``.
"""
