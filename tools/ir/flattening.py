"""Flattening: from nested and repeated graphs to the operations of one batch and the dataflow between them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from flashrt.ir.graphs import node_of, port_of, topological_nodes
from flashrt.ir.model import Edge, Graph, Initial, Port, Program

INPUT = "<input>"
OUTPUT = "<output>"


@dataclass(frozen=True)
class Prologue:
    """The op that yields a carried input's first value; runs as part of the operation that consumes it."""

    port: str
    """Input port of the operation that receives the value."""
    op: str
    """Name in the ops mapping."""
    graph_port: str
    """The carried input port of the graph, as its edges call it."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    feeds: tuple[str, ...]
    """The graph's other input ports, which the op receives by name; see `Dataflow.prologue_port`."""


@dataclass(frozen=True)
class Operation:
    """One operation of a batch: a node, or one iteration of it.

    `reads` and `writes` map the state's document name to the instance that this operation uses.
    """

    path: str
    op: str
    node: str
    reads: dict[str, str]
    writes: dict[str, str]
    degrees: tuple[int, ...]
    tiles: tuple[int, ...]
    opaque: bool
    num_devices: int | None
    event_driven: bool
    iteration: tuple[int, ...]
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    prologues: tuple[Prologue, ...] = ()

    @property
    def template(self) -> str:
        """The path with iteration numbers replaced by stars: ``dit/step[*]``."""
        return re.sub(r"\[\d+\]", "[*]", self.path)

    @property
    def accesses(self) -> dict[str, str]:
        """State instance -> ``r``, ``w`` or ``rw``, the prologue's accesses included."""
        return {
            instance: ("r" if instance in self.reads.values() else "")
            + ("w" if instance in self.writes.values() else "")
            for instance in (*self.reads.values(), *self.writes.values())
        }


@dataclass(frozen=True)
class Dataflow:
    """A value's way from the port that makes it to the port that uses it, boundaries of nested graphs removed.

    `source` is an operation's path, or ``<input>``; `target` an operation's path, or ``<output>``.
    The producer hands over `source_chunks` pieces, the consumer takes `target_chunks`; `chunked` says
    that the pieces travel one by one, so that both ends overlap.
    """

    source: str
    source_port: str
    target: str
    target_port: str
    source_chunks: int = 1
    target_chunks: int = 1
    chunked: bool = False
    axis: int = 0
    lookahead: int = 0
    carried: bool = False
    """From one iteration of a repeated graph to the next."""
    prologue: bool = False
    """Feeds the op that makes the consumer's initial value, not the consumer itself."""
    labels: tuple[str, ...] = ()
    """The document's edges that it runs through, outermost last."""

    @property
    def label(self) -> str:
        """``dit/step[3].latents -> vae.latents``."""
        source = self.source_port if self.source == INPUT else f"{self.source}.{self.source_port}"
        target = self.target_port if self.target == OUTPUT else f"{self.target}.{self.target_port}"
        return f"{source} -> {target}"


@dataclass(frozen=True)
class FlatProgram:
    """The operations of one batch in an order that respects the dataflow, and the dataflow between them."""

    program: Program
    operations: tuple[Operation, ...]
    dataflow: tuple[Dataflow, ...]
    state_instances: tuple[str, ...]

    @cached_property
    def by_path(self) -> dict[str, Operation]:
        """Operation by its path."""
        return {operation.path: operation for operation in self.operations}

    @cached_property
    def incoming(self) -> dict[str, tuple[Dataflow, ...]]:
        """Dataflow into each operation (key: path) and into ``<output>``."""
        found: dict[str, list[Dataflow]] = defaultdict(list)
        for flow in self.dataflow:
            found[flow.target].append(flow)
        return {target: tuple(flows) for target, flows in found.items()}

    @cached_property
    def outgoing(self) -> dict[str, tuple[Dataflow, ...]]:
        """Dataflow out of each operation (key: path) and out of ``<input>``."""
        found: dict[str, list[Dataflow]] = defaultdict(list)
        for flow in self.dataflow:
            found[flow.source].append(flow)
        return {source: tuple(flows) for source, flows in found.items()}

    @cached_property
    def predecessors(self) -> dict[str, frozenset[str]]:
        """Every operation that must have run before, through dataflow alone, by path."""
        direct: dict[str, set[str]] = {operation.path: set() for operation in self.operations}
        for flow in self.dataflow:
            if flow.source != INPUT and flow.target != OUTPUT:
                direct[flow.target].add(flow.source)
        closed: dict[str, frozenset[str]] = {}
        for operation in self.operations:
            before = direct[operation.path]
            closed[operation.path] = frozenset(before).union(*(closed[path] for path in before))
        return closed


