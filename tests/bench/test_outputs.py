"""Benchmarks of systems with several outputs, uneven batches, and a pace of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.bench.search import MAX_FINAL_TRIES, MAX_PROBES
from flashrt.errors import InputError

SYSTEMS = """
import time
import numpy as np

def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": generator.standard_normal(6).astype(np.float32)}

def work(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def fast(io):
    io.ready()
    for x in io.inputs["x"]:
        work(1e-4)
        io.outputs["y"].write(x)

def pictures_and_sound(io):
    io.ready()
    for x in io.inputs["x"]:
        work(2e-3)
        io.outputs["frames"].write(np.zeros((12, 4), np.float32))
        io.outputs["audio"].write(np.zeros(1920, np.float32))

def uneven(io):
    io.ready()
    for batch, x in enumerate(io.inputs["x"]):
        for token in range(3 + batch % 4):
            io.outputs["tokens"].write(np.zeros(1))
        io.batch_done(batch)

def uneven_and_silent(io):
    io.ready()
    for batch, x in enumerate(io.inputs["x"]):
        io.outputs["tokens"].write(np.zeros(5 + batch % 2))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "systems.py").write_text(SYSTEMS)
    return tmp_path


def measured(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    chosen = RunSettings(**{"duration_s": 0.3, "runs": 1, "timeout_s": 120, **settings})
    return run_benchmark(resolve_system(f"systems.py:{name}", folder), "systems.py:batches", folder, folder, chosen)


def test_frames_stand_for_a_run_and_samples_are_kept_beside_them(folder: Path) -> None:
    # So long that what comes between a batch's two writes is nothing of it.
    result = measured(folder, "pictures_and_sound", runs=2, duration_s=2.0)
    assert result["output"] == "frames"
    assert result["elements_per_batch"] == 12
    assert result["outputs"]["audio"]["elements_per_batch"] == 1920
    assert result["outputs"]["audio"]["fps"] == pytest.approx(160 * result["outputs"]["frames"]["fps"], rel=0.05)
    assert result["confidence_95"]["fps"][0] <= result["fps"] <= result["confidence_95"]["fps"][1]
    assert "bootstrap" in result["confidence_method"]
    assert {len(runs) for runs in result["block_means"].values()} == {2}


@pytest.mark.parametrize("scenario", ["single_stream", "realtime"])
def test_batches_of_different_amounts_are_measured_where_the_system_tells_their_ends(
    folder: Path, scenario: str
) -> None:
    result = measured(folder, "uneven", scenario=scenario, period_ms=5.0, duration_s=1.0)
    assert result["elements_per_batch"] == pytest.approx(4.5, abs=0.3)
    with np.load(result["artifacts"]["samples"]) as samples:
        counts = samples["run0_counts_tokens"].tolist()
    assert counts == [3 + batch % 4 for batch in range(len(counts))]


def test_batches_of_different_amounts_are_refused_where_nobody_tells_their_ends(folder: Path) -> None:
    with pytest.raises(InputError, match=r"output 'tokens'.*io\.batch_done\(batch\)") as caught:
        measured(folder, "uneven_and_silent")
    assert caught.value.findings[0].rule == "uneven-batches"


def test_a_system_that_runs_out_of_items_is_measured_and_the_result_says_so(folder: Path) -> None:
    result = measured(folder, "fast", max_batches=40, duration_s=30.0)
    # On a machine that is busy at first the warm-up goes on for some of them.
    assert result["batches_measured"] == [40 - result["warmup"]["cut_at_change"]]
    assert any("raise max_batches" in note for note in result["notes"])
    assert result["confidence_95"]["fps"] is not None


def test_the_search_for_the_rate_ends_for_a_fast_system_with_batches_left_to_measure(folder: Path) -> None:
    result = measured(folder, "fast", scenario="max_rate", duration_s=1.0)
    assert result["batches_measured"][0] >= 5
    assert result["search_tries"] <= MAX_PROBES + MAX_FINAL_TRIES
    assert result["fps"] > 0


def test_all_wrong_settings_are_named_at_once(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        measured(folder, "fast", scenario="realtme", runs=0, duration_s=0)
    assert len(caught.value.findings) == 3
    assert "did you mean 'realtime'" in str(caught.value)
