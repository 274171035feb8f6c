"""A good plan of a logical plan, fast: efficient configurations, GPUs where they are short, then one change at a time.

Nothing here proves anything: what it finds is where the exhaustive search begins, and what is left where that cannot
end in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flashrt.planners.serving.flat import load_kernels
from flashrt.planners.serving.flow import best_routing
from flashrt.planners.serving.plans import Allocation, Logical, Plan, Routes
from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.space import Space

Judge = Callable[[Plan, Routes], float]


@dataclass(frozen=True)
class Sketch:
    """A plan without counts: one configuration a node, one path a type."""

    configurations: tuple[int, ...]
    paths: tuple[int, ...]


def first_sketch(space: Space, logical: Logical, own: Routes) -> Sketch | None:
    """Return the sketch that takes least GPU time, or None where a type finds no path."""
    problem = space.problem
    with np.errstate(divide="ignore"):
        gpu_s = np.array([one.gpus for one in problem.configurations])[:, None] / problem.capacity
    choices = [problem.configurations_of(mask) for _, mask in logical.nodes]
    paths = []
    load = np.zeros((len(logical.nodes), len(problem.types)))
    for place in range(len(problem.types)):
        costs = {
            path: sum(float(gpu_s[choices[node], place].min()) for node in route.nodes)
            for (kind, path), route in own.items() if kind == place
        }  # fmt: skip
        if not costs:
            return None
        path = min(costs, key=lambda one: costs[one])
        paths.append(path)
        for node in own[place, path].nodes:
            load[node, place] = problem.fractions[place]
    found = []
    for node, numbers in enumerate(choices):
        used = load[node] > 0
        needed = (gpu_s[numbers][:, used] * load[node, used]).sum(axis=1)
        found.append(numbers[int(np.argmin(needed))])
    return Sketch(tuple(found), tuple(paths))


def filled(space: Space, logical: Logical, own: Routes, sketch: Sketch) -> Plan | None:
    """Return the sketch with its GPUs: each goes where the load is highest; None where they do not suffice."""
    problem = space.problem
    shape = len(problem.types), len(logical.paths)
    arrays = own.arrays(*shape)
    configurations = np.array(sketch.configurations, np.int64)
    counts = np.zeros(len(configurations), np.int64)
    rate = load_kernels()["fill"](
        np.array(sketch.paths, np.int64), problem.fractions, problem.capacity, configurations,
        problem.settings_of_configurations.gpus[configurations], space.num_gpus, arrays.number, arrays.length,
        arrays.node, counts,
    )  # fmt: skip
    if rate <= 0:
        return None
    share = np.zeros(shape)
    share[np.arange(shape[0]), list(sketch.paths)] = 1
    allocation = tuple(((k, count),) for k, count in zip(sketch.configurations, counts.tolist(), strict=True))
    return Plan(logical, allocation, share, np.ones((shape[0], len(counts), 1)), float(rate))


def sketches_beside(space: Space, logical: Logical, own: Routes, sketch: Sketch) -> Iterator[Sketch]:
    """Yield every sketch that differs in one node's configuration or one type's path."""
    for node, (_, mask) in enumerate(logical.nodes):
        for k in space.problem.configurations_of(mask):
            if k != sketch.configurations[node]:
                changed = (*sketch.configurations[:node], k, *sketch.configurations[node + 1 :])
                yield Sketch(changed, sketch.paths)
    for place, path in enumerate(sketch.paths):
        for kind, other in own:
            if kind == place and other != path:
                yield Sketch(sketch.configurations, (*sketch.paths[:place], other, *sketch.paths[place + 1 :]))


def improve(
    space: Space, chosen: tuple[int, ...], judge: Judge, out_of_time: Callable[[], bool]
) -> tuple[Plan, float] | None:
    """Return the plan that no single change of its sketch improves, with its value; None where nothing fits."""
    logical, own = space.logical(chosen)
    sketch = first_sketch(space, logical, own)
    plan = filled(space, logical, own, sketch) if sketch is not None else None
    if sketch is None or plan is None:
        return None
    value = judge(plan, own)
    improving = True
    while improving and not out_of_time():
        improving = False
        for other in sketches_beside(space, logical, own, sketch):
            changed = filled(space, logical, own, other)
            if changed is None:
                continue
            found = judge(changed, own)
            if found > value * (1 + 1e-9):
                sketch, plan, value, improving = other, changed, found, True
            if out_of_time():
                break
    return plan, value


def exchanges(problem: Problem, plan: Plan, num_gpus: int, max_kinds: int | None) -> Iterator[tuple[Allocation, ...]]:
    """Yield the plan's executors with one moved to another node or configuration, taken away, or added."""
    costs = [one.gpus for one in problem.configurations]
    choices = [problem.configurations_of(mask) for _, mask in plan.logical.nodes]
    spare = num_gpus - plan.num_gpus(problem)

    def with_change(node: int, k: int, by: int, allocation: tuple[Allocation, ...]) -> tuple[Allocation, ...] | None:
        counts = dict(allocation[node])
        counts[k] = counts.get(k, 0) + by
        executors = tuple(sorted((one, count) for one, count in counts.items() if count))
        if not executors or (max_kinds is not None and len(executors) > max_kinds):
            return None
        return (*allocation[:node], executors, *allocation[node + 1 :])

    for node, numbers in enumerate(choices):
        for k in numbers:
            if costs[k] <= spare and (added := with_change(node, k, 1, plan.allocation)):
                yield added
    for node, executors in enumerate(plan.allocation):
        for k, _ in executors:
            # Taken away for a moment: the node may be empty until the other comes.
            for other, numbers in enumerate(choices):
                for new in numbers:
                    if (node, k) == (other, new) or costs[new] > spare + costs[k]:
                        continue
                    first = with_change(other, new, 1, plan.allocation)
                    if first and (both := with_change(node, k, -1, first)):
                        yield both


def refine(
    space: Space, chosen: tuple[int, ...], plan: Plan, value: float, judge: Judge, out_of_time: Callable[[], bool]
) -> tuple[Plan, float]:
    """Return the plan after every exchange of one executor that improves it, routed by linear programs."""
    own = space.logical(chosen)[1]
    improving = True
    while improving and not out_of_time():
        improving = False
        for allocation in exchanges(space.problem, plan, space.num_gpus, space.max_kinds):
            changed = best_routing(space.problem, own, plan.logical, allocation, space.routings)
            if changed.rate_per_s > 0 and (found := judge(changed, own)) > value * (1 + 1e-9):
                plan, value, improving = changed, found, True
                break
            if out_of_time():
                break
    return plan, value
