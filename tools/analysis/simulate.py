"""An earliest-start simulator of a deployment: an event loop over batches, operations' parts and devices.

It knows nothing of constraint graphs: it takes the dataflow and the state dependencies from the program and lets
events happen. The tests hold the analysis against it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flashrt.analysis.constraints import flow_chunks
from flashrt.analysis.deployment import Placement
from flashrt.analysis.profile import TICKS_PER_MS, Profile, flow_bytes, to_ticks
from flashrt.errors import input_error
from flashrt.ir import INPUT, OUTPUT, BuiltProgram, find_dependencies

PartName = tuple[str, int]
Instance = tuple[int, str, int]
"""Batch, operation, chunk."""


@dataclass(frozen=True)
class Simulation:
    """What happened in `num_batches` batches at a period; milliseconds."""

    period_ms: Fraction
    completion_ms: dict[Instance, Fraction]
    """(batch, operation, chunk) -> completion, from the start of batch 0's first sub-interval."""
    d0_by_batch_ms: tuple[Fraction, ...]
    """For each batch, the largest lateness of a frame against the start of its sub-interval."""
    latency_by_batch_ms: tuple[Fraction, ...]
    """For each batch, from being ready to its last output."""

    @property
    def d0_ms(self) -> Fraction:
        """The largest lateness seen."""
        return max(self.d0_by_batch_ms, default=Fraction(0))

    @property
    def finite(self) -> bool:
        """Whether lateness stopped growing: the last third of the batches brings nothing above what was seen before."""
        split = len(self.d0_by_batch_ms) * 2 // 3
        return split > 0 and max(self.d0_by_batch_ms[split:]) <= max(self.d0_by_batch_ms[:split])


def simulate(
    built: BuiltProgram,
    profile: Profile,
    placement: Placement,
    device_parts: Mapping[int, Sequence[PartName]],
    period_ms: Fraction | float,
    num_batches: int,
) -> Simulation:
    """Run batches 0 … `num_batches` − 1, each operation starting as early as it may.

    Parameters
    ----------
    device_parts
        Device -> (operation, chunk from 0) in the order in which it runs them in every cycle: for the cycle's own
        batch, or for an earlier one where the placement staggers them.
    period_ms
        Batch j is ready at (j + 1) periods.

    Raises
    ------
    InputError
        The devices' orders deadlock.
    """
    period = Fraction(period_ms) * TICKS_PER_MS
    blocking = placement.document.blocking
    flows = [(flow, *flow_chunks(flow, blocking)) for flow in built.flat.dataflow]
    counts: dict[str, int] = {}
    for operation in built.flat.operations:
        into = [target for flow, _, target, _ in flows if flow.target == operation.path]
        out = [source for flow, source, _, _ in flows if flow.source == operation.path]
        counts[operation.path] = max([1, *into]) if max([1, *into]) > 1 else max([1, *out])
    times: dict[PartName, int] = {}
    for path, devices in placement.devices.items():
        total = to_ticks(profile.time_ms(path, len(devices)))
        for chunk, ticks in enumerate(profile.split_ticks(path, total, counts[path])):
            times[path, chunk] = ticks

    needs: dict[PartName, list[tuple[int, PartName, int]]] = defaultdict(list)
    for path, count in counts.items():
        for chunk in range(1, count):
            needs[path, chunk].append((0, (path, chunk - 1), 0))
    arrivals = {path for path in counts if not any(flow.target == path for flow, *_ in flows)}
    shown: list[list[PartName]] = []

    def lag(source: str, target: str, num_bytes: int | None, pieces: int) -> int:
        if set(placement.devices[target]) <= set(placement.devices[source]):
            return 0
        return to_ticks(profile.transfer_ms(source, target, num_bytes, pieces))

    for flow, _, chunks, chunked in flows:
        if flow.source == INPUT:
            arrivals.add(flow.target)
            continue
        end = (flow.source, counts[flow.source] - 1)
        sources = [end]
        if chunked:
            sources = [(flow.source, k) if counts[flow.source] == chunks else end for k in range(chunks)]
        if flow.target == OUTPUT:
            shown.append(sources)
            continue
        size = flow_bytes(built.flat, flow)
        for k in range(len(sources)):
            source = sources[min(k + flow.lookahead, len(sources) - 1)]
            needs[flow.target, k].append((0, source, lag(flow.source, flow.target, size, len(sources))))
    for edge in find_dependencies(built.flat):
        if edge.state is None:
            continue
        size = (built.program.states[edge.state.split("[")[0]].bytes or 0) if edge.kind == "RAW" else 0
        source = (edge.source, counts[edge.source] - 1)
        needs[edge.target, 0].append((edge.lam, source, lag(edge.source, edge.target, size, 1)))

    users: dict[PartName, list[tuple[int, PartName, int]]] = defaultdict(list)
    for part, sources_of in needs.items():
        for batches, source, ticks in sources_of:
            users[source].append((batches, part, ticks))
    done = _run_events(times, users, needs, arrivals, placement, device_parts, period, num_batches)

    frames = profile.frames_per_batch or max((len(parts) for parts in shown), default=1)
    d0, latency = [], []
    for batch in range(num_batches):
        lateness = [
            done[(batch, *parts[_chunk_of(k, frames, len(parts))])] - batch * period - k * period / frames
            for parts in shown
            for k in range(frames)
        ]
        d0.append(max(lateness, default=Fraction(0)) / TICKS_PER_MS)
        ends = [done[(batch, *parts[-1])] - (batch + 1) * period for parts in shown]
        latency.append(max(ends, default=Fraction(0)) / TICKS_PER_MS)
    completion = {instance: value / TICKS_PER_MS for instance, value in done.items()}
    return Simulation(period / TICKS_PER_MS, completion, tuple(d0), tuple(latency))


