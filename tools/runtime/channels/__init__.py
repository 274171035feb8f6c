"""Channels: how values travel between the processes of one deployment.

The door to this folder: `Endpoint` (one a process), made from a `Wiring` that `flashrt.runtime.channels.plan` lays out.
"""
