"""How a program is placed so that its operations can be measured at one degree."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt import gpu
from flashrt.bench.systems import System
from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.ir import BuiltProgram, FlatProgram

GPU_KINDS = {"cuda", "rocm"}
CPU: tuple[gpu.Kind, ...] = ("cpu",)


@dataclass(frozen=True)
class Part:
    """Operations that are in one group in every deployment, because they share a state that one of them writes."""

    paths: tuple[str, ...]
    degrees: frozenset[int]
    """Degrees that all of them allow."""

    @property
    def home(self) -> int:
        """The degree at which it runs while others are measured: the smallest."""
        return min(self.degrees)


@dataclass(frozen=True)
class Pool:
    """The devices to measure on."""

    kind: str
    names: tuple[str, ...]
    given: bool
    """Whether the caller named them; else they are this machine's cores, which ranks may share."""

    @property
    def limit(self) -> int | None:
        """The largest degree that can be measured; None: any."""
        return len(self.names) if self.given else None

    def take(self, count: int) -> tuple[str, ...]:
        """Return as many device names, the first ones again where there are too few."""
        return tuple(self.names[index % len(self.names)] for index in range(count))


def find_pool(devices: Sequence[str]) -> Pool:
    """Return the devices to measure on: those given, or this machine's cores.

    Raises
    ------
    InputError
        Emulated devices, or devices of several kinds.
    """
    if not devices:
        return Pool("cpu", tuple(device.uuid for device in gpu.inventory(kinds=CPU).devices), False)
    kinds = {name.split(":", 1)[0] if ":" in name else name.rpartition("-")[0] for name in devices}
    if kinds == {"emulated"} or len(kinds) > 1:
        raise input_error(
            "argument 'devices'", "real devices of one kind: emulated ones take their times from a profile",
            listed(devices), "name cpu-0, cuda:0 and the like, or a lease of such; then call again",
            rule="devices-to-measure",
        )  # fmt: skip
    return Pool(kinds.pop(), tuple(devices), True)


def find_parts(flat: FlatProgram) -> tuple[Part, ...]:
    """Return the program's parts in its order.

    Raises
    ------
    InputError
        Operations that share a state have no degree in common, so that no deployment can run them.
    """
    owner = {operation.path: operation.path for operation in flat.operations}
    users: dict[str, list[str]] = {}
    written = {instance for operation in flat.operations for instance, how in operation.accesses.items() if "w" in how}
    for operation in flat.operations:
        for instance in operation.accesses:
            users.setdefault(instance, []).append(operation.path)
    for instance in sorted(written):
        first = owner[users[instance][0]]
        merged = {owner[path] for path in users[instance]}
        owner = {path: first if root in merged else root for path, root in owner.items()}
    together: dict[str, list[str]] = {}
    for path, root in owner.items():
        together.setdefault(root, []).append(path)
    parts = [
        Part(tuple(paths), frozenset.intersection(*(frozenset(flat.by_path[path].degrees) for path in paths)))
        for paths in together.values()
    ]
    findings = [
        Finding(
            f"operations {listed(part.paths)}", "a degree that all of them allow: they share a state",
            "; ".join(f"'{path}': {list(flat.by_path[path].degrees)}" for path in part.paths),
            "change their degrees, or give each a state of its own, and call ir_build again", rule="no-common-degree",
        )
        for part in parts if not part.degrees
    ]  # fmt: skip
    if findings:
        raise InputError(findings)
    return tuple(parts)


def declared_degrees(built: BuiltProgram) -> tuple[int, ...]:
    """Return every degree that an operation of the program declares."""
    return tuple(sorted({degree for operation in built.flat.operations for degree in operation.degrees}))


def choose_degrees(built: BuiltProgram, wanted: Sequence[int] | None, limit: int | None) -> tuple[int, ...]:
    """Return the degrees to measure: those wanted, or all that are declared and that the devices allow.

    Raises
    ------
    InputError
        No operation declares one of them, or there are too few devices for it.
    """
    declared = declared_degrees(built)
    if not wanted:
        found = tuple(degree for degree in declared if limit is None or degree <= limit)
        if found:
            return found
        raise input_error(
            "argument 'devices'", f"at least {declared[0]} devices, the smallest degree of the program's operations",
            f"{limit}", "lease more with gpu_acquire and call again", rule="too-few-devices",
        )  # fmt: skip
    where, findings = "argument 'degrees'", []
    for degree in sorted(set(wanted)):
        if degree not in declared:
            near = min(declared, key=lambda other: abs(other - degree))
            findings.append(
                Finding(
                    where, f"degrees that operations declare: {list(declared)}", f"{degree}",
                    "leave it out, or add it to a node's 'degrees' if its op can do it, and call ir_build again",
                    rule="degrees", nearest=str(near),
                )
            )  # fmt: skip
        elif limit is not None and degree > limit:
            findings.append(
                Finding(
                    where, f"at most {limit}, the devices given", f"{degree}",
                    "lease more with gpu_acquire, or leave it out; then call again", rule="degrees",
                )
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return tuple(sorted(set(wanted)))


def place(parts: Iterable[Part], degree: int, wide: Collection[Part], pool: Pool) -> tuple[dict[str, Any], list[str]]:
    """Return a deployment document that runs `wide` in one group of `degree`, and the names of its devices.

    All other parts run at their own smallest degree, on devices of their own where there are enough. Nothing streams
    between operations and one batch is in flight, so that one operation works at a time.
    """
    groups: dict[str, list[int]] = {"measured": list(range(degree))}
    places: dict[str, str] = {}
    count = degree
    for part in parts:
        home = "measured" if part in wide else f"rest-{part.home}"
        if home not in groups:
            groups[home] = list(range(count, count + part.home))
            count += part.home
        places |= dict.fromkeys(part.paths, home)
    return {
        "schema": "flashrt/deployment@1",
        "devices": pool.kind,
        "groups": {name: numbers for name, numbers in groups.items() if name in places.values()},
        "place": places,
        "interleave": False,
        "in_flight": 1,
    }, list(pool.take(count))


def streaming_edges(built: BuiltProgram) -> list[str]:
    """Return the labels of the program's streaming edges."""
    graphs = built.program.graphs.values()
    return [edge.label for graph in graphs for edge in graph.edges if edge.mode == "streaming"]


def write_system(program: System, document: dict[str, Any], path: Path, measured: dict[str, Any]) -> System:
    """Write a deployment of `program` to `path` and return it as a system whose workers measure."""
    path.write_text(json.dumps(document, indent=1))
    return System(
        program.reference, "deployment", path, "", program.digest, program.program, program.folder, root=program.root,
        files=program.files, runs_in=program.folder, measured=measured,
    )  # fmt: skip
