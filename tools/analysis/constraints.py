"""The constraint graph H: which part of an operation may start how long after which other part, in which batch.

Parts
-----
An operation that takes a streaming input of c chunks, or makes a streaming output of c chunks, becomes c parts in a
chain. Its inputs decide when both differ: its outputs are then complete only with its last part. A streaming edge
joins part to part (with the look-ahead), any other edge joins the last part to the first, and so does state.

A device and its parts
----------------------
A device runs its operations in a cyclic order and does not preempt: once an operation has begun, the device waits with
it for the next chunk. Neighbours in that order that stream to each other may instead take turns (u1 v1 u2 v2 …): a
consumer's part runs as soon as everything that it needs from this device is done. That shows the first chunk earlier
and changes neither the work nor the last chunk of that device; but where v also waits, through another device, for
the whole of u, taking turns would deadlock, and op after op is right. `device_sequences` gives both.

An event-driven operation counts as run once a batch, with consumers that wait for it, unless a `Variation` says that
they go on with its last value.

Batches follow each other in order on every device, unless the deployment staggers operations: in its cycle j a device
runs an operation of stagger n for batch j − n. An arc of its order from u to v then has the height n_u − n_v, which may
be negative (v of a batch waits for u of a later one), and one more where the cycle wraps around.

Source: ``spec/cost-model.md``, "Going past the bounds", "Streaming edges", "State gives the λ edges".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flashrt.analysis.deployment import Placement
from flashrt.analysis.profile import Profile, flow_bytes, to_ticks
from flashrt.ir import INPUT, OUTPUT, BuiltProgram, Dataflow, find_dependencies

ArcKind = Literal["chunks", "data", "state", "device"]


@dataclass(frozen=True)
class Part:
    """One chunk's share of an operation; `count` is 1 for an operation that does not stream."""

    operation: str
    index: int
    count: int

    def __str__(self) -> str:
        return self.operation if self.count == 1 else f"{self.operation} chunk {self.index + 1}/{self.count}"


@dataclass(frozen=True)
class Arc:
    """Part `target` of batch j starts no earlier than `weight` ticks after part `source` of batch j − `height` starts.

    `weight` is the source's time plus `lag`.
    """

    source: int
    target: int
    weight: int
    height: int
    lag: int
    kind: ArcKind
    cause: str


@dataclass(frozen=True)
class OutputParts:
    """The parts whose completion shows the chunks of one output, first chunk first."""

    label: str
    parts: tuple[int, ...]
    num_axes: int = 0
    """Axes of its declared shape; 0 where none is declared."""


@dataclass(frozen=True)
class Variation:
    """What a candidate changes in the program without a new document."""

    asynchronous: frozenset[str] = frozenset()
    """Event-driven operations (paths) whose consumers use the last value instead of waiting for this batch's."""
    double_buffered: frozenset[str] = frozenset()
    """States (document names) of which the next batch writes a second copy: their WAR edges span two batches."""


@dataclass(frozen=True)
class Constraints:
    """H without the resource arcs: parts, their times, and what dataflow, chunks and state ask."""

    parts: tuple[Part, ...]
    times: tuple[int, ...]
    """Time of each part, in ticks."""
    first: dict[str, int]
    """Operation -> number of its first part."""
    counts: dict[str, int]
    """Operation -> how many parts it has."""
    arcs: tuple[Arc, ...]
    entries: tuple[int, ...]
    """Parts that may not start before the batch is ready (R_j)."""
    outputs: tuple[OutputParts, ...]
    streams: frozenset[tuple[str, str]]
    """Pairs (producer, consumer) that work chunk by chunk at the same time."""
    placement: Placement = field(repr=False)

    def last(self, operation: str) -> int:
        """Return the number of the operation's last part."""
        return self.first[operation] + self.counts[operation] - 1

    def parts_of(self, operation: str) -> range:
        """Return the numbers of the operation's parts."""
        return range(self.first[operation], self.first[operation] + self.counts[operation])

    def label(self, part: int) -> str:
        """Return the part as messages call it."""
        return str(self.parts[part])


def flow_chunks(flow: Dataflow, blocking: Iterable[str]) -> tuple[int, int, bool]:
    """Return source chunks, target chunks and whether chunks travel one by one, with some edges run whole."""
    whole = [label in blocking for label in flow.labels] or [False]
    source = 1 if whole[0] else flow.source_chunks
    target = 1 if whole[-1] or flow.prologue else flow.target_chunks
    return source, target, flow.chunked and not any(whole) and not flow.prologue


