"""Synthetic references, each with one thing that a trace has to see; and what its draft has to have."""

from __future__ import annotations

from tests.trace.cases import TWO_INPUTS, Case

CASES: dict[str, Case] = {}

CASES["loop_with_carry"] = Case(
    """
import numpy as np


def refine(weights, x, step):
    return np.tanh(x @ weights + step).astype(np.float32)


def finish(x):
    return x * 2


def serve(io):
    weights = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    io.ready()
    for x in io.inputs["x"]:
        y = x + 1
        for step in range(3):
            y = refine(weights, y, step)
        io.outputs["y"].write(finish(y))
""",
    ("refine[2]", "finish"), repeats=1,
)  # fmt: skip

CASES["nested_modules"] = Case(
    """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 8)

    def forward(self, x):
        return torch.relu(self.line(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 6)

    def forward(self, z):
        return self.line(z)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z) + 1


@torch.inference_mode()
def serve(io):
    torch.manual_seed(3)
    model = Model().eval()
    io.ready()
    for x in io.inputs["x"]:
        io.outputs["y"].write(model(torch.as_tensor(x)))
""",
    ("model/encoder", "model/decoder"),
)  # fmt: skip

CASES["state_as_attribute"] = Case(
    """
import numpy as np


class App:
    def __init__(self, io):
        self.io = io
        self.memory = np.zeros(6, np.float32)
        self.seen = 0

    def look(self, x):
        self.memory = (0.5 * self.memory + x.mean(0)).astype(np.float32)
        return x - self.memory

    def show(self, z):
        self.seen += 1
        return z * self.seen

    def run(self):
        self.io.ready()
        for x in self.io.inputs["x"]:
            z = self.look(x)
            self.io.outputs["y"].write(self.show(z))


def serve(io):
    App(io).run()
""",
    ("look", "show"), ("self.memory", "self.seen"), ("state-or-scratch",),
)  # fmt: skip

CASES["generator_outside"] = Case(
    """
import numpy as np


def noise(x, random):
    return x + random.standard_normal(x.shape).astype(np.float32)


def mask(x, random):
    return (random.random(x.shape) > 0.5).astype(np.float32)


def join(a, b):
    return a * b


def serve(io):
    random = np.random.default_rng(5)
    io.ready()
    for x in io.inputs["x"]:
        noisy = noise(x, random)
        masks = mask(x, random)
        io.outputs["y"].write(join(noisy, masks))
""",
    ("noise", "mask", "join"), ("random",), ("shared-state",),
)  # fmt: skip

CASES["list_as_cache"] = Case(
    """
import numpy as np


def look(x, history):
    return x + (np.mean(history, axis=0) if history else 0)


def keep(y):
    return y * np.float32(0.5)


def serve(io):
    history = []
    io.ready()
    for x in io.inputs["x"]:
        y = look(x, history).astype(np.float32)
        history.append(keep(y))
        del history[:-3]
        io.outputs["y"].write(y)
""",
    ("look", "keep"), ("history",),
)  # fmt: skip

CASES["branches"] = Case(
    """
import numpy as np


def loud(x):
    return x * 3


def quiet(x):
    return x - 1


def finish(x, note):
    return x + len(note)


def serve(io):
    last = None
    io.ready()
    for x in io.inputs["x"]:
        note = "none"
        if float(x.sum()) > 0:
            y = loud(x)
            note = "loud"
        else:
            y = quiet(x if last is None else x + last)
            last = y
        io.outputs["y"].write(finish(y, note).astype(np.float32))
""",
    ("finish",), ("last",),
)  # fmt: skip

CASES["rare_branch"] = Case(
    """
import numpy as np


def common(x):
    return x * 3


def rare(x):
    return x - 1


def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        y = common(x)
        if float(x.sum()) > 1e6:
            y = rare(y)
        io.outputs["y"].write(y)
""",
    ("common",), (), ("untaken-branch",),
)  # fmt: skip

CASES["buffers"] = Case(
    """
import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.register_buffer("past", torch.zeros(3, 4, 6))
        self.at = 0

    def forward(self, x):
        y = self.line(x) + self.past.mean(0)
        self.past[self.at % 3] = y
        self.at += 1
        return y


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 2)

    def forward(self, y):
        return self.line(y)


def serve(io):
    torch.manual_seed(1)
    memory, head = Memory(), Head()
    with torch.no_grad():
        io.ready()
        for x in io.inputs["x"]:
            y = memory(torch.as_tensor(x))
            io.outputs["y"].write(head(y))
""",
    ("memory", "head"), ("memory.kept",),
)  # fmt: skip

CASES["process_generator"] = Case(
    """
import torch


def draw(x):
    return x + torch.randn(x.shape)


def scale(x, weights):
    return x * weights


def serve(io):
    torch.manual_seed(11)
    first = torch.randn(6)
    weights = torch.randn(6)
    io.ready()
    for x in io.inputs["x"]:
        z = draw(torch.as_tensor(x))
        io.outputs["y"].write(scale(z, weights))
""",
    ("draw", "scale"), ("random.torch",), ("process-generator",),
)  # fmt: skip

