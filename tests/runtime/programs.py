"""Random programs with NumPy-only operations, and random deployments of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from tests.ir.documents import edge

CHUNKED = 3
"""Elements of one chunk along axis 0: every value has `CHUNKED * chunks` of them."""

OPS = """
import numpy as np

WIDTH = 3


def mix(salt, inputs):
    total = np.float32(salt)
    for port in sorted(inputs):
        total = total + np.asarray(inputs[port], np.float32) * np.float32(1 + len(port) + salt / 7)
    return total


def elementwise(salt, states):
    '''Maps element by element along axis 0 and counts them in its states, so that chunks equal the whole.'''
    def call(inputs, state):
        value = mix(salt, inputs)
        out = np.empty_like(value)
        for index, element in enumerate(value):
            seen = [state.get(name, np.float32(0)) for name in states]
            out[index] = np.tanh(element) + sum(seen, np.float32(0)) * np.float32(0.25)
            for name, before in zip(states, seen):
                if name.startswith('w'):
                    state[name] = before * np.float32(0.5) + element.mean(dtype=np.float32)
        return {port: out * np.float32(1 + number) for number, port in enumerate(('y', 'z'))}
    return call


def whole(salt, states):
    '''Mixes along axis 0, so that it needs whole inputs; yields its chunks one by one.'''
    inner = elementwise(salt, states)
    def call(inputs, state):
        made = inner({port: np.cumsum(value, axis=0) for port, value in inputs.items()}, state)
        return made
    return call


def chunked(salt, states, chunks):
    inner = whole(salt, states)
    def call(inputs, state):
        made = inner(inputs, state)
        for part in range(chunks):
            yield {port: np.array_split(value, chunks)[part] for port, value in made.items()}
    return call


def window(salt, states, lookahead):
    '''Sees `lookahead` chunks ahead and puts out as many elements as a chunk has.'''
    def call(inputs, state):
        value = mix(salt, inputs)
        return {'y': value[:SIZE] + value[-1], 'z': value[:SIZE]}
    return call


def gated(salt, states):
    '''Maps `a` chunk by chunk with all of `b` in hand.'''
    inner = elementwise(salt, states)
    def call(inputs, state):
        return inner({'a': inputs['a'] + inputs['b'].mean(axis=0, dtype=np.float32)}, state)
    return call


def noise(inputs, state):
    drawn = state.get('wrng', 0)
    state['wrng'] = drawn + 1
    base = next(iter(inputs.values()))
    return np.random.default_rng(drawn).standard_normal(base.shape).astype(np.float32)


SIZE = __SIZE__
KINDS = {'elementwise': elementwise, 'whole': whole, 'chunked': chunked, 'window': window, 'gated': gated}


def load(context):
    made = {'noise': noise}
    for name, (kind, *arguments) in __TABLE__.items():
        made[name] = KINDS[kind](*arguments)
    return made
"""

INPUTS = """
import numpy as np

