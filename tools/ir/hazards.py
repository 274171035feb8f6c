"""Dependencies between operations: within a batch (lambda 0) from dataflow, across batches (lambda 1) from state.

Source: ``spec/cost-model.md``, "State gives the lambda edges"; ``papers/000``, Section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal

from flashrt.ir.flattening import INPUT, OUTPUT, FlatProgram

Kind = Literal["data", "RAW", "WAR", "WAW"]


@dataclass(frozen=True, order=True)
class Dependency:
    """Instance (j, target) may not start before (j - lambda, source) has finished."""

    source: str
    target: str
    lam: int
    kind: Kind
    state: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the record that ``analyze`` reports."""
        return {
            "source": self.source,
            "target": self.target,
            "lambda": self.lam,
            "kind": self.kind,
            "state": self.state,
        }


@dataclass(frozen=True, order=True)
class Race:
    """Two operations that touch one state, at least one writing, with no dataflow path between them."""

    state: str
    first: str
    second: str
    kinds: tuple[str, str]


def state_accesses(flat: FlatProgram) -> dict[str, list[tuple[str, str]]]:
    """Return state instance -> [(operation path, ``r`` | ``w`` | ``rw``)] in execution order."""
    found: dict[str, list[tuple[str, str]]] = {instance: [] for instance in flat.state_instances}
    for operation in flat.operations:
        for instance, access in operation.accesses.items():
            found[instance].append((operation.path, access))
    return found


def find_races(flat: FlatProgram) -> list[Race]:
    """Return every pair of conflicting accesses that no dataflow path orders."""
    races = []
    for instance, accesses in state_accesses(flat).items():
        for i, (first, how_first) in enumerate(accesses):
            for second, how_second in accesses[i + 1 :]:
                conflicting = "w" in how_first or "w" in how_second
                ordered = first in flat.predecessors[second] or second in flat.predecessors[first]
                if conflicting and not ordered:
                    races.append(Race(instance, first, second, (how_first, how_second)))
    return races


def find_dependencies(flat: FlatProgram) -> list[Dependency]:
    """Return every dependency of the program, transitively implied ones included.

    `flat` must be free of races. Where two operations conflict in more than one way, the edge carries the
    strongest kind, in the order RAW, WAW, WAR.
    """
    found: dict[tuple[str, str, int, str | None], Kind] = {}
    rank = {"data": 0, "RAW": 1, "WAW": 2, "WAR": 3}

    def add(source: str, target: str, lam: int, kind: Kind, state: str | None) -> None:
        key = (source, target, lam, state)
        if key not in found or rank[kind] < rank[found[key]]:
            found[key] = kind

    for flow in flat.dataflow:
        if flow.source != INPUT and flow.target != OUTPUT and flow.source != flow.target:
            add(flow.source, flow.target, 0, "data", None)
    for instance, accesses in state_accesses(flat).items():
        for path, how in accesses:
            if "w" in how:
                add(path, path, 1, "RAW" if "r" in how else "WAW", instance)
        for i, (first, how_first) in enumerate(accesses):
            for second, how_second in accesses[i + 1 :]:
                for kind in conflicts(how_first, how_second):
                    add(first, second, 0, kind, instance)
                for kind in conflicts(how_second, how_first):
                    add(second, first, 1, kind, instance)
    return [Dependency(s, t, lam, kind, state) for (s, t, lam, state), kind in found.items()]


def conflicts(earlier: str, later: str) -> list[Kind]:
    """Return how a later access conflicts with an earlier one; each is ``r``, ``w`` or ``rw``."""
    kinds: list[Kind] = []
    if "w" in earlier and "r" in later:
        kinds.append("RAW")
    if "w" in earlier and "w" in later:
        kinds.append("WAW")
    if "r" in earlier and "w" in later:
        kinds.append("WAR")
    return kinds


def reduce_dependencies(dependencies: Iterable[Dependency]) -> list[Dependency]:
    """Leave out what other dependencies imply at equal lambda; an operation's tie to itself always stays.

    A lambda-0 edge is implied by a longer lambda-0 path. A lambda-1 edge u -> v is implied by another lambda-1
    edge a -> b when u reaches a and b reaches v through lambda-0 edges.
    """
    all_edges = list(dependencies)
    zero = {(d.source, d.target) for d in all_edges if d.lam == 0}
    one = {(d.source, d.target) for d in all_edges if d.lam == 1}
    reach = _closure(zero)

    def reaches(a: str, b: str) -> bool:
        return a == b or b in reach.get(a, frozenset())

    def implied(edge: Dependency) -> bool:
        u, v = edge.source, edge.target
        if edge.lam == 0:
            return any(mid != v and reaches(mid, v) for (a, mid) in zero if a == u)
        if u == v:
            return False
        # Ties of an operation to itself are kept by rule, so they must not remove anything either: through
        # them a one-batch edge between two nodes would always look implied.
        return any((a, b) != (u, v) and a != b and reaches(u, a) and reaches(b, v) for (a, b) in one)

    kept = [edge for edge in all_edges if not implied(edge)]
    seen: dict[tuple[str, str, int], Dependency] = {}
    for edge in kept:
        key = (edge.source, edge.target, edge.lam)
        if key not in seen or (edge.kind == "data" and seen[key].kind != "data"):
            seen[key] = edge
    return list(seen.values())


def _closure(edges: set[tuple[str, str]]) -> dict[str, frozenset[str]]:
    successors: dict[str, set[str]] = {}
    for a, b in edges:
        successors.setdefault(a, set()).add(b)
    closed: dict[str, frozenset[str]] = {}
    # Named as its "predecessors", a node's successors come before it.
    for node in TopologicalSorter(successors).static_order():
        below = successors.get(node, set())
        closed[node] = frozenset(below).union(*(closed[child] for child in below))
    return closed
