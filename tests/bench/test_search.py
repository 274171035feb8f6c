"""The search for the smallest sustainable period: sequential decisions, bisection, and what they claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.bench.drive import Recorder, Written, completed_ns
from flashrt.bench.run import bracketed
from flashrt.bench.search import LOOKS, MAX_PROBES, RESOLUTION, Decision, bisect, decide_growth, growth_interval

SERVICE_MS = 40.0


def latencies(generator: np.random.Generator, period_ms: float, num: int, noise: float) -> np.ndarray:
    """Return latencies of batches that come at a period to one server whose autocorrelated times average 40 ms."""
    wander, done, found = 0.0, -math.inf, []
    for batch in range(num):
        wander = 0.6 * wander + 0.8 * generator.standard_normal()
        due = batch * period_ms
        done = max(done, due) + SERVICE_MS * (1 + noise * wander)
        found.append(done - due)
    return np.asarray(found)


def probe(generator: np.random.Generator, noise: float) -> Callable[[float], Decision]:
    def decide(period_ms: float) -> Decision:
        series = latencies(generator, period_ms, LOOKS[-1], noise)
        for number, look in enumerate(LOOKS, 1):
            decision = decide_growth(series[:look], period_ms, number)
            if decision.verdict != "undecided":
                break
        return decision

    return decide


@pytest.mark.parametrize("noise", [0.001, 0.02, 0.05])
def test_periods_off_the_limit_are_decided_rightly_with_the_stated_confidence(noise: float) -> None:
    generator = np.random.default_rng(1)
    decide = probe(generator, noise)
    for share, wrong in ((1.1, "grows"), (0.9, "sustained")):
        found = [decide(SERVICE_MS * share) for _ in range(100)]
        assert sum(one.verdict == wrong for one in found) <= 5
        if noise < 0.05:
            assert sum(one.verdict == "undecided" for one in found) <= 10
        if noise < 0.01:
            # What is clear is decided at the first look: that is what they are for.
            assert {one.num_batches for one in found} == {LOOKS[0]}


@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_the_bracket_holds_the_true_period_and_is_narrow(noise: float) -> None:
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(30):
        found = bisect(probe(generator, noise), SERVICE_MS * generator.uniform(0.93, 1.07), lambda _: True)
        assert found.sustained_ms is not None
        assert found.grows_ms is not None
        # Growth of less than half a percent counts as none, so the limit lies that much below the service time.
        held += found.grows_ms <= SERVICE_MS * 1.002 and found.sustained_ms >= SERVICE_MS * 0.99
        assert found.sustained_ms <= SERVICE_MS * 1.06
    assert held >= 28


def test_a_search_ends_with_its_budget_and_claims_no_more_than_it_saw() -> None:
    undecided = Decision(50.0, "undecided", (-1.0, 1.0), 0.25, 90, 6)
    never = bisect(lambda period: Decision(period, "undecided", (-1, 1), 0.25, 90, 6), 40.0, lambda _: True)
    assert len(never.decisions) == MAX_PROBES
    assert (never.grows_ms, never.ended) == (None, "budget")
    # What cannot be decided is no reason to go lower.
    assert never.next_ms == max(one.period_ms for one in never.decisions)
    hopeless = bisect(lambda period: Decision(period, "grows", (1, 2), 0.2, 12, 1), 40.0, lambda _: True)
    assert hopeless.sustained_ms is None
    assert hopeless.next_ms > (hopeless.grows_ms or math.inf)
    once = bisect(lambda period: undecided, 40.0, lambda _: False)
    assert len(once.decisions) == 1
    exact = bisect(
        lambda period: Decision(period, "sustained" if period >= 40 else "grows", (0, 0), 0.2, 12, 1), 41.0,
        lambda _: True,
    )  # fmt: skip
    assert exact.ended == "resolution"
    assert exact.grows_ms is not None
    assert exact.sustained_ms is not None
    assert exact.grows_ms < 40 <= exact.sustained_ms <= exact.grows_ms * RESOLUTION


def test_the_growth_of_a_steady_and_of_a_falling_behind_system() -> None:
    low, high = growth_interval(np.full(12, 7.0), 0.05)
    assert low == high == 0
    low, high = growth_interval(3.0 + 0.5 * np.arange(24), 0.05)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert growth_interval(np.ones(5), 0.05) == (-math.inf, math.inf)
    # A growth that the clock's noise explains decides nothing.
    assert decide_growth(np.arange(14) * 0.001, 0.1, 1).verdict != "grows"


def test_batches_are_complete_when_all_that_they_owe_is_there() -> None:
    writes = [Written(at, name, count, None) for at, name, count in
              [(1, "a", 2), (2, "b", 1), (3, "a", 1), (4, "a", 1), (9, "b", 1), (10, "a", 2)]]  # fmt: skip
    recorder = Recorder([0, 0, 0], [0, 0, 0], writes)
    assert completed_ns(recorder, {"a": 2, "b": 1}).tolist() == [2, 9]
    recorder.ends = [2, 5, 6]
    assert completed_ns(recorder, None).tolist() == [2, 9, 10]
    assert completed_ns(Recorder([0], [0]), {"a": 1}).tolist() == []
    assert completed_ns(Recorder([0], [0]), None).tolist() == []


def test_a_rate_s_interval_is_as_wide_as_the_search_s_bracket() -> None:
    intervals = {"period_ms": [99.9, 100.1], "fps": [119.9, 120.1], "d0_ms": [1, 2]}
    metrics = {"period_ms": 100.0, "fps": 120.0}
    wide = bracketed(intervals, [{"bracket_ms": [98.0, 100.0]}], metrics)
    assert wide["period_ms"] == [98.0, 100.1]
    assert wide["fps"] == [pytest.approx(12000 / 100.1), pytest.approx(12000 / 98)]
    assert wide["d0_ms"] == [1, 2]
    assert bracketed(intervals, [{"bracket_ms": [None, 100.0]}], metrics) == intervals


@pytest.mark.parametrize("lows", [[1.0, 9.0], [98.0, 100.0]])
def test_two_restarts_that_differ_much_give_no_negative_rate(lows: list[float]) -> None:
    searches = [{"bracket_ms": [low, low + 1]} for low in lows]
    wide = bracketed({"period_ms": [5.0, 10.0], "fps": [1.0, 2.0]}, searches, {"period_ms": 8.0, "fps": 120.0})
    assert 0 < wide["period_ms"][0] <= 5
    assert 0 < wide["fps"][0] < wide["fps"][1]


def test_max_rate_reports_its_decisions_with_their_evidence(tmp_path: Path) -> None:
    (tmp_path / "system.py").write_text(
        "import time\n"
        "def batches(seed, count):\n    yield from ({'x': float(seed % 97 + n)} for n in range(count))\n"
        "def serve(io):\n    io.ready()\n    for x in io.inputs['x']:\n"
        "        time.sleep(0.008)\n        io.outputs['y'].write(x)\n"
    )
    settings = RunSettings("max_rate", duration_s=4.5, runs=1, elements_per_batch={"y": 1}, timeout_s=120)
    result = run_benchmark(
        resolve_system("system.py:serve", tmp_path), "system.py:batches", tmp_path, tmp_path, settings
    )
    (search,) = result["search"]
    assert search["decisions"]
    assert search["confidence"] == 0.95
    assert search["ended"] in {"resolution", "budget", "items"}
    for decision in search["decisions"]:
        low, high = decision["growth_ms"]
        assert decision["verdict"] in {"sustained", "grows", "undecided"}
        assert decision["verdict"] != "sustained" or high < decision["limit_ms"]
        assert decision["verdict"] != "grows" or low > decision["limit_ms"]
    # No sleep is shorter than it was asked to be, so no shorter period can be sustained; two percent of three seconds
    # is how late the first output may be seen.
    assert result["period_ms"] >= 8 * 0.98
    assert result["search_tries"] >= len(search["decisions"])
    low, high = result["confidence_95"]["period_ms"]
    assert low <= result["period_ms"] <= high
    assert search["bracket_ms"][0] is None or low <= search["bracket_ms"][0]
