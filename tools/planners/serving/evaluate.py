"""What a plan is worth: by the Monte Carlo estimate, and by the request-level simulation.

Goodput of a type is the rate of its requests that are done within its target. Source: ``papers/002`` (Cornfigurator),
sections 3.2, 4.3 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashrt.planners.serving.arrivals import unit_arrivals
from flashrt.planners.serving.flat import Flat, Working, flatten_plan, load_kernels, work_at
from flashrt.planners.serving.plans import Plan, Routes
from flashrt.planners.serving.problem import Problem

WARM_SHARE = 0.1
NUM_PARTS = 8
T_95 = 2.365
"""Student's t for `NUM_PARTS` parts, 95 %."""


@dataclass(frozen=True)
class Load:
    """How much a plan is asked to serve, and how it is judged.

    Attributes
    ----------
    alpha
        Share of the rate at which its first executor is overloaded.
    num_estimated, num_simulated
        Requests of an estimate, and of a simulation.
    transfer_ms
        Between nodes.
    trace_s
        Moments of a trace, where requests come by one.
    """

    alpha: float = 0.95
    num_estimated: int = 1000
    num_simulated: int = 20_000
    transfer_ms: float = 10.0
    seed: int = 1
    trace_s: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Estimate:
    """What is expected of a plan without simulating it.

    Attributes
    ----------
    goodput_per_s : [types]
    """

    goodput_per_s: np.ndarray
    working: Working
    latency_ms: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True, eq=False)
class Simulated:
    """What a simulation of a plan shows.

    Attributes
    ----------
    offered_per_s, throughput_per_s
        Total rate of requests that come, and that are done.
    goodput_per_s, goodput_error : [types]
        Rate of good requests by type, and half the width of its 95 % interval.
    total_error
        Half the width of the 95 % interval of the total goodput.
    latency_ms
        By type: the latencies of all requests after the warm-up.
    busy : [executors]
    """

    offered_per_s: float
    throughput_per_s: float
    goodput_per_s: np.ndarray
    goodput_error: np.ndarray
    total_error: float
    latency_ms: tuple[np.ndarray, ...]
    busy: np.ndarray


