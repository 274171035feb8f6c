"""From a deployment to what each worker is told: its operations in order, its devices, its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from flashrt.errors import Finding, InputError, listed
from flashrt.ir.flatten import INPUT, OUTPUT, FlatProgram


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker does.

    Attributes
    ----------
    hold_ms
        Operation -> time that it holds an emulated device for a batch; empty where the devices are real.
    blocking
        Edges of the document that are run whole here although they could stream.
    takes_turns
        Operations whose chunks are made as the next one in the order asks for them, so that both advance together.
    """

    group: str
    devices: tuple[str, ...]
    operations: tuple[str, ...]
    hold_ms: Mapping[str, float]
    blocking: tuple[str, ...]
    takes_turns: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """All workers of a deployment and who sends to whom."""

    workers: tuple[WorkerPlan, ...]
    links: tuple[tuple[str, str], ...]
    """(sending group, receiving group)."""
    window: int
    """How many batches may be in flight: enough to fill every worker, and no more."""


def lay_out(
    flat: FlatProgram,
    place: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
    order: Mapping[str, Sequence[str]],
    hold_ms: Mapping[str, float],
    blocking: Sequence[str],
    *,
    emulated: bool,
    interleave: bool = True,
) -> Layout:
    """Return the workers of a deployment.

    Parameters
    ----------
    place
        Operation path -> group.
    groups
        Group -> device names.
    order
        Group -> its operations in the order they run within a batch; may be left out for a group.
    hold_ms
        Emulated devices: operation path -> time at its group's degree.
    interleave
        Whether neighbours in the order that stream to each other take turns, where that cannot lock up.

    Raises
    ------
    InputError
        A state is written in one group and used in another, a group of real devices has several, or the orders
        contradict the dataflow.
    """
    used = list(dict.fromkeys(place[operation.path] for operation in flat.operations))
    orders = {}
    for group in used:
        mine = [operation.path for operation in flat.operations if place[operation.path] == group]
        orders[group] = [path for path in order.get(group, ()) if path in mine] or mine
    findings = [*_shared_states(flat, place), *([] if emulated else _wide_groups(place, groups))]
    findings += _contradictions(flat, orders)
    if findings:
        raise InputError(findings)
    turns = _turns(flat, orders, frozenset(blocking)) if interleave else set()
    workers = []
    for group, ordered in orders.items():
        held = {path: hold_ms[path] for path in ordered if path in hold_ms}
        taking = tuple(path for path in ordered if path in turns)
        workers.append(WorkerPlan(group, tuple(groups[group]), tuple(ordered), held, tuple(blocking), taking))
    links = dict.fromkeys(
        (place[flow.source], place[flow.target])
        for flow in flat.dataflow
        if flow.source != INPUT and flow.target != OUTPUT and place[flow.source] != place[flow.target]
    )
    return Layout(tuple(workers), tuple(links), window=2 * len(workers) + 1)


def _precedence(flat: FlatProgram, orders: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Return, for each operation, those that cannot start before it: by dataflow, and next in its group's order."""
    after: dict[str, set[str]] = {operation.path: set() for operation in flat.operations}
    for flow in flat.dataflow:
        if flow.source != INPUT and flow.target != OUTPUT:
            after[flow.source].add(flow.target)
    for ordered in orders.values():
        for first, second in pairwise(ordered):
            after[first].add(second)
    return after


def _contradictions(flat: FlatProgram, orders: Mapping[str, Sequence[str]]) -> list[Finding]:
    try:
        tuple(TopologicalSorter(_precedence(flat, orders)).static_order())
    except CycleError as error:
        # The sorter takes predecessors and was given successors: its cycle reads from the waiting to the waited for.
        cycle = error.args[1]
        group_of = {path: group for group, ordered in orders.items() for path in ordered}
        groups = dict.fromkeys(group_of[path] for path in cycle)
        return [
            Finding(
                f"order of {', '.join(f'group {group!r}' for group in groups)}",
                "an order in which every operation comes after those that it needs",
                f"each waits for the next: {', '.join(cycle)}", "change the order, or leave it out; then call again",
                rule="order-deadlock",
            )
        ]  # fmt: skip
    return []


def _turns(flat: FlatProgram, orders: Mapping[str, Sequence[str]], blocking: frozenset[str]) -> set[str]:
    """Return the operations that can take turns with the next one in their group's order.

    Two that take turns act as one: they may not when something in between needs the first and is needed by the
    second, such as an operation of another group.
    """
    after = _precedence(flat, orders)
    merged = {path: path for path in after}
    found = set()
    for ordered in orders.values():
        for first, second in pairwise(ordered):
            between = [flow for flow in flat.outgoing.get(first, ()) if flow.target == second]
            streams = between and all(flow.chunked and not blocking & set(flow.labels) for flow in between)
            trial = {path: merged[first] if name == merged[second] else name for path, name in merged.items()}
            if streams and _is_acyclic(after, trial):
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


def _wide_groups(place: Mapping[str, str], groups: Mapping[str, Sequence[str]]) -> list[Finding]:
    return [
        Finding(
            f"group '{group}'", "one device (sequence-parallel groups run on emulated devices only so far)",
            f"{len(groups[group])}: {listed(groups[group])}", "give the group one device, or write devices: emulated",
            rule="wide-group",
        )
        for group in dict.fromkeys(place.values())
        if len(groups[group]) > 1
    ]  # fmt: skip
