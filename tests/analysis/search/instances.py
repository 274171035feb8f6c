"""Random small instances with all features, and the exhaustive search that the real one is held against."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flashrt.analysis import Profile, read_profile
from flashrt.analysis.search import Pins, SearchRequest
from flashrt.ir import BuiltProgram, build, find_races, flatten
from flashrt.ir.building import parse_program

from .checker import Checker

Front = dict[tuple[Fraction, Fraction], int]
"""(period, latency) in milliseconds -> fewest devices."""


@dataclass(frozen=True)
class Instance:
    """A program, its profile and a request."""

    built: BuiltProgram
    profile: Profile
    request: SearchRequest


def random_instance(seed: int) -> Instance:
    """Return instance number `seed`; the same one every time."""
    rng = random.Random(seed)
    while True:
        document = _program(rng)
        program, findings = parse_program(document, None)
        if not [f for f in findings if f.severity == "error"] and not find_races(flatten(program)):
            break
    built = build(document, Path(__file__).parent)
    num_devices = rng.choice([2, 3, 3, 4])
    stagger = rng.choice([0, 0, 1, 2]) if len(built.flat.operations) <= 3 else rng.choice([0, 0, 0, 1])
    overlap = (
        rng.choice(["disjoint", "disjoint", "aligned"])
        if stagger == 0 and len(built.flat.operations) <= 3
        else ("disjoint")
    )
    profile = _profile(rng, built)
    islands: Sequence[Sequence[int]] = ()
    if rng.random() < 0.3 and num_devices > 1:
        cut = rng.randrange(1, num_devices)
        islands = (tuple(range(cut)), tuple(range(cut, num_devices)))
    memory = rng.choice([None, None, None, 8, 14])
    request = SearchRequest(
        num_devices,
        islands=islands,
        memory_bytes=memory,
        pins=_pins(rng, built, num_devices),
        overlap=overlap,  # type: ignore[arg-type]
        max_stagger=stagger,
        split_states=rng.random() < 0.5,
        time_limit_s=60.0,
    )
    return Instance(built, profile, request)


def _program(rng: random.Random) -> dict[str, Any]:
    num = rng.choice([2, 3, 3, 4, 4])
    names = [f"n{i}" for i in range(num)]
    repeated = rng.randrange(num) if num < 4 and rng.random() < 0.35 else None
    opaque = rng.randrange(num) if rng.random() < 0.2 else None
    if opaque == repeated:
        opaque = None
    edges: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    made: dict[str, int] = {}

    def connect(source: str, target: str, end: str) -> None:
        chunks = rng.choice([1, 1, 2, 3])
        mixed = rng.random() < 0.15
        if taken.get(target, chunks) != chunks or (made.get(source, chunks) != chunks and not mixed):
            chunks = 1
        if made.get(source, chunks) != chunks:
            chunks = 1
        edge: dict[str, Any] = {"from": f"{source}.y", "to": end, "mode": "blocking"}
        if chunks > 1:
            taken[target] = made[source] = chunks
            edge |= {"mode": "streaming", "chunks": chunks, "lookahead": rng.choice([0, 0, 1])}
        edges.append(edge)

    for j in range(num):
        before = [i for i in range(j) if rng.random() < 0.6]
        if repeated == j:
            before = before[:1]
        for i in before:
            connect(names[i], names[j], f"n{j}.x" if repeated == j else f"n{j}.x{i}")
        if not before:
            edges.append({"from": "inp", "to": f"n{j}.x", "mode": "blocking"})
    outputs: dict[str, Any] = {}
    for i in range(num):
        if not any(edge["from"] == f"n{i}.y" for edge in edges):
            outputs[f"o{i}"] = {}
            connect(names[i], f"o{i}", f"o{i}")
    port = {"dtype": "float32", "shape": [250, 1000]}
    nodes: dict[str, Any] = {}
    for i, name in enumerate(names):
        nodes[name] = {"op": "f", "degrees": sorted({1, *rng.sample([1, 2, 3], rng.choice([1, 2, 2]))})}
        if i == opaque:
            nodes[name] = {"opaque": "engine", "devices": rng.choice([1, 1, 2])}
        if rng.random() < 0.4 and i != repeated:
            nodes[name]["outputs"] = {"y": port}
    users = dict(nodes)
    states: dict[str, Any] = {}
    graphs: dict[str, Any] = {"app": {"inputs": {"inp": {}}, "outputs": outputs, "nodes": nodes, "edges": edges}}
    if repeated is not None:
        name = names[repeated]
        users[name] = {"op": "g", "degrees": [1, 2]}
        nodes[name] = {"graph": "loop"}
        graphs["loop"] = {
            "repeat": {"times": 2, "carry": {"y": "x"}}, "inputs": {"x": {}}, "outputs": {"y": {}},
            "nodes": {"s": users[name]},
            "edges": [{"from": "x", "to": "s.x", "mode": "blocking"}, {"from": "s.y", "to": "y", "mode": "blocking"}],
        }  # fmt: skip
        if rng.random() < 0.5:
            states["step"] = {"per": "iteration", "bytes": 2}
            users[name]["reads"] = users[name]["writes"] = ["step"]
    for state in range(rng.choice([0, 1, 1, 2])):
        how = {name: rng.choice(["", "", "r", "w", "rw"]) for name in names}
        if not any(how.values()):
            continue
        states[f"s{state}"] = {"bytes": rng.choice([0, 1, 3])}
        for name, access in how.items():
            for letter, key in (("r", "reads"), ("w", "writes")):
                if letter in access:
                    users[name][key] = [*users[name].get(key, []), f"s{state}"]
    return {"schema": "flashrt/program@1", "name": "random", "entry": "app", "states": states, "graphs": graphs}


def _profile(rng: random.Random, built: BuiltProgram) -> Profile:
    times: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for operation in built.flat.operations:
        base = rng.choice([0, rng.randrange(1, 12), rng.randrange(5, 30), 7.3])
        times[operation.path] = {
            str(d): round(base / d ** rng.choice([0.3, 0.7, 1.0]) + rng.choice([0, 1]), 1) for d in operation.degrees
        }
        if rng.random() < 0.6:
            by_degree = {str(d): rng.randrange(6) for d in operation.degrees}
            memory[operation.path] = rng.choice([rng.randrange(5), by_degree])
    if len(times) > 1 and rng.random() < 0.1:
        times[next(iter(times))].popitem() if len(times[next(iter(times))]) > 1 else None
    memory = {path: value for path, value in memory.items() if isinstance(value, int) or set(value) >= set(times[path])}
    return read_profile(
        {
            "schema": "flashrt/profile@1", "device": "emulated", "provenance": "declared",
            "operations": times, "memory": memory,
            "transfer": {"latency_ms": rng.choice([0, 1, 2.5]), "gigabytes_per_s": rng.choice([None, 1])},
        },
        built,
    )  # fmt: skip


def _pins(rng: random.Random, built: BuiltProgram, num_devices: int) -> Pins:
    paths = [operation.path for operation in built.flat.operations]
    place: dict[str, Any] = {}
    together: list[list[str]] = []
    apart: list[list[str]] = []
    degree: dict[str, int] = {}
    if rng.random() < 0.1:
        operation = rng.choice(built.flat.operations)
        size = rng.choice(operation.degrees)
        if size <= num_devices:
            place[operation.path] = sorted(rng.sample(range(num_devices), size))
    if len(paths) > 1 and rng.random() < 0.1:
        together.append(rng.sample(paths, 2))
    if len(paths) > 1 and rng.random() < 0.1:
        apart.append(rng.sample(paths, 2))
    if rng.random() < 0.1:
        operation = rng.choice(built.flat.operations)
        degree[operation.path] = rng.choice(operation.degrees)
    return Pins(place, together, apart, degree)


def placements(instance: Instance) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield every placement that is allowed, one of those that renumbering devices makes equal."""
    built, request = instance.built, instance.request
    checker = Checker(built, instance.profile)
    devices = range(request.num_devices)
    islands = [set(island) for island in request.islands] or [set(devices)]
    choices = []
    for operation in built.flat.operations:
        known = instance.profile.operations[operation.path]
        degrees = {d for d in operation.degrees if d in known}
        if operation.path in request.pins.degree:
            degrees &= {request.pins.degree[operation.path]}
        pinned = request.pins.place.get(operation.path)
        choices.append([
            subset for size in sorted(degrees) for subset in itertools.combinations(devices, size)
            if any(set(subset) <= island for island in islands) and (pinned is None or tuple(pinned) == subset)
        ])  # fmt: skip
    renumberings = [
        dict(zip(devices, image, strict=True)) for image in itertools.permutations(devices)
        if not request.pins.place and {frozenset(image[d] for d in island) for island in islands}
        == {frozenset(island) for island in islands}
    ] or [{device: device for device in devices}]  # fmt: skip
    paths = checker.paths
    seen: set[tuple[tuple[int, ...], ...]] = set()
    written = [
        {o.path for o in built.flat.operations if state in o.accesses}
        for state in built.flat.state_instances
        if any("w" in o.accesses.get(state, "") for o in built.flat.operations)
    ]
    for combination in itertools.product(*choices):
        groups = set(combination)
        for a, b in itertools.combinations(groups, 2):
            common = set(a) & set(b)
            if common and (request.overlap == "disjoint" or common not in (set(a), set(b))):
                break
        else:
            placed = dict(zip(paths, combination, strict=True))
            if not request.split_states and any(len({placed[p] for p in users}) > 1 for users in written):
                continue
            if any(len({placed[p] for p in names}) > 1 for names in request.pins.together):
                continue
            if any(set(placed[a]) & set(placed[b]) for a, b in request.pins.apart):
                continue
            limit = request.memory_bytes
            if limit is not None and any(used > limit for used in checker.memory(placed).values()):
                continue
            key = min(
                tuple(tuple(sorted(renumbering[d] for d in group)) for group in combination)
                for renumbering in renumberings
            )
            if key not in seen:
                seen.add(key)
                yield placed


