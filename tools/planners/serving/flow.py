"""Phase 5 and 6: routing, and the rate at which the first executor is overloaded.

At a total rate R, type t brings R·π_t requests a second; an executor of configuration k is busy for the share
Σ_t R·π_t·share_t/μ_t,k of its time, at most 1. With routing given, the first that reaches 1 sets R; with routing free,
R and the shares are one linear program.

Source: ``papers/002`` (Cornfigurator), section 4.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flashrt.planners.serving.plans import Allocation, Logical, Plan, Route
from flashrt.planners.serving.problem import Problem

SLACK = 1e-9
SMALL_FLOW = 1e-6
LATENCY_WEIGHT = 1e-5

NodeRoutings = dict[tuple[Allocation, tuple[float, ...]], tuple[float, np.ndarray]]


def width(allocation: Sequence[Allocation]) -> int:
    """Return the most configurations that a node has."""
    return max(len(node) for node in allocation)


def load_per_rate(
    problem: Problem,
    routes: Mapping[tuple[int, int], Route],
    allocation: Sequence[Allocation],
    path_share: np.ndarray,
    split: np.ndarray,
) -> np.ndarray:
    """Return how busy one executor is at a total rate of 1; shape [nodes, configurations of a node].

    Infinite where a type goes to a configuration that cannot serve it.
    """
    load = np.zeros((len(allocation), width(allocation)))
    for (place, path), route in routes.items():
        coming = problem.fractions[place] * path_share[place, path]
        if coming <= 0:
            continue
        for node in route.nodes:
            for slot, (k, count) in enumerate(allocation[node]):
                share = split[place, node, slot]
                if share > 0:
                    capacity = problem.capacity[k, place]
                    load[node, slot] += coming * share / (count * capacity) if capacity > 0 else np.inf
    return load


def rate_of(
    problem: Problem,
    routes: Mapping[tuple[int, int], Route],
    allocation: Sequence[Allocation],
    path_share: np.ndarray,
    split: np.ndarray,
) -> float:
    """Return R, the total rate at which the first executor is overloaded, in requests a second."""
    worst = float(load_per_rate(problem, routes, allocation, path_share, split).max())
    return 1 / worst if worst > 0 else 0.0


def is_redundant(
    problem: Problem, routes: Mapping[tuple[int, int], Route], plan: Plan, *, grid: float | None = None
) -> bool:
    """Return whether an executor can go and R stays: of a configuration with several, or one that nothing needs.

    Parameters
    ----------
    grid
        Step of the routing; None: the linear program.
    """
    for node, executors in enumerate(plan.allocation):
        for slot, (k, count) in enumerate(executors):
            if count > 1:
                fewer = (*executors[:slot], (k, count - 1), *executors[slot + 1 :])
            elif len(executors) > 1:
                fewer = (*executors[:slot], *executors[slot + 1 :])
            else:
                continue
            changed = (*plan.allocation[:node], fewer, *plan.allocation[node + 1 :])
            if grid is not None and len(fewer) == len(executors):
                rate = rate_of(problem, routes, changed, plan.path_share, plan.split)
            else:
                rate = best_routing(problem, routes, plan.logical, changed).rate_per_s
            if rate >= plan.rate_per_s * (1 - SLACK):
                return True
    return False


def only_paths(problem: Problem, routes: Mapping[tuple[int, int], Route]) -> list[int] | None:
    """Return each type's path where it has one alone, else None."""
    paths: list[int] = [-1] * len(problem.types)
    for place, path in routes:
        if paths[place] >= 0:
            return None
        paths[place] = path
    return paths if min(paths) >= 0 else None


def node_routing(
    problem: Problem, executors: Allocation, coming: tuple[float, ...], known: NodeRoutings
) -> tuple[float, np.ndarray]:
    """Return the largest total rate of a node, and how its requests go to its configurations; [types, configurations].

    Of two configurations each type is better on one, relative to the others: in the order of that, types go to the
    first until both are as busy. More are a linear program.

    Parameters
    ----------
    coming
        By type, the share of all requests that pass the node.
    known
        What has been answered before.
    """
    key = executors, coming
    if key not in known:
        known[key] = _node_routing(problem, executors, np.array(coming))
    return known[key]


