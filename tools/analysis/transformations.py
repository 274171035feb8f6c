"""The transformations, each with its legality check beside it.

A `Proposal` is one application of a transformation to named targets, legal or not, with the argument. Illegal ones
name the edge, state or declaration that forbids them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flashrt.analysis.constraints import Variation
from flashrt.analysis.parallel import judge_stream
from flashrt.analysis.settings import Setting, baseline_setting
from flashrt.analysis.structure import (
    PlacedEdge,
    PlacedNode,
    RepeatedGraph,
    Unit,
    downstream_stream,
    find_edges,
    find_repeats,
    find_units,
    walk_nodes,
)
from flashrt.errors import listed
from flashrt.ir import INPUT, OUTPUT, BuiltProgram, Dependency, find_dependencies

Transformation = Literal[
    "stream", "co-locate", "disaggregate", "step-pipeline", "sequence-parallel", "tile", "double-buffer", "event-driven"
]


@dataclass(frozen=True)
class Verdict:
    """Whether a transformation may be applied, and why."""

    legal: bool
    reason: str


@dataclass(frozen=True)
class Proposal:
    """One transformation of named targets."""

    id: str
    transformation: Transformation
    targets: tuple[str, ...]
    verdict: Verdict
    attacks: str
    """The bottleneck that it is meant for."""
    effect: str
    """What it does, in words, where no profile gives figures."""
    operations: frozenset[str]
    """Operations whose times it concerns."""
    setting: Setting | None = None
    program_change: dict[str, Any] | None = None
    needs: str | None = None
    """Why a deployment document alone cannot express it; None where it can."""
    predictable: bool = True
    """Whether the profile's times and the setting give its figures."""
    parts: tuple[Transformation, ...] = ()
    """For a composition: the two transformations."""


def _state_edges(built: BuiltProgram) -> list[Dependency]:
    return [edge for edge in find_dependencies(built.flat) if edge.state is not None]


def _name_edge(edge: Dependency) -> str:
    return f"'{edge.source} -> {edge.target}' (lambda {edge.lam}, {edge.kind}, state '{edge.state}')"


def check_stream(built: BuiltProgram, placed: PlacedEdge) -> Verdict:
    """Streaming is legal where the document declares it and no state or carry makes the ends take turns."""
    could, reason = judge_stream(built, placed)
    if placed.edge.mode == "streaming" and could:
        claim = "the claim (whole result = joined chunk results) is what ir_interpret executes"
        return Verdict(True, f"{reason}; {claim} and compares with the baseline")
    if could:
        return Verdict(False, f"edge '{placed.edge.label}' is {reason}")
    return Verdict(False, f"edge '{placed.edge.label}': {reason}")


def propose_streams(built: BuiltProgram) -> Iterator[Proposal]:
    """Run a streaming edge, and what carries its chunks on, chunk by chunk."""
    seen: set[str] = set()
    for placed in find_edges(built):
        if all(flow.source == INPUT for flow in placed.flows) or placed.key in seen:
            continue
        seen.add(placed.key)
        verdict = check_stream(built, placed)
        labels = downstream_stream(built, placed.edge.label) if verdict.legal else frozenset({placed.edge.label})
        ends = {end for flow in placed.flows for end in (flow.source, flow.target)} - {INPUT, OUTPUT}
        setting = baseline_setting(built)
        change = None
        if placed.edge.mode == "blocking" and not any(flow.carried for flow in placed.flows):
            change = {"graph": placed.graph, "edge": placed.edge.label, "set": {"mode": "streaming"}}
        yield Proposal(
            f"stream:{placed.key}", "stream", tuple(sorted(labels)), verdict,
            "latency: the path to the first output waits for a whole value",
            "first output after the first chunk; the work of each device stays the same",
            frozenset(ends),
            Setting(setting.blocks, streamed=labels) if verdict.legal else None,
            change,
        )  # fmt: skip


def check_disaggregate(built: BuiltProgram, blocks: Sequence[frozenset[str]]) -> Verdict:
    """Any cut is legal: values travel over the edges; state that both sides use has to travel too, and ties them."""
    place = {path: index for index, block in enumerate(blocks) for path in block}
    crossing = [edge for edge in _state_edges(built) if edge.lam == 1 and place[edge.source] != place[edge.target]]
    if not crossing:
        return Verdict(True, "only dataflow edges cross the cut; no state is shared, so batches overlap freely")
    return Verdict(
        True,
        f"legal, but state crosses the cut and has to be moved every batch: {_name_edge(crossing[0])}"
        + (f" and {len(crossing) - 1} more" if len(crossing) > 1 else "")
        + "; the recurrence limits the overlap of batches",
    )


