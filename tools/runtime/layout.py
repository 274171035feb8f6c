"""From a deployment to what each worker is told: its operations in order, its devices, its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from flashrt.errors import Finding, InputError, listed
from flashrt.ir.flattening import INPUT, OUTPUT, FlatProgram
from flashrt.runtime.channels.plan import ChannelPlan, plan_channels


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker does.

    Attributes
    ----------
    name
        The worker's end of its channels.
    group, rank, degree
        Its group, its number in it, and how many workers the group has.
    devices
        Names of its own devices: one, or all of the group's where they are emulated.
    operations
        Operation paths in the order in which it runs them for a batch.
    part_ns
        Operation -> how long each of its chunks holds an emulated device; empty where the devices are real.
    lag_ns
        Number of a dataflow -> how long a value on it is under way between emulated devices.
    blocking
        Edges of the document that are run whole here although they could stream.
    takes_turns
        Operations whose chunks are made as the next one in the order asks for them, so that both advance together.
    asynchronous
        Operations, anywhere, whose last value is taken instead of waiting for this batch's.
    tiles
        Op -> into how many tiles its ranks cut its value.
    nan
        ``refuse`` or ``pass``.
    stagger
        Operation -> how many batches it is behind those that its worker begins; absent: 0.
    measured
        What a profile asks for (see `flashrt.runtime.measuring`); empty: nothing is measured.
    """

    name: str
    group: str
    rank: int
    degree: int
    devices: tuple[str, ...]
    operations: tuple[str, ...]
    part_ns: Mapping[str, Sequence[int]]
    lag_ns: Mapping[str, int]
    blocking: tuple[str, ...]
    takes_turns: tuple[str, ...]
    asynchronous: tuple[str, ...] = ()
    tiles: Mapping[str, int] = field(default_factory=dict)
    nan: str = "refuse"
    stagger: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> WorkerPlan:
        """Return the plan that `as_dict` described."""
        tuples = {
            key: tuple(record[key]) for key in ("devices", "operations", "blocking", "takes_turns", "asynchronous")
        }
        return WorkerPlan(**{**record, **tuples})

    @property
    def title(self) -> str:
        """The worker as messages call it."""
        rank = f", rank {self.rank}" if self.degree > 1 else ""
        return f"group '{self.group}'{rank} ({', '.join(self.operations)} on {', '.join(self.devices) or 'cpu'})"


@dataclass(frozen=True)
class Emulation:
    """The times that emulated devices take."""

    part_ns: Mapping[str, Sequence[int]]
    """Operation -> time of each chunk."""
    lag_ns: Mapping[int, int]
    """Number of a dataflow -> transfer."""
    num_batches: int = 1
    """How many batches are in flight at once at the smallest period."""
    period_s: float = 0.0
    """The smallest period."""


@dataclass(frozen=True)
class Layout:
    """All workers of a deployment and the channels between them."""

    workers: tuple[WorkerPlan, ...]
    channels: tuple[ChannelPlan, ...]
    window: int
    """How many batches may be in flight: enough to fill every worker, and no more."""
    depth: int = 0
    """The largest stagger: how many cycles after its first a batch's last operation may run."""
    period_s: float = 0.0
    """The period that emulated devices sustain; 0 where it is not known."""