def _node_routing(problem: Problem, executors: Allocation, coming: np.ndarray) -> tuple[float, np.ndarray]:
    numbers, counts = [k for k, _ in executors], np.array([count for _, count in executors])
    capacity = problem.capacity[numbers] * counts[:, None]
    split = np.zeros((len(coming), len(numbers)))
    types = np.flatnonzero(coming > 0)
    if not len(types):
        return np.inf, split
    if (capacity[:, types].max(axis=0) <= 0).any():
        return 0.0, split
    with np.errstate(divide="ignore"):
        load = coming[types] / capacity[:, types]
    if len(numbers) == 1:
        split[types, 0] = 1
        return float(1 / load.sum()), split
    if len(numbers) > 2:
        return _node_program(load, types, split)
    order = np.argsort(load[0] / np.where(np.isfinite(load[1]), load[1], np.inf), kind="stable")
    first, second = 0.0, float(load[1][np.isfinite(load[1])].sum())
    for index in order:
        one, two = load[0, index], load[1, index]
        if not np.isfinite(two):
            split[types[index]] = 1, 0
            first += one
            continue
        if not np.isfinite(one):
            break
        share = min(max((second - first) / (one + two), 0.0), 1.0)
        split[types[index]] = share, 1 - share
        first += share * one
        second -= share * two
        if share < 1:
            break
    rest = split[types].sum(axis=1) == 0
    split[types[rest], 1] = 1
    # Of what is only served by one and came late in the order, the loads are added again.
    total = np.array([np.where(split[types, slot] > 0, split[types, slot] * load[slot], 0).sum() for slot in (0, 1)])
    return float(1 / total.max()), split


def _node_program(load: np.ndarray, types: np.ndarray, split: np.ndarray) -> tuple[float, np.ndarray]:
    from scipy.optimize import linprog

    num_slots, num = load.shape
    usable = np.isfinite(load)
    cost = np.zeros(1 + num_slots * num)
    cost[0] = 1
    upper = np.zeros((num_slots, len(cost)))
    equal = np.zeros((num, len(cost)))
    bounds: list[tuple[float, float | None]] = [(0, None)]
    for slot in range(num_slots):
        upper[slot, 0] = -1
        for index in range(num):
            upper[slot, 1 + slot * num + index] = load[slot, index] if usable[slot, index] else 0
            equal[index, 1 + slot * num + index] = 1
            bounds.append((0, 1 if usable[slot, index] else 0))
    found = linprog(cost, upper, np.zeros(num_slots), equal, np.ones(num), bounds, method="highs")
    shares = found.x[1:].reshape(num_slots, num).T.clip(min=0)
    shares[shares < SLACK] = 0
    split[types] = shares / shares.sum(axis=1, keepdims=True)
    busiest = max(float(np.where(split[types, s] > 0, split[types, s] * load[s], 0).sum()) for s in range(num_slots))
    return 1 / busiest, split


def separate_routing(
    problem: Problem,
    routes: Mapping[tuple[int, int], Route],
    logical: Logical,
    allocation: Sequence[Allocation],
    known: NodeRoutings,
    paths: Sequence[int],
) -> Plan:
    """Return the plan where each type takes one path: then the nodes can be routed one by one."""
    num_types = len(problem.types)
    coming = np.zeros((len(allocation), num_types))
    share = np.zeros((num_types, len(logical.paths)))
    for place, path in enumerate(paths):
        share[place, path] = 1
        coming[list(routes[place, path].nodes), place] = problem.fractions[place]
    split = np.zeros((num_types, len(allocation), width(allocation)))
    rate = np.inf
    for node, executors in enumerate(allocation):
        own, shares = node_routing(problem, executors, tuple(coming[node]), known)
        rate = min(rate, own)
        split[:, node, : shares.shape[1]] = shares
    return Plan(logical, tuple(allocation), share, split, float(rate) if np.isfinite(rate) else 0.0)


def best_routing(
    problem: Problem,
    routes: Mapping[tuple[int, int], Route],
    logical: Logical,
    allocation: Sequence[Allocation],
    known: NodeRoutings | None = None,
) -> Plan:
    """Return a plan whose routing has the largest R.

    Where types have several paths, a linear program: of the routings with that R, the one with the least latency.
    """
    paths = only_paths(problem, routes)
    if paths is not None:
        return separate_routing(problem, routes, logical, allocation, {} if known is None else known, paths)
    return _linear_program(problem, routes, logical, allocation) or _unroutable(problem, logical, allocation)


def _unroutable(problem: Problem, logical: Logical, allocation: Sequence[Allocation]) -> Plan:
    shape = len(problem.types), len(logical.paths)
    return Plan(
        logical, tuple(allocation), np.zeros(shape), np.zeros((shape[0], len(allocation), width(allocation))), 0.0
    )


