"""The null system: writes back what it is given. Driving it measures the harness and nothing else."""

from __future__ import annotations

from flashrt.bench.io import InputClosed, SystemIO


def echo(io: SystemIO) -> None:
    """Copy every item of every input to the output of the same name."""
    io.ready()
    names = list(io.inputs)
    while True:
        try:
            for name in names:
                io.outputs[name].write(io.inputs[name].read())
        except InputClosed:
            return
