"""The answer against everything: every plan of small spaces, listed by code of its own, each simulated.

`FLASHRT_SERVING_INSTANCES` sets how many; `make test` takes few.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from flashrt.errors import InputError
from flashrt.planners.serving import Evaluator, Load, Problem, Settings
from flashrt.planners.serving.flow import best_routing
from flashrt.planners.serving.plans import Logical, Plan, Route, Routes
from flashrt.planners.serving.search import Answer

from .drawn import documents, problem
from .steps import plan_serving

NUM = int(os.environ.get("FLASHRT_SERVING_INSTANCES", "12"))
MOST_PLANS = 1500


def partitions(items: Sequence[str]) -> Iterator[list[set[str]]]:
    """Yield every partition of a set."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [{items[0]}, *rest]
        for index in range(len(rest)):
            yield [*rest[:index], rest[index] | {items[0]}, *rest[index + 1 :]]


def simple_subplans(found: Problem) -> list[tuple[tuple[frozenset[str], ...], set[int]]]:
    """Return (nodes in an order that data can take, types served) of every simple subplan: every partition is tried."""
    edges = {(edge.source, edge.target) for edge in found.model.edges}
    joints = {frozenset((edge.source, edge.target)) for edge in found.model.edges if edge.colocatable}
    needs = [frozenset(found.names(need)) for need in found.needs]
    unions = {
        frozenset().union(*chosen)
        for size in range(1, len(needs) + 1) for chosen in itertools.combinations(needs, size)
    }  # fmt: skip
    result = []
    for union in sorted(unions, key=sorted):
        for parts in partitions(sorted(union)):
            if not all(connected(part, joints) for part in parts):
                continue
            order = in_order(parts, edges)
            if order is None:
                continue
            types = {
                place for place, need in enumerate(needs) if need <= union
                and all(any(found.capacity[k, place] > 0 for k in of(found, node)) for node in order if node & need)
            }  # fmt: skip
            if (
                types
                and frozenset().union(*(needs[place] for place in types)) == union
                and all(of(found, node) for node in order)
            ):
                result.append((tuple(order), types))
    return result


def of(found: Problem, node: frozenset[str]) -> list[int]:
    return [k for k, one in enumerate(found.configurations) if frozenset(found.names(one.mask)) == node]


def connected(part: set[str], joints: set[frozenset[str]]) -> bool:
    seen, pending = set(), [min(part)]
    while pending:
        one = pending.pop()
        seen.add(one)
        pending += [other for other in part - seen if frozenset((one, other)) in joints]
    return seen == part


def in_order(parts: Sequence[set[str]], edges: set[tuple[str, str]]) -> list[frozenset[str]] | None:
    for order in itertools.permutations(parts):
        home = {name: place for place, part in enumerate(order) for name in part}
        if all(home[a] <= home[b] for a, b in edges if a in home and b in home):
            return [frozenset(part) for part in order]
    return None


def every_plan(found: Problem, num_gpus: int, step: float | None) -> Iterator[tuple[Plan, Routes]]:
    """Yield every physical plan with one or two subplans, each of one or two simple ones that share a node."""
    simple = simple_subplans(found)
    edges = {(edge.source, edge.target) for edge in found.model.edges}
    subplans = [(one,) for one in range(len(simple))] + [
        pair for pair in itertools.combinations(range(len(simple)), 2)
        if set(simple[pair[0]][0]) & set(simple[pair[1]][0])
    ]  # fmt: skip
    for size in (1, 2):
        for chosen in itertools.combinations(subplans, size):
            if set().union(*(simple[one][1] for members in chosen for one in members)) != set(range(len(found.types))):
                continue
            nodes = [(place, node) for place, members in enumerate(chosen)
                     for node in sorted({node for one in members for node in simple[one][0]}, key=sorted)]  # fmt: skip
            paths = [(place, one) for place, members in enumerate(chosen) for one in members]
            logical = Logical(
                tuple(chosen), tuple((place, mask_of(found, node)) for place, node in nodes), tuple(paths)
            )
            own = Routes()
            for path, (place, one) in enumerate(paths):
                for kind in simple[one][1]:
                    need = set(found.names(found.needs[kind]))
                    passed = [node for node in simple[one][0] if node & need]
                    before = tuple(
                        tuple(index for index, other in enumerate(passed)
                              if other != node and any((a, b) in edges for a in other for b in node))
                        for node in passed
                    )  # fmt: skip
                    own[kind, path] = Route(tuple(nodes.index((place, node)) for node in passed), before)
            for allocation in executors(found, [node for _, node in nodes], num_gpus):
                yield from routed(found, logical, own, allocation, step)


def mask_of(found: Problem, node: frozenset[str]) -> int:
    return sum(1 << found.model.components.index(name) for name in node)


