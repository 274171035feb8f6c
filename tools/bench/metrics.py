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
from flashrt.bench.intervals import block_means, middle_95, one_a_restart_95, resample_means, resample_quantiles
from flashrt.bench.playback import deadlines, play, real_time_factor

MAX_SLOPE_POINTS = 400
# Over restarts these are added up, and of these the largest counts; of all others the mean.
COUNTED = frozenset({"deadline_misses", "misses", "freezes"})
LARGEST = frozenset({"max", "longest_run", "smallest_d0_ms"})


@dataclass(frozen=True)
class Timeline:
    """One output of one run, element by element and batch by batch; all times in ns.

    Attributes
    ----------
    due_ns : [batches]
        When each batch's item was meant to be sent.
    visible_ns : [batches, elements of the largest batch]
        When each element had arrived in the harness; a smaller batch repeats its last one.
    counts : [batches]
        How many elements each batch has.
    """

    output: str
    due_ns: np.ndarray
    visible_ns: np.ndarray
    counts: np.ndarray

    @property
    def num_elements(self) -> float:
        """Elements (frames, samples, tokens) of a batch, on average."""
        return float(self.counts.mean())

    @property
    def completed_ns(self) -> np.ndarray:
        """When each batch was complete; shape [batches]."""
        return np.asarray(self.visible_ns.max(axis=1))

    @property
    def all_visible_ns(self) -> np.ndarray:
        """When each element of the stream had arrived, in order."""
        columns = np.arange(self.visible_ns.shape[1])
        return np.asarray(self.visible_ns[columns[None, :] < self.counts[:, None]])

    def since(self, start: int) -> Timeline:
        """Return the part from batch `start` on."""
        return Timeline(self.output, self.due_ns[start:], self.visible_ns[start:], self.counts[start:])


@dataclass(frozen=True)
class Attribution:
    """Which elements belong to which batch, or why that cannot be said."""

    timelines: tuple[Timeline, ...]
    problems: tuple[str, ...] = field(default=())


def attribute(recorder: Recorder) -> Attribution:
    """Assign what was written to the batches that were sent.

    In this order: by the batch that a write names; by the ends of batches that the system tells; one write a batch,
    where there are as many; else evenly, every batch with the same number of elements.
    """
    num_batches = len(recorder.intended_ns)
    timelines, problems = [], []
    names = list(dict.fromkeys(write.output for write in recorder.written))
    if not names:
        problems.append("the system wrote nothing")
    for name in names:
        batches = _batches_of(recorder, name)
        if isinstance(batches, str):
            problems.append(f"output '{name}': {batches}")
            continue
        counts = np.bincount(batches, minlength=num_batches)
        if len(counts) > num_batches:
            problems.append(f"output '{name}': batch {len(counts) - 1} of {num_batches} batches")
        elif not counts.all():
            problems.append(f"output '{name}': batch {int(np.argmin(counts))} has no element")
        else:
            timelines.append(_timeline(recorder, name, batches, counts))
    return Attribution(tuple(timelines), tuple(problems))


def _batches_of(recorder: Recorder, name: str) -> np.ndarray | str:
    """Return the batch of every element of an output, or why it cannot be said."""
    writes = [(index, write) for index, write in enumerate(recorder.written) if write.output == name]
    sizes = np.asarray([write.num_elements for _, write in writes])
    num_batches, total = len(recorder.intended_ns), int(sizes.sum())
    if all(write.batch is not None and write.batch >= 0 for _, write in writes):
        return np.asarray([write.batch for _, write in writes]).repeat(sizes)
    if len(recorder.ends) >= num_batches > 0:
        ended = np.searchsorted(recorder.ends[:num_batches], [index for index, _ in writes], side="right")
        return np.asarray(ended.repeat(sizes))
    if len(writes) == num_batches:
        return np.arange(num_batches).repeat(sizes)
    share, left = divmod(total, num_batches) if num_batches else (0, 1)
    if left or not share:
        return (
            f"{total} elements do not divide among {num_batches} batches; where batches yield different amounts, call "
            "io.batch_done(batch) after each"
        )
    return np.arange(total) // share


