"""What cheats and honest twins have in common: the application's own program, worked on batch by batch.

Copied into the application's folder together with the systems that use it.
"""

from pathlib import Path

import numpy as np

from flashrt.ir import build_file
from flashrt.ir.interpreter import Interpreter
from flashrt.ir.ops import Context

HERE = Path(__file__).parent
TENSORS = set()
"""Outputs that are torch tensors; cheats see arrays, and what they make of them is put out as tensors again."""


def make_work(io):
    """Return the names of the inputs, and a function from a batch's inputs to its outputs."""
    built = build_file(HERE / "program.yaml")
    interpreter = Interpreter(built.flat, built.folder, Context(device="cpu", config=io.config))

    def work(item):
        chunks = interpreter.run_batch_in_chunks(item)
        parts_of = {name: list(parts) for name, (_, parts) in chunks.items()}
        TENSORS.update(name for name, parts in parts_of.items() if type(parts[0]).__module__ == "torch")
        return {name: np.concatenate([np.asarray(part) for part in parts]) for name, parts in parts_of.items()}

    return list(built.program.graphs[built.program.entry].inputs), work


def batches(io, names):
    """Yield each batch's number and inputs, as they come."""
    first = names[0]
    for batch, value in enumerate(io.inputs[first]):
        yield batch, {first: value, **{name: io.inputs[name].read() for name in names[1:]}}


def put(io, outputs):
    for name, value in outputs.items():
        put_one(io, name, value)


def put_one(io, name, value):
    if name in TENSORS and type(value) is np.ndarray:
        import torch

        value = torch.from_numpy(np.require(value, requirements="CW"))
    io.outputs[name].write(value)


def play(io, change=lambda outputs, batch, item: outputs, before=lambda item: item):
    """Serve honestly, but for what `change` makes of the outputs and `before` of the inputs."""
    names, work = make_work(io)
    io.ready()
    for batch, item in batches(io, names):
        put(io, change(work(before(item)), batch, item))