@dataclass(frozen=True)
class Strategy:
    """What a deployment chooses beside the place of its operations."""

    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Group -> its operations in the order they run within a batch; may be left out for a group."""
    blocking: tuple[str, ...] = ()
    interleave: bool = True
    """Whether neighbours in the order that stream to each other take turns, where that cannot lock up."""
    asynchronous: frozenset[str] = frozenset()
    tiles: Mapping[str, int] = field(default_factory=dict)
    in_flight: int | None = None
    nan: str = "refuse"
    stagger: Mapping[str, int] = field(default_factory=dict)
    """Operation -> how many batches it is behind those that its worker begins."""


def lay_out(
    flat: FlatProgram,
    place: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
    strategy: Strategy | None = None,
    emulation: Emulation | None = None,
) -> Layout:
    """Return the workers of a deployment.

    Parameters
    ----------
    place
        Operation path -> group.
    groups
        Group -> device names; a group of several real devices has a worker for each.
    emulation
        Times, where the devices are emulated.

    Raises
    ------
    InputError
        A state is written in one group and used in another, or the orders contradict the dataflow.
    """
    strategy = strategy or Strategy()
    used = list(dict.fromkeys(place[operation.path] for operation in flat.operations))
    orders = {}
    for group in used:
        mine = [operation.path for operation in flat.operations if place[operation.path] == group]
        orders[group] = [path for path in strategy.order.get(group, ()) if path in mine] or mine
    findings = [*_shared_states(flat, place), *_contradictions(flat, orders, strategy)]
    findings += _wide_consumers(flat, place, groups, strategy) if emulation is None else []
    if findings:
        raise InputError(findings)
    blocking = frozenset(strategy.blocking)
    turns = _turns(flat, orders, blocking, strategy) if strategy.interleave else set()
    ranks = {
        group: [group, *(f"{group}#{rank}" for rank in range(1, len(groups[group])))] if emulation is None else [group]
        for group in used
    }
    depth = max(strategy.stagger.values(), default=0)
    filled = max(2 * len(orders) + 1, emulation.num_batches + 2 if emulation else 0)
    window = strategy.in_flight or filled + depth
    on_gpu = emulation is None and any(":" in name for names in groups.values() for name in names)
    channels = plan_channels(
        flat, place, ranks, blocking, window, separate_outputs=on_gpu, asynchronous=strategy.asynchronous
    )
    workers = []
    for group, ordered in orders.items():
        for rank, name in enumerate(ranks[group]):
            devices = tuple(groups[group]) if emulation else (groups[group][rank],)
            workers.append(
                WorkerPlan(
                    name, group, rank, len(ranks[group]), devices, tuple(ordered),
                    {path: tuple(emulation.part_ns[path]) for path in ordered} if emulation else {},
                    {str(number): lag for number, lag in emulation.lag_ns.items()} if emulation else {},
                    strategy.blocking, tuple(path for path in ordered if path in turns),
                    tuple(sorted(strategy.asynchronous)),
                    {flat.by_path[path].op: strategy.tiles[path] for path in ordered if path in strategy.tiles},
                    strategy.nan,
                    {path: strategy.stagger[path] for path in ordered if strategy.stagger.get(path)},
                )
            )  # fmt: skip
    return Layout(tuple(workers), channels, window, depth, emulation.period_s if emulation else 0.0)


def _precedence(flat: FlatProgram, orders: Mapping[str, Sequence[str]], strategy: Strategy) -> dict[str, set[str]]:
    """Return, for each operation, those that come after it in a batch: by dataflow, and next in its group's order."""
    after: dict[str, set[str]] = {operation.path: set() for operation in flat.operations}
    for flow in flat.dataflow:
        if flow.source != INPUT and flow.target != OUTPUT and flow.source not in strategy.asynchronous:
            after[flow.source].add(flow.target)
    for ordered in orders.values():
        for first, second in pairwise(ordered):
            if strategy.stagger.get(first, 0) == strategy.stagger.get(second, 0):
                after[first].add(second)
    return after


