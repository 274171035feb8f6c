"""Small programs for the audit: `u` feeds `v`, and tables of lies and of honest programs that look like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.ir.documents import edge

PLAIN_U = 'return {"y": inputs["x"] * 2 + 1}'
PLAIN_V = 'return {"y": inputs["x"] - 3}'


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes
    ----------
    top, setup
        Code of the module, and of `load` before the ops.
    states
        State -> declaration; `reads` and `writes` are node -> states.
    finds
        (kind, node, part of the subject) of every error or warning that has to be there; empty: an honest program.
    chunks
        Streaming chunks of u -> v; 0: blocking.
    repeat
        How often `u` runs, the value carried.
    beside
        Whether `w` runs beside `v`, from the same `u`.
    start
        Whether a process of another hash seed is compared too.
    """

    name: str
    top: str = ""
    setup: str = ""
    u: str = PLAIN_U
    v: str = PLAIN_V
    w: str = 'return {"y": inputs["x"] * 5}'
    states: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, list[str]] = field(default_factory=dict)
    writes: Mapping[str, list[str]] = field(default_factory=dict)
    finds: tuple[tuple[str, str, str], ...] = ()
    chunks: int = 0
    lookahead: int = 0
    repeat: int = 0
    beside: bool = False
    start: bool = False
    torch: bool = False
    hints: tuple[str, ...] = ()
    """Kinds of hints that have to be there."""

    def document(self) -> dict[str, Any]:
        """Return the program document."""

        def node(name: str) -> dict[str, Any]:
            found: dict[str, Any] = {"op": name}
            for verb, of in (("reads", self.reads), ("writes", self.writes)):
                if name in of:
                    found[verb] = of[name]
            return found

        stream: dict[str, Any] = {"mode": "streaming", "chunks": self.chunks} if self.chunks else {}
        look = {"lookahead": self.lookahead} if self.lookahead else {}
        nodes = {"u": {"graph": "again"} if self.repeat else node("u"), "v": node("v")}
        edges = [edge("x", "u.x"), edge("u.y", "v.x", **{**stream, **look}), edge("v.y", "y", **stream)]
        outputs: dict[str, Any] = {"y": {}}
        if self.beside:
            nodes["w"] = node("w")
            edges += [edge("u.y", "w.x"), edge("w.y", "z")]
            outputs["z"] = {}
        graphs: dict[str, Any] = {"app": {"inputs": {"x": {}}, "outputs": outputs, "nodes": nodes, "edges": edges}}
        if self.repeat:
            graphs["again"] = {
                "repeat": {"times": self.repeat, "carry": {"y": "x"}}, "inputs": {"x": {}}, "outputs": {"y": {}},
                "nodes": {"step": node("u")}, "edges": [edge("x", "step.x"), edge("step.y", "y")],
            }  # fmt: skip
        return {
            "schema": "flashrt/program@1", "name": "audited", "ops": "ops.py:load", "entry": "app",
            "states": dict(self.states), "graphs": graphs,
        }  # fmt: skip

    def ops(self) -> str:
        """Return the ops file."""

        def body(text: str) -> str:
            return "\n".join(f"        {line}" for line in text.strip("\n").splitlines())

        head = "import numpy as np\n" + ("import torch\n" if self.torch else "") + self.top
        setup = "\n".join(f"    {line}" for line in self.setup.strip("\n").splitlines())
        ops = "\n".join(f"    def {name}(inputs, state):\n{body(text)}"
                        for name, text in (("u", self.u), ("v", self.v), ("w", self.w)))  # fmt: skip
        return f"{head}\n\ndef load(context):\n{setup}\n{ops}\n    return {{'u': u, 'v': v, 'w': w}}\n"


