"""What is drawn of a record: a run from its own samples and trace, a plan's front, a deployment's steady state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.analysis.schedule import Schedule
from flashrt.bench.metrics import Timeline, gaps_ms, latencies_ms, offsets_ms
from flashrt.variants.report.charts import Mark, Series, Span, line_chart, scatter_chart, timeline_chart

SHOWN_BATCHES = 3
"""Of a run's timeline."""
MAX_SPANS = 400


def read_timelines(samples: Path, run: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return ``output, restart n`` -> the measured part of its stream, from a run's kept samples."""
    measured = run.get("batches_measured") or []
    found: dict[str, Timeline] = {}
    with np.load(samples, allow_pickle=False) as arrays:
        for restart, num_batches in enumerate(measured):
            due = arrays[f"run{restart}_intended_ns"]
            prefix = f"run{restart}_visible_ns_"
            for name in (key.removeprefix(prefix) for key in arrays.files if key.startswith(prefix)):
                line = Timeline(name, due, arrays[prefix + name], arrays[f"run{restart}_counts_{name}"])
                found[f"{name}, restart {restart + 1}"] = line.since(max(len(due) - int(num_batches), 0))
    return {name: line for name, line in found.items() if len(line.due_ns)}


def run_charts(run: Mapping[str, Any], lines: Mapping[str, Timeline]) -> list[tuple[str, str]]:
    """Return a run's drawings, each with what it shows: latency, offsets, times between elements, distributions."""
    period_ms = run.get("period_ms")
    waited = {name: latencies_ms(line) for name, line in lines.items()}
    between = {name: np.diff(np.sort(line.all_visible_ns)) / 1e6 for name, line in lines.items()}
    gaps = {name: gaps_ms(line) for name, line in lines.items()}
    over_batches = {"Latency from the intended send time": waited}
    if isinstance(period_ms, int | float) and period_ms > 0:
        over_batches["Offset of each batch from its schedule"] = {
            name: offsets_ms(line, period_ms * 1e6).max(axis=1) for name, line in lines.items()
        }
    charts = [
        (title, line_chart(title, "batch after warm-up", "ms", _lines(found), from_zero=title.startswith("Latency")))
        for title, found in over_batches.items()
    ]
    title = "Times between elements"
    charts.append((title, line_chart(title, "element after warm-up", "ms", _lines(between))))
    for title, label, found in (
        ("Latency, as a distribution", "latency, ms", waited),
        ("Times between completed batches, as a distribution", "ms", gaps),
    ):
        series = [
            Series(name, list(zip(np.sort(values), np.linspace(0, 1, len(values)), strict=True)), steps=True)
            for name, values in found.items()
            if len(values)
        ]
        charts.append((title, line_chart(title, label, "share of batches", series)))
    return [(title, chart) for title, chart in charts if chart]


def _lines(found: Mapping[str, np.ndarray]) -> list[Series]:
    return [Series(name, _numbered(values)) for name, values in found.items()]


def _numbered(values: np.ndarray) -> list[tuple[float, float]]:
    return [(float(number), float(value)) for number, value in enumerate(np.atleast_1d(values))]


def read_spans(trace: Path) -> list[Span]:
    """Return what the devices did for a few batches in the middle of a run's last restart, from its trace."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("pid") == 2 and event.get("name") == "thread_name"
    }
    whole = [event for event in events if event.get("ph") == "X" and event.get("pid") == 2]
    batches = sorted({int(event["args"].get("batch", 0)) for event in whole if event.get("cat") == "span"})
    middle = max((len(batches) - SHOWN_BATCHES) // 2, 0)
    shown = batches[middle : middle + SHOWN_BATCHES]
    picked = [event for event in whole if event.get("cat") == "span" and int(event["args"].get("batch", 0)) in shown]
    origin = min((float(event["ts"]) for event in picked), default=0.0)
    spans = []
    for event in sorted(picked, key=lambda event: (event["tid"], event["ts"]))[:MAX_SPANS]:
        begin = (float(event["ts"]) - origin) / 1e3
        length = float(event["dur"]) / 1e3
        batch = int(event["args"].get("batch", 0))
        spans.append(
            Span(str(names.get(event["tid"], event["tid"])), begin, begin + length, str(event["name"]),
                 f"{event['name']}, batch {batch}: {begin:.3f} to {begin + length:.3f} ms ({length:.3f} ms)",
                 shown.index(batch))
        )  # fmt: skip
    return spans


def run_timeline(spans: Sequence[Span], *, emulated: bool) -> str:
    """Return the drawing of what `read_spans` found."""
    marked = " (EMULATED devices)" if emulated else ""
    return timeline_chart(f"What the devices did{marked}", spans)


def front_chart(plan: Mapping[str, Any]) -> str:
    """Return a plan's front: period against latency, hollow where a point was left out."""
    marks = []
    for number, point in enumerate(plan.get("front") or [], 1):
        devices = point.get("num_devices")
        says = (
            f"point {number}: period {point['period_ms']:g} ms, latency {point['latency_ms']:g} ms, {devices} devices, "
            f"{point.get('proof')}"
        )
        marks.append(Mark(point["period_ms"], point["latency_ms"], f"{number}: {devices} dev.", says))
    for one in plan.get("left_out") or []:
        if "period_ms" in one and "latency_ms" in one:
            marks.append(
                Mark(one["period_ms"], one["latency_ms"], "", f"left out: period {one['period_ms']:g} ms, latency "
                     f"{one['latency_ms']:g} ms", "hollow")
            )  # fmt: skip
    return scatter_chart("The front: period against latency", "period, ms a batch", "latency, ms", marks)


def gantt_chart(title: str, schedule: Schedule) -> str:
    """Return a deployment's steady state; outlined: what binds the latency, hatched: what binds the period."""
    spans = []
    for bar in schedule.bars:
        chunk = f" chunk {bar.chunk} of {bar.num_chunks}" if bar.num_chunks > 1 else ""
        marks = {name for name, marked in (("path", bar.on_path), ("cycle", bar.on_cycle)) if marked}
        binds = "; binds the latency" * bar.on_path + "; binds the period" * bar.on_cycle
        spans.append(
            Span(f"device {bar.device}", bar.begin_ms, bar.end_ms, bar.operation.rpartition("/")[2],
                 f"{bar.operation}{chunk}, batch {bar.batch}: {bar.begin_ms:g} to {bar.end_ms:g} ms{binds}",
                 bar.batch, frozenset(marks))
        )  # fmt: skip
    lines = {batch * schedule.period_ms: f"batch {batch} is ready" for batch in range(schedule.num_batches + 1)}
    return timeline_chart(title, sorted(spans, key=lambda one: one.row), lines)
