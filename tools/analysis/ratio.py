"""Maximum cycle ratio and longest walks of a graph with integer weights and heights, exactly, with certificates.

Source: E. L. Lawler, *Combinatorial Optimization* (1976), chapter 3, for the test "is there a positive cycle at
this ratio?"; the ratio is raised to that of the cycle found until there is none (Newton's method on the ratio, which
never repeats a cycle), so the answer is the exact fraction of a real cycle and the potentials prove that no cycle is
better. Source of the model: ``spec/cost-model.md``, "Going past the bounds".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol


class WeightedArc(Protocol):
    """An arc of the graph: nodes are numbers from 0, weights and heights integers; every cycle's height is positive."""

    @property
    def source(self) -> int:
        """Node that the arc leaves."""

    @property
    def target(self) -> int:
        """Node that the arc enters."""

    @property
    def weight(self) -> int:
        """Time from the source's start to the target's, in ticks."""

    @property
    def height(self) -> int:
        """How many batches later the target is; negative where it works on a batch before the source's."""


@dataclass(frozen=True)
class CycleRatio:
    """The largest ratio of weight to height over all cycles, with its proof.

    `potentials` (one a node, in ticks times the ratio's denominator) satisfy, for every arc,
    ``potential[target] >= potential[source] + denominator * weight - numerator * height``.
    """

    ratio: Fraction
    cycle: tuple[int, ...]
    """Arc numbers of a cycle with exactly this ratio; empty when there is no cycle."""
    potentials: tuple[int, ...]


@dataclass(frozen=True)
class Walks:
    """Longest walks from the entries at one period; `None` where no walk arrives."""

    values: tuple[int | None, ...]
    """Length without the last node's own time, in ticks times `scale`."""
    arriving: tuple[int | None, ...]
    """Arc by which the longest walk arrives; None at an entry and where no walk arrives."""
    scale: int

    def path(self, arcs: Sequence[WeightedArc], node: int) -> list[int]:
        """Return the arc numbers of the longest walk to `node`, first arc first."""
        found: list[int] = []
        arc = self.arriving[node]
        while arc is not None:
            found.append(arc)
            arc = self.arriving[arcs[arc].source]
        return found[::-1]


def level_heights(num_nodes: int, arcs: Sequence[WeightedArc]) -> tuple[list[int], list[int] | None]:
    """Return heights without negative ones and with the same sum over every cycle, or a cycle of negative height.

    Counting each node's batches from another one shifts the heights of its arcs; the shifts are the shortest walks.
    """
    heights = [arc.height for arc in arcs]
    if min(heights, default=0) >= 0:
        return heights, None
    shifts = [0] * num_nodes
    parents: list[int | None] = [None] * num_nodes
    changed = True
    while changed:
        changed = False
        for number, arc in enumerate(arcs):
            if shifts[arc.source] + arc.height < shifts[arc.target]:
                shifts[arc.target] = shifts[arc.source] + arc.height
                parents[arc.target] = number
                changed = True
        cycle = _cycle_of_parents(arcs, parents) if changed else None
        if cycle is not None:
            return heights, cycle
    return [arc.height + shifts[arc.source] - shifts[arc.target] for arc in arcs], None


def topological_positions(num_nodes: int, arcs: Sequence[WeightedArc]) -> list[int] | None:
    """Return each node's place in an order that respects the arcs of height 0, or None when these have a cycle."""
    following: list[list[int]] = [[] for _ in range(num_nodes)]
    waiting = [0] * num_nodes
    heights, below = level_heights(num_nodes, arcs)
    if below is not None:
        return None
    for arc, height in zip(arcs, heights, strict=True):
        if height == 0:
            following[arc.source].append(arc.target)
            waiting[arc.target] += 1
    ready = [node for node in range(num_nodes) if waiting[node] == 0]
    positions = [-1] * num_nodes
    count = 0
    while ready:
        node = ready.pop()
        positions[node] = count
        count += 1
        for target in following[node]:
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    return positions if count == num_nodes else None


def find_zero_cycle(num_nodes: int, arcs: Sequence[WeightedArc]) -> list[int] | None:
    """Return the arc numbers of a cycle of height 0 or less, which means deadlock, or None."""
    outgoing: list[list[int]] = [[] for _ in range(num_nodes)]
    heights, below = level_heights(num_nodes, arcs)
    if below is not None:
        return below
    for number, arc in enumerate(arcs):
        if heights[number] == 0:
            outgoing[arc.source].append(number)
    state = [0] * num_nodes
    for root in range(num_nodes):
        if state[root]:
            continue
        trail: list[int] = []
        stack = [(root, iter(outgoing[root]))]
        state[root] = 1
        while stack:
            node, leaving = stack[-1]
            for number in leaving:
                target = arcs[number].target
                if state[target] == 1:
                    cycle = [*trail, number]
                    start = next(i for i, taken in enumerate(cycle) if arcs[taken].source == target)
                    return cycle[start:]
                if state[target] == 0:
                    state[target] = 1
                    trail.append(number)
                    stack.append((target, iter(outgoing[target])))
                    break
            else:
                state[node] = 2
                stack.pop()
                if trail:
                    trail.pop()
    return None


