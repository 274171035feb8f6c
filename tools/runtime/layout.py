"""From a deployment to what each worker is told: its operations in order, its devices, its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    interleave
        Whether neighbours in the order that stream to each other take turns, chunk by chunk.
    """

    group: str
    devices: tuple[str, ...]
    operations: tuple[str, ...]
    hold_ms: Mapping[str, float]
    blocking: tuple[str, ...]
    interleave: bool

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

    Raises
    ------
    InputError
        A state is written in one group and used in another, or a group of real devices has several.
    """
    findings = [*_shared_states(flat, place), *([] if emulated else _wide_groups(place, groups))]
    if findings:
        raise InputError(findings)
    used = list(dict.fromkeys(place[operation.path] for operation in flat.operations))
    workers = []
    for group in used:
        mine = [operation.path for operation in flat.operations if place[operation.path] == group]
        ordered = [path for path in order.get(group, ()) if path in mine] or mine
        held = {path: hold_ms[path] for path in mine if path in hold_ms}
        workers.append(WorkerPlan(group, tuple(groups[group]), tuple(ordered), held, tuple(blocking), interleave))
    links = dict.fromkeys(
        (place[flow.source], place[flow.target])
        for flow in flat.dataflow
        if flow.source != INPUT and flow.target != OUTPUT and place[flow.source] != place[flow.target]
    )
    return Layout(tuple(workers), tuple(links), window=2 * len(workers) + 1)


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
