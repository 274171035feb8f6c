"""The draft's documents: graphs of the blocks, and their text with the questions beside what they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import yaml

from flashrt.bench.trace.plan import Call, Loop
from flashrt.bench.trace.questions import Questions
from flashrt.bench.trace.states import Kept
from flashrt.bench.trace.units import Block, StaysClosedError, Unit, Units
from flashrt.bench.trace.values import Seen


class Document:
    """Builds the program of a draft.

    Attributes
    ----------
    begins
        Op that a repeated graph's count begins with -> the name of the count.
    order
        Operation -> outputs that are only there so that another one comes after it.
    """

    def __init__(self, kept: Kept, units: Units, questions: Questions) -> None:
        self.kept = kept
        self.units = units
        self.questions = questions
        self.graphs: dict[str, Any] = {}
        self.begins: dict[str, str] = {}
        self.order: dict[str, list[str]] = {}

    def program(
        self, name: str, top: Block, inputs: Mapping[str, tuple[str, Seen]], outputs: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the document.

        Parameters
        ----------
        inputs
            Input of the reference -> the name of its value, and what it was seen to be.
        outputs
            Output of the reference -> the name of its value.
        """
        self.graphs = {}
        graph = self._graph("app", top)
        names = {variable: entry for entry, (variable, _) in inputs.items()}
        graph["inputs"] = {entry: _port(entry, seen) for entry, (_, seen) in inputs.items()}
        graph["outputs"] = {entry: _port(entry, self.kept.merged(variable)) for entry, variable in outputs.items()}
        edges = []
        for edge in graph["edges"]:
            if "." not in edge["to"]:
                continue
            edges.append({**edge, "from": names.get(edge["from"], edge["from"])})
        for entry, variable in outputs.items():
            made = top.producer(variable, len(top.units))
            source = names.get(variable, variable) if made is None else f"{top.units[made].name}.{variable}"
            edges.append({"from": source, "to": entry, "mode": "blocking"})
        graph["edges"] = edges
        self.graphs = {"app": graph, **{key: one for key, one in self.graphs.items() if key != "app"}}
        states: dict[str, dict[str, Any]] = {}
        for state in sorted({one for unit in top.units for op in unit.every_unit() for one in op.reads | op.writes}):
            states[state] = {"per": "iteration"} if state in self.kept.per_iteration else {}
            size = self.kept.num_bytes(state)
            if size:
                states[state]["bytes"] = size
        document: dict[str, Any] = {"schema": "flashrt/program@1", "name": name, "ops": "ops.py:load", "entry": "app"}
        if states:
            document["states"] = states
        document["graphs"] = self.graphs
        return document

    def _graph(self, name: str, block: Block) -> dict[str, Any]:
        nodes: dict[str, Any] = {}
        edges: list[dict[str, Any]] = []
        inputs: dict[str, Any] = {key: _port(key, self.kept.merged(key)) for key in sorted(block.inputs)}
        graph: dict[str, Any] = {}
        if block.times is not None:
            graph["repeat"] = {"times": block.times}
            carry = sorted(block.carry)
            if carry:
                graph["repeat"]["carry"] = {key: key for key in carry}
        graph |= {"inputs": inputs, "outputs": {}, "nodes": nodes, "edges": edges}
        if block.index is not None:
            self._begin(name, block, inputs, edges)
        for at, unit in enumerate(block.units):
            nodes[unit.name] = self._node(unit)
            needs = set(unit.needs)
            for key in sorted(needs):
                made = block.producer(key, at)
                source = key if made is None else f"{block.units[made].name}.{key}"
                self._edge(edges, name, source, f"{unit.name}.{key}", block, made)
            if unit.block is not None and unit.block.index is not None and self._is_fed(unit):
                edges.append({"from": f"begin_{unit.name}.{unit.block.index}", "to": f"{unit.name}.{unit.block.index}",
                              "mode": "blocking"})  # fmt: skip
                nodes[f"begin_{unit.name}"] = {"op": f"begin_{unit.name}"}
        for earlier, later in block.order:
            self._ordered(name, block, earlier, later, edges, nodes)
        for key in sorted(block.outputs):
            made = block.producer(key, len(block.units))
            graph["outputs"][key] = _port(key, self.kept.merged(key))
            if made is not None:
                edges.append({"from": f"{block.units[made].name}.{key}", "to": key, "mode": "blocking"})
        self.graphs[name] = graph
        return graph

    def _is_fed(self, unit: Unit) -> bool:
        """Return whether the count of a repeated graph comes from a node before it: several nodes want it."""
        assert unit.block is not None, "a repeated graph"
        index = unit.block.index
        users = [one for at, one in enumerate(unit.block.units)
                 if index in one.needs and unit.block.producer(str(index), at) is None]  # fmt: skip
        return len(users) != 1 or users[0].block is not None

    def _begin(self, name: str, block: Block, inputs: dict[str, Any], edges: list[dict[str, Any]]) -> None:
        index = str(block.index)
        op = f"begin_{name}"
        self.begins[op] = index
        unit = next(one for one in self._all if one.block is block)
        inputs[index] = {} if self._is_fed(unit) else {"initial": {"op": op}}

    @property
    def _all(self) -> list[Unit]:
        found: list[Unit] = []

        def gather(units: Sequence[Unit]) -> None:
            for unit in units:
                found.append(unit)
                if unit.block is not None:
                    gather(unit.block.units)

        gather(self.top)
        return found

    top: Sequence[Unit] = ()

    def _node(self, unit: Unit) -> dict[str, Any]:
        if unit.block is not None:
            self._graph(unit.name, unit.block)
            return {"graph": unit.name}
        node: dict[str, Any] = {"op": unit.name}
        ports = {key: _port(key, self.kept.merged(key)) for key in sorted(unit.outputs)}
        if any(ports.values()):
            node["outputs"] = ports
        for verb, states in (("reads", unit.reads), ("writes", unit.writes)):
            if states:
                node[verb] = sorted(states)
        return node

    def _edge(
        self, edges: list[dict[str, Any]], graph: str, source: str, target: str, block: Block, made: int | None
    ) -> None:
        edges.append({"from": source, "to": target, "mode": "blocking"})
        if made is None:
            return
        producer = block.units[made]
        key = source.partition(".")[2]
        where = f"graphs.{graph}.edges.{source} -> {target}"
        if not self.units.travels(key):
            self.questions.ask(
                "opaque-value", producer.steps[-1].place if producer.steps else "reference",
                f"'{key}' is a {'/'.join(sorted({s.kind for s in self.kept.seen(key) if not s.travels}))}, which "
                "cannot go to another process: may its two ends be on different devices?",
                [
                    ("together", "as drafted; deployments keep both ends in one group"),
                    ("apart", "let the reference return tensors, arrays, numbers, text, lists and dicts of these"),
                ],
                where,
            )  # fmt: skip
        for step in producer.steps:
            sites = self.units.evidence(step).sites.values()
            named = [getattr(site.callee, "__name__", "it") for site in sites if site.generator and site.own]
            if named and key in self.units.gives_of(step):
                self.questions.ask(
                    "streaming", step.place,
                    f"'{key}' is made piece by piece ({named[0]} yields): may what comes after begin with its "
                    "first piece?",
                    [
                        ("blocking", "as drafted"),
                        ("streaming", "write mode: streaming with chunks on this edge, and let the op yield pieces"),
                    ],
                    where,
                )  # fmt: skip

    def _ordered(
        self, graph: str, block: Block, earlier: int, later: int, edges: list[dict[str, Any]], nodes: dict[str, Any]
    ) -> None:
        first, second = block.units[earlier], block.units[later]
        for unit in (first, second):
            if unit.block is not None:
                assert isinstance(unit.part, Loop | Call), "a graph is made of a part"
                raise StaysClosedError(unit.part, "only a state orders it beside another operation")
        port = f"before_{second.name}"
        self.order.setdefault(first.name, [])
        if port not in self.order[first.name]:
            self.order[first.name].append(port)
        if "outputs" in nodes[first.name]:
            nodes[first.name]["outputs"][port] = {}
        source, target = f"{first.name}.{port}", f"{second.name}.after_{first.name}"
        edges.append({"from": source, "to": target, "mode": "blocking"})
        shared = (first.reads | first.writes) & (second.reads | second.writes)
        self.questions.ask(
            "shared-state", first.steps[-1].place,
            f"'{first.name}' and '{second.name}' both use {', '.join(repr(one) for one in sorted(shared))}; only the "
            "order of the reference's lines says which comes first",
            [
                ("ordered", "as drafted: an edge keeps the order"),
                ("apart", "give each a state of its own, and remove the edge"),
            ],
            f"graphs.{graph}.edges.{source} -> {target}",
        )  # fmt: skip


