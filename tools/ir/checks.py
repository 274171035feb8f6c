"""The rules a program must keep, in one table; every finding is reported, not the first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from flashrt.errors import Finding, listed, nearest
from flashrt.ir.flatten import FlatProgram, find_cycle, flatten, node_of, port_of
from flashrt.ir.hazards import find_races
from flashrt.ir.model import Edge, Graph, Node, Port, Program

AGAIN = "call ir_build again"
MAX_NESTING = 64
MAX_OPERATIONS = 500
Rule = Callable[[Program], Iterator[Finding]]


def _graphs(program: Program) -> Iterator[tuple[str, Graph, str]]:
    for name, graph in program.graphs.items():
        yield name, graph, f"graph '{name}'"


def check_names(program: Program) -> Iterator[Finding]:
    """Names of nodes, ports and graphs must not contain the characters that paths are made of."""
    for _, graph, where in _graphs(program):
        for noun, names in (("node", graph.nodes), ("input", graph.inputs), ("output", graph.outputs)):
            for name in names:
                if not name or any(sign in name for sign in "./[]*? <>"):
                    yield Finding(
                        f"{where}, {noun} '{name}'", "a name without any of . / [ ] * ? < > or a space",
                        f"'{name}'", f"rename it; {AGAIN}", rule="bad-name",
                    )  # fmt: skip


def check_entry(program: Program) -> Iterator[Finding]:
    """The entry is a graph of the document."""
    if program.entry not in program.graphs:
        yield Finding(
            "key 'entry'", f"a graph of the document: {listed(program.graphs)}", f"'{program.entry}'",
            f"name one of them; {AGAIN}", rule="unknown-graph", nearest=nearest(program.entry, program.graphs),
        )  # fmt: skip


def check_node_kinds(program: Program) -> Iterator[Finding]:
    """A node is exactly one of op, graph, opaque, and says only what fits its kind."""
    for _, graph, place in _graphs(program):
        for name, node in graph.nodes.items():
            where = f"{place}, node '{name}'"
            given = [key for key in ("op", "graph", "opaque") if getattr(node, key) is not None]
            if len(given) != 1:
                yield Finding(
                    where, "exactly one of 'op', 'graph', 'opaque'", listed(given),
                    f"keep one; {AGAIN}", rule="node-kind",
                )  # fmt: skip
                continue
            if node.graph is not None and node.graph not in program.graphs:
                yield Finding(
                    where, f"a graph of the document: {listed(program.graphs)}", f"'{node.graph}'",
                    f"name one of them or add the graph; {AGAIN}", rule="unknown-graph",
                    nearest=nearest(node.graph, program.graphs),
                )  # fmt: skip
            if node.graph is not None:
                for key in ("reads", "writes", "inputs", "outputs", "tiles", "devices", "event_driven"):
                    if getattr(node, key):
                        yield Finding(
                            f"{where}, key '{key}'", "nothing: a nested graph's own nodes and ports say it",
                            f"{getattr(node, key)!r}"[:80], f"move it into graph '{node.graph}'; {AGAIN}",
                            rule="graph-node-annotation",
                        )  # fmt: skip
            if node.opaque is not None and node.devices is None:
                yield Finding(
                    where, "key 'devices': how many devices the opaque system takes", "nothing",
                    f"say 'devices'; {AGAIN}", rule="opaque-devices",
                )  # fmt: skip
            if node.op is not None and node.devices is not None:
                yield Finding(
                    f"{where}, key 'devices'", "'degrees' (an op's device counts); 'devices' is for opaque nodes",
                    str(node.devices), f"write degrees: [{node.devices}]; {AGAIN}", rule="op-devices",
                )  # fmt: skip
            bad = [degree for degree in (*node.degrees, *node.tiles) if degree < 1]
            if bad or not node.degrees or len(set(node.degrees)) != len(node.degrees):
                yield Finding(
                    where, "degrees and tiles: different whole numbers of at least 1, one degree or more",
                    f"degrees {list(node.degrees)}, tiles {list(node.tiles)}", f"correct them; {AGAIN}",
                    rule="bad-degree",
                )  # fmt: skip


def check_recursion(program: Program) -> Iterator[Finding]:
    """A graph does not contain itself, and nesting has a bound."""
    too_deep: set[str] = set()

    def descend(name: str, trail: tuple[str, ...]) -> Iterator[Finding]:
        if len(trail) > MAX_NESTING:
            too_deep.add(name)
            return
        for node_name, node in program.graphs[name].nodes.items():
            if node.graph in trail:
                yield Finding(
                    f"graph '{name}', node '{node_name}'", "a graph that does not contain this one",
                    " -> ".join([*trail[trail.index(node.graph) :], node.graph]),
                    f"break the recursion (use 'repeat' for loops); {AGAIN}", rule="recursive-graph",
                )  # fmt: skip
            elif node.graph in program.graphs and node.graph is not None:
                yield from descend(node.graph, (*trail, node.graph))

    if program.entry in program.graphs:
        yield from descend(program.entry, (program.entry,))
    for name in sorted(too_deep)[:1]:
        yield Finding(
            f"graph '{name}'", f"graphs nested at most {MAX_NESTING} deep", "deeper", f"flatten some levels; {AGAIN}",
            rule="nested-too-deep",
        )  # fmt: skip


def check_size(program: Program) -> Iterator[Finding]:
    """A batch has a bounded number of operations, so that analysis stays exact and quick."""
    counts: dict[str, int] = {}

    def count(name: str, trail: tuple[str, ...]) -> int:
        if name not in program.graphs or name in trail or len(trail) > MAX_NESTING:
            return 0
        if name not in counts:
            graph = program.graphs[name]
            inner = sum(count(node.graph, (*trail, name)) if node.graph else 1 for node in graph.nodes.values())
            counts[name] = inner * (graph.repeat.times if graph.repeat else 1)
        return counts[name]

    total = count(program.entry, ())
    if total > MAX_OPERATIONS:
        yield Finding(
            f"graph '{program.entry}'", f"at most {MAX_OPERATIONS} operations a batch, repeats counted", str(total),
            f"make nodes coarser, or repeat inside an op; {AGAIN}", rule="too-many-operations",
        )  # fmt: skip


def ports_of(program: Program, node: Node, side: str) -> dict[str, Port] | None:
    """Return a node's ports on one side (``inputs`` or ``outputs``), or None when only the edges name them."""
    if node.graph is not None:
        nested = program.graphs.get(node.graph)
        return dict(getattr(nested, side)) if nested else None
    declared: dict[str, Port] | None = getattr(node, side)
    return declared


