"""From a program, a profile and a request to the arrays of the search: integer ticks, sizes, arcs, constraints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

from flashrt.analysis.constraints import Constraints, build_constraints
from flashrt.analysis.deployment import Deployment, Placement
from flashrt.analysis.profile import Profile, to_ticks
from flashrt.analysis.ratio import topological_positions
from flashrt.analysis.search.arrays import Problem
from flashrt.analysis.search.resolve import Ask
from flashrt.analysis.structure import find_edges
from flashrt.errors import input_error
from flashrt.ir import BuiltProgram

MAX_BLOCKING_CHOICES = 5


@dataclass(frozen=True)
class Model:
    """One variant of the program (which edges are run whole), ready for the search."""

    problem: Problem
    blocking: tuple[str, ...]
    constraints: Constraints
    """With every operation on devices of its own."""
    unit: int
    """Ticks of the analysis in one tick of the search."""
    has_turns: bool
    """Whether two operations stream to each other, so that sharing a device they could take turns."""


def apart_placement(built: BuiltProgram, ask: Ask, blocking: tuple[str, ...]) -> Placement:
    """Return the placement of every operation on devices of its own, at its least degree."""
    devices, number = {}, 0
    for path, degrees in ask.degrees.items():
        devices[path] = tuple(range(number, number + degrees[0]))
        number += degrees[0]
    document = Deployment(groups={}, place={}, blocking=blocking)
    return Placement(document, devices, {})


def blocking_variants(built: BuiltProgram) -> list[tuple[str, ...]]:
    """Return the sets of streaming edges that are worth running whole, the empty one first.

    A streamed edge waits for no more than a whole one, so running it whole can only help where the consumer's own
    output is cut into other chunks: those are then complete only with its last part.
    """
    labels: set[str] = set()
    streaming = {placed.edge.label for placed in find_edges(built) if placed.edge.mode == "streaming"}
    for path in built.flat.by_path:
        taken = {flow.target_chunks for flow in built.flat.incoming.get(path, ())} - {1}
        made = {flow.source_chunks for flow in built.flat.outgoing.get(path, ())} - {1}
        if taken and made and taken != made:
            labels |= {label for flow in built.flat.incoming[path] for label in flow.labels if label in streaming}
    chosen = sorted(labels)[:MAX_BLOCKING_CHOICES]
    return [subset for size in range(len(chosen) + 1) for subset in combinations(chosen, size)]


def build_models(built: BuiltProgram, profile: Profile, ask: Ask) -> list[Model]:
    """Return a model for every variant worth searching, all with the same unit.

    Raises
    ------
    InputError
        Times too large for exact integers, or chunk shares that do not fit.
    """
    variants = []
    for blocking in blocking_variants(built):
        constraints = build_constraints(built, profile, apart_placement(built, ask, blocking))
        times = {
            path: {
                degree: profile.split_ticks(path, to_ticks(profile.time_ms(path, degree)), constraints.counts[path])
                for degree in degrees
            }
            for path, degrees in ask.degrees.items()
        }
        variants.append((blocking, constraints, times))
    numbers = [ticks for _, _, times in variants for by in times.values() for parts in by.values() for ticks in parts]
    numbers += [arc.lag for _, constraints, _ in variants for arc in constraints.arcs]
    unit = math.gcd(*numbers) or 1
    largest = (
        max(
            sum(max(sum(parts) for parts in by.values()) for by in times.values())
            + sum(arc.lag for arc in constraints.arcs)
            for _, constraints, times in variants
        )
        // unit
    )
    num_ops = len(ask.degrees)
    num_edges = max(len(constraints.arcs) for _, constraints, _ in variants) + num_ops * num_ops
    room = (1 << 62) // (16 * num_edges * (ask.max_stagger + 2) ** 2 * (num_ops + 2))
    if largest > room:
        raise input_error(
            "profile", f"times that add up to at most {room:.0e} of their common divisor, for exact integers",
            f"{largest:.1e} times {unit} ps", "round the times and transfers to microseconds and call again",
            rule="times-too-fine",
        )  # fmt: skip
    # Periods are fractions of ticks: a limit is kept to a fraction that no smaller one of theirs falls below.
    parts = max(parts for parts in (1, 12, 60, 2520) if parts == 1 or largest * parts * num_ops < room)
    return [_build(ask, blocking, constraints, times, unit, parts) for blocking, constraints, times in variants]


def _build(
    ask: Ask,
    blocking: tuple[str, ...],
    constraints: Constraints,
    times: dict[str, dict[int, list[int]]],
    unit: int,
    fraction: int,
) -> Model:
    import numpy as np

    paths = list(ask.degrees)
    number = {path: index for index, path in enumerate(paths)}
    sizes = sorted({degree for degrees in ask.degrees.values() for degree in degrees})
    num_parts = len(constraints.parts)
    part_times = np.zeros((len(sizes), num_parts), np.int64)
    totals = np.zeros((len(paths), len(sizes)), np.int64)
    allowed = np.zeros((len(paths), len(sizes)), np.bool_)
    memory = np.zeros((len(paths), len(sizes)), np.int64)
    for path, by_degree in times.items():
        for degree, ticks in by_degree.items():
            size = sizes.index(degree)
            allowed[number[path], size] = True
            memory[number[path], size] = ask.memory[path][degree]
            totals[number[path], size] = sum(ticks) // unit
            for part, value in zip(constraints.parts_of(path), ticks, strict=True):
                part_times[size, part] = value // unit
    owner = [number[part.operation] for part in constraints.parts]
    positions = _positions(constraints)
    kept: dict[tuple[int, int, int], int] = {}
    for arc in constraints.arcs:
        key = (arc.source, arc.target, arc.height)
        kept[key] = max(kept.get(key, 0), arc.lag // unit)
    arcs = sorted(((*key, lag) for key, lag in kept.items()), key=lambda arc: (positions[arc[0]], arc))
    before = np.zeros((len(paths), len(paths)), np.bool_)
    for source, target, height, _ in arcs:
        before[owner[source], owner[target]] |= height == 0 and owner[source] != owner[target]
    near = before | before.T
    for middle in range(len(paths)):
        before |= np.outer(before[:, middle], before[middle])
    stream = list(range(len(paths)))
    for source_path, target_path in sorted(constraints.streams):
        old, new = stream[number[target_path]], stream[number[source_path]]
        stream = [new if value == old else value for value in stream]
    states = sorted(ask.state_bytes)
    uses = np.zeros((len(paths), len(states)), np.bool_)
    for index, state in enumerate(states):
        for path in ask.state_users[state]:
            uses[number[path], index] = True
    apart = np.zeros((len(paths), len(paths)), np.bool_)
    for a, b in ask.apart:
        apart[number[a], number[b]] = apart[number[b], number[a]] = True
    problem = Problem(
        first=_ints([constraints.first[path] for path in paths]),
        last=_ints([constraints.last(path) for path in paths]),
        owner=_ints(owner),
        times=part_times,
        totals=totals,
        allowed=allowed,
        sizes=_ints(sizes),
        arcs=np.array(arcs, np.int64).reshape(-1, 4),
        entries=np.isin(np.arange(num_parts), constraints.entries),
        outputs=_ints([output.parts[-1] for output in constraints.outputs]),
        memory=memory,
        state_bytes=_ints([ask.state_bytes[state] for state in states]),
        uses=uses,
        islands=_ints([_mask(island) for island in ask.islands]),
        pinned=_ints([_mask(ask.pinned.get(path, ())) for path in paths]),
        kinship=_ints([ask.kinship[path] for path in paths]),
        has_kin=np.array([list(ask.kinship.values()).count(ask.kinship[path]) > 1 for path in paths]),
        apart=apart,
        before=before,
        near=near,
        stream=_ints(stream),
        sequence=_ints(_sequence(ask, totals, allowed, sizes, [positions[constraints.first[path]] for path in paths])),
        tails=_ints(_tails(constraints, part_times, allowed, owner, positions)),
        longest=_ints([2 * (int(part_times.max(axis=0).sum()) + sum(arc[3] for arc in arcs)) + 1]),
        limits=_ints([*_limit(ask.max_period, unit, fraction), *_limit(ask.max_latency, unit, fraction)]),
    )
    return Model(problem, blocking, constraints, unit, bool(constraints.streams))


def _sequence(ask: Ask, totals: Any, allowed: Any, sizes: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return the order in which operations are placed: those first that take most device time at the least.

    What is left to place then weighs little, so that a node's bounds are near what it leads to. Against the order of
    the dataflow, the tree of a dozen operations has a tenth of the nodes, a hundredth where groups overlap.
    """

    def least_area(op: int) -> int:
        return min(int(totals[op, size]) * count for size, count in enumerate(sizes) if allowed[op, size])

    return sorted(range(len(ask.degrees)), key=lambda op: (-least_area(op), positions[op]))


def _positions(constraints: Constraints) -> list[int]:
    positions = topological_positions(len(constraints.parts), constraints.arcs)
    assert positions is not None, "dataflow and state have no cycle within a batch"
    return positions


def _tails(
    constraints: Constraints, part_times: Any, allowed: Any, owner: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Return the least time from each operation's end to the last output, all transfers left out."""
    least = [
        min(int(part_times[size, part]) for size in range(len(part_times)) if allowed[owner[part], size])
        for part in range(len(owner))
    ]
    after = {output.parts[-1]: 0 for output in constraints.outputs}
    for arc in sorted(constraints.arcs, key=lambda arc: -positions[arc.source]):
        if arc.height == 0 and arc.target in after:
            after[arc.source] = max(after.get(arc.source, 0), least[arc.target] + after[arc.target])
    return [after.get(constraints.last(path), -1) for path in constraints.first]


def _mask(devices: Sequence[int]) -> int:
    return sum(1 << device for device in devices)


def _limit(ticks: Fraction | None, unit: int, fraction: int) -> tuple[int, int]:
    return (-1, 1) if ticks is None else (math.floor(ticks / unit * fraction), fraction)


def _ints(values: Sequence[int]) -> Any:
    import numpy as np

    return np.array(values, np.int64)
