"""The best order of every device for a fixed placement: least period, then least latency.

Branch and bound over pairs of operations that share a device and that neither dataflow nor earlier choices order. A
node of the search is H with the arcs of the pairs decided so far, so its largest cycle ratio and its longest walks
bound every completion. Where the search is cut, exchanges of neighbours improve the best order seen and the proof
says ``heuristic``.

Only orders within a batch are searched; orders that interleave different batches (modulo schedules, a deployment's
`stagger`) are taken as given: they belong to the search over deployments (`flashrt.analysis.search`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from flashrt.analysis.constraints import Arc, Constraints, device_sequences, resource_arcs
from flashrt.analysis.figures import Figures, completion, deadlock_error, find_figures
from flashrt.analysis.ratio import Walks, exceeds_ratio, find_zero_cycle, longest_walks, max_cycle_ratio, sort_arcs
from flashrt.errors import InputError

OrderProof = Literal["given", "optimal", "heuristic"]
DEFAULT_NODE_LIMIT = 2000
DEFAULT_WORK = 400_000
MIN_NODES = 4


@dataclass(frozen=True)
class Ordered:
    """An order of every device with the complete graph H and its figures."""

    order: dict[int, tuple[str, ...]]
    interleave: bool
    sequences: dict[int, tuple[int, ...]]
    """Device -> its parts in order."""
    arcs: tuple[Arc, ...]
    """All arcs of H."""
    figures: Figures
    proof: OrderProof
    choice: bool = False
    """Whether taking turns and op after op differ here, so that the document has to say which."""


def apply_order(
    constraints: Constraints, order: Mapping[int, Sequence[str]], interleave: bool | None, frames_per_batch: int | None,
    proof: OrderProof,
) -> Ordered:  # fmt: skip
    """Return H and its figures for one order; with `interleave` None, the better of taking turns and op after op.

    Raises
    ------
    InputError
        The order contradicts the dataflow: the deadlock's cycle is named.
    """
    best: Ordered | None = None
    refused = None
    both = [device_sequences(constraints, order, interleave=turns) for turns in (False, True)]
    choice = both[0] != both[1]
    fixed = {device: tuple(operations) for device, operations in order.items()}
    either = (False, True) if choice else (False,)
    for turns in either if interleave is None else (interleave and choice,):
        sequences = both[turns]
        arcs = (*constraints.arcs, *resource_arcs(constraints, sequences))
        cycle = find_zero_cycle(len(constraints.parts), arcs)
        if cycle is not None:
            refused = refused or deadlock_error(constraints, arcs, cycle)
            continue
        figures = find_figures(constraints, arcs, frames_per_batch)
        if best is None or figures.rank < best.figures.rank:
            best = Ordered(fixed, turns, sequences, arcs, figures, proof, choice)
    if best is None:
        assert refused is not None
        raise refused
    return best


@dataclass
class _Search:
    constraints: Constraints
    frames_per_batch: int | None
    interleave: bool | None
    node_limit: int
    paths: list[str] = field(init=False)
    bit: dict[str, int] = field(init=False)
    by_device: dict[int, tuple[str, ...]] = field(init=False)
    pairs: list[tuple[int, int]] = field(init=False)
    streaming: list[int] = field(init=False)
    busiest: int = field(init=False)
    work: dict[str, int] = field(init=False)
    tails: dict[str, int] = field(init=False)
    best: Ordered | None = None
    refused: InputError | None = None
    nodes: int = 0

    def __post_init__(self) -> None:
        self.by_device = self.constraints.placement.by_device
        self.paths = list(self.constraints.first)
        self.bit = {path: index for index, path in enumerate(self.paths)}
        shared = {
            (min(self.bit[a], self.bit[b]), max(self.bit[a], self.bit[b]))
            for operations in self.by_device.values()
            for index, a in enumerate(operations)
            for b in operations[index + 1 :]
        }
        self.pairs = sorted(shared)
        self.streaming = self._streaming_components()
        work = {path: sum(self.constraints.times[p] for p in self.constraints.parts_of(path)) for path in self.paths}
        self.work = work
        self.tails = self._find_tails()
        self.busiest = max((sum(work[path] for path in paths) for paths in self.by_device.values()), default=0)

    def _streaming_components(self) -> list[int]:
        """Number operations so that those joined by streaming edges, directly or not, have the same number."""
        number = list(range(len(self.paths)))
        for source, target in sorted(self.constraints.streams):
            old, new = number[self.bit[target]], number[self.bit[source]]
            number = [new if value == old else value for value in number]
        return number

    def dataflow_closure(self) -> list[int]:
        """Return, for each operation, a mask of those that must end before it ends in the same batch."""
        before = [0] * len(self.paths)
        for arc in self.constraints.arcs:
            source = self.bit[self.constraints.parts[arc.source].operation]
            target = self.bit[self.constraints.parts[arc.target].operation]
            if arc.height == 0 and source != target:
                decide(before, source, target)
        return before

    def undecided(self, before: Sequence[int]) -> tuple[int, int] | None:
        return next(((a, b) for a, b in self.pairs if not (before[b] >> a & 1 or before[a] >> b & 1)), None)

    def order_of(self, before: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Return the order of each device once all its pairs are decided."""
        found = {}
        for device, operations in self.by_device.items():
            own = sum(1 << self.bit[path] for path in operations)
            found[device] = tuple(sorted(operations, key=lambda path: (before[self.bit[path]] & own).bit_count()))
        return found

    def offer(self, before: Sequence[int]) -> None:
        order = self.order_of(before)
        try:
            candidate = apply_order(self.constraints, order, self.interleave, self.frames_per_batch, "optimal")
        except InputError as error:
            # Only where the document insists on taking turns; another order may still be free of deadlock.
            self.refused = error
            return
        if self.best is None or candidate.figures.rank < self.best.figures.rank:
            self.best = candidate

    def bounded(self, before: Sequence[int]) -> bool:
        """Return whether no completion of the decided pairs can be better than the best order seen."""
        if self.best is None:
            return False
        constraints, target = self.constraints, self.best.figures
        arcs = [*constraints.arcs]
        for path in self.paths:
            end = constraints.last(path)
            arcs.append(Arc(end, constraints.first[path], constraints.times[end], 1, 0, "device", ""))
        for a, b in self.pairs:
            if not (before[b] >> a & 1 or before[a] >> b & 1):
                continue
            u, v = (a, b) if before[b] >> a & 1 else (b, a)
            first, last = constraints.first, constraints.last
            ends = (last(self.paths[u]), last(self.paths[v]))
            arcs.append(Arc(ends[1], first[self.paths[u]], constraints.times[ends[1]], 1, 0, "device", ""))
            if self.streaming[u] != self.streaming[v]:
                arcs.append(Arc(ends[0], first[self.paths[v]], constraints.times[ends[0]], 0, 0, "device", ""))
        num_parts = len(constraints.parts)
        period = target.ratio.ratio
        numbers = sort_arcs(num_parts, arcs)
        if numbers is None or exceeds_ratio(num_parts, arcs, period, numbers):
            return True
        if self.busiest < period and max_cycle_ratio(num_parts, arcs, numbers).ratio < period:
            return False
        walks = longest_walks(num_parts, arcs, constraints.entries, period, numbers)
        assert walks is not None
        ends_at = [completion(constraints, walks, output.parts[-1]) for output in constraints.outputs]
        return max([*ends_at, *self.device_floors(walks)], default=Fraction(0)) >= target.latency

    def device_floors(self, walks: Walks) -> Iterator[Fraction]:
        """Yield lower bounds on the latency: earliest start on a device, its work, shortest way to an output."""
        for operations in self.by_device.values():
            shown = [path for path in operations if path in self.tails]
            if shown:
                heads = [walks.values[self.constraints.first[path]] or 0 for path in shown]
                work = sum(self.work[path] for path in shown)
                yield Fraction(min(heads), walks.scale) + work + min(self.tails[path] for path in shown)

    def _find_tails(self) -> dict[str, int]:
        """Return, for each operation that an output waits for, the least time from its end to the last output."""
        constraints = self.constraints
        numbers = sort_arcs(len(constraints.parts), constraints.arcs) or ()
        after: dict[int, int] = {output.parts[-1]: 0 for output in constraints.outputs}
        for number in reversed(numbers):
            arc = constraints.arcs[number]
            if arc.height == 0 and arc.target in after:
                gained = arc.lag + constraints.times[arc.target] + after[arc.target]
                after[arc.source] = max(after.get(arc.source, 0), gained)
        return {path: after[last] for path in self.paths if (last := constraints.last(path)) in after}

    def branch(self, before: list[int]) -> bool:
        """Search below a node; return False when the limit cut it."""
        self.nodes += 1
        if self.nodes > self.node_limit:
            return False
        pair = self.undecided(before)
        if pair is None:
            self.offer(before)
            return True
        if self.bounded(before):
            return True
        whole = True
        for source, target in (pair, pair[::-1]):
            following = list(before)
            decide(following, source, target)
            whole = self.branch(following) and whole
        return whole

    def climb(self, fixed: Sequence[int]) -> None:
        """Improve the best order by exchanging neighbours of one list of all operations, within the limit."""
        if self.best is None:
            return
        before = list(fixed)
        for operations in self.best.order.values():
            for u, v in pairwise(operations):
                decide(before, self.bit[u], self.bit[v])
        listing = sorted(range(len(before)), key=lambda index: before[index].bit_count())
        improved, offers = True, 0
        while improved:
            improved = False
            for index in range(len(listing) - 1):
                a, b = listing[index], listing[index + 1]
                if fixed[b] >> a & 1 or (min(a, b), max(a, b)) not in self.pairs:
                    continue
                offers += 1
                if offers > self.node_limit:
                    return
                listing[index], listing[index + 1] = b, a
                held = self.best
                self.offer(_masks_of(listing))
                if self.best is held:
                    listing[index], listing[index + 1] = a, b
                else:
                    improved = True


