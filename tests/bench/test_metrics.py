"""From stamps to figures: attribution, offsets, stalls, intervals and comparisons, on times that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.bench.compare import compare_runs
from flashrt.bench.drive import Recorder, Written
from flashrt.bench.intervals import block_means, cut_blocks, middle_95, resample_means, students_t_95
from flashrt.bench.metrics import (
    Timeline,
    attribute,
    batch_intervals,
    combine,
    gaps_ms,
    measure,
    offsets_ms,
    samples_of,
    slope,
    stalls,
)
from flashrt.bench.scenarios import judge

MS = 1_000_000


def recorded(batches: int, writes: list[tuple[str, int, int, int | None]], ends: list[int] | None = None) -> Recorder:
    """Return a recorder with an item every 100 ms and writes of (output, ms, elements, batch)."""
    due = [100 * MS * batch for batch in range(batches)]
    written = [Written(at * MS, name, count, None, batch) for name, at, count, batch in writes]
    return Recorder(due, due, written, ends=ends or [])


def counts(recorder: Recorder) -> dict[str, list[int]]:
    return {line.output: line.counts.tolist() for line in attribute(recorder).timelines}


def test_even_writes_are_divided_evenly_also_where_they_cross_batches() -> None:
    found = attribute(recorded(2, [("y", 10, 4, None), ("y", 60, 4, None), ("y", 110, 4, None)]))
    (line,) = found.timelines
    assert line.visible_ns.tolist() == [[m * MS for m in (10, 10, 10, 10, 60, 60)], [60 * MS] * 2 + [110 * MS] * 4]


def test_uneven_batches_are_told_apart_by_name_by_end_or_by_one_write_a_batch() -> None:
    tagged = recorded(3, [("y", 10, 5, 0), ("y", 20, 2, 0), ("y", 110, 6, 1), ("y", 210, 5, 2)])
    ended = recorded(3, [("y", 10, 5, None), ("y", 20, 2, None), ("y", 110, 6, None), ("y", 210, 5, None)], [2, 3, 4])
    single = recorded(3, [("y", 20, 7, None), ("y", 110, 6, None), ("y", 210, 5, None)])
    for recorder in (tagged, ended, single):
        assert counts(recorder) == {"y": [7, 6, 5]}
        (line,) = attribute(recorder).timelines
        assert line.completed_ns.tolist() == [20 * MS, 110 * MS, 210 * MS]
        assert len(line.all_visible_ns) == 18
    assert measure(attribute(tagged).timelines[0], 0, None)["fps"] == pytest.approx(5.5 / 0.095)


def test_batches_that_cannot_be_told_apart_are_a_problem_that_says_what_to_do() -> None:
    found = attribute(recorded(2, [("y", 10, 3, None), ("y", 20, 2, None), ("y", 110, 6, None)]))
    assert not found.timelines
    assert "io.batch_done(batch)" in found.problems[0]
    missing = attribute(recorded(3, [("y", 10, 3, 0), ("y", 110, 3, 2)]))
    assert missing.problems == ("output 'y': batch 1 has no element",)
    assert attribute(recorded(1, [("y", 10, 1, 0), ("y", 20, 1, 4)])).problems
    assert attribute(recorded(2, [])).problems == ("the system wrote nothing",)


def test_outputs_of_different_lengths_are_measured_each_by_itself() -> None:
    writes = [("frames", 40, 12, 0), ("audio", 45, 1920, 0), ("frames", 140, 12, 1), ("audio", 145, 1920, 1)]
    lines = {line.output: measure(line, 0, None) for line in attribute(recorded(2, writes)).timelines}
    assert lines["frames"]["fps"] == pytest.approx(120)
    assert lines["audio"]["fps"] == pytest.approx(19200)
    assert lines["audio"]["latency_ms"]["max"] == 45


def test_offsets_follow_the_schedule_of_each_batchs_own_elements() -> None:
    line = Timeline(
        "y", np.array([0, 100]) * MS, np.array([[20, 20, 20, 20], [120, 130, 130, 130]]) * MS, np.array([4, 2])
    )
    # One period before it is due a batch's interval begins: four elements 25 ms apart, then two 50 ms apart.
    assert offsets_ms(line, 100 * MS).tolist() == [[120, 95, 70, 45], [120, 80, 80, 80]]


def stalls_one_by_one(visible_ns: list[float], interval_ns: float) -> tuple[int, float]:
    shown, late, frozen = visible_ns[0], 0, 0.0
    for at in visible_ns[1:]:
        due = shown + interval_ns
        if at > due + interval_ns / 2:
            late += 1
            frozen += at - due
        shown = max(due, at)
    total = shown - visible_ns[0]
    return late, frozen / total if total > 0 else 0.0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 50))
def test_stalls_are_those_of_a_player_that_never_drops(gaps: list[int], interval: int) -> None:
    visible = np.cumsum(gaps)
    late, share = stalls(visible, interval)
    want_late, want_share = stalls_one_by_one([float(at) for at in visible], interval)
    assert late == want_late
    assert share == pytest.approx(want_share)


def test_a_slope_is_not_tilted_by_one_hiccup_and_a_long_series_is_no_burden() -> None:
    values = 0.5 * np.arange(60.0)
    values[30] += 1000
    assert slope(values) == pytest.approx(0.5)
    assert slope(0.25 * np.arange(100_000.0)) == pytest.approx(0.25)
    assert slope(np.array([1.0, 9.0])) == 0.0


@given(st.integers(1, 500))
def test_blocks_hold_every_batch_once_in_order(length: int) -> None:
    blocks = cut_blocks(np.arange(length))
    assert np.concatenate(blocks).tolist() == list(range(length))
    assert all(len(block) for block in blocks)
    assert len(blocks) <= 20


def noisy(seed: int, count: int, mean: float, correlation: float = 0.6) -> np.ndarray:
    """Return autocorrelated times around a mean."""
    generator = np.random.default_rng(seed)
    noise = np.zeros(count)
    for index in range(1, count):
        noise[index] = correlation * noise[index - 1] + generator.standard_normal()
    return mean + noise


def test_intervals_cover_the_true_mean_of_autocorrelated_batches() -> None:
    covered = 0
    for seed in range(100):
        runs = [block_means(noisy(1000 * seed + run, 120, 50.0)) for run in range(2)]
        low, high = middle_95(resample_means(runs))
        covered += low <= 50.0 <= high
        assert high - low < 3
    assert covered >= 80


def test_restarts_that_differ_widen_the_interval_to_their_range() -> None:
    low, high = middle_95(resample_means([block_means(noisy(1, 100, 50.0)), block_means(noisy(2, 100, 60.0))]))
    assert low < 51
    assert high > 59
    width = students_t_95([50.0, 60.0])
    assert width is not None
    assert width[1] - width[0] > 10 * (high - low)


def test_one_restart_gives_intervals_for_what_every_batch_contributes_to() -> None:
    due = np.arange(80) * 100 * MS
    visible = due[:, None] + (noisy(3, 80, 30.0)[:, None] * MS).astype(int) + np.arange(4)[None, :] * MS
    part = Timeline("y", due, visible, np.full(80, 4))
    found = batch_intervals([part], samples_of([part]))
    for name in ("period_ms", "fps", "first_output_ms"):
        value = measure(part, 0, None)[name]
        assert found[name][0] <= value <= found[name][1]
    for name in ("mean", "p50", "p90"):
        assert (
            found["latency_ms"][name][0] <= measure(part, 0, None)["latency_ms"][name] <= found["latency_ms"][name][1]
        )
    _, once = combine([measure(part, 0, None)])
    assert once["fps"] is None
    assert gaps_ms(part).mean() == pytest.approx(measure(part, 0, None)["period_ms"])


def run_record(name: str, period: float, seed: int, *, restarts: int = 2, elements: int = 12) -> dict[str, Any]:
    means = {
        "period_ms": [block_means(noisy(seed + run, 100, period)) for run in range(restarts)],
        "latency_ms.mean": [block_means(noisy(seed + 50 + run, 100, 2 * period)) for run in range(restarts)],
    }
    measured = float(np.mean(means["period_ms"]))
    return {
        "run": name,
        "valid": True,
        "scenario": "max_rate",
        "period_ms": measured,
        "fps": elements * 1e3 / measured,
        "latency_ms": {"mean": float(np.mean(means["latency_ms.mean"]))},
        "block_means": means,
        "confidence_95": {},
    }


def test_two_restarts_suffice_to_tell_a_clear_difference_and_noise_from_each_other() -> None:
    base, same, fast = run_record("a", 50.0, 0), run_record("b", 50.0, 100), run_record("c", 40.0, 200)
    found = {entry["run"]: entry["metrics"] for entry in compare_runs([base, same, fast])["comparisons"]}
    assert found["b"]["fps"]["verdict"] == "inconclusive"
    assert found["c"]["fps"]["verdict"] == "faster"
    assert found["c"]["period_ms"]["verdict"] == "faster"
    assert found["c"]["latency_ms.mean"]["verdict"] == "faster"
    low, high = found["c"]["fps"]["confidence_95"]
    assert 1.2 < low < found["c"]["fps"]["ratio"] < high < 1.3
    assert found["c"]["fps"]["confidence_method"] == "block bootstrap"


def test_a_ratio_counts_the_elements_of_a_batch_too() -> None:
    base, other = run_record("a", 50.0, 0), run_record("b", 50.0, 100, elements=24)
    ratio = compare_runs([base, other])["comparisons"][0]["metrics"]["fps"]
    assert ratio["confidence_95"][0] < ratio["ratio"] < ratio["confidence_95"][1]
    assert ratio["ratio"] == pytest.approx(2, rel=0.02)
    assert ratio["verdict"] == "faster"


def test_older_records_are_compared_by_their_own_intervals() -> None:
    base, other = run_record("a", 50.0, 0), run_record("b", 40.0, 1)
    for record in (base, other):
        del record["block_means"]
        record["confidence_95"] = {"fps": [record["fps"] * 0.99, record["fps"] * 1.01]}
    found = compare_runs([base, other])["comparisons"][0]["metrics"]
    assert found["fps"]["verdict"] == "faster"
    assert found["fps"]["confidence_method"] == "propagated"
    assert found["period_ms"]["verdict"] == "inconclusive"


def test_a_run_is_judged_by_its_batches_its_sender_and_its_drift() -> None:
    steady = Recorder([index * 10 * MS for index in range(50)], [index * 10 * MS for index in range(50)])
    late = Recorder(steady.intended_ns, [at + 5 * MS for at in steady.intended_ns])
    assert judge(steady, 0, 10.0, {"y": {"drift_ms_per_batch": 0.0}}, {}) == []
    assert judge(steady, 0, 10.0, {"y": {"drift_ms_per_batch": 0.19}}, {}) == []
    assert "does not sustain" in judge(steady, 0, 10.0, {"y": {"drift_ms_per_batch": 1.0}}, {})[0]
    assert "the harness was disturbed; measure again on a quieter machine" in judge(late, 0, 10.0, {"y": {}}, {})[0]
    assert "at least 5 are needed" in judge(steady, 47, None, {}, {})[0]
    # Over few fast batches the clock's own noise looks like a drift.
    assert judge(steady, 40, 0.1, {"y": {"drift_ms_per_batch": 0.01}}, {}) == []
