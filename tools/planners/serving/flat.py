"""A plan as the arrays that the compiled functions take, and the requests that they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt.planners.serving.plans import Plan, RouteArrays, Routes
from flashrt.planners.serving.problem import Problem

_compiled: dict[str, Callable[..., Any]] = {}


def load_kernels() -> dict[str, Callable[..., Any]]:
    """Return the compiled functions by name; the first use of all on a machine takes some seconds."""
    if not _compiled:
        from flashrt.analysis.compiled import compile_functions
        from flashrt.planners.serving import kernels

        names = ("pick", "latency_at", "push", "drop_first", "simulate", "estimate", "work", "fill")
        _compiled.update(compile_functions([(kernels, *names)], [kernels], nogil=True))
    return _compiled


@dataclass(frozen=True, eq=False)
class Flat:
    """The arrays of `flashrt.planners.serving.kernels`, a row each executor, or a row for executors that are alike."""

    engine_of: np.ndarray
    batch_of: np.ndarray
    static_of: np.ndarray
    keeps: np.ndarray
    path_cum: np.ndarray
    first_of: np.ndarray
    exec_cum: np.ndarray
    exec_share: np.ndarray
    node_of: np.ndarray
    count_of: np.ndarray
    configuration_of: np.ndarray
    routes: RouteArrays

    @property
    def places(self) -> int:
        """Most nodes that a request passes."""
        return int(self.routes.node.shape[1])


def flatten_plan(problem: Problem, routes: Routes, plan: Plan, *, grouped: bool = False) -> Flat:
    """Return a plan's arrays.

    Parameters
    ----------
    grouped
        One row for all executors of a node that have the same configuration.
    """
    parts = [
        (node, slot, k, count)
        for node, executors in enumerate(plan.allocation) for slot, (k, count) in enumerate(executors)
    ]  # fmt: skip
    node, slot, k, count = np.array(parts, np.int64).T
    share = plan.split[:, node, slot]
    if not grouped:
        share = np.repeat(share / count, count, axis=1)
        node, k, count = np.repeat(node, count), np.repeat(k, count), np.ones(int(count.sum()), np.int64)
    first = np.searchsorted(node, np.arange(len(plan.allocation) + 1))
    cumulated = share.cumsum(axis=1)
    before = np.concatenate([np.zeros((len(share), 1)), cumulated], axis=1)[:, first[:-1]]
    settings = problem.settings_of_configurations
    return Flat(
        settings.engine[k], settings.batch[k], settings.static[k], problem.occupancy[k],
        _closed(plan.path_share.cumsum(axis=1)), first, _closed(cumulated - before[:, node]), share, node, count, k,
        routes.arrays(*plan.path_share.shape),
    )  # fmt: skip


def _closed(cumulated: np.ndarray) -> np.ndarray:
    """Return cumulated shares of which the last share that is not zero reaches above 1."""
    return np.where(cumulated >= 1 - 1e-9, 2.0, cumulated)


@dataclass(frozen=True, eq=False)
class Working:
    """How executors work at a rate, a row as in `Flat`.

    Attributes
    ----------
    load : [rows]
        Share of an executor's places in use.
    at_batch : [rows]
        Requests in a batch, or in flight.
    wait_ms : [rows]
        Mean time that a request which does not find it idle waits for a place.
    busy : [rows]
        How likely a request finds it not idle.
    """

    load: np.ndarray
    at_batch: np.ndarray
    wait_ms: np.ndarray
    busy: np.ndarray


def work_at(problem: Problem, plan: Plan, flat: Flat, rate_per_s: float) -> Working:
    """Return how the executors of a plan work at a total rate."""
    found = np.zeros((4, len(flat.engine_of)))
    own = flat.routes
    load_kernels()["work"](
        rate_per_s / 1e3, problem.fractions, plan.path_share, flat.exec_share, flat.count_of, flat.node_of,
        problem.mean_ms, flat.engine_of, flat.batch_of, flat.static_of, flat.keeps, own.number, own.length, own.node,
        *found,
    )  # fmt: skip
    return Working(*found)
