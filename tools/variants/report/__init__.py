"""A workspace as one self-contained page: programs, plans, variants, runs, and where they were measured."""

from flashrt.variants.report.page import Contents, Drawn, ProgramPart, environment, render_report
from flashrt.variants.report.pictures import (
    front_chart,
    gantt_chart,
    read_spans,
    read_timelines,
    run_charts,
    run_timeline,
)

__all__ = [
    "Contents",
    "Drawn",
    "ProgramPart",
    "environment",
    "front_chart",
    "gantt_chart",
    "read_spans",
    "read_timelines",
    "render_report",
    "run_charts",
    "run_timeline",
]
