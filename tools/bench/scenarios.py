"""Open-loop scenarios: items at a period or at planned moments, and whether a run can be believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashrt.bench.drive import Recorder, open_loop
from flashrt.bench.metrics import Timeline, attribute, slope
from flashrt.bench.process import SystemProcess
from flashrt.bench.settings import RunSettings
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error

MIN_MEASURED_BATCHES = 5
MAX_LAG_SHARE = 0.05
MAX_DRIFT_SHARE = 0.02
NOISE_MS = 0.5
LEAD_NS = 20_000_000


def last_latency_ms(recorder: Recorder) -> float:
    """Return the latency of the last batch sent, to choose a period by."""
    if not recorder.sent_ns:
        raise input_error("argument 'period_ms'", "a period, or warm-up batches to choose one by", "neither", "say one")
    return (recorder.written[-1].at_ns - recorder.sent_ns[-1]) / 1e6


def paced(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    period_ms: float,
    settings: RunSettings,
    recorder: Recorder,
    duration_s: float | None = None,
) -> None:
    """Send items open loop at a period for `duration_s`, by default the settings' own."""
    count = max(int((duration_s or settings.duration_s) * 1e3 / period_ms), MIN_MEASURED_BATCHES + 1)
    chosen = items[:count]
    begin = monotonic_ns() + int(period_ms * 1e6)
    due = [begin + int(index * period_ms * 1e6) for index in range(len(chosen))]
    open_loop(process, chosen, per_batch, due, settings.timeout_s, recorder)


def planned(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    moments_s: np.ndarray,
    settings: RunSettings,
    recorder: Recorder,
) -> None:
    """Send items open loop at moments from now, as many as there are items for."""
    begin = monotonic_ns() + LEAD_NS
    due = [begin + round(moment * 1e9) for moment in moments_s[: len(items)]]
    open_loop(process, items[: len(due)], per_batch, due, settings.timeout_s, recorder)


def describe_load(recorder: Recorder, start: int, num_due: int | None) -> dict[str, Any]:
    """Return what was offered from batch `start` on, what of it was sent, how late, and what waited to be taken.

    Parameters
    ----------
    num_due
        How many items were due; None where the scenario sends as many as it can.
    """
    intended = np.asarray(recorder.intended_ns[start:])
    num_sent = len(intended)
    lags = lags_ms(recorder, start)
    blocked = (np.asarray(recorder.taken_ns[start:]) - np.asarray(recorder.sent_ns[start:])) / 1e6
    span_s = float(intended[-1] - intended[0]) / 1e9 if num_sent > 1 else 0.0
    return {
        "offered_hz": (num_sent - 1) / span_s if span_s else None,
        "num_due": num_sent if num_due is None else num_due,
        "num_sent": num_sent,
        "num_dropped": max((num_due or 0) - num_sent, 0),
        "client_lag_ms": {
            "p50": float(np.percentile(lags, 50)), "p99": float(np.percentile(lags, 99)), "max": float(lags.max()),
        } if num_sent else None,
        "refused_ms": float(blocked.max()) if len(blocked) else 0.0,
    }  # fmt: skip


def completions_ns(recorder: Recorder, first: int) -> np.ndarray:
    """Return when all outputs of each batch from `first` on were complete, in ns."""
    found = attribute(recorder)
    if found.problems or not found.timelines:
        raise input_error(
            "scenario 'max_rate'", "outputs that can be assigned to batches", "; ".join(found.problems),
            "correct the system and call again", rule="no-batches",
        )  # fmt: skip
    return np.asarray(np.max([line.completed_ns for line in found.timelines], axis=0)[first:])


def drift_ms(completions: np.ndarray, period_ms: float) -> float:
    """Return by how much the offset grows a batch, in ms; infinite for too few batches to say."""
    if len(completions) < 3:
        return math.inf
    return slope(completions / 1e6 - np.arange(len(completions)) * period_ms)