def orders(
    instance: Instance, placed: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[dict[int, tuple[str, ...]], dict[str, int]]]:
    """Yield every order of every device with every stagger within the request's range."""
    used = sorted({device for group in placed.values() for device in group})
    on = {device: [path for path in placed if device in placed[path]] for device in used}
    distinct = {tuple(paths) for paths in on.values()}
    range_of = range(instance.request.max_stagger + 1)
    for chosen in itertools.product(*(itertools.permutations(paths) for paths in sorted(distinct))):
        order_of = dict(zip(sorted(distinct), chosen, strict=True))
        order = {device: order_of[tuple(paths)] for device, paths in on.items()}
        for staggers in itertools.product(range_of, repeat=len(placed)):
            stagger = dict(zip(placed, staggers, strict=True))
            if all(min(stagger[path] for path in paths) == 0 for paths in distinct):
                yield order, stagger


def num_orders(instance: Instance, placed: Mapping[str, tuple[int, ...]]) -> int:
    """Return an upper bound on how many `orders` yields."""
    total = (instance.request.max_stagger + 1) ** len(placed)
    for paths in {tuple(p for p in placed if device in placed[p]) for group in placed.values() for device in group}:
        for factor in range(2, len(paths) + 1):
            total *= factor
    return total


def brute_force(instance: Instance, limit: int = 6000) -> Front | None:
    """Return the exact front by enumeration, or None where there is more than `limit` to look at."""
    found: Front = {}
    labels = sorted({
        label for flow in instance.built.flat.dataflow if flow.chunked or flow.source_chunks > 1 or
        flow.target_chunks > 1 for label in flow.labels
    } & {edge.label for graph in instance.built.program.graphs.values() for edge in graph.edges
         if edge.mode == "streaming"})  # fmt: skip
    variants = [subset for size in range(len(labels) + 1) for subset in itertools.combinations(labels, size)]
    all_placed = list(placements(instance))
    if len(variants) * sum(num_orders(instance, placed) for placed in all_placed) > limit:
        return None
    for blocking in variants:
        checker = Checker(instance.built, instance.profile, blocking)
        for placed in all_placed:
            prepared = checker.graph(placed)
            devices = len({device for group in placed.values() for device in group})
            for order, stagger in orders(instance, placed):
                for turns in (False, True) if prepared[4] else (False,):
                    figures = checker.figures(placed, order, stagger, turns, prepared)
                    if figures is not None:
                        found[figures] = min(found.get(figures, devices), devices)
    return {
        figures: devices for figures, devices in found.items()
        if not any(a[0] <= figures[0] and a[1] <= figures[1] and a != figures for a in found)
    }  # fmt: skip
