"""Verdicts on two systems: false ones are rare, true differences are found, and turns are what they are said to be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from flashrt.bench import RunSettings, compare_systems, resolve_system
from flashrt.bench.interleave import DEFAULT_PAIRS, check_pair
from flashrt.bench.metrics import combine
from flashrt.bench.resampling import block_length, resampled_means, restart_interval_95, restarts_drawn
from flashrt.bench.verdicts import decide, effect, halves_differ, holm, turns
from flashrt.errors import InputError

SERIES = ("period_ms", "latency_ms.mean", "first_output_ms")
SINGLE = ("latency_ms.p50", "latency_ms.p90", "d0_ms", "ttfo_ms", "startup_ms")
PAIRS = DEFAULT_PAIRS
BATCHES = 100


def wander(generator: np.random.Generator, num: int, correlation: float) -> np.ndarray:
    """Return autocorrelated noise of unit variance."""
    noise = generator.standard_normal(num)
    for index in range(1, num):
        noise[index] = correlation * noise[index - 1] + math.sqrt(1 - correlation**2) * noise[index]
    return noise


def restarts(
    generator: np.random.Generator, mean: float, *, between: float, within: float, num: int, drift: float
) -> list[np.ndarray]:
    """Return frame times of restarts that differ, drift over the pairs, and wander within."""
    return [
        mean * (1 + drift * pair) * math.exp(between * generator.standard_normal())
        * (1 + within * wander(generator, num, 0.7))
        for pair in range(PAIRS)
    ]  # fmt: skip


def compared(seed: int, speed: float, between: float = 0.01, within: float = 0.05, drift: float = 0.01) -> dict:
    generator = np.random.default_rng(seed)
    sides = [
        {name: restarts(generator, mean, between=between, within=within if num > 1 else 0, num=num, drift=drift)
         for names, num in ((SERIES, BATCHES), (SINGLE, 1)) for name in names}
        for mean in (50.0, 50.0 / speed)
    ]  # fmt: skip
    return decide(*sides, dict.fromkeys((*SERIES, *SINGLE), False))


@pytest.mark.parametrize(("between", "within"), [(0.01, 0.05), (0.05, 0.02), (0.0, 0.2)])
def test_equal_systems_are_called_different_in_at_most_5_of_100_comparisons(between: float, within: float) -> None:
    found = [compared(seed, 1.0, between, within) for seed in range(100)]
    false = [one for one in found if any(metric["verdict"] != "inconclusive" for metric in one.values())]
    assert len(false) <= 5
    # The intervals themselves hold what they promise, so that the verdicts' caution is not their width alone.
    covered = np.mean([[low <= 1 <= high for low, high in (m["confidence_95"] for m in f.values())] for f in found])
    assert 0.92 <= covered <= 0.995


@pytest.mark.parametrize(("speed", "verdict"), [(1.05, "faster"), (1 / 1.05, "slower")])
def test_a_difference_of_5_percent_is_found_in_at_least_45_of_50_comparisons(speed: float, verdict: str) -> None:
    found = [compared(1000 + seed, speed) for seed in range(50)]
    for name in (*SERIES, *SINGLE):
        assert sum(one[name]["verdict"] == verdict for one in found) >= 45, name
    ratios = [one["period_ms"]["ratio"] for one in found]
    assert np.mean(ratios) == pytest.approx(1 / speed, rel=0.005)


def test_frames_that_were_taken_as_independent_would_be_believed_too_much() -> None:
    generator = np.random.default_rng(1)
    errors = {"blocks": [], "independent": []}
    means = []
    for _ in range(60):
        series = wander(generator, 200, 0.8)
        means.append(series.mean())
        errors["blocks"].append(resampled_means(series, 500, generator).std())
        errors["independent"].append(series.std() / math.sqrt(len(series)))
    true = np.std(means)
    assert np.mean(errors["independent"]) < 0.5 * true
    assert np.mean(errors["blocks"]) == pytest.approx(true, rel=0.3)


def test_blocks_grow_with_the_correlation_and_stay_below_the_series() -> None:
    generator = np.random.default_rng(2)
    lengths = [np.mean([block_length(wander(generator, 400, rho)) for _ in range(8)]) for rho in (0.0, 0.5, 0.9)]
    assert lengths[0] < lengths[1] < lengths[2] <= 60
    assert block_length(np.ones(50)) == block_length(np.ones(1)) == 1
    assert resampled_means(np.array([3.0]), 4, generator).tolist() == [3.0] * 4


def test_few_pairs_that_happen_to_agree_are_not_believed_beyond_their_own_noise() -> None:
    generator = np.random.default_rng(3)
    draws = generator.normal(0.0, 1.0, (6, 4000))
    alike = restarts_drawn(np.zeros(6), draws, generator).std()
    assert alike == pytest.approx(1 / math.sqrt(6), rel=0.05)
    figures = generator.normal(0.0, 3.0, 6)
    apart = restarts_drawn(figures, figures[:, None] + draws, generator).std()
    assert apart == pytest.approx(figures.std(ddof=1) / math.sqrt(6), rel=0.05)


def test_a_verdict_needs_five_pairs_and_a_difference_beyond_the_floor() -> None:
    base = [np.array([50.0 + 0.01 * pair]) for pair in range(6)]
    half = [one / 2 for one in base]
    few = decide({"d0_ms": base[:4]}, {"d0_ms": half[:4]}, {"d0_ms": False})["d0_ms"]
    assert few["verdict"] == "inconclusive"
    assert "4 pairs of restarts; 5 are needed" in few["reason"]
    assert decide({"d0_ms": base}, {"d0_ms": half}, {"d0_ms": False})["d0_ms"]["verdict"] == "faster"
    assert decide({"d0_ms": base}, {"d0_ms": half}, {"d0_ms": True})["d0_ms"]["verdict"] == "slower"
    # Both wander together by far more than they differ: the pairs agree, the system with itself does not.
    wild = [np.array([50.0 * 1.3**pair]) for pair in range(6)]
    near = [one * (1.02 + 0.0001 * pair) for pair, one in enumerate(wild)]
    found = decide({"d0_ms": wild}, {"d0_ms": near}, {"d0_ms": False})["d0_ms"]
    assert found["p_adjusted"] < 0.001
    assert found["verdict"] == "inconclusive"
    assert "halves of one system's own restarts differ" in found["reason"]
    assert found["noise_floor"] == pytest.approx(0.3, abs=0.001)


def test_the_floor_is_what_halves_of_one_system_differ_by() -> None:
    assert halves_differ(np.zeros(8)) == 0
    assert halves_differ(np.array([0.0, 1.0])) == 1
    many = np.random.default_rng(4).normal(0.0, 0.01, 60)
    assert halves_differ(many) == pytest.approx(1.96 * 0.01 * 2 / math.sqrt(60), rel=0.25)


def test_a_figure_that_is_missing_or_zero_on_one_side_is_not_compared() -> None:
    good, zero = [np.ones(1)] * 5, [np.zeros(1)] * 5
    assert decide({"a": good, "b": good, "c": good}, {"a": good, "b": zero}, {"a": False, "b": False}).keys() == {"a"}
    same = effect("a", good, good)
    assert (same.p_value, same.log_ratio, same.confidence_95) == (1.0, 0.0, [1.0, 1.0])


def test_holm_s_p_values_hold_for_all_figures_at_once() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_turns_are_balanced_pair_by_pair() -> None:
    assert turns(4) == "ABBAABBA"
    assert turns(5) == "ABBAABBAAB"


def test_figures_with_one_value_a_restart_are_bootstrapped_from_five_restarts_on() -> None:
    assert restart_interval_95([1.0, 2.0, 3.0, 4.0]) is None
    generator = np.random.default_rng(6)
    covered = 0
    for _ in range(200):
        low, high = restart_interval_95(list(generator.normal(10.0, 1.0, 6))) or (0.0, 0.0)
        covered += low <= 10 <= high
    assert 180 <= covered <= 200
    runs = [{"d0_ms": value} for value in (10.0, 11.0, 12.0, 11.5, 10.5)]
    assert combine(runs)[1]["d0_ms"] == restart_interval_95([10.0, 11.0, 12.0, 11.5, 10.5])
    assert combine(runs[:2])[1]["d0_ms"] is not None
    assert combine(runs[:1])[1]["d0_ms"] is None


SYSTEMS = """
import time
import numpy as np

