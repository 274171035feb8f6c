"""Phases 1 and 2: simple subplans, each a path with every colocatable edge kept or merged; compounds that share nodes.

Source: ``papers/002`` (Cornfigurator), section 4.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx

from flashrt.planners.serving.problem import Problem

Restriction = Callable[[tuple[tuple[str, ...], ...]], bool]
"""Says of a subplan's nodes (their components) whether it is allowed: baselines are such restrictions."""


@dataclass(frozen=True)
class Simple:
    """A subgraph of the model as nodes of merged components.

    Attributes
    ----------
    nodes
        Components as bits, in topological order.
    types
        The request types that it can serve, as bits.
    before
        Node -> the nodes whose output it needs, by their place in `nodes`.
    """

    nodes: tuple[int, ...]
    types: int
    before: tuple[tuple[int, ...], ...]


def merged(components: Sequence[int], merges: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return the nodes, as bits, that merging these pairs makes of the components."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(components)
    graph.add_edges_from(merges)
    return frozenset(sum(1 << component for component in group) for group in nx.connected_components(graph))


def simple_subplans(
    problem: Problem, num_gpus: int, allowed: Restriction = lambda nodes: True
) -> tuple[tuple[Simple, ...], int]:
    """Return every simple subplan that the profile can serve within the GPUs, and how many there are without that."""
    names = problem.model.components
    edges = [(names.index(one.source), names.index(one.target), one.colocatable) for one in problem.model.edges]
    unions: set[int] = set()
    for need in problem.needs:
        unions |= {need} | {need | other for other in unions}
    found: dict[frozenset[int], Simple] = {}
    count = 0
    for union in sorted(unions):
        inside = [(a, b, can) for a, b, can in edges if union >> a & 1 and union >> b & 1]
        joints = [(a, b) for a, b, can in inside if can]
        members = [bit for bit in range(len(names)) if union >> bit & 1]
        seen: set[frozenset[int]] = set()
        for chosen in itertools.product((False, True), repeat=len(joints)):
            nodes = merged(members, [joint for joint, is_merged in zip(joints, chosen, strict=True) if is_merged])
            if nodes in seen:
                continue
            seen.add(nodes)
            ordered = _in_order(nodes, [(a, b) for a, b, _ in inside])
            if ordered is None:
                continue
            count += 1
            if not allowed(tuple(problem.names(node) for node in ordered[0])):
                continue
            types = _served(problem, ordered[0], union, num_gpus)
            if types:
                found.setdefault(nodes, Simple(ordered[0], types, ordered[1]))
    return tuple(sorted(found.values(), key=lambda one: (len(one.nodes), one.nodes))), count


def _in_order(
    nodes: frozenset[int], edges: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """Return nodes in topological order with what each needs, or None where merging made a cycle."""
    home = {bit: node for node in nodes for bit in range(node.bit_length()) if node >> bit & 1}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(sorted(nodes))
    graph.add_edges_from((home[a], home[b]) for a, b in edges if home[a] != home[b])
    if not nx.is_directed_acyclic_graph(graph):
        return None
    order = tuple(nx.lexicographical_topological_sort(graph))
    return order, tuple(tuple(sorted(order.index(one) for one in graph.predecessors(node))) for node in order)


def _served(problem: Problem, nodes: Sequence[int], union: int, num_gpus: int) -> int:
    """Return the types that every node they pass has a configuration for; 0 where a node would serve none."""
    configurations = {
        node: [k for k in problem.configurations_of(node) if problem.configurations[k].gpus <= num_gpus]
        for node in nodes
    }
    if not all(configurations.values()):
        return 0
    types = 0
    for place, need in enumerate(problem.needs):
        if need & ~union:
            continue
        passed = [node for node in nodes if node & need]
        if all(any(problem.capacity[k, place] > 0 for k in configurations[node]) for node in passed):
            types |= 1 << place
    used = 0
    for place, need in enumerate(problem.needs):
        used |= need if types >> place & 1 else 0
    return types if used == union else 0


def compound_subplans(simple: Sequence[Simple], most: int) -> list[tuple[int, ...]]:
    """Return subplans as the simple ones they are made of: each alone, and up to `most` that shared nodes join."""
    found: list[tuple[int, ...]] = [(number,) for number in range(len(simple))]
    layer = list(found)
    for _ in range(most - 1):
        larger = {
            tuple(sorted((*subplan, other)))
            for subplan in layer
            for other in range(len(simple))
            if other not in subplan and any(set(simple[other].nodes) & set(simple[one].nodes) for one in subplan)
        }
        layer = sorted(larger)
        found += layer
    return found


def route_of(problem: Problem, simple: Simple, place: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the nodes that a type passes, by their place in the subplan, and what each waits for, by place here."""
    need = problem.needs[place]
    passed = [number for number, node in enumerate(simple.nodes) if node & need]
    return tuple(passed), tuple(
        tuple(passed.index(one) for one in simple.before[number] if one in passed) for number in passed
    )