def sort_arcs(num_nodes: int, arcs: Sequence[WeightedArc]) -> list[int] | None:
    """Return arc numbers in an order of their sources that respects height 0, or None when there is a zero cycle.

    The functions below take it as `numbers`, so that several questions about one graph sort it once.
    """
    positions = topological_positions(num_nodes, arcs)
    if positions is None:
        return None
    return sorted(range(len(arcs)), key=lambda number: positions[arcs[number].source])


def _sorted_numbers(num_nodes: int, arcs: Sequence[WeightedArc], numbers: Sequence[int] | None) -> Sequence[int]:
    numbers = numbers if numbers is not None else sort_arcs(num_nodes, arcs)
    assert numbers is not None, "cycles of height 0 are refused before any ratio is asked for"
    return numbers


def _cycle_of_parents(arcs: Sequence[WeightedArc], parents: Sequence[int | None]) -> list[int] | None:
    seen = [0] * len(parents)
    for root in range(len(parents)):
        node = root
        while seen[node] == 0:
            seen[node] = root + 1
            arc = parents[node]
            if arc is None:
                break
            node = arcs[arc].source
        else:
            if seen[node] == root + 1:
                cycle: list[int] = []
                end = node
                while True:
                    arc = parents[node]
                    assert arc is not None
                    cycle.append(arc)
                    node = arcs[arc].source
                    if node == end:
                        return cycle[::-1]
    return None


def _relax(
    arcs: Sequence[WeightedArc], order: Sequence[int], values: list[int | None], numerator: int, denominator: int
) -> tuple[list[int | None], list[int] | None]:
    """Raise `values` to the longest walks; return the arriving arcs and a positive cycle when there is one."""
    steps = [
        (number, arcs[number].source, arcs[number].target,
         denominator * arcs[number].weight - numerator * arcs[number].height)
        for number in order
    ]  # fmt: skip
    parents: list[int | None] = [None] * len(values)
    while True:
        changed = False
        for number, source, target, cost in steps:
            value = values[source]
            if value is None:
                continue
            value += cost
            known = values[target]
            if known is None or value > known:
                values[target] = value
                parents[target] = number
                changed = True
        if not changed:
            return parents, None
        cycle = _cycle_of_parents(arcs, parents)
        if cycle is not None:
            return parents, cycle


def max_cycle_ratio(num_nodes: int, arcs: Sequence[WeightedArc], numbers: Sequence[int] | None = None) -> CycleRatio:
    """Return the largest Σ weight / Σ height over all cycles; 0 without a cycle.

    The graph must have no cycle of height 0 (see `find_zero_cycle`).
    """
    order = _sorted_numbers(num_nodes, arcs, numbers)
    best, cycle = Fraction(0), ()  # type: Fraction, tuple[int, ...]
    for number, arc in enumerate(arcs):
        if arc.source == arc.target and Fraction(arc.weight, arc.height) >= best:
            best, cycle = Fraction(arc.weight, arc.height), (number,)
    while True:
        values: list[int | None] = [0] * num_nodes
        _, found = _relax(arcs, order, values, best.numerator, best.denominator)
        if found is None:
            return CycleRatio(best, cycle, tuple(value or 0 for value in values))
        weight = sum(arcs[number].weight for number in found)
        best, cycle = Fraction(weight, sum(arcs[number].height for number in found)), tuple(found)


def exceeds_ratio(
    num_nodes: int, arcs: Sequence[WeightedArc], ratio: Fraction, numbers: Sequence[int] | None = None
) -> bool:
    """Return whether some cycle has a ratio above `ratio`; cheaper than `max_cycle_ratio`."""
    values: list[int | None] = [0] * num_nodes
    order = _sorted_numbers(num_nodes, arcs, numbers)
    return _relax(arcs, order, values, ratio.numerator, ratio.denominator)[1] is not None


def longest_walks(
    num_nodes: int,
    arcs: Sequence[WeightedArc],
    entries: Sequence[int],
    period: Fraction,
    numbers: Sequence[int] | None = None,
) -> Walks | None:
    """Return the longest walks from `entries` of Σ weight − period · Σ height, or None below the largest cycle ratio.

    Parameters
    ----------
    entries
        Nodes at which a walk may start, with length 0.
    period
        Batch period in ticks.
    """
    values: list[int | None] = [None] * num_nodes
    for node in entries:
        values[node] = 0
    order = _sorted_numbers(num_nodes, arcs, numbers)
    arriving, cycle = _relax(arcs, order, values, period.numerator, period.denominator)
    if cycle is not None:
        return None
    return Walks(tuple(values), tuple(arriving), period.denominator)