S = {"s": {}}
READ, WRITE = {"u": ["s"]}, {"u": ["s"]}
COUNT = 'n = (state["s"] or 0) + 1\nstate["s"] = n\nreturn {"y": inputs["x"] + n}'
"""An honest counter in the declared state `s`."""
BOX = """
class Box:
    def __init__(self, value=0.0):
        self.value = value
"""
BUFFER = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('memory', torch.zeros(4))
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
"""
T = 'x = torch.as_tensor(inputs["x"])\n'

LIES = (
    # What goes through the mapping.
    Case("read-undeclared", u='return {"y": inputs["x"] + (state["s"] or 0)}', v='state["s"] = 1\n' + PLAIN_V, states=S,
         writes={"v": ["s"]}, finds=(("undeclared-read", "u", "s"),)),
    Case("write-undeclared", u=COUNT, states=S, reads=READ, finds=(("undeclared-write", "u", "s"),)),
    Case("state-that-nobody-declares", u=COUNT, finds=(("undeclared-read", "u", "s"), ("undeclared-write", "u", "s"))),
    Case("several-at-once", u='state["a"] = 1\nstate["b"] = state["c"]\n' + PLAIN_U, states={"a": {}, "b": {}, "c": {}},
         reads={"v": ["a", "b"]}, writes={"v": ["c"]}, v='state["c"] = (state["a"], state["b"])\n' + PLAIN_V,
         finds=(("undeclared-write", "u", "a"), ("undeclared-write", "u", "b"), ("undeclared-read", "u", "c"))),
    Case("read-never-used", u='state["s"] = 1\n' + PLAIN_U, states=S, reads=READ, writes=WRITE,
         finds=(("unused-read", "u", "s"),)),
    Case("write-never-used", u='state["s"]\n' + PLAIN_U, states=S, reads=READ, writes=WRITE,
         finds=(("unused-write", "u", "s"),)),
    Case("old-value-of-a-written-state", u=COUNT, states=S, writes=WRITE, finds=(("reads-old-value", "u", "s"),)),
    Case("old-value-kept-in-part",
         u='b = state["s"]\nif b is None: b = np.zeros((6, 4), np.float32)\nb[:2] = inputs["x"][:2]\nstate["s"] = b\n'
           'return {"y": inputs["x"]}',
         v='return {"y": inputs["x"] + state["s"]}', states=S, writes=WRITE, reads={"v": ["s"]},
         finds=(("reads-old-value", "u", "s"),)),
    # What is changed in place.
    Case("read-state-changed-in-place", u='state["s"] = np.ones(4, np.float32)\n' + PLAIN_U,
         v='state["s"][0] += 1\nreturn {"y": inputs["x"] + state["s"]}', states=S, writes=WRITE, reads={"v": ["s"]},
         finds=(("changes-read-state", "v", "s"),)),
    Case("read-tensor-changed-past-its-version", torch=True, u='state["s"] = torch.ones(4)\n' + PLAIN_U,
         v=T + 'state["s"].data.add_(1)\nreturn {"y": x + state["s"]}', states=S, writes=WRITE, reads={"v": ["s"]},
         finds=(("changes-read-state", "v", "s"),)),
    Case("input-changed", v='inputs["x"] -= 3\nreturn {"y": inputs["x"]}', finds=(("changes-input", "v", "x"),)),
    Case("program-input-changed", u='inputs["x"][0] = 0\nreturn {"y": inputs["x"] * 2}',
         finds=(("changes-input", "u", "x"),)),
    Case("input-of-two-changed", beside=True, v='inputs["x"] *= 2\nreturn {"y": inputs["x"] + 1}',
         finds=(("changes-input", "v", "x"),)),
    # What is kept elsewhere.
    Case("closure", setup="last = 0.0", u='nonlocal last\nlast = last + float(inputs["x"].sum())\n'
         'return {"y": inputs["x"] + last}', finds=(("hidden-attribute", "u", "last"),)),
    Case("list-in-closure", setup="seen = []", u='seen.append(1)\nreturn {"y": inputs["x"] + len(seen)}',
         finds=(("hidden-attribute", "u", "seen"),)),
    Case("attribute-of-object", top=BOX, setup="box = Box()",
         u='box.value = 0.5 * box.value + float(inputs["x"].mean())\nreturn {"y": inputs["x"] + box.value}',
         finds=(("hidden-attribute", "u", "value"),)),
    Case("attribute-of-self", top="class Op:\n    kept = None\n    def __call__(self, inputs, state):\n"
         "        old, self.kept = self.kept, inputs['x'].copy()\n"
         "        return {'y': inputs['x'] - 3 + (0 if old is None else old)}\n",
         setup="v_op = Op()", v='return v_op(inputs, state)', finds=(("hidden-attribute", "v", "kept"),)),
    Case("attribute-of-class", top="class Counter:\n    calls = 0\n",
         u='Counter.calls += 1\nreturn {"y": inputs["x"] + Counter.calls}', finds=(("hidden-attribute", "u",
         "calls"),)),
    Case("global", top="CALLS = 0\n", u='global CALLS\nCALLS += 1\nreturn {"y": inputs["x"] + CALLS}',
         finds=(("hidden-global", "u", "CALLS"),)),
    Case("global-from-u-to-v", top="KEPT = {}\n", u='KEPT["m"] = float(inputs["x"].mean())\n' + PLAIN_U,
         v='return {"y": inputs["x"] - KEPT.get("m", 0.0)}', finds=(("hidden-global", "v", "KEPT"),)),
    Case("global-of-builtins", u='import builtins\nbuiltins.flashrt_n = getattr(builtins, "flashrt_n", 0) + 1\n'
         'return {"y": inputs["x"] + builtins.flashrt_n}', finds=(("hidden-global", "u", "flashrt_n"),)),
    Case("environment", u='import os\nn = int(os.environ.get("N_SEEN", "0")) + 1\nos.environ["N_SEEN"] = str(n)\n'
         'return {"y": inputs["x"] + n}', finds=(("hidden-environment", "u", "environment"),)),
    Case("buffer-of-module", torch=True, top=BUFFER, setup="layer = Layer()",
         u=T + 'layer.memory.mul_(0.5).add_(x[0])\nreturn {"y": x + layer.memory}',
         finds=(("hidden-buffer", "u", "memory"),)),
    Case("parameter-of-module", torch=True, top=BUFFER, setup="layer = Layer()",
         u=T + 'layer.weight.data.mul_(1.1)\nreturn {"y": x * layer.weight}', finds=(("hidden-buffer", "u",
         "weight"),)),
    Case("torch-random", torch=True, u=T + 'return {"y": x + torch.rand(4)}', finds=(("hidden-random", "u", "torch"),)),
    Case("numpy-random", u='return {"y": inputs["x"] + np.random.rand(4)}', finds=(("hidden-random", "u", "NumPy"),)),
    Case("python-random", top="import random\n", u='return {"y": inputs["x"] + random.random()}',
         finds=(("hidden-random", "u", "random module"),)),
    Case("generator-in-closure", setup="rng = np.random.default_rng(3)",
         u='return {"y": inputs["x"] + rng.standard_normal(4)}', finds=(("hidden-random", "u", "rng"),)),
    Case("torch-generator-in-closure", torch=True, setup="rng = torch.Generator().manual_seed(3)",
         u=T + 'return {"y": x + torch.rand(4, generator=rng)}', finds=(("hidden-random", "u", "rng"),)),
    Case("file", top="import pathlib\nFILE = pathlib.Path(__file__).with_name('kept.txt')\n",
         u='n = int(FILE.read_text()) + 1 if FILE.exists() else 1\nFILE.write_text(str(n))\n'
           'return {"y": inputs["x"] + n}',
         finds=(("hidden-file", "u", "kept.txt"),)),
    Case("iterator-in-closure", setup="import itertools\nnumbers = itertools.count()",
         u='return {"y": inputs["x"] + next(numbers)}', finds=(("hidden-attribute", "u", "numbers"),)),
    Case("attribute-of-the-state-view", u='state.n = getattr(state, "n", 0) + 1\nreturn {"y": inputs["x"] + state.n}',
         finds=(("hidden-unknown", "u", "not found"),)),
    # What is shared.
    Case("two-states-one-memory", u='m = inputs["x"].copy()\nif state["a"] is None: state["a"] = state["b"] = m\n'
         'state["a"] += 1\nreturn {"y": inputs["x"] + state["a"]}',
         v='state["b"] *= 2\nreturn {"y": inputs["x"] + state["b"]}', states={"a": {}, "b": {}},
         reads={"u": ["a"], "v": ["b"]}, writes={"u": ["a", "b"], "v": ["b"]},
         finds=(("shared-storage", "v", "a"), ("shared-storage", "u", "b"))),
    Case("state-is-memory-of-the-op", setup="start = np.zeros((6, 4), np.float32)",
         u='s = start if state["s"] is None else state["s"]\ns += inputs["x"]\nstate["s"] = s\n'
           'return {"y": s.copy()}', states=S, reads=READ, writes=WRITE, finds=(("shared-storage", "u", "s"),)),
    Case("output-is-a-state", u='s = state["s"]\nif s is None: s = np.zeros((6, 4), np.float32)\ns += inputs["x"]\n'
         'state["s"] = s\nreturn {"y": s}', states=S, reads=READ, writes=WRITE, finds=(("shared-storage", "u",
         "output"),)),
    Case("chunks-in-one-memory", chunks=3, setup="room = np.empty((2, 4), np.float32)",
         u='def chunks():\n    for part in np.split(inputs["x"], 3):\n        room[:] = part\n'
           '        yield {"y": room}\n'
           'return chunks()', finds=(("shared-storage", "u", "output"),)),
    # What leaks from one iteration to the next.
    Case("iterations-share-a-closure", repeat=3, setup="last = [0.0]",
         u='old = last[0]\nlast[0] = float(inputs["x"].mean())\nreturn {"y": inputs["x"] + old}',
         finds=(("iteration-leak", "u/step[*]", "last"),)),
    Case("iterations-share-a-state-s-memory", repeat=2, states={"s": {"per": "iteration"}}, reads=READ, writes=WRITE,
         setup="start = np.zeros((6, 4), np.float32)",
         u='s = start if state["s"] is None else state["s"]\ns += 0.25 * inputs["x"]\nstate["s"] = s\n'
           'return {"y": inputs["x"] + s}', finds=(("iteration-leak", "u/step[*]", "s"),)),
    # What streams.
    Case("needs-the-next-chunk", chunks=3, v='x = inputs["x"]\nreturn {"y": np.concatenate([x[1:], x[-1:]]) - x}',
         finds=(("streaming-lookahead", "v", "u.y -> v.x"),)),
    Case("needs-the-whole", chunks=3, v='return {"y": inputs["x"] - inputs["x"].mean()}',
         finds=(("streaming-lookahead", "v", "u.y -> v.x"),)),
    Case("forgets-the-chunk-before", chunks=3, v='return {"y": np.cumsum(inputs["x"], axis=0)}',
         finds=(("streaming-differs", "v", "u.y -> v.x"),)),
    Case("counts-calls-in-its-state", chunks=3,
         v='n = (state["s"] or 0) + 1\nstate["s"] = n\nreturn {"y": inputs["x"] + n}',
         states=S, reads={"v": ["s"]}, writes={"v": ["s"]}, finds=(("streaming-differs", "v", "u.y -> v.x"),)),
    # What depends on order, or on chance.
    Case("scratch-of-two", beside=True, top="SCRATCH = np.zeros((6, 4), np.float32)\n",
         v='SCRATCH[:] = inputs["x"]\nfactor = 2\nreturn {"y": SCRATCH * factor}',
         w='SCRATCH[:] = -inputs["x"]\nfactor = 3\nreturn {"y": SCRATCH * factor}',
         finds=(("order-dependent", "v", "at once"),)),
    Case("order-of-two", beside=True, top="SEEN = []\n", v='SEEN.append("v")\nreturn {"y": inputs["x"] * 2}',
         w='first = not SEEN\nSEEN.clear()\nreturn {"y": inputs["x"] + first}', finds=(("hidden-global", "w",
         "SEEN"),)),
    Case("clock", top="import time\n", u='return {"y": inputs["x"] + (time.time_ns() % 997)}',
         finds=(("nondeterministic", "u", "clock"),)),
    Case("process-id", u='import os\nreturn {"y": inputs["x"] + os.getpid()}',
         finds=(("nondeterministic", "u", "process id"),)),
    Case("entropy", top="import os\n", u='return {"y": inputs["x"] + os.urandom(2)[0]}',
         finds=(("nondeterministic", "u", "randomness"),)),
    Case("hash-seed", start=True, u='return {"y": inputs["x"] + hash("a word") % 1013}',
         finds=(("nondeterministic", "u", "hash seed"),)),
    Case("unseeded-weights", start=True, setup="weights = np.random.rand(4)", u='return {"y": inputs["x"] * weights}',
         finds=(("nondeterministic", "u", "loading"),)),
)  # fmt: skip

HONEST = (
    Case("pure", hints=("could-stream",)),
    Case("looks-ahead-for-nothing", chunks=3, lookahead=1, v='return {"y": inputs["x"][:2] - 3}',
         hints=("lookahead-unused",)),
    Case("counter", u=COUNT, states=S, reads=READ, writes=WRITE),
    Case("table-made-when-needed", setup="table = {}",
         u='if "t" not in table: table["t"] = np.linspace(0, 1, 4, dtype=np.float32)\n'
           'return {"y": inputs["x"] * table["t"]}'),
    Case("table-in-a-global", top="TABLE = None\n", u='global TABLE\nif TABLE is None: TABLE = np.arange(4)\n'
         'return {"y": inputs["x"] + TABLE}'),
    Case("table-in-an-attribute", top=BOX, setup="box = Box(None)",
         u='if box.value is None: box.value = np.ones(4)\nreturn {"y": inputs["x"] + box.value}'),
    Case("cached-function", top="import functools\n@functools.cache\ndef factor(n):\n    return n * 0.5\n",
         u='return {"y": inputs["x"] * factor(len(inputs["x"]))}'),
    Case("cached-property", top="import functools\nclass W:\n    @functools.cached_property\n    def w(self):\n"
         "        return np.eye(4)\n", setup="w_ = W()", u='return {"y": inputs["x"] @ w_.w}'),
    Case("cache-keyed-by-input", top="import functools\n@functools.lru_cache(8)\ndef slow(n):\n    return n + 1.0\n",
         u='return {"y": inputs["x"] + slow(int(abs(inputs["x"].sum()) * 10) % 3)}'),
    Case("counts-calls-for-nobody", top="CALLS = 0\n", u='global CALLS\nCALLS += 1\n' + PLAIN_U),
    Case("statistics-in-attribute", top=BOX, setup="box = Box()",
         u='box.value += float(inputs["x"].sum())\n' + PLAIN_U),
    Case("workspace", setup="room = np.empty((6, 4), np.float32)",
         u='np.multiply(inputs["x"], 2, out=room)\nreturn {"y": room + 1}'),
    Case("workspace-of-torch", torch=True, setup="room = torch.empty(6, 4)",
         u=T + 'torch.mul(x, 2, out=room)\nreturn {"y": room + 1}'),
    Case("generator-in-state",
         u='rng = np.random.default_rng(5)\nif state["s"] is not None: rng.bit_generator.state = state["s"]\n'
         'noise = rng.standard_normal(4)\nstate["s"] = rng.bit_generator.state\nreturn {"y": inputs["x"] + noise}',
         states=S, reads=READ, writes=WRITE),
    Case("generator-object-in-state", u='rng = state["s"] if state["s"] is not None else np.random.default_rng(5)\n'
         'state["s"] = rng\nreturn {"y": inputs["x"] + rng.standard_normal(4)}', states=S, reads=READ, writes=WRITE),
    Case("torch-generator-in-state", torch=True,
         u=T + 'g = torch.Generator().manual_seed(1)\nif state["s"] is not None: g.set_state(state["s"])\n'
         'noise = torch.rand(4, generator=g)\nstate["s"] = g.get_state()\nreturn {"y": x + noise}',
         states=S, reads=READ, writes=WRITE),
    Case("torch-generator-object-in-state", torch=True,
         u=T + 'g = state["s"] if state["s"] is not None else torch.Generator().manual_seed(1)\nstate["s"] = g\n'
         'return {"y": x + torch.rand(4, generator=g)}', states=S, reads=READ, writes=WRITE),
    Case("generator-seeded-in-each-call",
         u='rng = np.random.default_rng(7)\nreturn {"y": inputs["x"] + rng.standard_normal(4)}'),
    Case("global-generator-put-back", u='before = np.random.get_state()\nnp.random.seed(3)\nnoise = np.random.rand(4)\n'
         'np.random.set_state(before)\nreturn {"y": inputs["x"] + noise}'),
    Case("chunks", chunks=3, u='return ({"y": part * 2} for part in np.split(inputs["x"], 3))'),
    Case("chunks-of-a-whole", chunks=3),
    Case("chunks-with-a-remembered-edge", chunks=3, states=S, reads={"v": ["s"]}, writes={"v": ["s"]},
         v='x = inputs["x"]\nlast = np.zeros((1, 4), x.dtype) if state["s"] is None else state["s"]\n'
           'both = np.concatenate([last, x])\nstate["s"] = x[-1:].copy()\nreturn {"y": both[1:] - both[:-1]}'),
    Case("chunks-summed-on", chunks=2, states=S, reads={"v": ["s"]}, writes={"v": ["s"]},
         v='total = np.zeros((1, 4), np.float64) if state["s"] is None else state["s"]\n'
           'y = []\nfor row in inputs["x"]:\n    total = total + row\n    y.append(total[0])\nstate["s"] = total\n'
           'return {"y": np.stack(y)}'),
    Case("looks-ahead-and-says-so", chunks=3, lookahead=1,
         v='x = inputs["x"]\nnext_ = x[2:4] if len(x) > 2 else x[:2]\nreturn {"y": x[:2] + next_}'),
    Case("kv-cache-in-place", torch=True, states=S, reads=READ, writes=WRITE,
         u=T + 'kv = state["s"]\nif kv is None: kv = {"k": torch.zeros(8, 4), "n": 0}\n'
           'kv["k"][kv["n"] % 8] = x.sum(0)\n'
           'kv["n"] += 1\nstate["s"] = kv\nreturn {"y": x + kv["k"].sum(0)}'),
    Case("kv-cache-in-place-never-set-again", states=S, reads=READ, writes=WRITE,
         u='if state["s"] is None: state["s"] = np.zeros((8, 4))\nkv = state["s"]\nkv[:-1] = kv[1:].copy()\n'
           'kv[-1] = inputs["x"].sum(0)\nreturn {"y": inputs["x"] + kv.sum(0)}'),
    Case("kv-cache-grows", states=S, reads=READ, writes=WRITE,
         u='kv = [] if state["s"] is None else state["s"]\nstate["s"] = [*kv, inputs["x"].mean(0)][-4:]\n'
           'return {"y": inputs["x"] + np.sum(state["s"], axis=0)}'),
    Case("state-per-iteration", repeat=3, states={"s": {"per": "iteration"}}, reads=READ, writes=WRITE, u=COUNT),
    Case("state-shared-by-iterations", repeat=3, states=S, reads=READ, writes=WRITE, u=COUNT),
    Case("table-per-iteration", repeat=3, setup="tables = {}",
         u='key = int(inputs["x"].shape[0])\ntables.setdefault(key, np.arange(4) / key)\n'
           'return {"y": inputs["x"] + tables[key]}'),
    Case("start-value-shared-and-never-changed", repeat=2, states={"s": {"per": "iteration"}}, reads=READ, writes=WRITE,
         setup="start = np.zeros((6, 4), np.float32)",
         u='s = start if state["s"] is None else state["s"]\nstate["s"] = s + inputs["x"]\n'
           'return {"y": inputs["x"] + s}'),
    Case("two-states-one-value-never-changed", states={"a": {}, "b": {}}, reads={"u": ["a", "b"]}, writes={"u": ["a",
         "b"]},
         u='old = (0 if state["a"] is None else state["a"], 0 if state["b"] is None else state["b"])\n'
           'state["a"] = state["b"] = inputs["x"].copy()\nreturn {"y": inputs["x"] + old[0] + old[1]}'),
    Case("written-now-and-then", states=S, reads=READ, writes=WRITE,
         u='n = state["s"] or 0\nif inputs["x"][0, 0] > 0: state["s"] = n + 1\nreturn {"y": inputs["x"] + n}'),
    Case("written-in-the-first-batch", states=S, reads=READ, writes=WRITE,
         u='if state["s"] is None: state["s"] = inputs["x"].mean()\nreturn {"y": inputs["x"] - state["s"]}'),
    Case("whole-state-written-in-place", states=S, writes=WRITE, reads={"v": ["s"]},
         u='b = state["s"]\nif b is None: b = state["s"] = np.zeros((6, 4), np.float32)\nb[:] = inputs["x"]\n'
           '' + PLAIN_U,
         v='return {"y": inputs["x"] + state["s"]}'),
    Case("view-of-the-input", u='return {"y": inputs["x"][::-1]}'),
    Case("the-input-itself", u='return {"y": inputs["x"]}'),
    Case("view-of-torch", torch=True, u='return {"y": torch.as_tensor(inputs["x"]).T}',
         v='return {"y": inputs["x"] - 3}'),
    Case("beside", beside=True), Case("beside-with-own-scratch", beside=True, setup="a = np.zeros(4)\nb = np.zeros(4)",
         v='a[:] = inputs["x"][0]\nreturn {"y": inputs["x"] + a}',
         w='b[:] = inputs["x"][1]\nreturn {"y": inputs["x"] + b}'),
    Case("beside-reading-one-state", beside=True, states=S, writes=WRITE, reads={"v": ["s"], "w": ["s"]},
         u='state["s"] = inputs["x"].mean()\n' + PLAIN_U, v='return {"y": inputs["x"] + state["s"]}',
         w='return {"y": inputs["x"] - state["s"]}'),
    Case("log-file", top="import pathlib\nLOG = pathlib.Path(__file__).with_name('log.txt')\n",
         u='with LOG.open("a") as log: log.write("called\\n")\n' + PLAIN_U, hints=("file-written",)),
    Case("table-in-a-file", top="import pathlib\nFILE = pathlib.Path(__file__).with_name('table.npy')\n",
         u='if not FILE.exists(): np.save(FILE, np.arange(4))\nreturn {"y": inputs["x"] + np.load(FILE)}',
         hints=("file-written",)),
    Case("weights-read-late", top="import pathlib\nFILE = pathlib.Path(__file__)\n", setup="kept = {}",
         u='if "n" not in kept: kept["n"] = len(FILE.read_text()) % 7\nreturn {"y": inputs["x"] + kept["n"]}',
         start=True),
    Case("module-in-training-mode", torch=True, setup="norm = torch.nn.BatchNorm1d(4)",
         u=T + 'with torch.no_grad(): return {"y": norm(x)}'),
    Case("weights-seeded", start=True, setup="weights = np.random.default_rng(0).random(4)",
         u='return {"y": inputs["x"] * weights}'),
    Case("clock-for-nobody", top="import time\n", setup="spent = []",
         u='begun = time.time()\ny = inputs["x"] * 2\nspent.append(time.time() - begun)\nreturn {"y": y}'),
    Case("text-and-numbers", u='return {"y": [float(n) for n in inputs["x"].sum(1)]}',
         v='return {"y": [n + 1 for n in inputs["x"]]}'),
)  # fmt: skip
