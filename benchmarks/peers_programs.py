"""Random programs of NumPy operations with random deployments and profiles, for `pipeline.py`.

A program has chains, fan-out, streaming edges whose producers yield chunk by chunk, nested and repeated graphs, and
state, also state of its own for each iteration. All of it follows from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

OPS = """
import numpy as np


def mix(inputs):
    whole = inputs.get('gate')
    total = np.float32(0 if whole is None else whole.mean(dtype=np.float32))
    for port in sorted(inputs):
        if port != 'gate':
            total = total + np.asarray(inputs[port], np.float32)
    return total


def mapped(states):
    '''Maps element by element along axis 0, numbering them in its states: its chunks are those of the whole.'''
    def call(inputs, state):
        value = np.tanh(mix(inputs))
        for name in states:
            seen = state.get(name) or 0
            value = value + (seen + np.arange(len(value), dtype=np.float32))[:, None] % 7
            state[name] = seen + len(value)
        return {'y': value}
    return call


def yielding(states, chunks):
    '''Takes whole values and yields its chunks one by one.'''
    inner = mapped(states)
    def call(inputs, state):
        for part in np.array_split(inner(inputs, state)['y'], chunks):
            yield {'y': part}
    return call


def noise(inputs, state):
    drawn = state.get('rng') or 0
    state['rng'] = drawn + 1
    return np.full((ROWS, 3), drawn % 5, np.float32)


ROWS = __ROWS__
KINDS = {'mapped': mapped, 'yielding': yielding}


def load(context):
    return {'noise': noise} | {name: KINDS[kind](*rest) for name, (kind, *rest) in __TABLE__.items()}
