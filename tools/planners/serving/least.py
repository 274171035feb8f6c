"""The fewest GPUs that reach a goodput."""

from __future__ import annotations

import time
from dataclasses import replace

from flashrt.errors import Finding, InputError
from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.search import Answer, Clock, Progress, Settings, plan_serving
from flashrt.planners.serving.subplans import Restriction


def fewest_gpus(
    problem: Problem,
    most_gpus: int,
    wanted_per_s: float,
    settings: Settings,
    *,
    allowed: Restriction = lambda nodes: True,
    progress: Progress = lambda share, text: None,
    clock: Clock = time.monotonic,
) -> Answer:
    """Return the plan with the fewest GPUs whose goodput is at least `wanted_per_s`, found by bisection.

    The time limit is shared out: each search has a part of it.

    Raises
    ------
    InputError
        Not even `most_gpus` reach it: says what they reach.
    """
    rounds = max(most_gpus.bit_length(), 1)
    each = replace(settings, time_limit_s=settings.time_limit_s / (rounds + 1))

    def ask(num_gpus: int, part: int) -> Answer | None:
        def report(share: float, text: str) -> None:
            progress((part + share) / (rounds + 2), f"{num_gpus} GPUs: {text}")

        try:
            return plan_serving(problem, num_gpus, each, allowed=allowed, progress=report, clock=clock)
        except InputError as error:
            if any(one.rule in {"too-few-gpus", "no-path"} for one in error.findings) and num_gpus < most_gpus:
                return None
            raise

    def reached(answer: Answer | None) -> float:
        if answer is None or answer.best.simulated is None:
            return 0.0
        return float(answer.best.simulated.goodput_per_s.sum())

    best = ask(most_gpus, 0)
    assert best is not None, "the largest is asked to raise"
    if reached(best) < wanted_per_s:
        raise InputError(
            Finding("argument 'goodput_per_s'", f"at most what {most_gpus} GPUs reach, {reached(best):.4g} requests/s",
                    f"{wanted_per_s:g}", "lower it or raise devices, and call plan_serving again",
                    rule="goodput-not-reached")
        )  # fmt: skip
    low, high, part = 0, best.best.plan.num_gpus(problem), 1
    while low + 1 < high:
        middle = (low + high) // 2
        answer = ask(middle, part)
        part += 1
        if answer is not None and reached(answer) >= wanted_per_s:
            best, high = answer, min(middle, answer.best.plan.num_gpus(problem))
        else:
            low = middle
    return best
