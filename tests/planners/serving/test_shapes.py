"""On the shipped documents the plans have the shapes that the paper reports, and no baseline is better."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

import flashrt.planners.serving as serving
from flashrt.planners.serving import (
    Problem,
    Settings,
    baseline,
    make_problem,
    read_model,
    read_serving_profile,
    read_workload,
    restricted,
)
from flashrt.planners.serving.search import Answer

from .steps import plan_serving

FOLDER = Path(serving.__file__).parent / "examples"
SETTINGS = Settings(time_limit_s=5)
CASES = [
    ("qwen3-omni-like", "audio-third"),
    ("qwen3-omni-like", "audio-two-thirds"),
    ("internvl-like", "half-images"),
    ("qwen-vl-like", "half-images"),
    ("qwen-image-like", "mixed"),
]


def shipped(model: str, workload: str) -> Problem:
    folder = FOLDER / model
    return make_problem(
        read_model(folder / "model.yaml"), read_workload(folder / f"{workload}.yaml"),
        read_serving_profile(folder / "profile.yaml"),
    )  # fmt: skip


@functools.cache
def answer(model: str, workload: str) -> Answer:
    return plan_serving(shipped(model, workload), 8, SETTINGS)


def nodes(found: Answer) -> dict[frozenset[str], int]:
    """Return the GPUs of every node, by its components."""
    gpus: dict[frozenset[str], int] = {}
    for (_, mask), executors in zip(found.best.plan.logical.nodes, found.best.plan.allocation, strict=True):
        own = sum(found.problem.configurations[k].gpus * count for k, count in executors)
        name = frozenset(found.problem.names(mask))
        gpus[name] = gpus.get(name, 0) + own
    return gpus


def test_a_third_of_audio_merges_encoders_with_the_thinker_and_talker_with_the_vocoder() -> None:
    found = nodes(answer("qwen3-omni-like", "audio-third"))
    assert frozenset({"talker", "vocoder"}) in found
    (thinker,) = [name for name in found if "thinker" in name]
    assert len(thinker) > 1
    assert "talker" not in thinker
    assert found[frozenset({"talker", "vocoder"})] + found[thinker] >= 6


def test_two_thirds_of_audio_split_talker_and_vocoder() -> None:
    found = nodes(answer("qwen3-omni-like", "audio-two-thirds"))
    assert found[frozenset({"talker"})] >= 4
    assert frozenset({"vocoder"}) in found


def test_a_heavy_encoder_has_gpus_of_its_own() -> None:
    found = nodes(answer("internvl-like", "half-images"))
    assert found[frozenset({"image_encoder"})] >= 3


@pytest.mark.parametrize("case", [("qwen-vl-like", "half-images"), ("qwen-image-like", "mixed")])
def test_where_the_first_stage_is_light_all_is_one(case: tuple[str, str]) -> None:
    found = answer(*case)
    assert set(nodes(found)) == {frozenset(found.problem.model.components)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_no_baseline_is_better(case: tuple[str, str]) -> None:
    found = answer(*case)
    assert found.best.simulated is not None
    mine = float(found.best.simulated.goodput_per_s.sum())
    for name in ("monolithic", "disaggregated", "encoder_split"):
        groups = baseline(found.problem.model, name)
        settings = restricted(Settings(time_limit_s=1))
        other = plan_serving(shipped(*case), 8, settings, allowed=groups.allowed)
        assert other.best.simulated is not None
        # Equal as far as simulations can tell: their intervals meet.
        slack = found.best.simulated.total_error + other.best.simulated.total_error
        assert mine >= other.best.simulated.goodput_per_s.sum() - slack, name


def test_the_shipped_documents_are_what_their_rules_make() -> None:
    script = Path(__file__).parents[3] / "scripts" / "serving_examples.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
