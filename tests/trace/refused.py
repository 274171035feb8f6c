"""References that cannot be traced, each for one reason."""

from __future__ import annotations

LEFT_EARLY = """
def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        if x.sum() > 1e9:
            continue
        io.outputs["y"].write(x)
"""
FAILS = """
import numpy as np


def broken(x):
    return np.linalg.inv(x)


def serve(io):
    io.ready()
    for x in io.inputs["x"]:
        io.outputs["y"].write(broken(x))
"""
NO_LOOP = """
def serve(io):
    io.ready()
"""