def _cut(built: BuiltProgram, parts: Sequence[Sequence[Unit]]) -> Proposal:
    blocks = [frozenset(path for unit in part for path in unit.operations) for part in parts]
    names = tuple(",".join(unit.name for unit in part) for part in parts)
    return Proposal(
        "disaggregate:" + "|".join(names), "disaggregate", names, check_disaggregate(built, blocks),
        "period: the cycle of the device that all of them share",
        "the period becomes that of the busiest part instead of the sum; latency gains a transfer",
        frozenset().union(*blocks), Setting(frozenset(blocks)),
    )  # fmt: skip


def propose_disaggregations(built: BuiltProgram) -> Iterator[Proposal]:
    """Give parts of the application devices of their own: every cut along the dataflow, each unit alone, all apart."""
    units = find_units(built)
    if len(units) < 2:
        return
    cuts: list[list[list[Unit]]] = [[units[:index], units[index:]] for index in range(1, len(units))]
    cuts += [[[unit], [other for other in units if other is not unit]] for unit in units[1:-1]]
    cuts.append([[unit] for unit in units])
    seen: set[frozenset[frozenset[str]]] = set()
    for cut in cuts:
        proposal = _cut(built, cut)
        assert proposal.setting is not None
        if proposal.setting.blocks not in seen:
            seen.add(proposal.setting.blocks)
            yield proposal


def check_co_locate(built: BuiltProgram, units: Sequence[Unit], degree: int) -> Verdict:
    """Operations share a group where all allow its size and none is opaque."""
    for path in (path for unit in units for path in unit.operations):
        operation = built.flat.by_path[path]
        if operation.opaque:
            return Verdict(False, f"'{path}' is opaque and keeps its {operation.degrees[0]} devices to itself")
        if degree not in operation.degrees:
            return Verdict(False, f"'{path}' declares degrees {listed(operation.degrees)}, not {degree}")
    return Verdict(True, f"every operation allows degree {degree}; a group runs them one after the other")


def propose_co_locations(built: BuiltProgram) -> Iterator[Proposal]:
    """Put neighbours, or everything, on one group; the group's size is their degree."""
    units = find_units(built)
    joined = {
        (a.name, b.name)
        for a in units
        for b in units
        for flow in built.flat.dataflow
        if flow.source in a.operations and flow.target in b.operations and a is not b
    }
    pairs = [[a, b] for a in units for b in units if (a.name, b.name) in joined]
    whole = [units] if len(units) > 2 else []
    for members in [*pairs, *whole]:
        paths = frozenset(path for unit in members for path in unit.operations)
        allowed = sorted({degree for path in paths for degree in built.flat.by_path[path].degrees})
        if any(built.flat.by_path[path].opaque for path in paths):
            # An opaque node is never placed with others, so there is no choice of degree to list.
            allowed = [max(min(built.flat.by_path[path].degrees) for path in paths)]
        base = max(min(built.flat.by_path[path].degrees) for path in paths)
        rest = [frozenset(unit.operations) for unit in units if unit not in members]
        for degree in allowed:
            if degree == base and not rest and check_co_locate(built, members, degree).legal:
                continue
            name = "|".join(unit.name for unit in members)
            suffix = "" if degree == base else f"@{degree}"
            verdict = check_co_locate(built, members, degree)
            yield Proposal(
                f"co-locate:{name}{suffix}", "co-locate", tuple(unit.name for unit in members), verdict,
                "latency: transfers between them, and each one's time at a low degree",
                "no transfer between them and the whole group for each; the period is the sum of their times",
                paths, Setting(frozenset({paths, *rest}), _degrees(built, paths, degree)) if verdict.legal else None,
            )  # fmt: skip


def _degrees(built: BuiltProgram, paths: frozenset[str], degree: int) -> tuple[tuple[str, int], ...]:
    return tuple(
        (path, degree) for path in sorted(paths)
        if degree in built.flat.by_path[path].degrees and degree != min(built.flat.by_path[path].degrees)
    )  # fmt: skip


