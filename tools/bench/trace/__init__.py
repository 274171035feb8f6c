"""Drafting a program from a reference that runs: its stages, states, loops and times, and what could not be seen.

The door to this folder: `trace_system`; see docs/tracing.md.
"""

from flashrt.bench.trace.apart import TraceSettings, refuse_other_draft, trace_system

__all__ = ["TraceSettings", "refuse_other_draft", "trace_system"]
