"""Rules about edges and what flows on them: ends, feeds, cycles, repeats, streams, states, shapes."""

from __future__ import annotations

from collections.abc import Iterator

from flashrt.errors import Finding, listed, nearest
from flashrt.ir.graphs import find_cycle, node_of, port_of
from flashrt.ir.model import Edge, Graph, Node, Port, Program
from flashrt.ir.rules_nodes import AGAIN, each_graph


def ports_of(program: Program, node: Node, side: str) -> dict[str, Port] | None:
    """Return a node's ports on one side (``inputs`` or ``outputs``), or None when only the edges name them."""
    if node.graph is not None:
        nested = program.graphs.get(node.graph)
        return dict(getattr(nested, side)) if nested else None
    declared: dict[str, Port] | None = getattr(node, side)
    return declared


def check_edges(program: Program) -> Iterator[Finding]:
    """Both ends of an edge exist and point the right way."""
    for _, graph, where in each_graph(program):
        for number, edge in enumerate(graph.edges):
            place = f"{where}, edge {number} '{edge.label}'"
            yield from _check_end(program, graph, place, edge.source, "inputs", "outputs", "from")
            yield from _check_end(program, graph, place, edge.target, "outputs", "inputs", "to")
            yield from _check_mode(place, edge)


def _check_end(
    program: Program, graph: Graph, place: str, end: str, own_side: str, node_side: str, key: str
) -> Iterator[Finding]:
    node_name = node_of(end)
    if node_name is None:
        own = getattr(graph, own_side)
        if end not in own:
            valid = [
                *own,
                *(f"{name}.{port}" for name in graph.nodes for port in _known_ports(program, graph, name, node_side)),
            ]
            yield Finding(
                f"{place}, key '{key}'", f"{own_side[:-1]} of the graph ({listed(own)}) or node.port", f"'{end}'",
                f"correct the name; {AGAIN}", rule="unknown-port", nearest=nearest(end, valid),
            )  # fmt: skip
        return
    if node_name not in graph.nodes:
        yield Finding(
            f"{place}, key '{key}'", f"a node of the graph: {listed(graph.nodes)}", f"'{node_name}'",
            f"correct the name or add the node; {AGAIN}", rule="unknown-node",
            nearest=nearest(node_name, graph.nodes),
        )  # fmt: skip
        return
    ports = ports_of(program, graph.nodes[node_name], node_side)
    if ports is not None and port_of(end) not in ports:
        yield Finding(
            f"{place}, key '{key}'", f"{node_side[:-1]} port of node '{node_name}': {listed(ports)}",
            f"'{port_of(end)}'", f"correct the name or declare the port; {AGAIN}", rule="unknown-port",
            nearest=nearest(port_of(end), ports),
        )  # fmt: skip


def _known_ports(program: Program, graph: Graph, node: str, side: str) -> list[str]:
    return list(ports_of(program, graph.nodes[node], side) or {})


def _check_mode(place: str, edge: Edge) -> Iterator[Finding]:
    if edge.mode == "streaming" and edge.chunks is None:
        yield Finding(
            place, "key 'chunks': into how many chunks a batch's value is cut", "nothing",
            f"say 'chunks'; {AGAIN}", rule="missing-chunks",
        )  # fmt: skip
    if edge.mode == "blocking" and (edge.chunks is not None or edge.lookahead or edge.axis):
        yield Finding(
            place, "no 'chunks', 'axis' or 'lookahead' on a blocking edge", f"chunks {edge.chunks}",
            f"remove them or write mode: streaming; {AGAIN}", rule="blocking-chunks",
        )  # fmt: skip
    if edge.mode == "streaming" and edge.chunks is not None and edge.lookahead >= edge.chunks:
        yield Finding(
            place, f"a look-ahead below {edge.chunks} chunks", str(edge.lookahead),
            f"lower it, or write mode: blocking; {AGAIN}", rule="lookahead",
        )  # fmt: skip