def check_step_pipeline(built: BuiltProgram, repeat: RepeatedGraph) -> Verdict:
    """Iterations may run on devices of their own only where no state that one of them writes is shared by two."""
    iteration = {path: index for index, paths in enumerate(repeat.iterations) for path in paths}
    shared = [
        edge for edge in _state_edges(built)
        if edge.lam == 1 and edge.source in iteration and edge.target in iteration
        and iteration[edge.source] != iteration[edge.target]
    ]  # fmt: skip
    if not shared:
        return Verdict(True, "no state is shared between iterations: the steps of successive batches may overlap")
    widest = max(shared, key=lambda edge: iteration[edge.source] - iteration[edge.target])
    states = listed(dict.fromkeys(edge.state for edge in shared))
    return Verdict(
        False,
        f"iterations share state {states}: {_name_edge(widest)} makes the next batch's first step wait for this "
        "batch's last, so steps of two batches never overlap; keep the state per iteration (per: iteration) if the "
        "steps do not need each other's",
    )


def propose_step_pipelines(built: BuiltProgram) -> Iterator[Proposal]:
    """One device for each iteration of a repeated graph."""
    for repeat in find_repeats(built):
        inside = frozenset(path for paths in repeat.iterations for path in paths)
        blocks = [set(paths) for paths in repeat.iterations]
        for operation in built.flat.operations:
            if operation.path not in inside:
                before = any(operation.path in built.flat.predecessors[path] for path in inside)
                blocks[0 if before else -1].add(operation.path)
        yield Proposal(
            f"step-pipeline:{repeat.name}", "step-pipeline", (repeat.name,), check_step_pipeline(built, repeat),
            "period: all iterations in turn on one device",
            "the period becomes that of one step; latency keeps all steps and gains a transfer between them",
            inside, Setting(frozenset(frozenset(block) for block in blocks)),
        )  # fmt: skip


def check_sequence_parallel(built: BuiltProgram, unit: Unit) -> Verdict:
    """A node runs on several devices where it declares degrees above one."""
    operations = [built.flat.by_path[path] for path in unit.operations]
    if all(operation.opaque for operation in operations):
        return Verdict(False, f"'{unit.name}' is opaque and keeps its {operations[0].degrees[0]} devices")
    degrees = sorted({degree for operation in operations for degree in operation.degrees})
    if len(degrees) == 1:
        return Verdict(False, f"'{unit.name}' declares degrees {degrees}: nothing says that it runs on more devices")
    return Verdict(True, f"'{unit.name}' declares degrees {degrees}; rank 0's outputs count")


def propose_sequence_parallels(built: BuiltProgram) -> Iterator[Proposal]:
    """Run a unit at one of its higher degrees; the rest stays on the group's first device."""
    for unit in find_units(built):
        verdict = check_sequence_parallel(built, unit)
        attacks = "period and latency: the unit's own time"
        effect = "the unit's time becomes that at the higher degree, on more devices"
        paths = frozenset(unit.operations)
        if not verdict.legal:
            yield Proposal(
                f"sequence-parallel:{unit.name}", "sequence-parallel", (unit.name,), verdict, attacks, effect, paths
            )
            continue
        least = min(min(built.flat.by_path[path].degrees) for path in paths)
        for degree in sorted({degree for path in paths for degree in built.flat.by_path[path].degrees} - {least}):
            setting = Setting(baseline_setting(built).blocks, _degrees(built, paths, degree))
            yield Proposal(
                f"sequence-parallel:{unit.name}@{degree}", "sequence-parallel", (unit.name,), verdict, attacks, effect,
                paths, setting,
            )  # fmt: skip


def check_tile(node: PlacedNode) -> Verdict:
    """Tiling changes results at the seams: legal where the node declares it, and then only perceptually equal."""
    if node.node.tiles:
        return Verdict(
            True,
            f"'{node.template}' declares tiles {listed(node.node.tiles)}; results are only perceptually equal, so the "
            "element-wise check does not apply",
        )
    return Verdict(False, f"'{node.template}' declares no tile counts (key 'tiles' of the node)")


def propose_tiles(built: BuiltProgram) -> Iterator[Proposal]:
    """Cut an operation's value in space and work on the tiles on devices of their own."""
    for node in walk_nodes(built):
        for count in node.node.tiles or (0,):
            yield Proposal(
                f"tile:{node.template}" + (f"@{count}" if count else ""), "tile", (node.template,), check_tile(node),
                "latency and period: the operation's own time",
                f"at best the time of one of {count} tiles, plus their overlap; a profile has no times of tiles, "
                "measure the tiled op" if count else "the time of one tile",
                frozenset(node.operations),
                program_change={"graph": node.graph, "node": node.name, "tiles": count} if count else None,
                needs="the op itself has to work by tiles", predictable=False,
            )  # fmt: skip