def _port(name: str, seen: Seen | None) -> dict[str, Any]:
    if seen is None or seen.dtype is None or seen.was_none or seen.kind not in {"tensor", "array"}:
        return {}
    port: dict[str, Any] = {"dtype": seen.dtype}
    if seen.shape is not None:
        port["shape"] = [f"{name}_{axis}" if size is None else size for axis, size in enumerate(seen.shape)]
    return port


def as_yaml(document: Mapping[str, Any], questions: Questions, head: Sequence[str]) -> str:
    """Return a program as text, each question above what it is about."""
    lines = [f"# {line}" for line in head]
    lines += _comments(questions, "document", "")
    for key in ("schema", "name", "ops", "entry"):
        lines.append(f"{key}: {_flow(document[key])}")
    lines.append("")
    if document.get("states"):
        lines.append("states:")
        for name, state in document["states"].items():
            lines += _comments(questions, f"states.{name}", "  ")
            lines.append(f"  {_flow(name)}: {_flow(state)}")
        lines.append("")
    lines.append("graphs:")
    for graph_name, graph in document["graphs"].items():
        lines += _comments(questions, f"graphs.{graph_name}", "  ")
        lines.append(f"  {_flow(graph_name)}:")
        if "repeat" in graph:
            lines.append(f"    repeat: {_flow(graph['repeat'])}")
        for side in ("inputs", "outputs"):
            if graph[side]:
                lines.append(f"    {side}:")
                lines += [f"      {_flow(name)}: {_flow(port)}" for name, port in graph[side].items()]
        lines.append("    nodes:")
        for name, node in graph["nodes"].items():
            lines += _comments(questions, f"graphs.{graph_name}.nodes.{name}", "      ")
            lines.append(f"      {_flow(name)}: {_flow(node)}")
        lines.append("    edges:" if graph["edges"] else "    edges: []")
        for edge in graph["edges"]:
            lines += _comments(questions, f"graphs.{graph_name}.edges.{edge['from']} -> {edge['to']}", "      ")
            lines.append(f"      - {_flow(edge)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _comments(questions: Questions, where: str, indent: str) -> list[str]:
    made = []
    for question in questions.at(where):
        made.append(f"{indent}# question ({question.kind}, {question.source}): {question.text}")
        made += [f"{indent}#   - {answer}: {change}" for answer, change in question.choices]
    return made


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def profile_of(
    name: str, top: Block, units: Units, first_batch: int, graphs: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Return what was measured while tracing, as a profile document: milliseconds and bytes of each operation."""
    times: dict[str, Any] = {}
    memory: dict[str, int] = {}

    def add(block: Block, prefix: str, graph: str) -> None:
        suffix = "[*]" if block.times is not None else ""
        # What gives a repeated graph its first count does nothing else.
        counts = graphs[graph]["nodes"].keys() - {unit.name for unit in block.units}
        times.update({f"{prefix}{count}{suffix}": {"1": 0.0} for count in counts})
        for unit in block.units:
            path = f"{prefix}{unit.name}{suffix}"
            if unit.block is not None:
                add(unit.block, f"{path}/", unit.name)
                continue
            samples: list[float] = []
            held: dict[int, int] = {}
            per_step = [units.evidence(step).times_ns for step in unit.steps]
            for batch in sorted({one for times_ns in per_step for one in times_ns if one >= first_batch}):
                columns = [times_ns.get(batch, []) for times_ns in per_step]
                turns = max((len(column) for column in columns), default=0)
                samples += [
                    sum(column[turn] for column in columns if turn < len(column)) / 1e6 for turn in range(turns)
                ]
            for step in unit.steps:
                held.update(units.evidence(step).read_storages)
            times[path] = {"1": round(median(samples), 6) if samples else 0.0}
            if held:
                memory[path] = sum(held.values())

    add(top, "", "app")
    return {
        "schema": "flashrt/profile@1",
        "device": "cpu",
        "operations": times,
        "memory": memory,
        "provenance": "measured",
        "methods": {
            "time": "median of the reference's own statements while it was traced, in its one process",
            "memory": "memory that the tensor operations of one batch read: weights, states and values",
        },
        "notes": [
            "a first look, made while tracing: measure the draft with profile_measure before you plan with it",
            f"operations of '{name}' that run no tensor operation have no memory here",
        ],
    }