def build_constraints(
    built: BuiltProgram, profile: Profile, placement: Placement, variation: Variation | None = None
) -> Constraints:
    """Return the constraints of a placement; orders are added by `resource_arcs`.

    Raises
    ------
    InputError
        The profile lacks a time at a placed degree, or its chunk shares do not fit.
    """
    variation = variation or Variation()
    variation = replace(variation, asynchronous=variation.asynchronous | placement.asynchronous)
    flat = built.flat
    blocking = frozenset(placement.document.blocking)
    flows = [flow for flow in flat.dataflow if flow.source not in variation.asynchronous or flow.target == OUTPUT]
    taken: dict[str, int] = defaultdict(lambda: 1)
    made: dict[str, int] = defaultdict(lambda: 1)
    for flow in flows:
        source, target, _ = flow_chunks(flow, blocking)
        made[flow.source] = max(made[flow.source], source)
        taken[flow.target] = max(taken[flow.target], target)
    ticks = profile.require_times({path: len(devices) for path, devices in placement.devices.items()})

    parts: list[Part] = []
    times: list[int] = []
    first: dict[str, int] = {}
    counts: dict[str, int] = {}
    arcs: list[Arc] = []
    for operation in flat.operations:
        path = operation.path
        counts[path] = taken[path] if taken[path] > 1 else made[path]
        first[path] = len(parts)
        parts += [Part(path, index, counts[path]) for index in range(counts[path])]
        times += profile.split_ticks(path, ticks[path], counts[path])
        for index in range(counts[path] - 1):
            number = first[path] + index
            arcs.append(Arc(number, number + 1, times[number], 0, 0, "chunks", f"next chunk of {path}"))

    def last(path: str) -> int:
        return first[path] + counts[path] - 1

    def chunk_part(path: str, chunk: int, num_chunks: int) -> int:
        return first[path] + chunk if counts[path] == num_chunks else last(path)

    def join(source: int, target: int, height: int, lag: int, kind: ArcKind, cause: str) -> None:
        arcs.append(Arc(source, target, times[source] + lag, height, lag, kind, cause))

    streams: set[tuple[str, str]] = set()
    entries: set[int] = set()
    outputs: list[OutputParts] = []
    for flow in flows:
        _, num_chunks, chunked = flow_chunks(flow, blocking)
        if flow.source == INPUT:
            if flow.target != OUTPUT:
                entries.add(first[flow.target])
            continue
        if flow.target == OUTPUT:
            shown = range(num_chunks) if chunked else range(1)
            numbers = tuple(chunk_part(flow.source, k, num_chunks if chunked else 0) for k in shown)
            declared = flat.program.graphs[flat.program.entry].outputs[flow.target_port].shape
            outputs.append(OutputParts(flow.target_port, numbers, len(declared or ())))
            continue
        lag = flow_lag(built, profile, placement, flow)
        if chunked:
            streams.add((flow.source, flow.target))
            for chunk in range(num_chunks):
                needed = chunk_part(flow.source, min(chunk + flow.lookahead, num_chunks - 1), num_chunks)
                join(needed, first[flow.target] + chunk, 0, lag, "data", flow.label)
        else:
            join(last(flow.source), first[flow.target], 0, lag, "data", flow.label)
    fed = {flow.target for flow in flows}
    entries |= {first[operation.path] for operation in flat.operations if operation.path not in fed}

    for edge in find_dependencies(flat):
        if edge.state is None or (edge.lam == 0 and edge.source in variation.asynchronous):
            continue
        name = edge.state.split("[", 1)[0]
        num_bytes = (built.program.states[name].bytes if edge.kind == "RAW" else 0) or 0
        lag = _lag(profile, placement, edge.source, edge.target, num_bytes, 1)
        doubled = edge.lam == 1 and edge.kind == "WAR" and name in variation.double_buffered
        cause = f"state {edge.state} ({edge.kind})"
        join(last(edge.source), first[edge.target], edge.lam + doubled, lag, "state", cause)
    return Constraints(
        tuple(parts), tuple(times), first, counts, tuple(arcs), tuple(sorted(entries)), tuple(outputs),
        frozenset(streams), placement,
    )  # fmt: skip


