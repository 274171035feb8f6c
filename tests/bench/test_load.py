"""Open-loop load: when items are due, that a stall is charged to all it delays, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.bench.arrivals import bursts_s, plan_s, poisson_s, read_trace
from flashrt.bench.drive import Recorder
from flashrt.bench.scenarios import describe_load, judge, lags_ms
from flashrt.bench.settings import check_settings
from flashrt.errors import InputError

MS = 1_000_000
STALL_S = 2.0
STALLED = 7
SYSTEM = f"""
import time
import numpy as np

def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {{"x": generator.standard_normal(6)}}

def stalls_once(io):
    io.ready()
    for batch, x in enumerate(io.inputs["x"]):
        if batch == {STALLED}:
            time.sleep({STALL_S})
        io.outputs["y"].write(x)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "system.py").write_text(SYSTEM)
    moments = np.cumsum(np.random.default_rng(5).exponential(10.0, 300))
    (tmp_path / "trace.csv").write_text("ContextTokens,TIMESTAMP\n" + "".join(f"7,{one}\n" for one in moments))
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        RunSettings("poisson", rate_hz=50, seed=11),
        RunSettings("burst", rate_hz=50, burst_size=6, seed=11),
        RunSettings("trace", trace="trace.csv", speedup=500),
    ],
    ids=lambda settings: settings.scenario,
)
def test_a_stall_shows_in_every_item_that_it_delays(folder: Path, settings: RunSettings) -> None:
    settings = replace(settings, runs=1, duration_s=2.4, warmup=2, elements_per_batch={"y": 6}, timeout_s=120)
    result = run_benchmark(
        resolve_system("system.py:stalls_once", folder), "system.py:batches", folder, folder, settings
    )
    samples = np.load(result["artifacts"]["samples"])
    intended, visible = samples["run0_intended_ns"][2:], samples["run0_visible_ns_y"].max(axis=1)[2:]
    trace_s = read_trace(folder, "trace.csv") if settings.trace else None
    plan = plan_s(settings, trace_s, result["seeds"][0]["arrivals"] or 0)

    # No item was left out, put off or moved because the system was busy.
    assert np.allclose(intended - intended[0], (plan - plan[0]) * 1e9, atol=2)
    assert result["load"][0]["num_dropped"] == 0
    stalled = STALLED - 2
    end = visible[stalled]
    assert end - intended[stalled] >= STALL_S * 1e9
    delayed = [item for item in range(stalled, len(intended)) if intended[item] < end]
    assert len(delayed) > 20
    for item in delayed:
        assert visible[item] >= end
    latency = (visible - intended) / 1e6
    assert result["latency_ms"]["max"] == pytest.approx(latency.max())
    assert result["latency_ms"]["max"] >= STALL_S * 1e3
    assert result["latency_ms"]["p50"] == pytest.approx(np.percentile(latency, 50))
    least = [(end - due) / 1e6 if item in delayed else 0.0 for item, due in enumerate(intended)]
    assert np.percentile(least, 50) > 0.2 * STALL_S * 1e3
    for share in (50, 90, 99):
        assert result["latency_ms"][f"p{share}"] >= np.percentile(least, share) - 1e-3


def test_poisson_arrivals_have_exponential_gaps_and_repeat_with_their_seed() -> None:
    moments = poisson_s(20.0, 200.0, 3)
    assert kstest(np.diff(moments), "expon", args=(0, 1 / 20)).pvalue > 0.01
    assert len(moments) / 200 == pytest.approx(20, rel=0.05)
    assert np.array_equal(moments, poisson_s(20.0, 200.0, 3))
    assert not np.array_equal(moments[:10], poisson_s(20.0, 200.0, 4)[:10])
    assert moments[-1] < 200


