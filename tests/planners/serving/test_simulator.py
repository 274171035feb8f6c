"""The simulator against queueing theory, against conservation laws, and against the estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flashrt.planners.serving import Evaluator, Load, Problem
from flashrt.planners.serving.evaluate import Simulated
from flashrt.planners.serving.flow import best_routing
from flashrt.planners.serving.plans import Plan, Routes, make_logical, routes
from flashrt.planners.serving.subplans import simple_subplans

from .drawn import problem, single

NUM = 100_000


def one_executor(found: Problem, batch: int, count: int = 1) -> tuple[Plan, Routes]:
    simple, _ = simple_subplans(found, count)
    logical = make_logical(simple, [(0,)])
    own = routes(found, simple, logical)
    k = next(number for number, one in enumerate(found.configurations) if one.batch == batch)
    return best_routing(found, own, logical, (((k, count),),)), own


def simulate(found: Problem, batch: int, load: float, *, count: int = 1) -> list[Simulated]:
    plan, own = one_executor(found, batch, count)
    evaluator = Evaluator(found, Load(alpha=load))
    return [evaluator.simulate(plan, own, num=NUM, seed=seed) for seed in range(5)]


def mean_interval(runs: list[Simulated]) -> tuple[float, float]:
    means = np.array([np.concatenate(run.latency_ms).mean() for run in runs])
    width = stats.t.ppf(0.999, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
    return float(means.mean()), float(width)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_constant_times_wait_as_the_m_d_1_queue(load: float) -> None:
    mean, width = mean_interval(simulate(single({"latency_ms": {1: {"x": 10.0}}}), 1, load))
    assert abs(mean - (10 + load * 10 / (2 * (1 - load)))) < width + 1e-9


@pytest.mark.parametrize(("places", "load"), [(1, 0.7), (4, 0.8), (16, 0.9)])
def test_exponential_times_wait_as_the_m_m_c_queue(places: int, load: float) -> None:
    # As many quantiles as a profile keeps; the theory is of their very distribution only in its mean, so the second
    # moment corrects it (Lee & Longton).
    at = (np.arange(20_000) + 0.5) / 20_000
    samples = list(-10 * np.log1p(-at))[::2]
    found = single({"batching": "continuous", "latency_ms": {1: {"x": samples}, places: {"x": samples}}})
    drawn = found.latency_ms[0, 0, places - 1]
    offered = places * load
    tail = offered**places / math.factorial(places) / (1 - load)
    busy = tail / (sum(offered**n / math.factorial(n) for n in range(places)) + tail)
    spread = 1 + drawn.var() / drawn.mean() ** 2
    wait = busy * drawn.mean() / (places * (1 - load)) * spread / 2
    mean, width = mean_interval(simulate(found, places, load))
    assert abs(mean - (drawn.mean() + wait)) < width + 0.02 * wait


@pytest.mark.parametrize(("batch", "load"), [(4, 0.6), (8, 0.9)])
def test_batches_wait_as_the_bulk_service_queue(batch: int, load: float) -> None:
    """A batch takes what waits, up to its size, for a constant time: the embedded Markov chain gives the mean."""
    took = 20.0
    found = single({"latency_ms": {1: {"x": took}, batch: {"x": took}}})
    rate = load * batch / took
    size = 400
    arrivals = stats.poisson.pmf(np.arange(size), rate * took)
    chain = np.zeros((size, size))
    for present in range(size):
        left = max(present - batch, 0)
        chain[present, left:] = arrivals[: size - left]
        chain[present, -1] += 1 - chain[present].sum()
    still = np.ones(size) / size
    for _ in range(3000):
        still = still @ chain
    left_over = float(still @ np.maximum(np.arange(size) - batch, 0))
    waiting = took * (left_over + rate * took / 2) / (took + still[0] / rate)
    mean, width = mean_interval(simulate(found, batch, load))
    assert abs(mean - (took + waiting / rate)) < width + 1e-9


@pytest.mark.parametrize("alpha", [0.8, 0.85, 0.9, 0.95, 1.0])
def test_the_predicted_throughput_is_the_simulated_one_within_2_percent(alpha: float) -> None:
    for seed in range(6):
        found = problem(seed)
        simple, _ = simple_subplans(found, 4)
        whole = [one for one in range(len(simple)) if simple[one].types == (1 << len(found.types)) - 1]
        logical = make_logical(simple, [(whole[-1],)])
        own = routes(found, simple, logical)
        allocation = tuple(((found.configurations_of(mask)[-1], 2),) for _, mask in logical.nodes)
        plan = best_routing(found, own, logical, allocation)
        found.targets_ms[:] = 1e9
        shown = Evaluator(found, Load(alpha=alpha)).simulate(plan, own, num=40_000)
        assert shown.throughput_per_s == pytest.approx(alpha * plan.rate_per_s, rel=0.02)


def test_a_declared_throughput_is_what_an_executor_reaches() -> None:
    engine = {
        "batching": "continuous", "latency_ms": {1: {"x": 10.0}, 4: {"x": 40.0}}, "throughput_per_s": {4: {"x": 250.0}}
    }  # fmt: skip
    found = single(engine)
    plan, own = one_executor(found, 4)
    assert plan.rate_per_s == pytest.approx(250)
    shown = Evaluator(found, Load()).simulate(plan, own, num=40_000, rate_per_s=400.0)
    assert shown.throughput_per_s == pytest.approx(250, rel=0.01)


def test_preprocessing_shows_only_while_an_executor_is_idle() -> None:
    found = single({"latency_ms": {1: {"x": 10.0}}, "cpu_ms": {"x": 30.0}})
    plan, own = one_executor(found, 1)
    evaluator = Evaluator(found, Load(num_estimated=2000))
    rare = evaluator.simulate(plan, own, num=20_000, rate_per_s=0.5)
    assert np.median(rare.latency_ms[0]) == pytest.approx(40)
    # What the GPU can do is not less for it.
    full = evaluator.simulate(plan, own, num=20_000, rate_per_s=150.0)
    assert full.throughput_per_s == pytest.approx(100, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 1.3))
def test_every_request_is_done_once_and_not_before_its_work(seed: int, alpha: float) -> None:
    found = problem(seed, most_components=4)
    simple, _ = simple_subplans(found, 8)
    whole = [one for one in range(len(simple)) if simple[one].types == (1 << len(found.types)) - 1]
    logical = make_logical(simple, [(whole[seed % len(whole)],)])
    own = routes(found, simple, logical)
    allocation = tuple(((found.configurations_of(mask)[0], 1 + seed % 2),) for _, mask in logical.nodes)
    plan = best_routing(found, own, logical, allocation)
    found.targets_ms[:] = 1e9
    load = Load(alpha=alpha, transfer_ms=3.0)
    shown = Evaluator(found, load).simulate(plan, own, num=2000)
    for place, latencies in enumerate(shown.latency_ms):
        assert np.isfinite(latencies).all()
        least = min(
            _least_ms(found, own[key].nodes, own[key].before, allocation, place) for key in own if key[0] == place
        )
        assert (latencies >= least - 1e-6).all()
    assert (shown.busy <= 1 + 1e-9).all()


def _least_ms(
    found: Problem, nodes: tuple[int, ...], before: tuple[tuple[int, ...], ...], allocation: object, place: int
) -> float:
    done: list[float] = []
    for node, waits in zip(nodes, before, strict=True):
        engine = found.configurations[allocation[node][0][0]].engine  # type: ignore[index]
        took = float(np.nanmin(found.latency_ms[engine, place]))
        done.append(took + max((done[one] + 3.0 for one in waits), default=0.0))
    return max(done)


def test_the_estimate_is_near_the_simulation_where_little_waits() -> None:
    for seed in range(8):
        found = problem(seed)
        simple, _ = simple_subplans(found, 4)
        logical = make_logical(simple, [(len(simple) - 1,)])
        own = routes(found, simple, logical)
        if {place for place, _ in own} != set(range(len(found.types))):
            continue
        allocation = tuple(((found.configurations_of(mask)[0], 1),) for _, mask in logical.nodes)
        plan = best_routing(found, own, logical, allocation)
        found.targets_ms[:] = 1e9
        evaluator = Evaluator(found, Load(alpha=0.3))
        shown, expected = evaluator.simulate(plan, own, num=20_000), evaluator.estimate(plan, own)
        for place in range(len(found.types)):
            mine = expected.latency_ms[expected.kinds == place]
            assert mine.mean() == pytest.approx(shown.latency_ms[place].mean(), rel=0.15)