def _contradictions(flat: FlatProgram, orders: Mapping[str, Sequence[str]], strategy: Strategy) -> list[Finding]:
    """Find operations that wait for each other for ever.

    An arc from u to v of height h says that v of batch j waits for u of batch j − h; a cycle whose heights do not add
    up to more than zero can never begin (``spec/cost-model.md``, "Going past the bounds").
    """
    import networkx as nx  # takes longer to load than all else that a worker needs of this module

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(flat.by_path)
    heights: dict[tuple[str, str], int] = {}

    def join(first: str, second: str, height: int) -> None:
        heights[first, second] = min(height, heights.get((first, second), height))

    for flow in flat.dataflow:
        if flow.source != INPUT and flow.target != OUTPUT and flow.source not in strategy.asynchronous:
            join(flow.source, flow.target, 0)
    for ordered in orders.values():
        shifts = [strategy.stagger.get(path, 0) for path in ordered]
        for index, path in enumerate(ordered):
            wraps = index + 1 == len(ordered)
            follower = 0 if wraps else index + 1
            join(path, ordered[follower], shifts[index] - shifts[follower] + wraps)
    # A cycle of n arcs and height 0 weighs −n; of height 1 or more, more than 0.
    scale = len(graph) + 1
    for (first, second), height in heights.items():
        graph.add_edge(first, second, weight=height * scale - 1)
    graph.add_weighted_edges_from(("", path, 0) for path in flat.by_path)
    try:
        cycle = nx.find_negative_cycle(graph, "")[:-1]
    except nx.NetworkXError:
        return []
    group_of = {path: group for group, ordered in orders.items() for path in ordered}
    groups = dict.fromkeys(group_of[path] for path in cycle)
    return [
        Finding(
            f"order of {', '.join(f'group {group!r}' for group in groups)}",
            "an order in which every operation comes after those that it needs",
            f"each waits for the next: {', '.join(reversed(cycle))}",
            "change the order (or stagger), or leave it out; then call again", rule="order-deadlock",
        )
    ]  # fmt: skip


def _turns(
    flat: FlatProgram, orders: Mapping[str, Sequence[str]], blocking: frozenset[str], strategy: Strategy
) -> set[str]:
    """Return the operations that can take turns with the next one in their group's order.

    Two that take turns act as one: they may not when something in between needs the first and is needed by the
    second, such as an operation of another group; or when they work on different batches.
    """
    after = _precedence(flat, orders, strategy)
    merged = {path: path for path in after}
    found = set()
    for ordered in orders.values():
        for first, second in pairwise(ordered):
            between = [flow for flow in flat.outgoing.get(first, ()) if flow.target == second]
            streams = between and all(flow.chunked and not blocking & set(flow.labels) for flow in between)
            alike = strategy.stagger.get(first, 0) == strategy.stagger.get(second, 0)
            trial = {path: merged[first] if name == merged[second] else name for path, name in merged.items()}
            if streams and alike and _is_acyclic(after, trial):
                merged = trial
                found.add(first)
    return found


def _is_acyclic(after: Mapping[str, set[str]], merged: Mapping[str, str]) -> bool:
    together: dict[str, set[str]] = {name: set() for name in merged.values()}
    for path, followers in after.items():
        together[merged[path]] |= {merged[follower] for follower in followers} - {merged[path]}
    try:
        TopologicalSorter(together).prepare()
    except CycleError:
        return False
    return True


def _wide_consumers(
    flat: FlatProgram, place: Mapping[str, str], groups: Mapping[str, Sequence[str]], strategy: Strategy
) -> list[Finding]:
    """Find groups of several ranks that would each take the last value of an asynchronous operation by themselves."""
    return [
        Finding(
            f"asynchronous '{flow.source}', group '{place[flow.target]}'",
            f"one device for '{flow.target}', which takes its last value: ranks might take different ones",
            f"{len(groups[place[flow.target]])} devices", "put an operation on one device in between, or wait for it",
            rule="asynchronous-ranks",
        )
        for flow in flat.dataflow
        if flow.source in strategy.asynchronous and flow.target != OUTPUT and len(groups[place[flow.target]]) > 1
    ]  # fmt: skip


def _shared_states(flat: FlatProgram, place: Mapping[str, str]) -> list[Finding]:
    users: dict[str, dict[str, list[str]]] = {}
    written: set[str] = set()
    for operation in flat.operations:
        for instance, how in operation.accesses.items():
            users.setdefault(instance, {}).setdefault(place[operation.path], []).append(operation.path)
            written |= {instance} if "w" in how else set()
    return [
        Finding(
            f"state '{instance}'", "its operations in one group, since it lives there",
            "; ".join(f"group '{group}': {listed(paths)}" for group, paths in by_group.items()),
            "place them together, or give each operation its own state (per: iteration); then call again",
            rule="state-across-groups",
        )
        for instance, by_group in users.items()
        if len(by_group) > 1 and instance in written
    ]  # fmt: skip