def _chunk_of(frame: int, frames: int, chunks: int) -> int:
    """Return the chunk that holds the frame's last piece; frames that do not divide evenly go by their start."""
    if frames >= chunks:
        return int(Fraction(frame * chunks, frames))
    return next(c for c in range(chunks) if Fraction(c + 1, chunks) >= Fraction(frame + 1, frames))


def _run_events(
    times: Mapping[PartName, int],
    users: Mapping[PartName, list[tuple[int, PartName, int]]],
    needs: Mapping[PartName, list[tuple[int, PartName, int]]],
    arrivals: set[str],
    placement: Placement,
    device_parts: Mapping[int, Sequence[PartName]],
    period: Fraction,
    num_batches: int,
) -> dict[Instance, Fraction]:
    devices, stagger = placement.devices, placement.stagger
    waiting: dict[Instance, int] = {}
    earliest: dict[Instance, Fraction] = {}
    for batch in range(num_batches):
        for operation, chunk in times:
            instance = (batch, operation, chunk)
            waiting[instance] = sum(batch >= batches for batches, _, _ in needs.get((operation, chunk), []))
            entry = operation in arrivals and chunk == 0
            earliest[instance] = (batch + 1) * period if entry else Fraction(0)
    position = dict.fromkeys(device_parts, 0)
    longest = max(stagger.values(), default=0)
    free_at = dict.fromkeys(device_parts, Fraction(0))
    done: dict[Instance, Fraction] = {}
    started: set[Instance] = set()
    events: list[tuple[Fraction, Instance]] = []

    def head(device: int) -> Instance | None:
        sequence = device_parts[device]
        while True:
            cycle, place = divmod(position[device], len(sequence))
            batch = cycle - stagger.get(sequence[place][0], 0)
            if 0 <= batch < num_batches:
                return (batch, *sequence[place])
            if cycle > num_batches + longest:
                return None
            position[device] += 1

    def try_start(instance: Instance | None) -> None:
        if instance is None or instance in started or waiting[instance]:
            return
        own = devices[instance[1]]
        if any(head(device) != instance for device in own):
            return
        started.add(instance)
        begin = max(earliest[instance], *(free_at[device] for device in own))
        heapq.heappush(events, (begin + times[instance[1], instance[2]], instance))

    for device in device_parts:
        try_start(head(device))
    while events:
        now, instance = heapq.heappop(events)
        batch, operation, chunk = instance
        done[instance] = now
        for device in devices[operation]:
            position[device] += 1
            free_at[device] = now
        for batches, (user, piece), ticks in users.get((operation, chunk), []):
            follower = (batch + batches, user, piece)
            if follower in waiting:
                waiting[follower] -= 1
                earliest[follower] = max(earliest[follower], now + ticks)
                try_start(follower)
        for device in devices[operation]:
            try_start(head(device))
    if len(done) < len(waiting):
        stuck = sorted({f"device {device}: '{head(device)}'" for device in device_parts if head(device) is not None})
        raise input_error(
            "deployment, order", "orders under which every operation gets its turn", f"a deadlock at {stuck[:6]}",
            "leave out 'order' to have the best one found", rule="deadlock",
        )  # fmt: skip
    return done
