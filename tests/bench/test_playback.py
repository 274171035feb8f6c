"""What a viewer would see: every figure on streams whose misses, freezes and skew are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.bench.metrics import Timeline, combine, measure
from flashrt.bench.playback import (
    NEEDED,
    change_point,
    deadlines,
    freezes,
    longest_run,
    one_percent_low,
    play,
    real_time_factor,
    shown_ns,
    skew_ms,
    suffice,
    underruns,
)

MS = 1_000_000


def test_samples_suffice_where_none_over_would_prove_the_share() -> None:
    for share, needed in NEEDED.items():
        part = float(share[1:]) / 100
        assert part**needed <= 0.01 < part ** (needed - 1)
    found = suffice(459)
    assert [found[share]["suffices"] for share in NEEDED] == [True, True, False]


def test_a_freeze_is_a_gap_of_thrice_the_mean_and_150_ms_more() -> None:
    steady = np.arange(100) * 40.0 * MS
    assert freezes(steady) == (0, 0.0)
    late = steady.copy()
    late[50:] += 300 * MS
    count, share = freezes(late)
    assert count == 1
    assert share == pytest.approx(340 / (99 * 40 + 300))
    late[50:] -= 150 * MS
    # 190 ms are thrice the mean, but not 150 ms more than it.
    assert freezes(late)[0] == 0
    assert freezes(steady[:1]) == (0, 0.0)


def test_the_slowest_percent_sets_the_low() -> None:
    gaps = np.full(300, 10.0)
    gaps[[20, 120, 220]] = [20.0, 40.0, 60.0]
    assert one_percent_low(np.concatenate([[0], np.cumsum(gaps)]) * MS) == pytest.approx(25.0)
    assert one_percent_low(np.zeros(1)) is None


def test_a_buffer_takes_up_what_is_late_by_less() -> None:
    visible = np.arange(40) * 10.0 * MS
    visible[10] += 15 * MS
    visible[30] += 5 * MS
    assert [underruns(visible, 10 * MS, delay * MS) for delay in (0, 5, 14, 15)] == [1, 1, 1, 0]
    burst = np.repeat(np.arange(5) * 40.0 * MS, 4)
    found = play(burst, 10 * MS, 40 * MS)
    assert found["underruns"] == {"without": 0, "one_batch": 0, "two_batches": 0}
    assert found["one_percent_low"] == pytest.approx(100)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 100))
def test_the_player_shows_in_order_never_early_never_faster(gaps: list[int], interval: int, delay: int) -> None:
    visible = np.cumsum(gaps).astype(float)
    shown = shown_ns(visible, interval, delay) + visible[0]
    assert (shown >= visible - 1e-6).all()
    assert shown[0] == visible[0] + delay
    assert (np.diff(shown) >= interval - 1e-6).all()
    more = shown_ns(visible, interval, delay + 1000)
    assert underruns(visible, interval, delay + 100_000) == 0
    assert len(more) == len(visible)


def test_misses_are_counted_at_the_stated_offset_and_the_least_one_has_none() -> None:
    offsets = np.array([10.0, 30.0, 31.0, 35.0, 12.0, 40.0])
    found = deadlines(offsets, 30.0)
    assert found == {
        "stated_d0_ms": 30.0, "smallest_d0_ms": 40.0, "misses": 4 - 1, "miss_share": 0.5, "longest_run": 2
    }  # fmt: skip
    assert deadlines(offsets, found["smallest_d0_ms"])["misses"] == 0
    assert "misses" not in deadlines(offsets, None)
    assert [longest_run(np.array(flags, bool)) for flags in ([], [0, 0], [1, 1, 0, 1], [0, 1, 1, 1])] == [0, 0, 2, 3]


def test_restarts_add_up_misses_and_keep_the_worst() -> None:
    runs = [{"deadline": deadlines(np.array([1.0, 5.0, late]), 4.0), "freezes": 1} for late in (2.0, 9.0)]
    means, _ = combine(runs)
    assert means["deadline"]["misses"] == 3
    assert means["deadline"]["longest_run"] == 2
    assert means["deadline"]["smallest_d0_ms"] == 9
    assert means["freezes"] == 2


def test_the_real_time_factor_needs_a_rate() -> None:
    assert real_time_factor(48_000.0, 24_000) == 0.5
    assert real_time_factor(48_000.0, None) is None
    line = Timeline(
        "y", np.arange(20) * 40 * MS, (np.arange(20) * 40 * MS)[:, None] + np.zeros((1, 2), int), np.full(20, 2)
    )
    assert measure(line, 0, 40.0, media_rate=25)["rtf"] == pytest.approx(0.5)
    assert measure(line, 0, 40.0)["rtf"] is None
    assert measure(line, 0, 40.0, stated_d0_ms=100)["deadline"]["misses"] == 0


def test_skew_is_between_what_belongs_to_one_moment_of_the_media() -> None:
    frames = np.arange(50) * 40.0 * MS
    audio = np.repeat(np.arange(50) * 40.0 * MS, 80) + 25 * MS
    found = skew_ms({"frames": frames, "audio": audio}, {"frames": 25, "audio": 2000})
    assert found == {"audio -> frames": {"mean": -25.0, "p99_abs": 25.0, "max": 25.0}}
    # A rate that is wrong shows as a skew that grows.
    assert skew_ms({"frames": frames, "audio": audio}, {"frames": 25, "audio": 1000})["audio -> frames"]["max"] > 500
    assert skew_ms({"frames": frames, "audio": audio}, {"frames": 25}) == {}


def test_warm_up_is_cut_where_the_level_changes_and_nowhere_else() -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 1, 80)
    slow = 50 + noise
    slow[:6] += 40
    assert change_point(slow) == 6
    one = 50 + noise
    one[0] += 100
    assert change_point(one) == 1
    # A hiccup later on is the system's, and stays.
    late = 50 + noise
    late[30] += 100
    assert change_point(late) == 0
    # The level is found through the hiccups of a busy machine, which are none where they begin.
    busy = 50 + noise
    busy[generator.choice(np.arange(8, 80), 9, replace=False)] += 200
    assert change_point(busy) == 0
    busy[:4] += 300
    assert change_point(busy) == 4
    busy[1] = 50
    assert change_point(busy) <= 1
    # Nor through hiccups as many as a scheduler that takes turns makes, where values else hardly scatter.
    turns = 5 + noise / 20
    turns[9::3] += generator.uniform(5, 40, len(turns[9::3]))
    assert change_point(turns) == 0
    turns[:4] = 600
    assert change_point(turns) == 4
    turns[50] = 600
    assert change_point(turns) == 0
    assert change_point(slow[:10]) == 0
    assert change_point(np.full(60, 3.0)) == 0
    cut = 0
    for _ in range(100):
        wander = np.zeros(80)
        for index in range(1, 80):
            wander[index] = 0.7 * wander[index - 1] + generator.standard_normal()
        cut += change_point(50 + wander) > 0
    assert cut <= 3


SLOW_MS = 600
"""Of the first batches: far beyond what a busy machine adds to the others."""
SYSTEM = f"""
import time
import numpy as np