def check_feeds(program: Program) -> Iterator[Finding]:
    """Every input port and every output of a graph has exactly one edge into it."""
    for name, graph, where in each_graph(program):
        fed: dict[str, list[str]] = {}
        for edge in graph.edges:
            fed.setdefault(edge.target, []).append(edge.label)
        wanted = {output: f"{where}, output '{output}'" for output in graph.outputs}
        for node_name, node in graph.nodes.items():
            nested = program.graphs.get(node.graph) if node.graph else None
            for port in ports_of(program, node, "inputs") or {}:
                if nested and (nested.inputs[port].initial is not None):
                    continue
                wanted[f"{node_name}.{port}"] = f"{where}, node '{node_name}', port '{port}'"
        for end, place in wanted.items():
            if end not in fed:
                yield Finding(
                    place, "one edge into it", "none", f"add an edge to '{end}' or remove the port; {AGAIN}",
                    rule="unfed-port",
                )  # fmt: skip
        for end, labels in fed.items():
            if len(labels) > 1:
                yield Finding(
                    f"{where}, port '{end}'", "one edge into it", f"{len(labels)}: {listed(labels)}",
                    f"keep one, or join the values in a node; {AGAIN}", rule="port-fed-twice",
                )  # fmt: skip
        for node_name, node in graph.nodes.items():
            sources = {port_of(edge.source) for edge in graph.edges if node_of(edge.source) == node_name}
            nested = program.graphs.get(node.graph) if node.graph else None
            carried = nested.repeat.carry if nested and nested.repeat else {}
            unused = [p for p in ports_of(program, node, "outputs") or {} if p not in sources and p not in carried]
            for port in unused:
                yield Finding(
                    f"{where}, node '{node_name}', port '{port}'", "an edge from it", "none",
                    f"remove the port if nothing needs it; {AGAIN}", rule="unused-output", severity="warning",
                )  # fmt: skip
            if not sources and not node.writes and node.graph is None:
                yield Finding(
                    f"{where}, node '{node_name}'", "an output that is used or a state that is written", "neither",
                    f"remove the node or connect it; {AGAIN}", rule="dead-node", severity="warning",
                )  # fmt: skip
        used = {edge.source for edge in graph.edges} | {p.initial.op for p in graph.inputs.values() if p.initial}
        for port in graph.inputs:
            if port not in used and not (graph.repeat and name):
                yield Finding(
                    f"{where}, input '{port}'", "an edge from it", "none", f"remove it or connect it; {AGAIN}",
                    rule="unused-input", severity="warning",
                )  # fmt: skip


def check_cycles(program: Program) -> Iterator[Finding]:
    """Graphs are acyclic; loops are written with repeat and carry."""
    for _, graph, where in each_graph(program):
        cycle = find_cycle(graph)
        if cycle:
            yield Finding(
                where, "an acyclic graph", "the cycle " + " -> ".join(cycle),
                f"carry the value between batches in a state, or between iterations with 'repeat'; {AGAIN}",
                rule="cycle",
            )  # fmt: skip


def check_repeats(program: Program) -> Iterator[Finding]:
    """Carries join an output to an input; a carried input has a first value."""
    fed_ports = {
        (node.graph, port_of(edge.target))
        for graph in program.graphs.values()
        for edge in graph.edges
        for name, node in graph.nodes.items()
        if node.graph is not None and node_of(edge.target) == name
    }
    for name, graph, where in each_graph(program):
        carry = graph.repeat.carry if graph.repeat else {}
        for output, target in carry.items():
            for port, side in ((output, "outputs"), (target, "inputs")):
                if port not in getattr(graph, side):
                    yield Finding(
                        f"{where}, repeat, carry '{output}: {target}'",
                        f"an {side[:-1]} of the graph: {listed(getattr(graph, side))}", f"'{port}'",
                        f"correct the name; {AGAIN}", rule="unknown-port",
                        nearest=nearest(port, getattr(graph, side)),
                    )  # fmt: skip
        for target in {target for target in carry.values() if list(carry.values()).count(target) > 1}:
            yield Finding(
                f"{where}, repeat, carry", f"one output for input '{target}'", "several", f"keep one; {AGAIN}",
                rule="carried-twice",
            )  # fmt: skip
        for port, declared in graph.inputs.items():
            place = f"{where}, input '{port}'"
            if declared.initial is not None and port not in carry.values():
                yield Finding(
                    f"{place}, key 'initial'", "a carried input of a repeated graph", f"'{port}' is not carried",
                    f"add it to repeat.carry, or feed it by an edge; {AGAIN}", rule="initial-not-carried",
                )  # fmt: skip
            if declared.initial is not None and (name, port) in fed_ports:
                yield Finding(
                    place, "either 'initial' or an edge from outside", "both", f"remove one; {AGAIN}",
                    rule="two-first-values",
                )  # fmt: skip
            if declared.initial is not None and declared.initial.op not in graph.inputs:
                consumers = {node_of(edge.target) for edge in graph.edges if edge.source == port}
                nested = [c for c in consumers if c is None or graph.nodes[c].kind == "graph"] if (
                    consumers <= {None, *graph.nodes}
                ) else []  # fmt: skip
                if len(consumers) != 1 or nested:
                    yield Finding(
                        place, "one op node that consumes the initial value", f"{listed(sorted(map(str, consumers)))}",
                        f"make the value in a node of its own and feed it by an edge; {AGAIN}",
                        rule="initial-consumers",
                    )  # fmt: skip