def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": generator.standard_normal(6)}

def serve(io, wait_s):
    io.ready()
    for x in io.inputs["x"]:
        time.sleep(wait_s)
        io.outputs["y"].write(x)

def slow(io):
    serve(io, 0.03)

def fast(io):
    serve(io, 0.003)
"""


def test_two_systems_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "systems.py").write_text(SYSTEMS)
    systems = [resolve_system(f"systems.py:{name}", tmp_path) for name in ("slow", "fast")]
    settings = RunSettings(duration_s=0.3, warmup=1, timeout_s=120)
    result = compare_systems(
        systems, "systems.py:batches", tmp_path, tmp_path, settings, pairs=5, elements=[{"y": 6}, {"y": 6}]
    )
    assert result["valid"], result["reasons"]
    assert result["order"].startswith("ABBAABBAAB")
    (comparison,) = result["comparisons"]
    assert comparison["run"] == "systems.py:fast"
    latency = comparison["metrics"]["latency_ms.mean"]
    assert latency["verdict"] == comparison["metrics"]["fps"]["verdict"] == "faster"
    assert comparison["metrics"]["fps"]["ratio"] == pytest.approx(1 / comparison["metrics"]["period_ms"]["ratio"])
    samples = np.load(result["artifacts"]["samples"])
    ratios = []
    for pair in range(5):
        means = []
        for side in "AB":
            due, visible = samples[f"pair{pair}_{side}_intended_ns"], samples[f"pair{pair}_{side}_visible_ns_y"]
            start = int(samples[f"pair{pair}_{side}_start"])
            means.append((visible.max(axis=1) - due)[start:].mean())
        ratios.append(means[1] / means[0])
    assert latency["ratio"] == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert len({seeds["inputs"] for seeds in result["seeds"]}) == len(result["order"])
    assert json.loads(Path(result["artifacts"]["result"]).read_text())["comparisons"] == result["comparisons"]


def test_what_cannot_take_turns_is_refused_all_at_once() -> None:
    with pytest.raises(InputError) as caught:
        check_pair(["a"], RunSettings("realtime", burst_size=2), 1)
    assert [finding.where for finding in caught.value.findings] == [
        "argument 'burst_size'", "argument 'systems'", "argument 'pairs'", "argument 'period_ms'"
    ]  # fmt: skip
