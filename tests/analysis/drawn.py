"""Random programs, profiles and placements, as Hypothesis strategies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from flashrt.analysis import DeploymentCost, Placement, Profile, read_deployment, read_profile
from flashrt.ir import BuiltProgram, build, find_races, flatten
from flashrt.ir.building import parse_program

FOLDER = Path(__file__).parent


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
def deployed(draw: st.DrawFn, *, ordered: bool = False, max_nodes: int = 5) -> tuple[BuiltProgram, Profile, Placement]:
    """A program with a profile and a placement; `max_nodes` limits the program."""
    built = draw(programs(max_nodes))
    return built, draw(profiles(built)), draw(placements(built, ordered=ordered))


def device_parts(cost: DeploymentCost) -> dict[int, list[tuple[str, int]]]:
    """Return the parts of each device in the order in which it runs them, as `simulate` takes them."""
    parts = cost.constraints.parts
    return {
        device: [(parts[number].operation, parts[number].index) for number in sequence]
        for device, sequence in cost.ordered.sequences.items()
    }