def _masks_of(listing: Sequence[int]) -> list[int]:
    before = [0] * len(listing)
    mask = 0
    for index in listing:
        before[index] = mask
        mask |= 1 << index
    return before


def decide(before: list[int], source: int, target: int) -> None:
    """Record that operation `source` ends before `target` ends, with all that follows from it."""
    gained = before[source] | 1 << source
    if before[target] & gained == gained:
        return
    for index in range(len(before)):
        if index == target or before[index] >> target & 1:
            before[index] |= gained


def limit_nodes(node_limit: int, work: int, size: int) -> int:
    """Return how many nodes the search may visit, so that nodes times size (pairs and parts) stays within `work`."""
    return max(MIN_NODES, min(node_limit, work // max(size, 1)))


def find_order(
    constraints: Constraints,
    frames_per_batch: int | None,
    *,
    node_limit: int = DEFAULT_NODE_LIMIT,
    work: int = DEFAULT_WORK,
) -> Ordered:
    """Return the given order of the placement's devices, completed with the best order of the others.

    Raises
    ------
    InputError
        The given orders contradict the dataflow.
    """
    document, given = constraints.placement.document, constraints.placement.order
    if constraints.placement.stagger:
        return _staggered(constraints, frames_per_batch)
    search = _Search(constraints, frames_per_batch, document.interleave, node_limit)
    search.node_limit = limit_nodes(node_limit, work, len(search.pairs) + len(constraints.parts))
    before = search.dataflow_closure()
    for operations in given.values():
        for a, b in pairwise(operations):
            decide(before, search.bit[a], search.bit[b])
    if any(mask >> index & 1 for index, mask in enumerate(before)):
        return apply_order(constraints, given, document.interleave, frames_per_batch, "given")
    if search.undecided(before) is None:
        open_devices = {device for device, operations in search.by_device.items() if len(operations) > 1}
        proof: OrderProof = "given" if given and open_devices <= set(given) else "optimal"
        return apply_order(constraints, search.order_of(before), document.interleave, frames_per_batch, proof)
    listing = sorted(range(len(before)), key=lambda index: (before[index].bit_count(), index))
    search.offer(_masks_of(listing))
    whole = search.branch(before)
    if not whole:
        search.climb(before)
    if search.best is None:
        assert search.refused is not None
        raise search.refused
    return search.best if whole else replace(search.best, proof="heuristic")


def _staggered(constraints: Constraints, frames_per_batch: int | None) -> Ordered:
    """Return the figures of a placement with staggers, whose devices with several of them have given orders.

    A device whose operations are staggered alike and that has no order keeps the program's.
    """
    placement = constraints.placement
    order = {device: placement.order.get(device, paths) for device, paths in placement.by_device.items()}
    return apply_order(constraints, order, placement.document.interleave, frames_per_batch, "given")
