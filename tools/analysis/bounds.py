"""The paper's lower bounds on period and latency, beside which the exact figures are reported."""

from __future__ import annotations

from fractions import Fraction

from flashrt.analysis.constraints import Constraints
from flashrt.analysis.figures import num_frames, visible_latency
from flashrt.analysis.ratio import longest_walks, max_cycle_ratio


def resource_bound(constraints: Constraints) -> tuple[int, int | None]:
    """Return the largest work W_r of a device, in ticks, and that device: no period is smaller.

    *Source*: ``papers/000``, Lemma 8.3.
    """
    work: dict[int, int] = {}
    for path, devices in constraints.placement.devices.items():
        for device in devices:
            work[device] = work.get(device, 0) + sum(constraints.times[p] for p in constraints.parts_of(path))
    busiest = max(work, key=lambda device: work[device], default=None)
    return (work[busiest], busiest) if busiest is not None else (0, None)


def recurrence_bound(constraints: Constraints) -> Fraction:
    """Return the largest cycle ratio through state that crosses batches, resources ignored, in ticks.

    *Source*: ``spec/cost-model.md``, "Going past the bounds": the bound that Lemma 8.3 misses.
    """
    return max_cycle_ratio(len(constraints.parts), constraints.arcs).ratio


def path_bound(constraints: Constraints, period: Fraction, frames_per_batch: int | None) -> Fraction | None:
    """Return the largest path bound on d0 at a period, in ticks; None where a recurrence forbids the period.

    For every path P from an entry to o(k): d0 ≥ w(P) + (1 − Λ(P))·T − kΔ. The longest walk is taken over dataflow
    and state without the devices' orders, so it covers all paths at once.

    *Source*: ``papers/000``, Lemma 8.2.
    """
    walks = longest_walks(len(constraints.parts), constraints.arcs, constraints.entries, period)
    if walks is None:
        return None
    return visible_latency(constraints, walks, period, num_frames(constraints, frames_per_batch)).d0
