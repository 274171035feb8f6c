"""From stamps to metrics. Pure: every figure of a run comes from the times in here.

Source: ``spec/cost-model.md`` (offset, period), ``spec/measuring.md`` (what a run reports).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashrt.bench.drive import Recorder


@dataclass(frozen=True)
class Timeline:
    """One output of one run, element by element and batch by batch; all times in ns.

    Attributes
    ----------
    due_ns : [batches]
        When each batch's item was meant to be sent.
    visible_ns : [batches, elements of a batch]
        When each element had arrived in the harness.
    """

    output: str
    due_ns: np.ndarray
    visible_ns: np.ndarray

    @property
    def num_elements(self) -> int:
        """Elements (frames, samples, tokens) of a batch."""
        return int(self.visible_ns.shape[1])


@dataclass(frozen=True)
class Attribution:
    """Which elements belong to which batch, or why that cannot be said."""

    timelines: tuple[Timeline, ...]
    problems: tuple[str, ...] = field(default=())


def attribute(recorder: Recorder) -> Attribution:
    """Assign what was written to the batches that were sent.

    Where the system tags its writes, by tag; else evenly, in order: every batch owes the same number of elements.
    """
    num_batches = len(recorder.intended_ns)
    timelines, problems = [], []
    names = list(dict.fromkeys(write.output for write in recorder.written))
    if not names:
        problems.append("the system wrote nothing")
    for name in names:
        writes = [write for write in recorder.written if write.output == name]
        stamps: list[list[int]] = [[] for _ in range(num_batches)]
        if all(write.batch is not None for write in writes):
            for write in writes:
                if write.batch is not None and 0 <= write.batch < num_batches:
                    stamps[write.batch] += [write.at_ns] * write.num_elements
        else:
            flat = [write.at_ns for write in writes for _ in range(write.num_elements)]
            if not flat or len(flat) % num_batches:
                if len(writes) == num_batches:
                    flat, share = [write.at_ns for write in writes], 1
                else:
                    problems.append(f"output '{name}': {len(flat)} elements do not divide among {num_batches} batches")
                    continue
            share = len(flat) // num_batches
            stamps = [flat[j * share : (j + 1) * share] for j in range(num_batches)]
        sizes = {len(batch) for batch in stamps}
        if sizes == {0} or 0 in sizes:
            problems.append(f"output '{name}': batch {next(j for j, b in enumerate(stamps) if not b)} has no element")
            continue
        if len(sizes) > 1:
            # Unequal batches have no common display schedule: each is judged by its first and last element.
            stamps = [[batch[0], batch[-1]] for batch in stamps]
        timelines.append(Timeline(name, np.asarray(recorder.intended_ns), np.asarray(stamps)))
    return Attribution(tuple(timelines), tuple(problems))


def quantiles(values_ms: np.ndarray) -> dict[str, float]:
    """Return mean, p50, p90, p99 and max."""
    return {
        "mean": float(values_ms.mean()),
        "p50": float(np.percentile(values_ms, 50)),
        "p90": float(np.percentile(values_ms, 90)),
        "p99": float(np.percentile(values_ms, 99)),
        "max": float(values_ms.max()),
    }


def offsets_ms(timeline: Timeline, period_ns: float) -> np.ndarray:
    """Return visible time minus schedule for every element, in ms; shape [batches, elements].

    Batch j's item is sent when its last sub-interval has ended, at (j + 1) T, so its schedule began one period
    before it was due: element k is scheduled at jT + k T / N.
    """
    batches, elements = timeline.visible_ns.shape
    begin = int(timeline.due_ns[0]) - period_ns + np.arange(batches)[:, None] * period_ns
    schedule = begin + np.arange(elements)[None, :] * (period_ns / elements)
    return np.asarray((timeline.visible_ns - schedule) / 1e6)


def stalls(visible_ns: np.ndarray, interval_ns: float) -> tuple[int, float]:
    """Return (late elements, share of time frozen) of a player that starts with the first element and never drops.

    An element is late when it is not there one interval after the one before was shown, half an interval forgiven.
    """
    shown = float(visible_ns[0])
    late, frozen = 0, 0.0
    for at in visible_ns[1:]:
        due = shown + interval_ns
        if at > due + interval_ns / 2:
            late += 1
            frozen += float(at) - due
        shown = max(due, float(at))
    total = shown - float(visible_ns[0])
    return late, frozen / total if total > 0 else 0.0


def jitter_ms(arrivals_ns: np.ndarray, expected_ns: float) -> float:
    """Return RFC 3550's running jitter of batch completions against their expected spacing, in ms."""
    jitter = 0.0
    for gap in np.diff(arrivals_ns):
        jitter += (abs(float(gap) - expected_ns) - jitter) / 16
    return jitter / 1e6