CASES["while_loop"] = Case(
    """
import numpy as np


def halve(x):
    return x / 2


def start(x):
    return np.abs(x)


def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        y = start(x)
        while float(y.max()) > 0.1:
            y = halve(y)
        io.outputs["y"].write(y)
""",
    ("start", "halve"),
)  # fmt: skip

CASES["count_varies"] = Case(
    """
import numpy as np


def halve(x):
    return x / 2


def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        y = x
        for _ in range(1 + int(abs(float(x[0, 0])) * 10) % 4):
            y = halve(y)
        io.outputs["y"].write(y)
""",
    ("halve",), (), ("loop-count",),
)  # fmt: skip

CASES["two_inputs_counted"] = Case(
    """
import numpy as np


def read(text, number):
    return np.float32(len(text.replace("a", "")) + number)


def mix(x, value):
    return x * value


def serve(io):
    io.ready()
    for number, (x, text) in enumerate(zip(io.inputs["x"], io.inputs["text"])):
        value = read(text, number)
        io.outputs["y"].write(mix(x, value))
        io.outputs["said"].write(text.upper())
""",
    ("read", "mix"), ("number",), inputs=TWO_INPUTS,
)  # fmt: skip

CASES["chunks_written"] = Case(
    """
import numpy as np


def encode(x):
    return np.repeat(x, 2, axis=0)


def decode(part, past):
    return part + past, part[-1]


def serve(io):
    past = np.zeros(6, np.float32)
    io.ready()
    for x in io.inputs["x"]:
        z = encode(x)
        for part in np.split(z, 4):
            y, past = decode(part, past)
            io.outputs["y"].write(y)
""",
    ("encode", "decode"), ("past",), repeats=1,
)  # fmt: skip

CASES["reads_with_timeout"] = Case(
    """
import numpy as np

COUNT = 0


def count(x):
    global COUNT
    COUNT += 1
    return x + COUNT


def serve(io):
    buffer = io.inputs["x"]
    io.ready()
    while True:
        try:
            x = buffer.read(0.05)
        except TimeoutError:
            continue
        io.outputs["y"].write(count(x).astype(np.float32))
""",
    ("count",), ("reference.COUNT",),
)  # fmt: skip

CASES["opened_function"] = Case(
    """
import numpy as np


def encode(x, past):
    z = np.tanh(x + past)
    return z, z[0]


def decode(z):
    return z[::-1] * 2


def step(x, past, scale=2):
    z, past = encode(x * scale, past)
    return decode(z).astype(np.float32), past


def run(io, scale):
    past = np.zeros(6, np.float32)
    io.ready()
    for x in io.inputs["x"]:
        y, past = step(x, past, scale)
        io.outputs["y"].write(y)


def serve(io):
    run(io, scale=3)
""",
    ("step/encode", "step/decode"), ("past",),
)  # fmt: skip

CASES["list_of_layers"] = Case(
    """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.line = nn.Linear(6, 6)
        nn.init.normal_(self.line.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.line.bias)

    def forward(self, x):
        return x + self.line(x).tanh()


@torch.no_grad()
def serve(io):
    layers = [Layer(seed) for seed in range(3)]
    io.ready()
    for x in io.inputs["x"]:
        y = torch.as_tensor(x)
        for layer in layers:
            y = layer(y)
        io.outputs["y"].write(y)
""",
    ("layer[0]", "layer[2]"), repeats=1,
)  # fmt: skip

CASES["closure_state"] = Case(
    """
import numpy as np


def make_counter():
    total = np.float32(0)

    def count(x):
        nonlocal total
        total = np.float32(total + x.sum())
        return x + total

    return count


def halve(x):
    return x / 2


def serve(io):
    count = make_counter()
    io.ready()
    for x in io.inputs["x"]:
        y = count(x)
        io.outputs["y"].write(halve(y).astype(np.float32))
""",
    ("count", "halve"), ("count.total",),
)  # fmt: skip

CASES["changed_in_place"] = Case(
    """
import torch


def first(x):
    return torch.as_tensor(x) + 1


def second(y, out):
    out.mul_(2).add_(y)
    return out.sum(0)


def third(z, out):
    return z + out


def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        out = first(x)
        y = first(x * 2)
        z = second(y, out)
        io.outputs["y"].write(third(z, out))
""",
    ("first", "second", "third"),
)  # fmt: skip

CASES["state_for_each_turn"] = Case(
    """
import numpy as np


def look(x, past):
    return x + past, x.mean(0)


def serve(io):
    past = {step: np.zeros(6, np.float32) for step in range(2)}
    io.ready()
    for x in io.inputs["x"]:
        y = x
        for step in range(2):
            y, past[step] = look(y, past[step])
        io.outputs["y"].write(y)
""",
    ("look[0]", "look[1]"), ("past",), repeats=1,
)  # fmt: skip

CASES["generator_of_pieces"] = Case(
    """
import numpy as np


def speak(x, random):
    for row in x:
        yield row + random.standard_normal(6).astype(np.float32)


def join(parts):
    return np.stack(parts)


def serve(io):
    random = np.random.default_rng(2)
    io.ready()
    for x in io.inputs["x"]:
        parts = list(speak(x, random))
        io.outputs["y"].write(join(parts))
""",
    ("speak", "join"), ("random",), ("streaming",),
)  # fmt: skip