def check_double_buffer(built: BuiltProgram, state: str) -> Verdict:
    """A second copy removes the wait of the next write for this batch's read, and nothing else."""
    edges = [e for e in _state_edges(built) if e.lam == 1 and str(e.state).split("[")[0] == state]
    waits = [edge for edge in edges if edge.kind == "WAR" and edge.source != edge.target]
    if waits:
        return Verdict(True, f"{_name_edge(waits[0])} only protects a value that is still read; a copy ends it")
    if not edges:
        return Verdict(False, f"state '{state}' makes no batch wait for another")
    return Verdict(
        False, f"{_name_edge(edges[0])}: the next batch needs the value that this one writes, not just its place"
    )


def propose_double_buffers(built: BuiltProgram) -> Iterator[Proposal]:
    """Keep two copies of a state, so that the next batch writes while this one still reads."""
    for state in built.program.states:
        edges = [e for e in _state_edges(built) if str(e.state).split("[")[0] == state]
        ends = frozenset(end for edge in edges for end in (edge.source, edge.target))
        if not ends:
            continue
        blocks: set[frozenset[str]] = set()
        for unit in find_units(built):
            inside = frozenset(unit.operations)
            if len(inside & ends) > 1:
                blocks |= {frozenset({path}) for path in inside & ends}
                inside -= ends
            blocks |= {inside} if inside else set()
        yield Proposal(
            f"double-buffer:{state}", "double-buffer", (state,), check_double_buffer(built, state),
            "period: the recurrence through a write that waits for a read (WAR)",
            "the write of the next batch overlaps this batch's read, on devices of their own",
            ends, Setting(frozenset(blocks), variation=Variation(double_buffered=frozenset({state}))),
            {"state": state, "copies": 2}, "the ops have to alternate between two copies of the state",
        )  # fmt: skip


def check_event_driven(built: BuiltProgram, node: PlacedNode) -> Verdict:
    """Consumers may go on with the last value only where the node says so and no written state ties it to others."""
    if not node.node.event_driven:
        waits = [f for path in node.operations for f in built.flat.outgoing.get(path, ()) if f.target != OUTPUT]
        needed = f"'{waits[0].label}' needs this batch's value" if waits else "its result belongs to this batch"
        return Verdict(False, f"'{node.template}' is not declared event_driven: {needed}")
    own = set(node.operations)
    tied = [e for e in _state_edges(built) if e.lam == 0 and (e.source in own) != (e.target in own)]
    if tied:
        return Verdict(False, f"{_name_edge(tied[0])} orders it with another operation in every batch")
    return Verdict(True, f"'{node.template}' is declared event_driven: its consumers use the last value")


def propose_event_driven(built: BuiltProgram) -> Iterator[Proposal]:
    """Take a stage out of the batch's path: it runs when an event comes, on a device of its own."""
    everything = frozenset(operation.path for operation in built.flat.operations)
    for node in walk_nodes(built):
        own = frozenset(node.operations)
        if not own:
            continue
        blocks = {own, everything - own} - {frozenset()}
        yield Proposal(
            f"event-driven:{node.template}", "event-driven", (node.template,), check_event_driven(built, node),
            "latency: the stage's time on the path of every batch",
            "the stage leaves the path and the cycle of the others",
            own, Setting(frozenset(blocks), variation=Variation(asynchronous=own)),
            needs="the consumers have to take the stage's last value instead of waiting",
        )  # fmt: skip


def propose_all(built: BuiltProgram) -> list[Proposal]:
    """Return every proposal, legal and illegal, in a stable order."""
    sources = (
        propose_streams, propose_co_locations, propose_disaggregations, propose_step_pipelines,
        propose_sequence_parallels, propose_tiles, propose_double_buffers, propose_event_driven,
    )  # fmt: skip
    return [proposal for source in sources for proposal in source(built)]


COMPOSABLE: frozenset[tuple[Transformation, Transformation]] = frozenset(
    {
        ("stream", "co-locate"),
        ("stream", "disaggregate"),
        ("stream", "step-pipeline"),
        ("stream", "sequence-parallel"),
        ("stream", "double-buffer"),
        ("stream", "event-driven"),
        ("disaggregate", "step-pipeline"),
        ("disaggregate", "sequence-parallel"),
        ("disaggregate", "event-driven"),
        ("step-pipeline", "sequence-parallel"),
        ("sequence-parallel", "sequence-parallel"),
        ("sequence-parallel", "double-buffer"),
        ("step-pipeline", "double-buffer"),
    }
)
"""Which two may be applied together: they choose different things, or the finer of two cuts holds both."""