def _linear_program(
    problem: Problem, routes: Mapping[tuple[int, int], Route], logical: Logical, allocation: Sequence[Allocation]
) -> Plan | None:
    """Return the plan of the largest R, of least latency among these; None where there is none.

    Variables: R, the flow of every (type, path), and of every (type, node, configuration).
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    endless = solver.infinity()
    rate = solver.NumVar(0, endless, "")
    flows = {key: solver.NumVar(0, endless, "") for key in routes}
    objective = solver.Objective()
    objective.SetCoefficient(rate, 1.0)
    objective.SetMaximization()
    passing: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for key, route in routes.items():
        for node in route.nodes:
            passing.setdefault((key[0], node), []).append(key)
    for place in range(len(problem.types)):
        row = solver.Constraint(0, 0)
        row.SetCoefficient(rate, -float(problem.fractions[place]))
        keys = [key for key in flows if key[0] == place]
        if not keys:
            return None
        for key in keys:
            row.SetCoefficient(flows[key], 1)
    busy = {
        (node, slot): solver.Constraint(-endless, 1)
        for node, executors in enumerate(allocation) for slot in range(len(executors))
    }  # fmt: skip
    parts = {}
    for (place, node), keys in passing.items():
        row = solver.Constraint(0, 0)
        for key in keys:
            row.SetCoefficient(flows[key], 1)
        for slot, (k, count) in enumerate(allocation[node]):
            capacity = float(problem.capacity[k, place])
            if capacity <= 0:
                continue
            part = parts[place, node, slot] = solver.NumVar(0, endless, "")
            row.SetCoefficient(part, -1)
            busy[node, slot].SetCoefficient(part, 1 / (count * capacity))
            one = problem.configurations[k]
            took_s = float(problem.latency_ms[one.engine, place, one.batch - 1].mean()) / 1e3
            objective.SetCoefficient(part, -LATENCY_WEIGHT * took_s)
    if solver.Solve() != pywraplp.Solver.OPTIMAL or rate.solution_value() <= 0:
        return None
    path_share = np.zeros((len(problem.types), len(logical.paths)))
    split = np.zeros((len(problem.types), len(allocation), width(allocation)))
    for key, flow in flows.items():
        path_share[key] = max(flow.solution_value(), 0)
    for spot, part in parts.items():
        split[spot] = max(part.solution_value(), 0)
    for shares in (path_share, split):
        shares[shares < SMALL_FLOW * rate.solution_value()] = 0
        total = shares.sum(axis=-1, keepdims=True)
        np.divide(shares, total, out=shares, where=total > 0)
    found = rate_of(problem, routes, allocation, path_share, split)
    return Plan(logical, tuple(allocation), path_share, split, found)


def grid_routings(
    problem: Problem,
    routes: Mapping[tuple[int, int], Route],
    logical: Logical,
    allocation: Sequence[Allocation],
    step: float,
) -> Iterator[Plan]:
    """Yield a plan for every routing in steps of `step`, between paths and between the configurations of a node."""
    num_steps = round(1 / step)
    num_types, num_nodes = len(problem.types), len(allocation)
    choices: list[list[tuple[float, ...]]] = []
    wheres: list[tuple[Any, ...]] = []
    for place in range(num_types):
        paths = [path for path in range(len(logical.paths)) if (place, path) in routes]
        choices.append(list(compositions(num_steps, len(paths))))
        wheres.append(("path", place, paths))
        nodes = sorted({node for path in paths for node in routes[place, path].nodes})
        for node in nodes:
            slots = [slot for slot, (k, _) in enumerate(allocation[node]) if problem.capacity[k, place] > 0]
            choices.append(list(compositions(num_steps, len(slots))))
            wheres.append(("node", place, node, slots))
    for chosen in itertools.product(*choices):
        path_share = np.zeros((num_types, len(logical.paths)))
        split = np.zeros((num_types, num_nodes, width(allocation)))
        for where, shares in zip(wheres, chosen, strict=True):
            if where[0] == "path":
                path_share[where[1], where[2]] = shares
            else:
                split[where[1], where[2], where[3]] = shares
        rate = rate_of(problem, routes, allocation, path_share, split)
        if rate > 0:
            yield Plan(logical, tuple(allocation), path_share, split, rate)


def compositions(total: int, parts: int) -> Iterator[tuple[float, ...]]:
    """Yield every way to cut 1 into `parts` shares that are multiples of 1 / `total`."""
    if parts == 0:
        return
    for cuts in itertools.combinations_with_replacement(range(total + 1), parts - 1):
        ends = (0, *cuts, total)
        yield tuple((b - a) / total for a, b in itertools.pairwise(ends))
