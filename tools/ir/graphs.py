"""Walking one graph: the ends of its edges, its order, its cycles."""

from __future__ import annotations

from collections.abc import Iterator

from flashrt.ir.model import Graph


def node_of(end: str) -> str | None:
    """Return the node that an edge's end names, or None for a port of the graph itself."""
    return end.split(".", 1)[0] if "." in end else None


def port_of(end: str) -> str:
    """Return the port that an edge's end names."""
    return end.split(".", 1)[1] if "." in end else end


def node_successors(graph: Graph) -> dict[str, set[str]]:
    """Return, for each node, the nodes that use its outputs."""
    found: dict[str, set[str]] = {name: set() for name in graph.nodes}
    for edge in graph.edges:
        source, target = node_of(edge.source), node_of(edge.target)
        if source in found and target in graph.nodes and source is not None and target is not None:
            found[source].add(target)
    return found


def find_cycle(graph: Graph) -> list[str] | None:
    """Return the nodes of one cycle of the graph, first node repeated at the end, or None."""
    successors = node_successors(graph)
    done: set[str] = set()
    for root in graph.nodes:
        trail: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = []
        if root not in done:
            stack.append((root, iter(sorted(successors[root]))))
            trail.append(root)
        while stack:
            node, following = stack[-1]
            for target in following:
                if target in trail:
                    return [*trail[trail.index(target) :], target]
                if target not in done:
                    stack.append((target, iter(sorted(successors[target]))))
                    trail.append(target)
                    break
            else:
                done.add(node)
                stack.pop()
                trail.pop()
    return None


def topological_nodes(graph: Graph) -> list[str]:
    """Return node names so that producers come first; ties keep the document's order.

    The graph must be acyclic (see `find_cycle`).
    """
    successors = node_successors(graph)
    waiting = dict.fromkeys(graph.nodes, 0)
    for targets in successors.values():
        for target in targets:
            waiting[target] += 1
    order: list[str] = []
    while len(order) < len(waiting):
        ready = next(name for name in graph.nodes if name not in order and waiting[name] == 0)
        order.append(ready)
        for target in successors[ready]:
            waiting[target] -= 1
    return order