def _timeline(recorder: Recorder, name: str, batches: np.ndarray, counts: np.ndarray) -> Timeline:
    writes = [write for write in recorder.written if write.output == name]
    stamps = np.asarray([write.at_ns for write in writes]).repeat([write.num_elements for write in writes])
    flat = stamps[np.argsort(batches, kind="stable")]
    # A smaller batch repeats its last element, so that its row is as wide as the largest one's.
    columns = np.minimum(np.arange(int(counts.max()))[None, :], counts[:, None] - 1)
    begins = np.cumsum(counts) - counts
    return Timeline(name, np.asarray(recorder.intended_ns), flat[begins[:, None] + columns], counts)


def quantiles(values_ms: np.ndarray) -> dict[str, float]:
    """Return mean, p50, p90, p99, p99.9 and max."""
    return {
        "mean": float(values_ms.mean()),
        "p50": float(np.percentile(values_ms, 50)),
        "p90": float(np.percentile(values_ms, 90)),
        "p99": float(np.percentile(values_ms, 99)),
        "p99.9": float(np.percentile(values_ms, 99.9)),
        "max": float(values_ms.max()),
    }


def offsets_ms(timeline: Timeline, period_ns: float) -> np.ndarray:
    """Return visible time minus schedule for every element, in ms; shape [batches, elements].

    Batch j's item is sent when its last sub-interval has ended, at (j + 1) T, so its schedule began one period
    before it was due: element k of N is scheduled at jT + k T / N.
    """
    batches, columns = timeline.visible_ns.shape
    begin = int(timeline.due_ns[0]) - period_ns + np.arange(batches)[:, None] * period_ns
    position = np.minimum(np.arange(columns)[None, :], timeline.counts[:, None] - 1)
    schedule = begin + position * (period_ns / timeline.counts[:, None])
    return np.asarray((timeline.visible_ns - schedule) / 1e6)


def stalls(visible_ns: np.ndarray, interval_ns: float) -> tuple[int, float]:
    """Return (late elements, share of time frozen) of a player that starts with the first element and never drops.

    An element is late when it is not there one interval after the one before was shown, half an interval forgiven.
    """
    steps = np.arange(len(visible_ns)) * interval_ns
    # Shown as soon as it is there, and no sooner than one interval after the one before.
    shown = np.maximum.accumulate(visible_ns - visible_ns[0] - steps) + steps
    wait = visible_ns[1:] - visible_ns[0] - shown[:-1] - interval_ns
    late = wait > interval_ns / 2
    total = float(shown[-1])
    return int(late.sum()), float(wait[late].sum()) / total if total > 0 else 0.0


def jitter_ms(arrivals_ns: np.ndarray, expected_ns: float) -> float:
    """Return RFC 3550's running jitter of batch completions against their expected spacing, in ms."""
    jitter = 0.0
    for gap in np.diff(arrivals_ns):
        jitter += (abs(float(gap) - expected_ns) - jitter) / 16
    return jitter / 1e6


def measure(
    timeline: Timeline,
    start: int,
    period_ms: float | None,
    *,
    stated_d0_ms: float | None = None,
    media_rate: float | None = None,
) -> dict[str, Any]:
    """Return the metrics of one output over the batches from `start` on; those before were warm-up.

    Parameters
    ----------
    period_ms
        The period at which items were sent; None when the scenario is closed loop, where the measured period
        stands in for it and offsets do not apply.
    stated_d0_ms
        The offset at which misses are counted.
    media_rate
        Elements in a second of the output's medium.
    """
    part = timeline.since(start)
    completed, latency = part.completed_ns, latencies_ms(part)
    num_gaps = len(completed) - 1
    measured_ns = float(completed[-1] - completed[0]) / num_gaps if num_gaps else math.nan
    open_loop_ns = period_ms * 1e6 if period_ms is not None else None
    spacing = open_loop_ns if open_loop_ns is not None else measured_ns
    found: dict[str, Any] = {
        "ttfo_ms": float((timeline.visible_ns[0, 0] - timeline.due_ns[0]) / 1e6),
        "first_output_ms": float(first_outputs_ms(part).mean()),
        "latency_ms": quantiles(latency),
        "period_ms": measured_ns / 1e6,
        "fps": float(part.counts[1:].mean()) * 1e9 / measured_ns if num_gaps and measured_ns else math.nan,
        "jitter_ms": jitter_ms(completed, spacing) if num_gaps else None,
        "elements_per_batch": part.num_elements,
    }
    if num_gaps:
        stream = part.all_visible_ns
        late, frozen = stalls(stream, spacing / part.num_elements)
        found["deadline_misses"], found["stall_ratio"] = late, frozen
        found |= play(stream, spacing / part.num_elements, spacing)
        found["rtf"] = real_time_factor(found["fps"], media_rate)
    if open_loop_ns is not None:
        offsets = offsets_ms(part, open_loop_ns)
        found["d0_ms"] = float(offsets.max())
        found["drift_ms_per_batch"] = slope(offsets.max(axis=1))
        own = np.arange(offsets.shape[1])[None, :] < part.counts[:, None]
        found["deadline"] = deadlines(offsets[own], stated_d0_ms)
    return found