"""
ROWS_PER_CHUNK = 4
MIN_OPERATIONS, MAX_OPERATIONS = 3, 10
MIN_MS, MAX_MS, MAX_TRANSFER_MS = 5.0, 60.0, 10.0


class Program:
    """One program, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chunks = self.random.choice([2, 3, 4])
        self.rows = ROWS_PER_CHUNK * self.chunks
        self.streaming_sources: set[str] = set()
        self._table: dict[str, tuple[Any, ...]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._graphs: dict[str, Any] = {}
        self._nodes: dict[str, Any] = {}
        self._edges: list[dict[str, Any]] = []
        self._num_operations = 0

    def _add_operation(self, name: str, *, streams_in: bool, streams_out: bool, iterated: bool = False) -> Any:
        """Return a node of its own op; it yields its chunks where an edge out of it streams."""
        states = []
        if self.random.random() < 0.5:
            states.append(f"s{name}")
            self._states[states[0]] = {"per": "iteration"} if iterated else {}
        yields = streams_out and not streams_in
        self._table[name] = ("yielding", states, self.chunks) if yields else ("mapped", states)
        return {"op": name, "reads": states, "writes": states, "degrees": [1, 2]}

    def _edge(self, source: str, target: str, *, streams: bool = False) -> dict[str, Any]:
        more = {"mode": "streaming", "chunks": self.chunks} if streams else {"mode": "blocking"}
        return {"from": source, "to": target, **more}

    def _add_nested(self, name: str) -> int:
        first, second = f"{name}p", f"{name}q"
        streams = self.random.random() < 0.7
        self._graphs[name] = {
            "inputs": {"x": {}},
            "outputs": {"y": {}},
            "nodes": {
                first: self._add_operation(first, streams_in=False, streams_out=streams),
                second: self._add_operation(second, streams_in=streams, streams_out=False),
            },
            "edges": [
                self._edge("x", f"{first}.a"),
                self._edge(f"{first}.y", f"{second}.a", streams=streams),
                self._edge(f"{second}.y", "y"),
            ],
        }
        return 2

    def _add_repeated(self, name: str, room: int) -> int:
        times = self.random.choice([2, 3]) if room >= 3 else 2
        initial: Any = "x"
        if "rng" not in self._states:
            self._states["rng"] = {}
            initial = {"op": "noise", "reads": ["rng"], "writes": ["rng"]}
        step = f"{name}s"
        self._graphs[name] = {
            "repeat": {"times": times, "carry": {"y": "carried"}},
            "inputs": {"x": {}, "carried": {"initial": initial}},
            "outputs": {"y": {}},
            "nodes": {step: self._add_operation(step, streams_in=False, streams_out=False, iterated=True)},
            "edges": [
                self._edge("x", f"{step}.a"),
                self._edge("carried", f"{step}.b"),
                self._edge(f"{step}.y", "y"),
            ],
        }
        return times

    def write(self, folder: Path) -> None:
        """Write program.yaml and ops.py to `folder`."""
        wanted = self.random.randint(MIN_OPERATIONS, MAX_OPERATIONS)
        sources, used = ["x"], set()
        while self._num_operations < wanted:
            name = f"n{len(self._nodes)}"
            room = wanted - self._num_operations
            kind = self.random.choice(["op", "op", "op", "nested", "repeated"] if room >= 2 else ["op"])
            # The newest source makes chains; any of them, fan-out.
            chosen = [sources[-1] if self.random.random() < 0.6 else self.random.choice(sources)]
            others = [source for source in sources if source not in chosen]
            if kind == "op" and others and self.random.random() < 0.4:
                chosen.append(self.random.choice(others))
            used.update(chosen)
            if kind != "op":
                add = self._add_nested if kind == "nested" else lambda each, room=room: self._add_repeated(each, room)
                self._num_operations += add(f"g{name}")
                self._nodes[name] = {"graph": f"g{name}"}
                self._edges.append(self._edge(chosen[0], f"{name}.x"))
            else:
                streams = self.random.random() < 0.6
                gated = streams and len(chosen) == 2 and self.random.random() < 0.5
                for source, port in zip(chosen, ("a", "gate" if gated else "b"), strict=False):
                    self._edges.append(self._edge(source, f"{name}.{port}", streams=streams and port != "gate"))
                self._nodes[name] = self._add_operation(name, streams_in=streams, streams_out=True)
                self._num_operations += 1
            sources.append(f"{name}.y")
        outputs = [source for source in sources[1:] if source not in used]
        for number, source in enumerate(outputs):
            self._edges.append(self._edge(source, f"out{number}", streams=self.random.random() < 0.5))
        self._make_yields_match()
        graph = {
            "inputs": {"x": {}},
            "outputs": {f"out{number}": {} for number in range(len(outputs))},
            "nodes": self._nodes,
            "edges": self._edges,
        }
        document = {
            "schema": "flashrt/program@1",
            "name": "drawn",
            "ops": "ops.py:load",
            "entry": "app",
            "states": self._states,
            "graphs": {"app": graph, **self._graphs},
        }
        (folder / "program.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        text = OPS.replace("__TABLE__", repr(self._table)).replace("__ROWS__", str(self.rows))
        (folder / "ops.py").write_text(text)

    def _make_yields_match(self) -> None:
        """Let an operation of the entry graph yield only where an edge out of it streams."""
        streaming = {edge["from"].split(".")[0] for edge in self._edges if edge["mode"] == "streaming"}
        for name, (kind, states, *_) in list(self._table.items()):
            if name in self._nodes and kind == "yielding" and name not in streaming:
                self._table[name] = ("mapped", states)


def draw_deployment(
    generator: random.Random, paths: list[str], accesses: Mapping[str, set[str]], streaming: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a deployment on 2 to 8 emulated devices, and a profile for it.

    Parameters
    ----------
    paths
        Operation paths in an order that respects the dataflow.
    accesses
        Operation path -> the state instances that it uses; operations that share one stay together.
    streaming
        Labels of the program's streaming edges.
    """
    left = generator.randint(2, 8)
    groups: dict[str, list[int]] = {}
    number = 0
    while left:
        size = min(generator.choice([1, 1, 2]), left)
        groups[f"g{len(groups)}"] = list(range(number, number + size))
        number, left = number + size, left - size
    place: dict[str, str] = {}
    home: dict[str, str] = {}
    for path in paths:
        known = [home[state] for state in sorted(accesses[path]) if state in home]
        place[path] = known[0] if known else generator.choice(list(groups))
        home.update(dict.fromkeys(accesses[path], place[path]))
    deployment: dict[str, Any] = {
        "schema": "flashrt/deployment@1",
        "program": "program.yaml",
        "profile": "profile.yaml",
        "devices": "emulated",
        "groups": {name: numbers for name, numbers in groups.items() if name in place.values()},
        "place": place,
    }
    if streaming and generator.random() < 0.3:
        deployment["blocking"] = [generator.choice(streaming)]
    one = {path: round(generator.uniform(MIN_MS, MAX_MS), 2) for path in paths}
    edges = {
        f"{source} -> {target}": round(generator.uniform(0, MAX_TRANSFER_MS), 2)
        for source in paths
        for target in paths
        if source != target and generator.random() < 0.5
    }
    profile = {
        "schema": "flashrt/profile@1",
        "device": "emulated",
        "operations": {
            path: {1: time_ms, 2: round(time_ms * generator.uniform(0.55, 0.9), 2)} for path, time_ms in one.items()
        },
        "transfer": {"latency_ms": round(generator.uniform(0, 3), 2), "edges": edges},
        "provenance": "declared",
    }
    return deployment, profile