class Evaluator:
    """Estimates and simulates plans of one problem, all with the same requests."""

    def __init__(self, problem: Problem, load: Load) -> None:
        self.problem, self.load = problem, load
        self._kernels = load_kernels()
        generator = np.random.default_rng(load.seed)
        # In shares as exact as so few allow, in an order that is drawn.
        self._kinds = generator.permutation(
            np.searchsorted(problem.fractions.cumsum(), (np.arange(load.num_estimated) + 0.5) / load.num_estimated)
        ).astype(np.int64)
        self._kinds = self._kinds.clip(max=len(problem.types) - 1)
        self._num_of_kind = np.bincount(self._kinds, minlength=len(problem.types)).clip(min=1)
        self._draws = generator.random((load.num_estimated, 1 + 3 * 16))
        self._tab = problem.latency_ms

    def estimate(self, plan: Plan, routes: Routes, *, targets_ms: np.ndarray | None = None) -> Estimate:
        """Return the Monte Carlo estimate at α·R."""
        problem, flat = self.problem, flatten_plan(self.problem, routes, plan, grouped=True)
        rate = self.load.alpha * plan.rate_per_s
        working = work_at(problem, plan, flat, rate)
        latency = self._latencies(flat, working.at_batch, working.wait_ms, working.busy)
        targets = problem.targets_ms if targets_ms is None else targets_ms
        good = latency <= targets[self._kinds]
        share = np.bincount(self._kinds, weights=good, minlength=len(problem.types)) / self._num_of_kind
        return Estimate(rate * problem.fractions * share, working, latency, self._kinds)

    def alone(self, plan: Plan, routes: Routes, *, full: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return types and latencies of requests that wait for nothing, in full batches or alone in theirs."""
        flat = flatten_plan(self.problem, routes, plan)
        nothing = np.zeros(len(flat.engine_of))
        at_batch = flat.batch_of.astype(float) if full else np.ones(len(flat.engine_of))
        return self._kinds, self._latencies(flat, at_batch, nothing, nothing)

    def _latencies(self, flat: Flat, at_batch: np.ndarray, wait_ms: np.ndarray, busy: np.ndarray) -> np.ndarray:
        latency = np.empty(len(self._kinds))
        self._kernels["estimate"](
            self._kinds, self._draws, self._tab, flat.engine_of, flat.batch_of, at_batch, wait_ms, busy,
            self.problem.cpu_ms, flat.routes.number, flat.path_cum, flat.routes.length, flat.routes.node,
            flat.routes.before, flat.first_of, flat.exec_cum, self.load.transfer_ms, latency,
        )  # fmt: skip
        return latency

    def requests(self, places: int, num: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return moments at a rate of 1, types and draws of the requests of a simulation; the same for every plan."""
        generator = np.random.default_rng((self.load.seed, seed))
        arrivals = unit_arrivals(self.problem.workload.arrivals, num, seed + self.load.seed, self.load.trace_s)
        kinds = generator.choice(len(self.problem.types), num, p=self.problem.fractions).astype(np.int64)
        return arrivals, kinds, generator.random((num, 33))[:, : 1 + 2 * places]

    def simulate(
        self, plan: Plan, routes: Routes, *, num: int | None = None, seed: int = 0, rate_per_s: float | None = None
    ) -> Simulated:
        """Return what a simulation shows, at α·R or at the rate that is given."""
        problem, flat = self.problem, flatten_plan(self.problem, routes, plan)
        rate = self.load.alpha * plan.rate_per_s if rate_per_s is None else rate_per_s
        num = self.load.num_simulated if num is None else num
        unit, kinds, draws = self.requests(flat.places, num, seed)
        arrivals = unit * (1e3 / rate)
        finish, busy = np.full(num, math.inf), np.zeros(len(flat.engine_of))
        self._kernels["simulate"](
            arrivals, kinds, draws, self._tab, flat.engine_of, flat.batch_of, flat.static_of, flat.keeps,
            problem.cpu_ms, flat.routes.number, flat.path_cum, flat.routes.length, flat.routes.node, flat.routes.before,
            flat.first_of, flat.exec_cum, self.load.transfer_ms, finish, busy,
        )  # fmt: skip
        return judge(problem, arrivals, kinds, finish, busy)


def judge(
    problem: Problem, arrivals: np.ndarray, kinds: np.ndarray, finish: np.ndarray, busy_ms: np.ndarray
) -> Simulated:
    """Return the figures of served requests, with intervals over parts of the time (batch means).

    Parameters
    ----------
    arrivals, finish : [requests]
        In ms; those within the first tenth of the time are the warm-up.
    """
    end = float(arrivals[-1])
    begin = WARM_SHARE * end
    latency = finish - arrivals
    good = latency <= problem.targets_ms[kinds]
    edges = np.linspace(begin, end, NUM_PARTS + 1)
    part = np.searchsorted(edges, arrivals, side="right") - 1
    counted = (part >= 0) & (part < NUM_PARTS)
    part_s = (end - begin) / NUM_PARTS / 1e3
    num_types = len(problem.types)
    counts = np.bincount(
        part[counted] * num_types + kinds[counted], weights=good[counted], minlength=NUM_PARTS * num_types
    ).reshape(NUM_PARTS, num_types) / part_s  # fmt: skip
    error = T_95 * counts.std(axis=0, ddof=1) / math.sqrt(NUM_PARTS)
    total_error = T_95 * float(counts.sum(axis=1).std(ddof=1)) / math.sqrt(NUM_PARTS)
    seconds = (end - begin) / 1e3
    throughput = int(((finish >= begin) & (finish < end)).sum()) / seconds
    after = arrivals >= begin
    return Simulated(
        int(after.sum()) / seconds, throughput, counts.mean(axis=0), error, total_error,
        tuple(latency[after & (kinds == place)] for place in range(num_types)), busy_ms / max(float(finish.max()), end),
    )  # fmt: skip