def test_bursts_are_whole_and_keep_the_rate_of_items() -> None:
    moments = bursts_s(40.0, 8, 400.0, 1)
    times, sizes = np.unique(moments, return_counts=True)
    assert (sizes == 8).all()
    assert kstest(np.diff(times), "expon", args=(0, 8 / 40)).pvalue > 0.01
    assert len(moments) / 400 == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "0.5\n1.5\n4\n",
        "t\n100.5\n101.5\n104\n",
        "tokens,timestamp\n3,0\n4,1\n1,3.5\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.6805900,396,109\n2023-11-16 18:15:50.1805900,879,55\n",
        "2024-05-10T00:00:00+02:00\n2024-05-09T22:00:01Z\n\n2024-05-10 00:00:03.5+02:00\n",
    ],
)
def test_traces_are_read_as_public_ones_are_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    assert read_trace(tmp_path, "trace.csv") == pytest.approx([0, 1, 3.5])
    settings = RunSettings("trace", trace="trace.csv", speedup=2, duration_s=1)
    assert plan_s(settings, read_trace(tmp_path, "trace.csv"), 0) == pytest.approx([0, 0.5])


def test_a_bad_trace_is_refused_with_every_line_at_fault(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("timestamp,n\n1,1\nsoon,1\n0.5,1\nnan,1\n2,1\n")
    with pytest.raises(InputError) as caught:
        read_trace(tmp_path, "bad.csv")
    assert [finding.where[-6:] for finding in caught.value.findings] == ["line 3", "line 4", "line 5"]
    assert "sort the trace" in str(caught.value)
    (tmp_path / "empty.csv").write_text("timestamp\n")
    with pytest.raises(InputError, match="at least one row"):
        read_trace(tmp_path, "empty.csv")
    with pytest.raises(InputError, match=r"beside it are 'bad\.csv', 'empty\.csv'"):
        read_trace(tmp_path, "absent.csv")
    with pytest.raises(InputError, match="inside the workspace"):
        read_trace(tmp_path, "../trace.csv")
    (tmp_path / "long.csv").write_text("".join(f"{-one}\n" for one in range(40)))
    with pytest.raises(InputError, match="31 more lines"):
        read_trace(tmp_path, "long.csv")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RunSettings("poisson"), ["argument 'rate_hz'"]),
        (RunSettings("burst"), ["argument 'rate_hz'", "argument 'burst_size'"]),
        (RunSettings("trace", rate_hz=3), ["argument 'rate_hz'", "argument 'trace'"]),
        (RunSettings("burst", rate_hz=-1, burst_size=0), ["argument 'rate_hz'", "argument 'burst_size'"]),
        (RunSettings("trace", trace="a.csv", speedup=0), ["argument 'speedup'"]),
        (RunSettings("poisson", rate_hz=float("nan"), seed=-1), ["argument 'rate_hz'", "argument 'seed'"]),
        (
            RunSettings("realtime", rate_hz=1, burst_size=2, trace="a", speedup=2, seed=1),
            [
                "argument 'rate_hz'",
                "argument 'burst_size'",
                "argument 'trace'",
                "argument 'seed'",
                "argument 'speedup'",
            ],
        ),
    ],
)
def test_wrong_load_is_refused_all_at_once(settings: RunSettings, expected: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_settings(settings)
    assert [finding.where for finding in caught.value.findings] == expected


def test_lateness_is_the_harness_s_only_where_the_system_took_what_was_sent() -> None:
    due = [index * 10 * MS for index in range(50)]
    # The system takes item 10 only after 100 ms: those behind it cannot leave before.
    taken = [at + (100 * MS if index == 10 else 0) for index, at in enumerate(due)]
    sent = list(due)
    for index in range(11, 50):
        sent[index] = max(due[index], taken[index - 1])
        taken[index] = sent[index]
    waited = Recorder(due, sent, taken_ns=taken)
    assert lags_ms(waited, 0).max() == 0
    assert describe_load(waited, 0, 60)["refused_ms"] == 100
    assert describe_load(waited, 0, 60)["num_dropped"] == 10
    assert judge(waited, 0, None, {}, {}) == []
    late = Recorder(due, [at + 5 * MS for at in due], taken_ns=[at + 5 * MS for at in due])
    assert describe_load(late, 0, None)["client_lag_ms"] == {"p50": 5, "p99": 5, "max": 5}
    assert "the harness was disturbed" in judge(late, 0, None, {}, {})[0]
