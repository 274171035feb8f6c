"""Which channels a deployment has: who makes what, who takes it, and how many messages may wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashrt.ir.flattening import INPUT, OUTPUT, Dataflow, FlatProgram

MAX_WAITING = 4096
"""Messages that may wait in one channel, where fewer would do for two batches."""


@dataclass(frozen=True)
class ChannelPlan:
    """One channel: the same sequence of values from one port to every endpoint that needs it.

    Attributes
    ----------
    number
        Its place in the deployment's list of channels.
    source, targets
        Endpoint names: workers, and `INPUT` and `OUTPUT` for the two sides of the supervisor.
    flows
        Numbers of the dataflow (places in `FlatProgram.dataflow`) that it carries.
    label
        What it carries, for messages.
    capacity
        Messages that may wait: a sender with as many unread messages waits for a reader.
    """

    number: int
    source: str
    targets: tuple[str, ...]
    flows: tuple[int, ...]
    label: str
    capacity: int

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> ChannelPlan:
        """Return the plan that `as_dict` described."""
        tuples = {key: tuple(record[key]) for key in ("targets", "flows")}
        return ChannelPlan(**{**record, **tuples})


def plan_channels(
    flat: FlatProgram,
    place: Mapping[str, str],
    ranks: Mapping[str, Sequence[str]],
    blocking: frozenset[str],
    window: int,
    *,
    separate_outputs: bool = False,
    asynchronous: Collection[str] = (),
) -> tuple[ChannelPlan, ...]:
    """Return every channel of a deployment.

    Dataflow from one port that is cut in the same way shares a channel, so that a value is written once for all.

    Parameters
    ----------
    place
        Operation path -> group.
    ranks
        Group -> its endpoints, rank 0 first; every rank takes the inputs, rank 0 makes the outputs.
    window
        How many batches may be in flight; a channel holds all their messages, so that only memory and the window
        bound how far a sender runs ahead.
    separate_outputs
        Whether what leaves the deployment has channels of its own: where values between workers stay on GPUs.
    asynchronous
        Operations that run beside the batches.
    """
    shared: dict[tuple[Any, ...], list[int]] = {}
    for number, flow in enumerate(flat.dataflow):
        if _crosses(flow, place):
            leaves = separate_outputs and flow.target == OUTPUT
            shared.setdefault((leaves, *_sequence(flow, blocking)), []).append(number)
    plans: list[ChannelPlan] = []
    for numbers in shared.values():
        flows = [flat.dataflow[number] for number in numbers]
        first = flows[0]
        source = INPUT if first.source == INPUT else ranks[place[first.source]][0]
        targets: dict[str, None] = {}
        for flow in flows:
            targets.update(dict.fromkeys((OUTPUT,) if flow.target == OUTPUT else ranks[place[flow.target]]))
        chunks = 1 if first.source == INPUT else max(flow.target_chunks for flow in flows)
        # An end marker may follow the chunks of a batch that has fewer.
        # What runs beside the batches may lie behind by more of them than are in flight.
        beside = any(flow.target in asynchronous for flow in flows)
        wanted = MAX_WAITING if beside else min(window * (chunks + 1), MAX_WAITING)
        capacity = max(2 * (chunks + 1), wanted)
        label = first.label if len(flows) == 1 else f"{first.label} and {len(flows) - 1} more"
        plans.append(ChannelPlan(len(plans), source, tuple(targets), tuple(numbers), label, capacity))
    return tuple(plans)


def _crosses(flow: Dataflow, place: Mapping[str, str]) -> bool:
    if flow.source == INPUT or flow.target == OUTPUT:
        return not (flow.source == INPUT and flow.target == OUTPUT)
    return place[flow.source] != place[flow.target]


def _sequence(flow: Dataflow, blocking: frozenset[str]) -> tuple[Any, ...]:
    """Return what decides the values on a flow: equal for flows that carry the same ones at the same moments."""
    if flow.source == INPUT:
        return (INPUT, flow.source_port)
    together = bool(blocking & set(flow.labels))
    return (flow.source, flow.source_port, flow.target_chunks, flow.chunked, flow.axis, together)
