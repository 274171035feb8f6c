"""What makes one goodput vector better than another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from flashrt.planners.serving.problem import Problem

Policy = Literal["total", "weighted", "fair", "least_gpus"]
POLICIES: tuple[Policy, ...] = ("total", "weighted", "fair", "least_gpus")


def value_of(problem: Problem, policy: Policy, goodput_per_s: np.ndarray) -> float:
    """Return the figure that a policy makes as large as it can, in requests a second.

    ``total``: of all types together; ``weighted``: the same with each type's weight; ``fair``: of the type that gets
    least of what it asks for, as the total rate at which all types got that share; ``least_gpus``: as ``total``, the
    GPUs are counted apart.
    """
    if policy == "weighted":
        weights = np.array([one.weight for one in problem.workload.types.values()])
        return float(weights @ goodput_per_s)
    if policy == "fair":
        return float((goodput_per_s / problem.fractions).min())
    return float(goodput_per_s.sum())


def most_value(problem: Problem, policy: Policy, rate_per_s: float) -> float:
    """Return the value where every request at this total rate is good: a bound for all plans with that rate."""
    return value_of(problem, policy, rate_per_s * problem.fractions)


def undominated(vectors: Sequence[np.ndarray], slack: float = 0.0) -> list[int]:
    """Return which goodput vectors no other beats in one type by more than `slack` and in none falls behind.

    Parameters
    ----------
    slack
        Share by which another must be better everywhere before it counts as better.
    """
    table = np.asarray(vectors)
    kept = []
    for index, own in enumerate(table):
        better = (table >= own * (1 + slack)).all(axis=1) & (table > own * (1 + slack) + 1e-12).any(axis=1)
        same_before = (table[:index] == own).all(axis=1).any() if index else False
        if not better.any() and not same_before:
            kept.append(index)
    return kept