def latencies_ms(timeline: Timeline) -> np.ndarray:
    """Return each batch's time from its intended send to its last element, in ms."""
    return np.asarray((timeline.completed_ns - timeline.due_ns) / 1e6)


def first_outputs_ms(timeline: Timeline) -> np.ndarray:
    """Return each batch's time from its intended send to its first element, in ms."""
    return np.asarray((timeline.visible_ns[:, 0] - timeline.due_ns) / 1e6)


def gaps_ms(timeline: Timeline) -> np.ndarray:
    """Return the times between completed batches, in ms."""
    return np.asarray(np.diff(timeline.completed_ns) / 1e6)


def slope(values: np.ndarray) -> float:
    """Return by how much a series grows a step (Theil-Sen: a single hiccup does not tilt it); 0 below three values."""
    if len(values) < 3:
        return 0.0
    from scipy.stats import theilslopes

    # The estimator looks at all pairs: a long series is thinned by the medians of neighbours.
    size = -(-len(values) // MAX_SLOPE_POINTS)
    whole = len(values) // size * size
    thinned = np.median(np.asarray(values[:whole], float).reshape(-1, size), axis=1)
    return float(theilslopes(thinned)[0]) / size if len(thinned) > 1 else 0.0


def busy_shares(spans: Sequence[Mapping[str, Any]], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Return the share of the measured time that each operation was running."""
    busy: dict[str, int] = {}
    for span in spans:
        inside = min(int(span["end_ns"]), end_ns) - max(int(span["start_ns"]), begin_ns)
        if inside > 0:
            busy[str(span["name"])] = busy.get(str(span["name"]), 0) + inside
    length = max(end_ns - begin_ns, 1)
    return {name: time / length for name, time in sorted(busy.items())}


def combine(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (means over runs, intervals from one value a run), nested as the runs' metrics are; counts are added."""
    means: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if run.get(key) is not None]
        if not values:
            means[key] = None
        elif isinstance(values[0], Mapping):
            means[key], intervals[key] = combine(values)
        elif key in COUNTED:
            means[key] = int(sum(values))
        elif key.startswith("peak_") or key in LARGEST:
            means[key] = max(values)
        else:
            means[key] = float(np.mean(values))
            intervals[key] = one_a_restart_95([float(value) for value in values])
    return means, intervals


def samples_of(parts: Sequence[Timeline]) -> dict[str, list[list[float]]]:
    """Return what a comparison resamples: figure -> for every restart the means of blocks of batches.

    `parts` are one output's measured batches, one a restart.
    """
    return {
        "period_ms": [
            [round(mean, 6) for mean in block_means(gaps_ms(part))] for part in parts if len(part.counts) > 1
        ],
        "latency_ms.mean": [[round(mean, 6) for mean in block_means(latencies_ms(part))] for part in parts],
        "first_output_ms": [[round(mean, 6) for mean in block_means(first_outputs_ms(part))] for part in parts],
    }


def batch_intervals(parts: Sequence[Timeline], samples: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return the intervals of the figures that every batch contributes to, nested as the metrics are."""
    latency = dict(
        zip(
            ("p50", "p90", "p99"),
            (middle_95(draws) for draws in resample_quantiles([latencies_ms(p) for p in parts], (50, 90, 99)).T),
            strict=True,
        )
    )
    found: dict[str, Any] = {
        "latency_ms": {"mean": middle_95(resample_means(samples["latency_ms.mean"])), **latency},
        "first_output_ms": middle_95(resample_means(samples["first_output_ms"])),
    }
    if samples["period_ms"]:
        periods = resample_means(samples["period_ms"])
        elements = float(np.mean([part.counts[1:].mean() for part in parts if len(part.counts) > 1]))
        found["period_ms"], found["fps"] = middle_95(periods), middle_95(elements * 1e3 / periods)
    return found