def measure(timeline: Timeline, start: int, period_ms: float | None) -> dict[str, Any]:
    """Return the metrics of one output over the batches from `start` on; those before were warm-up.

    Parameters
    ----------
    period_ms
        The period at which items were sent; None when the scenario is closed loop, where the measured period
        stands in for it and offsets do not apply.
    """
    due, visible = timeline.due_ns[start:], timeline.visible_ns[start:]
    completed = visible.max(axis=1)
    latency = (completed - due) / 1e6
    measured_ns = float(completed[-1] - completed[0]) / (len(completed) - 1) if len(completed) > 1 else math.nan
    per_batch = timeline.num_elements
    open_loop_ns = period_ms * 1e6 if period_ms is not None else None
    spacing = open_loop_ns if open_loop_ns is not None else measured_ns
    found: dict[str, Any] = {
        "ttfo_ms": float((timeline.visible_ns[0, 0] - timeline.due_ns[0]) / 1e6),
        "first_output_ms": float(((visible[:, 0] - due) / 1e6).mean()),
        "latency_ms": quantiles(latency),
        "period_ms": measured_ns / 1e6,
        "fps": per_batch * 1e9 / measured_ns if measured_ns else math.nan,
        "jitter_ms": jitter_ms(completed, spacing) if len(completed) > 1 else None,
        "elements_per_batch": per_batch,
    }
    if len(completed) > 1:
        late, frozen = stalls(visible.reshape(-1), spacing / per_batch)
        found["deadline_misses"], found["stall_ratio"] = late, frozen
    if open_loop_ns is not None:
        offsets = offsets_ms(Timeline(timeline.output, due, visible), open_loop_ns)
        found["d0_ms"] = float(offsets.max())
        found["drift_ms_per_batch"] = _slope(offsets.max(axis=1))
    return found


def _slope(values: np.ndarray) -> float:
    if len(values) < 3:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def busy_shares(spans: Sequence[Mapping[str, Any]], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Return the share of the measured time that each operation was running."""
    busy: dict[str, int] = {}
    for span in spans:
        inside = min(int(span["end_ns"]), end_ns) - max(int(span["start_ns"]), begin_ns)
        if inside > 0:
            busy[str(span["name"])] = busy.get(str(span["name"]), 0) + inside
    length = max(end_ns - begin_ns, 1)
    return {name: time / length for name, time in sorted(busy.items())}


def interval_95(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % confidence interval of the mean over runs (Student's t), or None for fewer than two runs."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return None
    from scipy import stats

    mean, error = float(np.mean(finite)), float(stats.sem(finite))
    if error == 0:
        return [mean, mean]
    low, high = stats.t.interval(0.95, len(finite) - 1, loc=mean, scale=error)
    return [float(low), float(high)]


def combine(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (means over runs, confidence intervals), nested as the runs' metrics are; counts are added up."""
    means: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if run.get(key) is not None]
        if not values:
            means[key] = None
        elif isinstance(values[0], Mapping):
            means[key], intervals[key] = combine(values)
        elif key == "deadline_misses":
            means[key] = int(sum(values))
        elif key.startswith("peak_") or key == "max":
            means[key] = max(values)
        else:
            means[key] = float(np.mean(values))
            intervals[key] = interval_95([float(value) for value in values])
    return means, intervals