def executors(found: Problem, nodes: Sequence[frozenset[str]], left: int) -> Iterator[tuple[Any, ...]]:
    if not nodes:
        yield ()
        return
    numbers = of(found, nodes[0])
    for counts in itertools.product(*(range(left // found.configurations[k].gpus + 1) for k in numbers)):
        spent = sum(found.configurations[k].gpus * count for k, count in zip(numbers, counts, strict=True))
        if sum(counts) > 0 and spent <= left:
            own = tuple((k, count) for k, count in zip(numbers, counts, strict=True) if count)
            for rest in executors(found, nodes[1:], left - spent):
                yield (own, *rest)


def routed(
    found: Problem, logical: Logical, own: Routes, allocation: tuple[Any, ...], step: float | None
) -> Iterator[tuple[Plan, Routes]]:
    if step is None:
        plan = best_routing(found, own, logical, allocation)
        if plan.rate_per_s > 0:
            yield plan, own
        return
    num_types, widest = len(found.types), max(len(one) for one in allocation)
    whole = round(1 / step)
    spots: list[tuple[str, int, int, list[int]]] = []
    for kind in range(num_types):
        paths = [path for path in range(len(logical.paths)) if (kind, path) in own]
        spots.append(("path", kind, 0, paths))
        for node in sorted({node for path in paths for node in own[kind, path].nodes}):
            spots.append(("node", kind, node, [s for s, (k, _) in enumerate(allocation[node])
                                               if found.capacity[k, kind] > 0]))  # fmt: skip
    shares = [[one for one in itertools.product(range(whole + 1), repeat=len(spot[3])) if sum(one) == whole]
              for spot in spots]  # fmt: skip
    for chosen in itertools.product(*shares):
        path_share = np.zeros((num_types, len(logical.paths)))
        split = np.zeros((num_types, len(allocation), widest))
        for (what, kind, node, places), parts in zip(spots, chosen, strict=True):
            for place, part in zip(places, parts, strict=True):
                if what == "path":
                    path_share[kind, place] = part * step
                else:
                    split[kind, node, place] = part * step
        busiest = 0.0
        for node, one in enumerate(allocation):
            for slot, (k, count) in enumerate(one):
                load = sum(
                    found.fractions[kind] * path_share[kind, path] * split[kind, node, slot]
                    / (count * found.capacity[k, kind])
                    for (kind, path), route in own.items()
                    if node in route.nodes and split[kind, node, slot] > 0
                )  # fmt: skip
                busiest = max(busiest, load)
        yield Plan(logical, allocation, path_share, split, 1 / busiest), own


def settings_of(seed: int) -> Settings:
    load = Load(num_estimated=400, num_simulated=30_000, seed=seed)
    routing: Any = "grid" if seed % 3 == 0 else "lp"
    return Settings(max_simulated=MOST_PLANS, max_kinds=None, routing=routing, step=0.5, time_limit_s=120, load=load)


@pytest.mark.parametrize("seed", range(NUM))
def test_no_plan_of_the_whole_space_is_better_than_the_answer(seed: int) -> None:
    num_gpus = 2 + seed % 5
    settings = settings_of(seed)
    step = settings.step if settings.routing == "grid" else None
    if next(every_plan(problem(seed), num_gpus, step), None) is None:
        with pytest.raises(InputError, match="GPUs"):
            plan_serving(problem(seed), num_gpus, settings)
        return
    answer: Answer = plan_serving(problem(seed), num_gpus, settings)
    found = answer.problem
    plans = list(itertools.islice(every_plan(found, num_gpus, step), MOST_PLANS + 1))
    if len(plans) > MOST_PLANS:
        # Too many to simulate; the answer must still be as good as a part of them.
        plans = plans[:: max(len(plans) // 200, 1)]
    else:
        assert answer.complete
    evaluator = Evaluator(found, settings.load)
    shortly = [float(evaluator.simulate(plan, own, num=4000, seed=1).goodput_per_s.sum()) for plan, own in plans]
    finals = [plans[index] for index in np.argsort(shortly)[::-1][:10]]
    best, error = max(at_length(evaluator, plan, own) for plan, own in finals)
    mine, own_error = at_length(evaluator, answer.best.plan, answer.best.routes)
    assert mine >= best - math.hypot(error, own_error), (documents(seed), answer.best.plan.allocation)


def at_length(evaluator: Evaluator, plan: Plan, own: Routes) -> tuple[float, float]:
    """Return a plan's goodput over long simulations, and half the width of its 95 % interval."""
    runs = [evaluator.simulate(plan, own, num=30_000, seed=seed) for seed in (5, 6, 7)]
    return (
        float(np.mean([run.goodput_per_s.sum() for run in runs])),
        math.sqrt(sum(run.total_error**2 for run in runs)) / len(runs),
    )


def test_the_brute_force_counts_what_the_planner_counts() -> None:
    for seed in range(30):
        found = problem(seed)
        try:
            answer = plan_serving(found, 3, Settings(max_kinds=None, time_limit_s=20, load=Load(num_simulated=1000)))
        except InputError:
            continue
        listed = {
            (plan.logical.subplans, plan.allocation) for plan, _ in every_plan(found, 3, 0.5)
        } if answer.counts["physical_candidates"] < 300 else set()  # fmt: skip
        if listed:
            assert len(listed) == answer.counts["physical_candidates"]
