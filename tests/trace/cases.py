"""What a synthetic reference is, and what it is fed with."""

from __future__ import annotations

from dataclasses import dataclass

INPUTS = """
import numpy as np


def batches(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": random.standard_normal((4, 6)).astype(np.float32)}
"""
TWO_INPUTS = """
import numpy as np


def batches(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": random.standard_normal((4, 6)).astype(np.float32), "text": "".join(random.choice(list("abc"), 5))}
"""


@dataclass(frozen=True)
class Case:
    """One reference.

    Attributes
    ----------
    operations
        Names of nodes that the draft has to have, each a piece of a path.
    states
        Names of states that it has to have, or that none may be missing of.
    kinds
        Kinds of questions that it has to ask.
    """

    code: str
    operations: tuple[str, ...]
    states: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    inputs: str = INPUTS
    repeats: int = 0