def check_edges(program: Program) -> Iterator[Finding]:
    """Both ends of an edge exist and point the right way."""
    for _, graph, where in _graphs(program):
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
    for name, graph, where in _graphs(program):
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
    for _, graph, where in _graphs(program):
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
    for name, graph, where in _graphs(program):
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
    for _, graph, where in _graphs(program):
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
    for name, graph, place in _graphs(program):
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
    for _, graph, where in _graphs(program):
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


def check_reachable(program: Program) -> Iterator[Finding]:
    """Graphs that nothing uses are named."""
    used = {program.entry} | {node.graph for graph in program.graphs.values() for node in graph.nodes.values()}
    for name in program.graphs:
        if name not in used:
            yield Finding(
                f"graph '{name}'", "a node that uses it", "none", f"remove it or use it; {AGAIN}",
                rule="unused-graph", severity="warning",
            )  # fmt: skip
    entry = program.graphs.get(program.entry)
    if entry is not None and not entry.outputs:
        yield Finding(
            f"graph '{program.entry}'", "at least one output", "none", f"declare what the application shows; {AGAIN}",
            rule="no-outputs",
        )  # fmt: skip
    for name, graph, where in _graphs(program):
        if not graph.nodes:
            yield Finding(where, "at least one node", f"none in '{name}'", f"add nodes; {AGAIN}", rule="empty-graph")


STRUCTURE: tuple[Rule, ...] = (
    check_names,
    check_entry,
    check_node_kinds,
    check_recursion,
    check_size,
    check_edges,
    check_feeds,
    check_cycles,
    check_repeats,
    check_streams,
    check_states,
    check_shapes,
    check_reachable,
)


def check_races(flat: FlatProgram) -> Iterator[Finding]:
    """Two operations that touch one state, one of them writing, are ordered by dataflow."""
    words = {"r": "reads", "w": "writes", "rw": "reads and writes"}
    for race in find_races(flat):
        yield Finding(
            f"state '{race.state}'",
            f"a dataflow path between '{race.first}' and '{race.second}', so that their order is defined",
            f"'{race.first}' {words[race.kinds[0]]} and '{race.second}' {words[race.kinds[1]]} it, unordered",
            f"add an edge that orders them, or give each its own state (per: iteration or a second name); {AGAIN}",
            rule="race",
        )  # fmt: skip


def check_ops(program: Program, folder: Path) -> Iterator[Finding]:
    """The ops file exists beside the document, parses, and has the function."""
    if program.ops is None:
        yield Finding(
            "key 'ops'", "file.py:function beside the document", "nothing",
            "add it before ir_interpret or profile_measure; analyze works without", rule="no-ops", severity="warning",
        )  # fmt: skip
        return
    file, _, function = program.ops.partition(":")
    path = folder / file
    if not file.endswith(".py") or not function:
        yield Finding("key 'ops'", "file.py:function", f"'{program.ops}'", f"correct it; {AGAIN}", rule="ops-reference")
        return
    if not path.resolve().is_relative_to(folder.resolve()):
        yield Finding(
            "key 'ops'", "a file in the document's own folder", f"'{file}'", f"move it there; {AGAIN}",
            rule="ops-outside",
        )  # fmt: skip
        return
    if not path.is_file():
        siblings = sorted(p.name for p in folder.glob("*.py"))
        yield Finding(
            "key 'ops'", f"an existing file; there are {listed(siblings)}", f"'{file}'", f"correct it; {AGAIN}",
            rule="no-such-file", nearest=nearest(file, siblings),
        )  # fmt: skip
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        yield Finding("key 'ops'", f"Python that parses in '{file}'", str(error), f"correct it; {AGAIN}", rule="syntax")
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    bound = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    } | {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if function not in names and function not in bound:
        yield Finding(
            "key 'ops'", f"a function of '{file}': {listed(names)}", f"'{function}'", f"correct the name; {AGAIN}",
            rule="no-such-function", nearest=nearest(function, names),
        )  # fmt: skip


def check_program(program: Program, folder: Path | None = None) -> list[Finding]:
    """Return all findings: the structure's, and, when that is sound, the races of the flattened program.

    `folder` is where the document lies; without it the ops file is not looked at.
    """
    findings = [finding for rule in STRUCTURE for finding in rule(program)]
    if not any(finding.severity == "error" for finding in findings):
        findings += check_races(flatten(program))
    if folder is not None:
        findings += check_ops(program, folder)
    return list(dict.fromkeys(findings))