def batches(seed, count):
    for number in range(count):
        yield {{"x": float(seed % 89 + number)}}

def speaks(io):
    io.ready()
    for batch, x in enumerate(io.inputs["x"]):
        time.sleep({SLOW_MS / 1000} if batch < 6 else 0.005)
        io.outputs["frames"].write(np.zeros((2, 4, 4), np.uint8))
        io.outputs["audio"].write(np.zeros(160, np.float32))
"""


def test_a_run_reports_them_all_and_says_what_it_cannot_know(tmp_path: Path) -> None:
    (tmp_path / "system.py").write_text(SYSTEM)
    system = resolve_system("system.py:speaks", tmp_path)
    owed = {"frames": 2, "audio": 160}
    settings = RunSettings(
        runs=1,
        warmup=2,
        duration_s=30,
        max_batches=100,
        elements_per_batch=owed,
        media_rate={"audio": 16_000, "frames": 200, "text": 3},
    )
    closed = run_benchmark(system, "system.py:batches", tmp_path, tmp_path, settings)
    # Four batches were as slow as those of the warm-up that was asked for: cut, and said.
    assert closed["warmup"]["cut_at_change"] >= 4
    assert closed["warmup"]["batches"] == 2 + closed["warmup"]["cut_at_change"]
    assert closed["outputs"]["audio"]["rtf"] == pytest.approx(16_000 / closed["outputs"]["audio"]["fps"])
    assert set(closed["skew_ms"]) == {"audio -> frames"}
    assert any("media_rate names 'text'" in note for note in closed["notes"])
    assert closed["percentiles"]["p99.9"]["suffices"] is False
    assert "deadline" not in closed

    paced = RunSettings(
        "realtime", runs=1, warmup=2, duration_s=1.2, period_ms=20, elements_per_batch=owed, d0_ms=150, timeout_s=120
    )
    opened = run_benchmark(system, "system.py:batches", tmp_path, tmp_path, paced)
    # Open loop nothing is cut: the slow batches count, and so does what they delayed.
    assert opened["warmup"]["batches"] == 2
    assert opened["latency_ms"]["max"] >= 4 * SLOW_MS - 3 * 20
    assert opened["deadline"]["misses"] >= 8
    assert opened["deadline"]["longest_run"] >= 8
    assert opened["deadline"]["smallest_d0_ms"] == pytest.approx(opened["outputs"]["frames"]["d0_ms"])
    assert opened["underruns"]["without"] >= opened["underruns"]["two_batches"]
    assert opened["rtf"] is None
    assert any("no real-time factor for 'frames', 'audio'" in note for note in opened["notes"])


def test_the_program_says_the_rate_and_an_argument_overrides_it(toy: Path) -> None:
    document = (toy / "program.yaml").read_text()
    (toy / "program.yaml").write_text(
        document.replace("shape: [frames, 4, 4]}", "shape: [frames, 4, 4], rate_hz: 1000}")
    )
    for system in ("program.yaml", "split.yaml"):
        found = []
        for rates in (None, {"frames": 2000.0}):
            settings = RunSettings(runs=1, duration_s=0.3, timeout_s=120, media_rate=rates)
            result = run_benchmark(resolve_system(system, toy), "inputs.py:batches", toy, toy, settings)
            found.append(result["rtf"] * result["fps"])
            assert not any("no real-time factor" in note for note in result["notes"])
        assert found == [pytest.approx(1000), pytest.approx(2000)]
