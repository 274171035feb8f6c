"""Phase 0: the latency that counts as good, where the workload does not say.

A type's target is a percentile of its latencies where it is served alone by the configuration that serves most of it
per GPU, in full batches. Source: ``papers/002`` (Cornfigurator), section 6.1; ``spec/planners.md``, section 2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashrt.errors import Finding, InputError
from flashrt.planners.serving.evaluate import Evaluator, Load
from flashrt.planners.serving.flow import width
from flashrt.planners.serving.plans import Plan, Route, Routes, make_logical
from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.space import Space
from flashrt.planners.serving.subplans import route_of


def with_targets(problem: Problem, space: Space, load: Load, percentile: float) -> Problem:
    """Return the problem with a target for every type.

    Raises
    ------
    InputError
        Targets that no plan can meet, with the least latency that there is.
    """
    targets = problem.targets_ms.copy()
    findings = []
    for place, name in enumerate(problem.types):
        if np.isnan(targets[place]):
            targets[place] = float(np.percentile(alone_ms(problem, space, load, place), percentile))
            continue
        least = least_ms(problem, space, load, place)
        if least > targets[place]:
            findings.append(
                Finding(f"workload, type '{name}', target_ms", f"at least {least:.4g} ms, the least on any plan",
                        f"{targets[place]:g}", "raise it, or profile faster engines; call plan_serving again",
                        rule="impossible-target")
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return replace(problem, targets_ms=targets)


def alone_ms(problem: Problem, space: Space, load: Load, place: int) -> np.ndarray:
    """Return latencies of a type where it is served alone by what serves most of it per GPU, in full batches."""
    with np.errstate(divide="ignore"):
        gpu_s = np.array([one.gpus for one in problem.configurations]) / problem.capacity[:, place]
    best: tuple[float, int, dict[int, int]] | None = None
    for number, one in enumerate(space.simple):
        if not one.types >> place & 1:
            continue
        passed = [one.nodes[index] for index in route_of(problem, one, place)[0]]
        chosen = {node: min(problem.configurations_of(node), key=lambda k: (gpu_s[k], k)) for node in passed}
        needed = float(sum(gpu_s[k] for k in chosen.values()))
        if best is None or needed < best[0] * (1 - 1e-12):
            best = needed, number, chosen
    assert best is not None, "every type has a path"
    one = space.simple[best[1]]
    logical = make_logical(space.simple, [(best[1],)])
    nodes, before = route_of(problem, one, place)
    number_of = {node: index for index, (_, node) in enumerate(logical.nodes)}
    own = Routes({(place, 0): Route(tuple(number_of[one.nodes[index]] for index in nodes), before)})
    allocation = tuple(((best[2].get(mask, problem.configurations_of(mask)[0]), 1),) for _, mask in logical.nodes)
    plan = Plan(
        logical, allocation, np.ones((len(problem.types), 1)),
        np.ones((len(problem.types), len(allocation), width(allocation))), 1.0,
    )  # fmt: skip
    single = replace(problem, fractions=np.eye(len(problem.types))[place])
    return Evaluator(single, load).alone(plan, own, full=True)[1]


def least_ms(problem: Problem, space: Space, load: Load, place: int) -> float:
    """Return the least latency that a request of a type can have on any plan, alone in its batches."""
    best = np.inf
    for one in space.simple:
        if not one.types >> place & 1:
            continue
        passed, before = route_of(problem, one, place)
        done: list[float] = []
        for index, waits in zip(passed, before, strict=True):
            took = min(
                float(problem.latency_ms[problem.configurations[k].engine, place, 0].min())
                for k in problem.configurations_of(one.nodes[index]) if problem.capacity[k, place] > 0
            )  # fmt: skip
            done.append(took + max((done[other] + load.transfer_ms for other in waits), default=0.0))
        best = min(best, max(done))
    return best
