"""Artefacts of a run: a trace for Perfetto and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench.drive import Recorder
from flashrt.bench.metrics import Attribution, gaps_ms, latencies_ms
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


def write_plot(path: Path, result: Mapping[str, Any], runs: Sequence[tuple[Attribution, int]]) -> None:
    """Write a PNG: latency over the batches, and the times between completions as a distribution."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for number, (attribution, start) in enumerate(runs):
        for line in attribution.timelines:
            part = line.since(start)
            if not len(part.due_ns):
                continue
            label = f"{line.output}, run {number + 1}"
            left.plot(latencies_ms(part), marker=".", label=label)
            gaps = np.sort(gaps_ms(part))
            if len(gaps):
                right.step(gaps, np.linspace(0, 1, len(gaps)), where="post", label=label)
    left.set(xlabel="batch after warm-up", ylabel="latency (ms)", title="Latency from the intended send time")
    right.set(xlabel="time between completed batches (ms)", ylabel="share of batches", title="Period")
    left.set_ylim(bottom=0)
    if left.lines:
        left.legend(fontsize=8)
    state = "valid" if result["valid"] else "NOT VALID"
    emulated = ", EMULATED devices" if result["emulated"] else ""
    figure.suptitle(f"{result['system']['reference']}  {result['scenario']}  {state}{emulated}", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