def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {name: generator.standard_normal((ROWS, 3)).astype(np.float32) for name in NAMES}
"""


class ProgramMaker:
    """Draws one program: an application graph whose nodes are operations, nested graphs and repeated graphs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.widths = random.Random(f"degrees {seed}")
        self.chunks = self.random.choice([2, 3, 4])
        self.table: dict[str, tuple[Any, ...]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.graphs: dict[str, Any] = {}

    def operation(self, name: str, num_inputs: int, *, streams_in: bool, streams_out: bool, per: str = "") -> Any:
        """Return a node and register its op; ports are a, b, … and y, z."""
        states = []
        if self.random.random() < 0.6:
            state = f"w{name}"
            self.states[state] = {"per": "iteration"} if per else {}
            states.append(state)
        kind: tuple[Any, ...]
        salt = self.random.randrange(1, 9)
        if streams_in:
            kind = ("elementwise", salt, states)
        elif streams_out and self.random.random() < 0.5:
            kind = ("chunked", salt, states, self.chunks)
        else:
            kind = (self.random.choice(["elementwise", "whole"]), salt, states)
        self.table[name] = kind
        # Every rank computes all of it: such an op is the same on any number of devices.
        degrees = [1, 2] if self.widths.random() < 0.8 else [1]
        return {"op": name, "reads": states, "writes": states, "degrees": degrees}

    def repeated(self, name: str) -> None:
        """Add a repeated graph with input x, output y, a carry, per-iteration states and an initial op."""
        ops = [f"{name}s{index}" for index in range(self.random.choice([1, 2]))]
        nodes = {op: self.operation(op, 2, streams_in=False, streams_out=False, per="iteration") for op in ops}
        edges = [edge("x", f"{ops[0]}.a"), edge("latents", f"{ops[0]}.b")]
        if len(ops) == 2:
            streams = self.random.random() < 0.5
            edges.append(edge(f"{ops[0]}.y", f"{ops[1]}.a", **self.mode(streams)))
            if streams:
                self.table[ops[1]] = ("elementwise", *self.table[ops[1]][1:3])
        edges.append(edge(f"{ops[-1]}.y", "latents"))
        initial: Any = {"op": "noise", "reads": ["wrng"], "writes": ["wrng"]}
        if "wrng" in self.states:
            initial = "x"
        else:
            self.states["wrng"] = {}
        self.graphs[name] = {
            "repeat": {"times": self.random.choice([2, 3]), "carry": {"latents": "latents"}},
            "inputs": {"x": {}, "latents": {"initial": initial}},
            "outputs": {"latents": {}},
            "nodes": nodes,
            "edges": edges,
        }

    def nested(self, name: str) -> None:
        """Add a graph of two operations with input x and outputs latents."""
        first, second = f"{name}p", f"{name}q"
        streams = self.random.random() < 0.7
        nodes = {
            first: self.operation(first, 1, streams_in=False, streams_out=streams),
            second: self.operation(second, 1, streams_in=streams, streams_out=False),
        }
        edges = [
            edge("x", f"{first}.a"),
            edge(f"{first}.y", f"{second}.a", **self.mode(streams)),
            edge(f"{second}.y", "latents"),
        ]
        self.graphs[name] = {
            "inputs": {"x": {}},
            "outputs": {"latents": {}},
            "nodes": nodes,
            "edges": edges,
        }

    def mode(self, streams: bool) -> dict[str, Any]:
        """Return an edge's mode."""
        return {"mode": "streaming", "chunks": self.chunks} if streams else {}

    def make(self, folder: Path) -> list[str]:
        """Write program.yaml, ops.py and inputs.py to `folder`; return the streaming edges of the entry graph."""
        names = [f"n{index}" for index in range(self.random.randrange(2, 6))]
        sources = ["in0", *(["in1"] if self.random.random() < 0.5 else [])]
        inputs = list(sources)
        nodes: dict[str, Any] = {}
        edges: list[dict[str, Any]] = []
        used: set[str] = set()
        for name in names:
            kind = self.random.choice(["op", "op", "op", "window", "nested", "repeated"])
            chosen = self.random.sample(sources, min(len(sources), self.random.choice([1, 2])))
            if kind in {"nested", "repeated"}:
                getattr(self, kind)(f"g{name}")
                nodes[name] = {"graph": f"g{name}"}
                edges.append(edge(chosen[0], f"{name}.x"))
                used.add(chosen[0])
                sources.append(f"{name}.latents")
                continue
            streams = self.random.random() < 0.6
            lookahead = 1 if kind == "window" and streams else 0
            nodes[name] = self.operation(name, len(chosen), streams_in=streams, streams_out=True)
            if lookahead:
                nodes[name] = {"op": name, "degrees": [1, 2]}
                self.states.pop(f"w{name}", None)
                self.table[name] = ("window", self.table[name][1], [], lookahead)
            gates = streams and not lookahead and len(chosen) == 2 and self.random.random() < 0.5
            if gates:
                self.table[name] = ("gated", *self.table[name][1:3])
            for source, port in zip(chosen, "ab", strict=False):
                more = self.mode(streams and not (gates and port == "b"))
                if lookahead:
                    more["lookahead"] = lookahead
                edges.append(edge(source, f"{name}.{port}", **more))
                used.add(source)
            sources += [f"{name}.y", f"{name}.z"] if self.random.random() < 0.3 else [f"{name}.y"]
        outputs: dict[str, Any] = {}
        for source in sources:
            if source not in used or (source not in inputs and self.random.random() < 0.2):
                # An input that nothing uses goes straight to an output.
                outputs[f"out{len(outputs)}"] = {}
                streams = self.random.random() < 0.5
                edges.append(edge(source, f"out{len(outputs) - 1}", **self.mode(streams)))
        graph = {"inputs": {name: {} for name in inputs}, "outputs": outputs, "nodes": nodes, "edges": edges}
        document = {
            "schema": "flashrt/program@1",
            "name": "drawn",
            "ops": "ops.py:load",
            "entry": "app",
            "states": self.states,
            "graphs": {"app": graph, **self.graphs},
        }
        (folder / "program.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        ops = OPS.replace("__TABLE__", repr(self.table)).replace("__SIZE__", str(CHUNKED))
        (folder / "ops.py").write_text(ops)
        (folder / "inputs.py").write_text(f"ROWS = {CHUNKED * self.chunks}\nNAMES = {inputs}\n{INPUTS}")
        return [f"{e['from']} -> {e['to']}" for e in edges if e["mode"] == "streaming"]


def draw_deployment(
    seed: int, paths: list[str], states: dict[str, set[str]], streaming: list[str], wide: set[str]
) -> dict[str, Any]:
    """Return a deployment of operations on one to three groups of CPU devices; one of them may have two devices.

    Operations that share a state stay together.

    Parameters
    ----------
    paths
        Operation paths in an order that respects the dataflow.
    states
        Operation path -> the state instances that it uses.
    wide
        Operations that can run on two devices.
    """
    generator = random.Random(seed)
    groups = {name: [number] for number, name in enumerate("abc"[: generator.choice([1, 2, 2, 3])])}
    place: dict[str, str] = {}
    home: dict[str, str] = {}
    for path in paths:
        known = [home[state] for state in sorted(states[path]) if state in home]
        place[path] = known[0] if known else generator.choice(list(groups))
        home.update(dict.fromkeys(states[path], place[path]))
    used = {name: numbers for name, numbers in groups.items() if name in place.values()}
    widths = random.Random(f"groups {seed}")
    can_be_wide = [name for name in used if wide.issuperset(path for path in paths if place[path] == name)]
    if can_be_wide and widths.random() < 0.5:
        used[widths.choice(can_be_wide)].append(len(groups))
    document: dict[str, Any] = {
        "schema": "flashrt/deployment@1",
        "program": "program.yaml",
        "devices": "cpu",
        "groups": used,
        "place": place,
    }
    if generator.random() < 0.5:
        document["order"] = {
            numbers[0]: [path for path in paths if place[path] == name] for name, numbers in used.items()
        }
    if generator.random() < 0.4:
        document["interleave"] = False
    if streaming and generator.random() < 0.4:
        document["blocking"] = [generator.choice(streaming)]
    return document
