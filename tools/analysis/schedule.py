"""The steady state of a deployment: when each part of a few batches runs on which device, at the smallest period.

Every part begins at its longest walk of the constraint graph (see `flashrt.analysis.ratio`), a period later for each
batch: this is where operations that start as early as they may end up, and what period and latency are read from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from flashrt.analysis.constraints import Arc
from flashrt.analysis.cost import DeploymentCost, to_ms
from flashrt.analysis.ratio import longest_walks

MAX_BATCHES = 24


@dataclass(frozen=True)
class Bar:
    """One part of one batch on one device; milliseconds from when batch 0 is ready."""

    device: int
    operation: str
    chunk: int
    """From 1."""
    num_chunks: int
    batch: int
    begin_ms: float
    end_ms: float
    on_path: bool
    """Whether it is on the path that binds the latency, of the one batch for which the path is marked."""
    on_cycle: bool
    """Whether it is on the cycle that binds the period."""


@dataclass(frozen=True)
class Transfer:
    """A value on its way between devices."""

    source: str
    target: str
    cause: str
    """The edge or state."""
    batch: int
    """The source's batch."""
    from_device: int
    to_device: int
    begin_ms: float
    end_ms: float
    on_path: bool


@dataclass(frozen=True)
class Schedule:
    """A few batches of a deployment's steady state, each from its first part to its last."""

    period_ms: float
    latency_ms: float
    num_batches: int
    """Batch j is ready at j periods."""
    path_batch: int
    """The batch whose latency the marked path binds."""
    devices: tuple[int, ...]
    bars: tuple[Bar, ...]
    transfers: tuple[Transfer, ...]


def find_schedule(cost: DeploymentCost, num_batches: int | None = None) -> Schedule:
    """Return the steady state at the smallest period.

    Parameters
    ----------
    num_batches
        How many batches; by default two more than are in flight at once, and always as many as the path that binds
        the latency goes through.
    """
    constraints, arcs, figures = cost.constraints, cost.ordered.arcs, cost.ordered.figures
    period = figures.ratio.ratio
    walks = longest_walks(len(constraints.parts), arcs, constraints.entries, period)
    assert walks is not None, "the smallest period is sustainable"
    begins = [Fraction(value or 0, walks.scale) for value in walks.values]
    path = [] if figures.latency_part is None else walks.path(arcs, figures.latency_part)
    on_path, walked, first, last = _path_batches(arcs, path, figures.latency_part)
    on_cycle = {arcs[number].source for number in figures.ratio.cycle}
    if num_batches is None:
        longest = max(
            (begin + time for begin, time in zip(begins, constraints.times, strict=True)), default=Fraction(0)
        )
        num_batches = min(math.ceil(longest / period) + 2 if period else 3, MAX_BATCHES)
    num_batches = max(num_batches, last - first + 1)
    path_batch = -first
    devices = constraints.placement.devices
    bars = []
    for batch in range(num_batches):
        for number, part in enumerate(constraints.parts):
            begin = begins[number] + batch * period
            marked = (number, batch - path_batch) in on_path
            bars += [
                Bar(device, part.operation, part.index + 1, part.count, batch, to_ms(begin),
                    to_ms(begin + constraints.times[number]), marked, number in on_cycle)
                for device in devices[part.operation]
            ]  # fmt: skip
    transfers = []
    for batch in range(num_batches):
        for number, arc in enumerate(arcs):
            if not arc.lag or not 0 <= batch + arc.height < num_batches:
                continue
            source, target = constraints.parts[arc.source].operation, constraints.parts[arc.target].operation
            near = [device for device in devices[target] if device not in devices[source]]
            end = begins[arc.source] + constraints.times[arc.source] + batch * period
            transfers.append(
                Transfer(source, target, arc.cause, batch, devices[source][0], near[0], to_ms(end),
                         to_ms(end + arc.lag), (number, batch - path_batch) in walked)
            )  # fmt: skip
    return Schedule(
        cost.t_min_ms, cost.latency_ms, num_batches, path_batch, tuple(constraints.placement.by_device), tuple(bars),
        tuple(transfers),
    )  # fmt: skip


Placed = set[tuple[int, int]]


def _path_batches(arcs: tuple[Arc, ...], path: list[int], end: int | None) -> tuple[Placed, Placed, int, int]:
    """Return (part, batch) and (arc, its source's batch) along a path that ends in batch 0, and the extreme batches."""
    if end is None:
        return set(), set(), 0, 0
    batch, parts, walked = 0, {(end, 0)}, set()
    for number in reversed(path):
        batch -= arcs[number].height
        parts.add((arcs[number].source, batch))
        walked.add((number, batch))
    batches = [batch for _, batch in parts]
    return parts, walked, min(batches), max(batches)