def check_streams(program: Program) -> Iterator[Finding]:
    """All streaming edges into one node, and all out of it, have the same number of chunks."""
    for _, graph, where in each_graph(program):
        for end, side in (("into", "target"), ("out of", "source")):
            counts: dict[str, dict[str, int]] = {}
            for edge in graph.edges:
                name = node_of(getattr(edge, side))
                if name is not None and edge.mode == "streaming" and edge.chunks:
                    counts.setdefault(name, {})[edge.label] = edge.chunks
            for name, by_edge in counts.items():
                if len(set(by_edge.values())) > 1:
                    yield Finding(
                        f"{where}, node '{name}'", f"one number of chunks on all streaming edges {end} it",
                        ", ".join(f"{label}: {chunks}" for label, chunks in by_edge.items()),
                        f"make them equal, or one of them blocking; {AGAIN}", rule="chunk-counts",
                    )  # fmt: skip


def check_states(program: Program) -> Iterator[Finding]:
    """States are declared, used, and kept per iteration only inside a repeated graph."""
    used: set[str] = set()
    repeated = _repeated_graphs(program)
    for name, graph, place in each_graph(program):
        uses = [(f"{place}, node '{node_name}'", node.reads, node.writes) for node_name, node in graph.nodes.items()]
        uses += [
            (f"{place}, input '{port}', initial", declared.initial.reads, declared.initial.writes)
            for port, declared in graph.inputs.items()
            if declared.initial
        ]
        for where, reads, writes in uses:
            for key, states in (("reads", reads), ("writes", writes)):
                for state in states:
                    used.add(state)
                    if state not in program.states:
                        yield Finding(
                            f"{where}, key '{key}'", f"a declared state: {listed(program.states)}", f"'{state}'",
                            f"declare it under 'states' or correct the name; {AGAIN}", rule="unknown-state",
                            nearest=nearest(state, program.states),
                        )  # fmt: skip
                    elif program.states[state].per == "iteration" and name not in repeated:
                        yield Finding(
                            f"{where}, state '{state}'", "use inside a repeated graph (per: iteration)",
                            f"graph '{name}' is not repeated", f"remove 'per', or add 'repeat'; {AGAIN}",
                            rule="per-iteration-outside",
                        )  # fmt: skip
    for state in program.states:
        if state not in used:
            yield Finding(
                f"state '{state}'", "a node that reads or writes it", "none", f"remove it or declare its use; {AGAIN}",
                rule="unused-state", severity="warning",
            )  # fmt: skip


def _repeated_graphs(program: Program) -> set[str]:
    found = {name for name, graph in program.graphs.items() if graph.repeat}
    grown = True
    while grown:
        below = {
            node.graph for name in found for node in program.graphs[name].nodes.values() if node.graph in program.graphs
        }
        grown = not below <= found
        found |= {name for name in below if name is not None}
    return found


def check_shapes(program: Program) -> Iterator[Finding]:
    """The two ends of an edge agree where both say dtype or shape."""
    for _, graph, where in each_graph(program):
        for number, edge in enumerate(graph.edges):
            source = _port(program, graph, edge.source, "inputs", "outputs")
            target = _port(program, graph, edge.target, "outputs", "inputs")
            if source is None or target is None:
                continue
            place = f"{where}, edge {number} '{edge.label}'"
            if source.dtype and target.dtype and source.dtype != target.dtype:
                yield Finding(
                    place, f"dtype {target.dtype} at '{edge.target}'", f"{source.dtype} from '{edge.source}'",
                    f"change one side; {AGAIN}", rule="dtype-mismatch",
                )  # fmt: skip
            if source.shape is None or target.shape is None:
                continue
            differ = len(source.shape) != len(target.shape) or any(
                isinstance(a, int) and isinstance(b, int) and a != b
                for axis, (a, b) in enumerate(zip(source.shape, target.shape, strict=False))
                if not (edge.mode == "streaming" and axis == edge.axis)
            )
            if differ:
                yield Finding(
                    place, f"shape {list(target.shape)} at '{edge.target}'",
                    f"{list(source.shape)} from '{edge.source}'", f"change one side; {AGAIN}",
                    rule="shape-mismatch",
                )  # fmt: skip


def _port(program: Program, graph: Graph, end: str, own_side: str, node_side: str) -> Port | None:
    name = node_of(end)
    if name is None:
        found: Port | None = getattr(graph, own_side).get(end)
        return found
    if name not in graph.nodes:
        return None
    return (ports_of(program, graph.nodes[name], node_side) or {}).get(port_of(end))
