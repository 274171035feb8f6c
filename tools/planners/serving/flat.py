"""A plan as the arrays that the compiled functions take, and the requests that they are given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt.planners.serving.flow import load_per_rate
from flashrt.planners.serving.plans import Plan, Route
from flashrt.planners.serving.problem import Problem

_compiled: dict[str, Callable[..., Any]] = {}


def load_kernels() -> dict[str, Callable[..., Any]]:
    """Return the compiled functions by name; the first use of all on a machine takes some seconds."""
    if not _compiled:
        from flashrt.analysis.compiled import compile_functions
        from flashrt.planners.serving import kernels

        names = ("pick", "latency_at", "push", "drop_first", "simulate", "estimate")
        _compiled.update(compile_functions([(kernels, *names)], [kernels], nogil=True))
    return _compiled


@dataclass(frozen=True, eq=False)
class Flat:
    """The arrays of `flashrt.planners.serving.kernels`, and of each executor its node, slot and configuration."""

    engine_of: np.ndarray
    batch_of: np.ndarray
    static_of: np.ndarray
    keeps: np.ndarray
    route_of: np.ndarray
    path_cum: np.ndarray
    route_len: np.ndarray
    route_node: np.ndarray
    route_before: np.ndarray
    first_of: np.ndarray
    exec_cum: np.ndarray
    node_of: np.ndarray
    slot_of: np.ndarray
    configuration_of: np.ndarray

    @property
    def places(self) -> int:
        """Most nodes that a request passes."""
        return int(self.route_node.shape[1])


def flatten_plan(problem: Problem, routes: Mapping[tuple[int, int], Route], plan: Plan) -> Flat:
    """Return a plan's arrays."""
    rows = [
        (node, slot, k)
        for node, executors in enumerate(plan.allocation)
        for slot, (k, count) in enumerate(executors)
        for _ in range(count)
    ]
    node_of, slot_of, configuration_of = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    num_types, num_paths = plan.path_share.shape
    first = np.searchsorted(node_of, np.arange(len(plan.allocation) + 1))
    share = np.zeros((num_types, len(rows)))
    for index, (node, slot, _) in enumerate(rows):
        share[:, index] = plan.split[:, node, slot] / plan.allocation[node][slot][1]
    cumulated = np.zeros_like(share)
    for begin, end in itertools.pairwise(first):
        cumulated[:, begin:end] = share[:, begin:end].cumsum(axis=1)
    numbers = {key: number for number, key in enumerate(routes)}
    places = max(len(route.nodes) for route in routes.values())
    route_of = np.full((num_types, num_paths), -1, np.int64)
    route_len = np.zeros(len(numbers), np.int64)
    route_node, route_before = (np.zeros((len(numbers), places), np.int64) for _ in range(2))
    for key, number in numbers.items():
        route = routes[key]
        route_of[key] = number
        route_len[number] = len(route.nodes)
        route_node[number, : len(route.nodes)] = route.nodes
        route_before[number, : len(route.nodes)] = [sum(1 << one for one in before) for before in route.before]
    configurations = [problem.configurations[k] for k in configuration_of]
    path_cum = plan.path_share.cumsum(axis=1)
    return Flat(
        np.array([one.engine for one in configurations], np.int64),
        np.array([one.batch for one in configurations], np.int64),
        np.array([problem.is_static(int(k)) for k in configuration_of]),
        problem.occupancy[configuration_of], route_of, _closed(path_cum), route_len, route_node, route_before,
        first.astype(np.int64), _closed(cumulated), node_of, slot_of, configuration_of,
    )  # fmt: skip


def _closed(cumulated: np.ndarray) -> np.ndarray:
    """Return cumulated shares of which the last share that is not zero reaches above 1."""
    return np.where(cumulated >= 1 - 1e-9, 2.0, cumulated)


@dataclass(frozen=True, eq=False)
class Working:
    """How executors work at a rate, by the fixed point of Little's law.

    Attributes
    ----------
    load : [executors]
        Share of its places in use.
    at_batch : [executors]
        Requests in a batch, or in flight.
    wait_ms : [executors]
        Mean time that a request which does not find it idle waits for a place.
    busy : [executors]
        How likely a request finds it not idle.
    """

    load: np.ndarray
    at_batch: np.ndarray
    wait_ms: np.ndarray
    busy: np.ndarray


def work_at(
    problem: Problem, routes: Mapping[tuple[int, int], Route], plan: Plan, flat: Flat, rate_per_s: float
) -> Working:
    """Return how the executors of a plan work at a total rate.

    The batch is where as many come during one as it has. Waiting beyond the batch under way is Sakasegawa's (1977)
    approximation for as many servers as an executor has places, with half of it where times are constant.
    """
    loads = load_per_rate(problem, routes, plan.allocation, plan.path_share, plan.split)
    num = len(flat.engine_of)
    load, at_batch, wait, busy = (np.zeros(num) for _ in range(4))
    coming = np.zeros((len(problem.types), len(plan.allocation)))
    for (place, path), route in routes.items():
        for node in route.nodes:
            coming[place, node] += problem.fractions[place] * plan.path_share[place, path]
    known: dict[tuple[int, int], tuple[float, float, float, float]] = {}
    for index in range(num):
        key = int(flat.node_of[index]), int(flat.slot_of[index])
        if key not in known:
            k, count = plan.allocation[key[0]][key[1]]
            own = coming[:, key[0]] * plan.split[:, key[0], key[1]] / count
            known[key] = _work(problem, k, own * rate_per_s / 1e3, float(loads[key]) * rate_per_s)
        load[index], at_batch[index], wait[index], busy[index] = known[key]
    return Working(load, at_batch, wait, busy)


def _work(problem: Problem, k: int, coming_per_ms: np.ndarray, load: float) -> tuple[float, float, float, float]:
    one = problem.configurations[k]
    total = float(coming_per_ms.sum())
    if total <= 0:
        return 0.0, 1.0, 0.0, 0.0
    kinds = coming_per_ms > 0
    means = problem.latency_ms[one.engine, kinds, : one.batch].mean(axis=-1)
    kept = (coming_per_ms[kinds] * problem.occupancy[k, kinds] / total) @ means
    sizes = np.arange(1, one.batch + 1)
    # The first size at which no more than a batch come during one.
    excess = total * kept - sizes
    if excess[-1] >= 0:
        size = float(one.batch)
    elif excess[0] <= 0:
        size = 1.0
    else:
        above = int(np.argmax(excess <= 0))
        size = above + excess[above - 1] / (excess[above - 1] - excess[above])
    took = float(np.interp(size, sizes, kept))
    load = min(load, 0.999)
    queue = float(kept[-1]) / one.batch * load ** (np.sqrt(2 * (one.batch + 1)) - 1) / (1 - load)
    if problem.is_static(k):
        busy = min(total * took / size, 1.0)
        return load, size, took / 2 + queue / 2, busy
    return load, size, queue / max(load, 1e-9), min(1.0, load ** np.sqrt(one.batch))
