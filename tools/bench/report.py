"""Artefacts of a run: a trace for Perfetto, and plots as PNG and as a page of HTML."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.analysis.search.pages import page
from flashrt.bench.drive import Recorder
from flashrt.bench.metrics import Attribution, Timeline, gaps_ms, latencies_ms, offsets_ms
from flashrt.runtime.trace import trace_events


def write_trace(
    path: Path, recorder: Recorder, activities: Sequence[Mapping[str, Any]], attribution: Attribution
) -> None:
    """Write the Trace Event format that Perfetto and Chrome open; times in µs from the first item sent."""
    origin = min(recorder.sent_ns) if recorder.sent_ns else 0
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "buffers"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "system"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "inputs"}},
    ]
    for batch, sent in enumerate(recorder.sent_ns):
        events.append({"ph": "i", "pid": 1, "tid": 1, "s": "t", "name": f"batch {batch}", "ts": (sent - origin) / 1e3})
    for row, line in enumerate(attribution.timelines, start=2):
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": line.output}})
        for batch, (due, visible) in enumerate(zip(line.due_ns, line.visible_ns, strict=True)):
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": row,
                    "name": f"batch {batch}",
                    "ts": (int(due) - origin) / 1e3,
                    "dur": (int(visible[-1]) - int(due)) / 1e3,
                    "args": {"first_output_ms": (int(visible[0]) - int(due)) / 1e6},
                }
            )
    events += trace_events(activities, origin, 2)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_plots(png: Path, html: Path, result: Mapping[str, Any], runs: Sequence[tuple[Attribution, int]]) -> None:
    """Draw a run once, as PNG and in a page of HTML: what a reader asks first, and what the mean hides.

    Latency over the batches, times between elements, both as distributions, and every batch's offset against the
    schedule that its items were meant to keep.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Laid out by hand: matplotlib's own layouts take longer than the drawing.
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7))
    figure.subplots_adjust(left=0.055, right=0.985, bottom=0.08, top=0.9, wspace=0.2, hspace=0.32)
    (latency, between, offsets), (latency_share, between_share, text) = axes
    for number, (attribution, start) in enumerate(runs):
        for line in attribution.timelines:
            part = line.since(start)
            if len(part.due_ns):
                _draw_run(axes, part, f"{line.output}, run {number + 1}", result.get("period_ms"))
    latency.set(xlabel="batch after warm-up", ylabel="ms", title="Latency from the intended send time")
    between.set(xlabel="element after warm-up", ylabel="ms", title="Times between elements")
    offsets.set(xlabel="batch after warm-up", ylabel="ms", title="Worst offset of a batch against its schedule")
    latency_share.set(xlabel="latency, ms", ylabel="share of batches", ylim=(0, 1))
    between_share.set(xlabel="between completed batches, ms", ylabel="share of batches", ylim=(0, 1))
    latency.set_ylim(bottom=0)
    if latency.lines:
        latency.legend(fontsize=8)
    text.axis("off")
    text.text(0, 1, "\n".join(_figures(result)), va="top", family="monospace", fontsize=9)
    title = says(result)
    figure.suptitle(title, fontsize=10)
    figure.savefig(png, dpi=110)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    pyplot.close(figure)
    html.write_text(_page(title, result, drawing.getvalue()), encoding="utf-8")


def _draw_run(axes: Any, part: Timeline, label: str, period_ms: float | None) -> None:
    (latency, between, offsets), (latency_share, between_share, _) = axes
    waited, gaps = latencies_ms(part), np.sort(gaps_ms(part))
    latency.plot(waited, marker=".", label=label)
    seen = np.sort(part.all_visible_ns)
    between.plot(np.diff(seen) / 1e6, linewidth=0.8, label=label)
    if period_ms:
        offsets.plot(offsets_ms(part, period_ms * 1e6).max(axis=1), marker=".", label=label)
    latency_share.step(np.sort(waited), np.linspace(0, 1, len(waited)), where="post", label=label)
    if len(gaps):
        between_share.step(gaps, np.linspace(0, 1, len(gaps)), where="post", label=label)


def says(result: Mapping[str, Any]) -> str:
    """Return what a run's figures are of, and whether they stand."""
    state = "valid" if result["valid"] else "NOT VALID"
    emulated = ", EMULATED devices" if result["emulated"] else ""
    return f"{result['system']['reference']}, {result['scenario']}: {state}{emulated}, {result['measured']}"


def _figures(result: Mapping[str, Any]) -> list[str]:
    """Return the figures that stand beside the plots, a line each."""
    waited = result.get("latency_ms") or {}
    rows = [("fps", result.get("fps")), ("period, ms", result.get("period_ms")), ("d0, ms", result.get("d0_ms")),
            ("first output, ms", result.get("first_output_ms")),
            *((f"latency {name}, ms", waited.get(name)) for name in ("p50", "p90", "p99", "max")),
            ("start-up, ms", result.get("startup_ms"))]  # fmt: skip
    return [f"{name:<18} {value:10.2f}" for name, value in rows if isinstance(value, int | float)]


def _page(title: str, result: Mapping[str, Any], svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    lists = [("Why it is not valid", result["reasons"]), ("Notes", result["notes"])]
    parts = [f"<figure>{svg}</figure>", f"<pre>{escape(chr(10).join(_figures(result)))}</pre>"]
    for heading, lines in lists:
        if lines:
            items = "".join(f"<li>{escape(str(line))}</li>" for line in lines)
            parts.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    records = {key: result.get(key) for key in ("guards", "rechecked", "settings", "environment")}
    parts.append(f"<h2>How it was measured</h2><pre>{escape(json.dumps(records, indent=1, default=str))}</pre>")
    return page(title, parts)
