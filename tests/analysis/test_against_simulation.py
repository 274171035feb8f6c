"""Random programs on random deployments: the exact figures against the event simulator, and the proofs re-checked."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashrt.analysis import (
    DeploymentCost,
    Placement,
    Profile,
    build_constraints,
    device_sequences,
    evaluate_placement,
    read_deployment,
    read_profile,
    resource_arcs,
    simulate,
)
from flashrt.analysis.figures import find_figures
from flashrt.analysis.profile import TICKS_PER_MS
from flashrt.analysis.ratio import find_zero_cycle
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram, build, find_races, flatten
from flashrt.ir.build import parse_program

FOLDER = Path(__file__).parent
EXAMPLES = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def _edge(source: str, target: str, chunks: int, lookahead: int = 0) -> dict[str, Any]:
    if chunks == 1:
        return {"from": source, "to": target, "mode": "blocking"}
    return {"from": source, "to": target, "mode": "streaming", "chunks": chunks, "lookahead": lookahead}


@st.composite
def programs(draw: st.DrawFn, max_nodes: int = 5) -> BuiltProgram:
    """A program with a random dataflow, streaming edges, states and perhaps a repeated graph; every sink is shown."""
    num_nodes = draw(st.integers(1, max_nodes))
    names = [f"n{index}" for index in range(num_nodes)]
    repeated = draw(st.sampled_from([None, *range(num_nodes)])) if num_nodes < max_nodes else None
    edges: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    made: dict[str, int] = {}

    def connect(source: str, target: str, port: str) -> None:
        chunks = draw(st.sampled_from([1, 1, 2, 3]))
        if taken.get(target, chunks) != chunks or made.get(source, chunks) != chunks:
            chunks = 1
        if chunks > 1:
            taken[target] = made[source] = chunks
        end = f"{target}.{port}" if target in names else port
        edges.append(_edge(f"{source}.y", end, chunks, draw(st.integers(0, 1)) if chunks > 1 else 0))

    for i, j in sorted(itertools.combinations(range(num_nodes), 2), key=lambda pair: pair[1]):
        if (repeated != j or not any(e["to"] == f"n{j}.x" for e in edges)) and draw(st.booleans()):
            connect(names[i], names[j], "x" if repeated == j else f"x{i}")
    for j in range(num_nodes):
        if not any(edge["to"].startswith(f"n{j}.") for edge in edges):
            edges.append(_edge("inp", f"n{j}.x", 1))
    outputs = {}
    for i in range(num_nodes):
        if not any(edge["from"] == f"n{i}.y" for edge in edges):
            outputs[f"o{i}"] = {}
            connect(names[i], f"o{i}", f"o{i}")
    degrees = [1, 2]
    nodes: dict[str, Any] = {name: {"op": "f", "degrees": degrees} for name in names}
    states: dict[str, Any] = {}
    graphs: dict[str, Any] = {
        "app": {"inputs": {"inp": {}}, "outputs": outputs, "nodes": nodes, "edges": edges},
    }
    users: list[dict[str, Any]] = list(nodes.values())
    if repeated is not None:
        inner = {"op": "g", "degrees": degrees}
        nodes[names[repeated]] = {"graph": "loop"}
        users[repeated] = inner
        graphs["loop"] = {
            "repeat": {"times": draw(st.integers(1, 3)), "carry": {"y": "x"}},
            "inputs": {"x": {}},
            "outputs": {"y": {}},
            "nodes": {"s": inner},
            "edges": [_edge("x", "s.x", 1), _edge("s.y", "y", 1)],
        }
        if draw(st.booleans()):
            states["step"] = {"per": "iteration", "bytes": 10**6}
            inner["reads"] = inner["writes"] = ["step"]
    for state in range(draw(st.integers(0, 2))):
        name = f"s{state}"
        accesses = [draw(st.sampled_from(["", "", "r", "w", "rw"])) for _ in users]
        if any(accesses):
            states[name] = {"bytes": draw(st.sampled_from([0, 2 * 10**6]))}
        for user, how in zip(users, accesses, strict=True):
            user["reads"] = [*user.get("reads", []), *([name] if "r" in how else [])]
            user["writes"] = [*user.get("writes", []), *([name] if "w" in how else [])]
    document = {"schema": "flashrt/program@1", "name": "random", "entry": "app", "states": states, "graphs": graphs}
    program, findings = parse_program(document, None)
    assert not [f for f in findings if f.severity == "error" and f.rule != "race"], findings
    assume(not find_races(flatten(program)))
    return build(document, FOLDER)


@st.composite
def profiles(draw: st.DrawFn, built: BuiltProgram) -> Profile:
    """Random times at both degrees, chunk shares, transfers and frames."""
    times = st.one_of(st.integers(0, 20), st.sampled_from([0.1, 7.3, 12.55]))
    return read_profile(
        {
            "schema": "flashrt/profile@1",
            "device": "emulated",
            "provenance": "declared",
            "frames_per_batch": draw(st.sampled_from([None, 1, 2, 3, 6, 12])),
            "operations": {o.path: {"1": draw(times), "2": draw(times)} for o in built.flat.operations},
            "chunks": {built.flat.operations[0].path: [3, 1, 2]} if draw(st.booleans()) and _splits(built) else {},
            "transfer": {"latency_ms": draw(st.integers(0, 3)), "gigabytes_per_s": draw(st.sampled_from([None, 1]))},
        },
        built,
    )


def _splits(built: BuiltProgram) -> bool:
    path = built.flat.operations[0].path
    counts = [f.target_chunks for f in built.flat.incoming[path]]
    counts += [f.source_chunks for f in built.flat.outgoing[path]]
    return max(counts) == 3 or max(counts) == 1


@st.composite
def placements(draw: st.DrawFn, built: BuiltProgram, *, ordered: bool) -> Placement:
    """Operations on random groups, which may overlap; perhaps with orders that follow one list of all operations."""
    groups = {"a": [0], "b": [1], "c": [2], "ab": [0, 1], "bc": [1, 2]}
    paths = [operation.path for operation in built.flat.operations]
    place = {path: draw(st.sampled_from(sorted(groups))) for path in paths}
    document: dict[str, Any] = {"groups": groups, "place": place, "interleave": draw(st.sampled_from([None, False]))}
    if ordered:
        order: dict[int, list[str]] = {}
        for path in paths:
            for device in groups[place[path]]:
                order.setdefault(device, []).append(path)
        document["order"] = {device: draw(st.permutations(listing)) for device, listing in order.items()}
    return read_deployment(document, built)


@st.composite
def deployed(draw: st.DrawFn, *, ordered: bool = False) -> tuple[BuiltProgram, Profile, Placement]:
    built = draw(programs())
    return built, draw(profiles(built)), draw(placements(built, ordered=ordered))


def _device_parts(cost: DeploymentCost) -> dict[int, list[tuple[str, int]]]:
    parts = cost.constraints.parts
    return {
        device: [(parts[number].operation, parts[number].index) for number in sequence]
        for device, sequence in cost.ordered.sequences.items()
    }


def _ms(ticks: Fraction) -> Fraction:
    return ticks / TICKS_PER_MS


@EXAMPLES
@given(deployed())
def test_period_and_latency_are_those_of_the_simulation(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    figures = cost.ordered.figures
    num_parts = len(cost.constraints.parts)
    t_min = _ms(figures.ratio.ratio)
    run = simulate(built, profile, placement, _device_parts(cost), t_min, 3 * num_parts + 3)
    assert run.finite
    assert run.d0_ms == _ms(figures.visible.d0)
    assert max(run.latency_by_batch_ms) == _ms(figures.latency)

    if t_min == 0:
        return
    everything = sum(_ms(Fraction(arc.weight)) for arc in cost.constraints.arcs) + sum(
        _ms(Fraction(time)) for time in cost.constraints.times
    )
    num_batches = min(400, math.ceil(8 * everything / t_min) + 3 * num_parts)
    slower = simulate(built, profile, placement, _device_parts(cost), t_min * 3 / 4, num_batches)
    assert not slower.finite


@EXAMPLES
@given(deployed(), st.integers(101, 300))
def test_d0_at_a_wanted_period(case: tuple[BuiltProgram, Profile, Placement], percent: int) -> None:
    built, profile, placement = case
    t_min_ms = evaluate_placement(built, profile, placement).t_min_ms
    assume(t_min_ms > 0)
    wanted = round(t_min_ms * percent / 100, 3)
    document = placement.document.model_copy(update={"period_ms": wanted})
    cost = evaluate_placement(built, profile, read_deployment(document, built))
    run = simulate(
        built, profile, placement, _device_parts(cost), Fraction(str(wanted)), 2 * len(cost.constraints.parts) + 3
    )
    assert cost.d0_ms == float(run.d0_ms)
    early = document.model_copy(update={"period_ms": t_min_ms * 0.9})
    refused = evaluate_placement(built, profile, read_deployment(early, built))
    assert refused.d0_ms is None
    assert not refused.sustainable


@EXAMPLES
@given(deployed())
def test_certificates_hold(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    arcs, ratio = cost.ordered.arcs, cost.ordered.figures.ratio
    for before, after in itertools.pairwise([*ratio.cycle, *ratio.cycle[:1]]):
        assert arcs[before].target == arcs[after].source
    if ratio.cycle:
        height = sum(arcs[number].height for number in ratio.cycle)
        assert Fraction(sum(arcs[number].weight for number in ratio.cycle), height) == ratio.ratio
    scale = ratio.ratio.denominator
    for arc in arcs:
        gain = scale * arc.weight - ratio.ratio.numerator * arc.height
        assert ratio.potentials[arc.target] >= ratio.potentials[arc.source] + gain
    length = sum(step.time_ms + step.lag_ms for step in cost.critical_path)
    late = cost.period_ms * (1 - sum(step.batches for step in cost.critical_path)) + length
    frames = cost.frames_per_batch or max(len(output.parts) for output in cost.constraints.outputs)
    assert cost.d0_ms is not None
    assert math.isclose(late - cost.latest_frame * cost.period_ms / frames, cost.d0_ms, abs_tol=1e-6)
    length = sum(step.time_ms + step.lag_ms - step.batches * cost.t_min_ms for step in cost.latency_path)
    assert math.isclose(length, cost.latency_ms, abs_tol=1e-6)


@EXAMPLES
@given(deployed())
def test_bounds_never_exceed_the_exact_figures(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    assert max(cost.t_min_resource_ms, cost.t_min_recurrence_ms) <= cost.t_min_ms
    assert cost.d0_ms is not None
    assert cost.d0_bound_ms is not None
    assert cost.d0_bound_ms <= cost.d0_ms
    assert cost.first_output_ms <= cost.latency_ms
    if all(len(output.parts) == 1 for output in cost.constraints.outputs):
        assert math.isclose(cost.d0_ms - cost.t_min_ms, cost.latency_ms, abs_tol=1e-6)


@EXAMPLES
@given(deployed())
def test_the_order_found_is_the_best_of_all(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    assert cost.order_proof == "optimal"
    choices = [list(itertools.permutations(paths)) for paths in placement.by_device.values()]
    assume(math.prod(len(choice) for choice in choices) <= 800)
    constraints = build_constraints(built, profile, placement)
    best: tuple[Fraction, Fraction] | None = None
    for combination in itertools.product(*choices):
        order = dict(zip(placement.by_device, combination, strict=True))
        for interleave in (False, True) if placement.document.interleave is None else (False,):
            sequences = device_sequences(constraints, order, interleave=interleave)
            arcs = [*constraints.arcs, *resource_arcs(constraints, sequences)]
            if find_zero_cycle(len(constraints.parts), arcs) is None:
                rank = find_figures(constraints, arcs, profile.frames_per_batch).rank[:2]
                best = rank if best is None else min(best, rank)
    assert best == cost.ordered.figures.rank[:2]


@EXAMPLES
@given(deployed(ordered=True))
def test_a_given_order_is_kept_or_its_deadlock_named(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    constraints = build_constraints(built, profile, placement)
    sequences = device_sequences(constraints, placement.order, interleave=False)
    arcs = [*constraints.arcs, *resource_arcs(constraints, sequences)]
    if find_zero_cycle(len(constraints.parts), arcs) is not None:
        with pytest.raises(InputError, match="a deadlock, each waiting for the one before") as caught:
            evaluate_placement(built, profile, placement)
        assert [finding.rule for finding in caught.value.findings] == ["deadlock"]
        parts = {
            device: [(constraints.parts[number].operation, constraints.parts[number].index) for number in sequence]
            for device, sequence in sequences.items()
        }
        with pytest.raises(InputError, match="a deadlock"):
            simulate(built, profile, placement, parts, 100.0, 3)
        return
    cost = evaluate_placement(built, profile, placement)
    assert cost.order == placement.order
    again = evaluate_placement(built, profile, read_deployment(cost.deployment, built))
    assert (again.t_min_ms, again.latency_ms, again.d0_ms) == (cost.t_min_ms, cost.latency_ms, cost.d0_ms)
