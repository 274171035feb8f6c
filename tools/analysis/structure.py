"""The document's tree as the analysis needs it: top-level units, repeated graphs, edges and who they join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashrt.ir import OUTPUT, BuiltProgram, Dataflow, Edge, Node, find_operations


@dataclass(frozen=True)
class Unit:
    """A top-level node with all its operations: what placements move as one."""

    name: str
    operations: tuple[str, ...]

    @property
    def pattern(self) -> str | None:
        """The place pattern that names exactly this unit, or None where it takes several."""
        if self.operations == (self.name,):
            return self.name
        return f"{self.name}/*" if all(path.startswith(f"{self.name}/") for path in self.operations) else None


@dataclass(frozen=True)
class PlacedNode:
    """A node with operations of its own, and where the document has it."""

    graph: str
    name: str
    node: Node
    template: str
    """Path with stars for iterations: ``dit/step[*]``."""
    operations: tuple[str, ...]


@dataclass(frozen=True)
class RepeatedGraph:
    """A graph that runs several times a batch, not inside another repeated one."""

    name: str
    """Path of the node that contains it: ``dit``."""
    iterations: tuple[tuple[str, ...], ...]
    """Operations of each iteration."""


@dataclass(frozen=True)
class PlacedEdge:
    """An edge of the document with the flattened values that travel on it."""

    graph: str
    edge: Edge
    flows: tuple[Dataflow, ...]

    @property
    def key(self) -> str:
        """The edge in candidate ids: ``dit.latents->vae.latents``."""
        return f"{self.edge.source}->{self.edge.target}"


def top_graph(built: BuiltProgram) -> str:
    """Return the outermost graph with more than one node: a wrapper around one nested graph is looked through."""
    name = built.program.entry
    while True:
        graph = built.program.graphs[name]
        (only, *others) = graph.nodes.values()
        if others or graph.repeat or only.graph is None or built.program.graphs[only.graph].repeat:
            return name
        name = only.graph


def find_units(built: BuiltProgram) -> list[Unit]:
    """Return the top-level nodes in an order that respects the dataflow."""
    prefix, name = "", built.program.entry
    while name != top_graph(built):
        node_name, node = next(iter(built.program.graphs[name].nodes.items()))
        prefix, name = f"{prefix}{node_name}/", str(node.graph)
    units = []
    for node_name in built.program.graphs[name].nodes:
        operations = tuple(find_operations(built.flat, prefix + node_name))
        if operations:
            units.append(Unit(prefix + node_name, operations))
    first = {operation.path: index for index, operation in enumerate(built.flat.operations)}
    return sorted(units, key=lambda unit: first[unit.operations[0]])


def walk_nodes(built: BuiltProgram) -> Iterator[PlacedNode]:
    """Yield every op and opaque node once, with its operations."""
    by_template: dict[str, list[str]] = {}
    for operation in built.flat.operations:
        by_template.setdefault(operation.template, []).append(operation.path)

    def walk(graph_name: str, prefix: str) -> Iterator[PlacedNode]:
        graph = built.program.graphs[graph_name]
        for name, node in graph.nodes.items():
            template = f"{prefix}{name}" + ("[*]" if graph.repeat else "")
            if node.graph is not None:
                yield from walk(node.graph, f"{template}/")
            else:
                yield PlacedNode(graph_name, name, node, template, tuple(by_template.get(template, ())))

    yield from walk(built.program.entry, "")


def find_repeats(built: BuiltProgram) -> list[RepeatedGraph]:
    """Return the outermost repeated graphs that run at least twice."""
    found = []

    def walk(graph_name: str, prefix: str, name: str) -> None:
        graph = built.program.graphs[graph_name]
        if graph.repeat:
            inside = [o for o in built.flat.operations if o.path.startswith(prefix)]
            iterations = tuple(
                tuple(o.path for o in inside if o.iteration[0] == index) for index in range(graph.repeat.times)
            )
            if graph.repeat.times > 1:
                found.append(RepeatedGraph(name, iterations))
            return
        for node_name, node in graph.nodes.items():
            if node.graph is not None:
                walk(node.graph, f"{prefix}{node_name}/", f"{prefix}{node_name}")

    walk(built.program.entry, "", built.program.entry)
    return found


def find_edges(built: BuiltProgram) -> list[PlacedEdge]:
    """Return every edge of the graphs in use, with the values that travel on it."""
    by_label: dict[str, list[Dataflow]] = {}
    for flow in built.flat.dataflow:
        for label in dict.fromkeys(flow.labels):
            by_label.setdefault(label, []).append(flow)
    return [
        PlacedEdge(name, edge, tuple(by_label[edge.label]))
        for name, graph in built.program.graphs.items()
        for edge in graph.edges
        if edge.label in by_label
    ]


def streaming_labels(built: BuiltProgram) -> frozenset[str]:
    """Return the labels of all edges that the document lets stream."""
    return frozenset(placed.edge.label for placed in find_edges(built) if placed.edge.mode == "streaming")


def downstream_stream(built: BuiltProgram, label: str) -> frozenset[str]:
    """Return an edge with the streaming edges that carry its chunks on: without them its consumer hands over whole."""
    streaming = streaming_labels(built)
    found: set[str] = set()
    pending = [label]
    while pending:
        current = pending.pop()
        if current in found:
            continue
        found.add(current)
        for flow in built.flat.dataflow:
            if current in flow.labels:
                pending += [other for other in flow.labels if other in streaming]
                if flow.target != OUTPUT:
                    pending += [
                        other
                        for following in built.flat.outgoing.get(flow.target, ())
                        for other in following.labels
                        if other in streaming
                    ]
    return frozenset(found)