def flow_lag(built: BuiltProgram, profile: Profile, placement: Placement, flow: Dataflow) -> int:
    """Return how long a value on `flow`, or one chunk of it, is under way between devices, in ticks."""
    _, num_chunks, chunked = flow_chunks(flow, placement.document.blocking)
    pieces = num_chunks if chunked else 1
    return _lag(profile, placement, flow.source, flow.target, flow_bytes(built.flat, flow), pieces)


def _lag(
    profile: Profile, placement: Placement, source: str, target: str, num_bytes: int | None, num_chunks: int
) -> int:
    if placement.shares_resource(source, target):
        return 0
    return to_ticks(profile.transfer_ms(source, target, num_bytes, num_chunks))


def ancestor_parts(constraints: Constraints) -> list[int]:
    """Return, for each part, a bit mask of the parts of the same batch that dataflow and state make it wait for."""
    before: list[list[int]] = [[] for _ in constraints.parts]
    for arc in constraints.arcs:
        if arc.height == 0:
            before[arc.target].append(arc.source)
    masks: list[int | None] = [None] * len(before)
    for root in range(len(before)):
        stack = [root]
        while stack:
            node = stack[-1]
            pending = [source for source in before[node] if masks[source] is None]
            if pending:
                stack += pending
                continue
            stack.pop()
            mask = 0
            for source in before[node]:
                mask |= (masks[source] or 0) | 1 << source
            masks[node] = mask
    return [mask or 0 for mask in masks]


def device_sequences(
    constraints: Constraints, order: Mapping[int, Sequence[str]], *, interleave: bool
) -> dict[int, tuple[int, ...]]:
    """Return the parts of each device in the order in which it runs them for a batch.

    With `interleave`, neighbours that stream to each other take turns, if both work on the same batch; otherwise it
    runs op after op.
    """
    ancestors = ancestor_parts(constraints) if interleave and constraints.streams else []
    sequences: dict[int, tuple[int, ...]] = {}
    for device, operations in order.items():
        sequence: list[int] = []
        for run in _runs(constraints, operations, interleave=interleave):
            sequence += _take_turns(constraints, run, ancestors) if len(run) > 1 else constraints.parts_of(run[0])
        sequences[device] = tuple(sequence)
    return sequences


def _runs(constraints: Constraints, operations: Sequence[str], *, interleave: bool) -> list[list[str]]:
    """Cut an order into stretches in which each operation takes a stream from an earlier one of the stretch."""
    runs: list[list[str]] = []
    stagger = constraints.placement.stagger
    for path in operations:
        together = interleave and runs and stagger.get(path, 0) == stagger.get(runs[-1][-1], 0)
        if together and any((source, path) in constraints.streams for source in runs[-1]):
            runs[-1].append(path)
        else:
            runs.append([path])
    return runs


def _take_turns(constraints: Constraints, run: Sequence[str], ancestors: Sequence[int]) -> list[int]:
    own = sum(1 << part for path in run for part in constraints.parts_of(path))
    pending = {path: list(constraints.parts_of(path)) for path in run}
    done, sequence = 0, []
    while any(pending.values()):
        ready = [p for p in reversed(run) if pending[p] and not ancestors[pending[p][0]] & own & ~done]
        path = ready[0] if ready else next(p for p in run if pending[p])
        part = pending[path].pop(0)
        sequence.append(part)
        done |= 1 << part
    return sequence


def resource_arcs(constraints: Constraints, sequences: Mapping[int, Sequence[int]]) -> list[Arc]:
    """Return the arcs of the devices' cyclic orders: next part in this cycle, first part in the next.

    *Source*: ``spec/cost-model.md``, "Going past the bounds"; heights shifted by the deployment's staggers.
    """
    arcs = []
    stagger = constraints.placement.stagger
    shifts = [stagger.get(part.operation, 0) for part in constraints.parts]
    for device, sequence in sequences.items():
        for index, part in enumerate(sequence):
            wraps = index + 1 == len(sequence)
            follower = sequence[0] if wraps else sequence[index + 1]
            height = int(wraps) + shifts[part] - shifts[follower]
            arcs.append(Arc(part, follower, constraints.times[part], height, 0, "device", f"device {device}"))
    return arcs
