"""Rules about graphs and nodes: names, kinds, nesting, size."""

from __future__ import annotations

from collections.abc import Iterator

from flashrt.errors import Finding, listed, nearest
from flashrt.ir.model import Graph, Program

AGAIN = "call ir_build again"
MAX_NESTING = 64
MAX_OPERATIONS = 500


def each_graph(program: Program) -> Iterator[tuple[str, Graph, str]]:
    """Yield name, graph, and how messages call it."""
    for name, graph in program.graphs.items():
        yield name, graph, f"graph '{name}'"


def check_names(program: Program) -> Iterator[Finding]:
    """Names of nodes, ports and graphs must not contain the characters that paths are made of."""
    for _, graph, where in each_graph(program):
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


def check_rates(program: Program) -> Iterator[Finding]:
    """Only what leaves the program is played, and so has a rate."""
    for name, graph, where in each_graph(program):
        places = [(f"{where}, input '{port}'", declared) for port, declared in graph.inputs.items()]
        if name != program.entry:
            places += [(f"{where}, output '{port}'", declared) for port, declared in graph.outputs.items()]
        for node_name, node in graph.nodes.items():
            for side in ("inputs", "outputs"):
                ports = getattr(node, side) or {}
                places += [(f"{where}, node '{node_name}', {side[:-1]} '{port}'", ports[port]) for port in ports]
        for place, declared in places:
            if declared.rate_hz is not None:
                yield Finding(
                    f"{place}, key 'rate_hz'", f"outputs of '{program.entry}' only", f"{declared.rate_hz:g}",
                    f"move it to the output that is played, or remove it; {AGAIN}", rule="rate-not-played",
                )  # fmt: skip


def check_node_kinds(program: Program) -> Iterator[Finding]:
    """A node is exactly one of op, graph, opaque, and says only what fits its kind."""
    for _, graph, place in each_graph(program):
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
    for name, graph, where in each_graph(program):
        if not graph.nodes:
            yield Finding(where, "at least one node", f"none in '{name}'", f"add nodes; {AGAIN}", rule="empty-graph")