@dataclass
class _Segment:
    """A stretch of a value's way: the edges passed so far, innermost producer first."""

    edges: list[Edge] = field(default_factory=list)
    carried: bool = False


@dataclass(frozen=True)
class _Source:
    operation: str
    port: str


class _Flattener:
    """Walks the graph tree once, giving each nested port the operation port or entry input behind it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operations: list[Operation] = []
        self.dataflow: list[Dataflow] = []
        self.instances: dict[str, None] = {}

    def run(self) -> FlatProgram:
        graph = self.program.graphs[self.program.entry]
        feeds = {name: (_Source(INPUT, name), _Segment()) for name in graph.inputs}
        outputs = self.expand(graph, self.program.entry, "", (), feeds)
        for name, (source, segment) in outputs.items():
            self.connect(source, segment, OUTPUT, name)
        return FlatProgram(self.program, tuple(self.operations), tuple(self.dataflow), tuple(sorted(self.instances)))

    def expand(
        self,
        graph: Graph,
        name: str,
        prefix: str,
        iteration: tuple[int, ...],
        feeds: dict[str, tuple[_Source, _Segment]],
    ) -> dict[str, tuple[_Source, _Segment]]:
        """Add the graph's operations; return the source behind each of its outputs."""
        times = graph.repeat.times if graph.repeat else 1
        carry = dict(graph.repeat.carry) if graph.repeat else {}
        current = dict(feeds)
        outputs: dict[str, tuple[_Source, _Segment]] = {}
        for index in range(times):
            inner = (*iteration, index) if graph.repeat else iteration
            outputs = self.expand_once(graph, name, prefix, inner, current, first=index == 0)
            for output, target in carry.items():
                if output in outputs:
                    source, segment = outputs[output]
                    current[target] = (source, _Segment(list(segment.edges), carried=True))
        return outputs

    def expand_once(
        self,
        graph: Graph,
        name: str,
        prefix: str,
        iteration: tuple[int, ...],
        feeds: dict[str, tuple[_Source, _Segment]],
        *,
        first: bool,
    ) -> dict[str, tuple[_Source, _Segment]]:
        suffix = f"[{iteration[-1]}]" if graph.repeat else ""
        made: dict[tuple[str, str], tuple[_Source, _Segment]] = {}
        outputs: dict[str, tuple[_Source, _Segment]] = {}
        for node_name in topological_nodes(graph):
            node = graph.nodes[node_name]
            path = f"{prefix}{node_name}{suffix}"
            arriving = [edge for edge in graph.edges if node_of(edge.target) == node_name]
            if node.graph is not None:
                nested = self.program.graphs[node.graph]
                inner_feeds = {}
                for edge in arriving:
                    found = self.source_of(edge, feeds, made)
                    if found is not None:
                        inner_feeds[port_of(edge.target)] = found
                results = self.expand(nested, node.graph, f"{path}/", iteration, inner_feeds)
                for port, value in results.items():
                    made[node_name, port] = value
                continue
            prologues: list[Prologue] = []
            wanted: dict[str, None] = {}
            for edge in arriving:
                port = port_of(edge.target)
                found = self.source_of(edge, feeds, made)
                if found is not None:
                    self.connect(*found, path, port)
                    continue
                initial = self.initial_of(graph, edge)
                if first and initial is not None and initial.op in graph.inputs:
                    if initial.op in feeds:
                        source, segment = feeds[initial.op]
                        self.connect(source, _Segment([*segment.edges, edge], segment.carried), path, port)
                elif first and initial is not None:
                    prologues.append(self.prologue(graph, edge, initial))
                    wanted.update(dict.fromkeys(prologues[-1].feeds))
            for other in wanted:
                if other in feeds:
                    self.connect(*feeds[other], path, other, prologue=True)
            self.operations.append(self.operation(path, node_name, graph, iteration, tuple(prologues)))
            for edge in graph.edges:
                if node_of(edge.source) == node_name:
                    made.setdefault(
                        (node_name, port_of(edge.source)), (_Source(path, port_of(edge.source)), _Segment())
                    )
        for edge in graph.edges:
            if "." not in edge.target:
                found = self.source_of(edge, feeds, made)
                if found is not None:
                    outputs[edge.target] = found
        return outputs

    def source_of(
        self,
        edge: Edge,
        feeds: dict[str, tuple[_Source, _Segment]],
        made: dict[tuple[str, str], tuple[_Source, _Segment]],
    ) -> tuple[_Source, _Segment] | None:
        key = node_of(edge.source)
        found = feeds.get(edge.source) if key is None else made.get((key, port_of(edge.source)))
        if found is None:
            return None
        source, segment = found
        return source, _Segment([*segment.edges, edge], segment.carried)

    def initial_of(self, graph: Graph, edge: Edge) -> Initial | None:
        return graph.inputs[edge.source].initial if edge.source in graph.inputs else None

    def prologue(self, graph: Graph, edge: Edge, initial: Initial) -> Prologue:
        others = tuple(port for port in graph.inputs if port != edge.source)
        return Prologue(port_of(edge.target), initial.op, edge.source, initial.reads, initial.writes, others)

    def operation(
        self, path: str, name: str, graph: Graph, iteration: tuple[int, ...], prologues: tuple[Prologue, ...]
    ) -> Operation:
        node = graph.nodes[name]
        reads = (*node.reads, *(state for prologue in prologues for state in prologue.reads))
        writes = (*node.writes, *(state for prologue in prologues for state in prologue.writes))
        inputs = dict(node.inputs or {})
        outputs = dict(node.outputs or {})
        for edge in graph.edges:
            if node_of(edge.target) == name:
                inputs.setdefault(port_of(edge.target), Port())
            if node_of(edge.source) == name:
                outputs.setdefault(port_of(edge.source), Port())
        return Operation(
            path=path,
            op=node.op or node.opaque or "",
            node=name,
            reads={state: self.instance(state, iteration) for state in reads},
            writes={state: self.instance(state, iteration) for state in writes},
            degrees=node.degrees if node.opaque is None else (node.devices or 1,),
            tiles=node.tiles,
            opaque=node.opaque is not None,
            num_devices=node.devices,
            event_driven=node.event_driven,
            iteration=iteration,
            inputs=inputs,
            outputs=outputs,
            prologues=prologues,
        )

    def instance(self, state: str, iteration: tuple[int, ...]) -> str:
        declared = self.program.states[state]
        name = state + "".join(f"[{index}]" for index in iteration) if declared.per == "iteration" else state
        self.instances[name] = None
        return name

    def connect(self, source: _Source, segment: _Segment, target: str, port: str, *, prologue: bool = False) -> None:
        edges = segment.edges
        streams = [edge for edge in edges if edge.mode == "streaming"]
        counts = [edge.num_chunks for edge in edges] or [1]
        whole = len(streams) == len(edges) and len(set(counts)) == 1
        self.dataflow.append(
            Dataflow(
                source=source.operation,
                source_port=source.port,
                target=target,
                target_port=port,
                source_chunks=counts[0],
                target_chunks=counts[-1],
                chunked=whole and counts[0] > 1,
                axis=streams[-1].axis if streams else 0,
                lookahead=max((edge.lookahead for edge in streams), default=0),
                carried=segment.carried,
                prologue=prologue,
                labels=tuple(edge.label for edge in edges),
            )
        )


def flatten(program: Program) -> FlatProgram:
    """Return the operations of one batch and their dataflow; `program` must have passed `check_structure`."""
    return _Flattener(program).run()