def grows(drift: float, period_ms: float, num_batches: int) -> bool:
    """Return whether an offset that grows by `drift` ms a batch shows that the period cannot be sustained.

    A growth that the clock's and the scheduler's noise explains over so few batches does not show it.
    """
    return drift > MAX_DRIFT_SHARE * period_ms and drift * num_batches > NOISE_MS


def lags_ms(recorder: Recorder, start: int) -> np.ndarray:
    """Return by how much each item was sent after its moment through the harness's own fault, in ms.

    While the system does not take an item, the next one cannot leave: that is the system's lateness, which its
    latency shows.
    """
    sent = np.asarray(recorder.sent_ns[start:])
    could = np.asarray(recorder.intended_ns[start:])
    if start < len(recorder.taken_ns):
        could = could.copy()
        could[1:] = np.maximum(could[1:], recorder.taken_ns[start : start + len(sent) - 1])
    return np.asarray((sent - could) / 1e6)


def lag_ms(recorder: Recorder, start: int) -> float:
    """Return by how much items were sent after their moment, p99 in ms."""
    lags = lags_ms(recorder, start)
    return float(np.percentile(lags, 99)) if len(lags) else 0.0


def judge(
    recorder: Recorder,
    start: int,
    period_ms: float | None,
    outputs: Mapping[str, Mapping[str, Any]],
    search: Mapping[str, Any],
    lines: Sequence[Timeline] = (),
    per_batch: Mapping[str, float] | None = None,
    gap_ms: float | None = None,
) -> list[str]:
    """Return why a run is not valid; empty when it is.

    Parameters
    ----------
    gap_ms
        The mean time between items where they have no period.
    """
    problems = [*_judge_amounts(recorder, per_batch), *_judge_order(lines)]
    measured = len(recorder.sent_ns) - start
    for name, found in outputs.items():
        rate = [float(found[key]) for key in ("fps", "period_ms") if key in found]
        if not all(math.isfinite(value) and value > 0 for value in rate):
            problems.append(f"output '{name}': no rate can be said of {rate}")
    if measured < MIN_MEASURED_BATCHES:
        problems.append(f"{measured} measured batches; at least {MIN_MEASURED_BATCHES} are needed: raise duration_s")
    # In closed loop an item's moment is when it is sent: there is nothing to be late for.
    lag = lag_ms(recorder, start)
    if lag > max(2.0, MAX_LAG_SHARE * (period_ms or gap_ms or 0.0)):
        problems.append(
            f"items were sent {lag:.1f} ms after their moment (p99): the harness was disturbed; measure again on a "
            "quieter machine, or with a longer period"
        )
    if period_ms is not None:
        drift = max((found.get("drift_ms_per_batch", 0.0) for found in outputs.values()), default=0.0)
        sustained = search["finite"] if search else not grows(drift, period_ms, measured)
        if not sustained:
            problems.append(
                f"the offset grows by {search.get('drift_ms', drift):.1f} ms a batch at a period of {period_ms:.1f} ms:"
                " the system does not sustain it"
            )
    return problems


def _judge_amounts(recorder: Recorder, per_batch: Mapping[str, float] | None) -> list[str]:
    """Return which outputs hold more or fewer elements than they owe."""
    num_batches = len(recorder.sent_ns)
    return [
        f"output '{name}': {count:g} elements a batch are owed, {recorder.elements[name]} came for {num_batches}"
        for name, count in (per_batch or {}).items()
        if recorder.elements[name] != round(count * num_batches)
    ]


def _judge_order(lines: Sequence[Timeline]) -> list[str]:
    """Return which outputs were there before their input was: no system that works on the input can do that."""
    found = []
    for line in lines:
        early = np.flatnonzero(line.visible_ns[:, 0] < line.due_ns)
        if len(early):
            first = f"batch {int(early[0])} came before its input was due"
            found.append(f"output '{line.output}': {first}, {len(early)} in all")
    return found
