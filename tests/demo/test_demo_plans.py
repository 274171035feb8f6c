"""The demonstrations' documents: what they try is there and legal, what they compare is what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis import analyze_program, read_profile
from flashrt.errors import InputError
from flashrt.ir import build_file
from flashrt.ir.documents import read_document
from flashrt.mcp_server.demo import applications
from flashrt.mcp_server.demo_plan import deployment_of, read_plan

APPS = ("background_editor", "conversation", "longlive", "omni", "worldplay")
FAMILIES = {
    "conversation": ["stream:talker.codes->vocoder.codes", "step-pipeline:dit"],
    "omni": ["stream:talker.codes->vocoder.codes", "disaggregate:thinker|talker|vocoder"],
    "worldplay": ["co-locate:dit|vae@2", "disaggregate:dit|vae", "step-pipeline:dit"],
    "longlive": ["co-locate:dit|vae@4", "disaggregate:asr,director,dit|vae", "event-driven:asr"],
    "background_editor": ["co-locate:dit|decoder@3", "disaggregate:encoder,dit,decoder|sam,mix"],
}
"""The paper's key variants."""
EXACT = 0.05


def modelled(name: str) -> list[tuple[Any, dict[str, Any], Any]]:
    """Return each emulated run of a demonstration with the model's figures."""
    folder = applications()[name]
    plan, built = read_plan(folder), build_file(folder / "program.yaml")
    assert plan.emulated is not None
    if plan.emulated.profile == "measured":
        return []
    profile = read_profile(read_document(folder / plan.emulated.profile))
    assert profile.provenance == "inferred"
    analysis = analyze_program(built, profile, None)
    streaming = [edge["edge"] for edge in analysis["streaming"] if edge["streams"]]
    runs = []
    for run in plan.emulated.runs:
        document = deployment_of(run, "program.yaml", plan.emulated.profile, streaming)
        runs.append((run, analyze_program(built, profile, document), plan.emulated))
    return runs


def test_the_five_applications_are_shipped() -> None:
    assert tuple(applications()) == APPS


@pytest.mark.parametrize("name", APPS)
def test_key_variants_and_those_that_are_tried_are_legal_candidates(name: str) -> None:
    folder = applications()[name]
    found = {one["id"]: one["legal"] for one in analyze_program(build_file(folder / "program.yaml"))["candidates"]}
    wanted = [*FAMILIES[name], *read_plan(folder).candidates]
    assert {candidate: found.get(candidate) for candidate in wanted} == dict.fromkeys(wanted, True)


@pytest.mark.parametrize("name", ["background_editor", "conversation", "longlive", "worldplay"])
def test_the_model_has_the_published_rates_where_the_profile_is_inferred_from_them(name: str) -> None:
    rates = 0
    for run, figures, emulated in modelled(name):
        if emulated.rate == "within_batch":
            if run.published.fps is None:
                continue
            rate = emulated.frames_after_first * 1000 / (figures["latency_ms"] - figures["first_output_ms"])
            assert figures["first_output_ms"] == pytest.approx(run.published.latency_ms, rel=EXACT)
        elif run.published.fps is None:
            assert figures["latency_ms"] == pytest.approx(run.published.latency_ms, rel=EXACT)
            continue
        else:
            rate = figures["fps"]
        rates += 1
        assert rate == pytest.approx(run.published.fps, rel=EXACT), run.name
    assert rates


def test_a_wrong_plan_is_refused_with_every_finding(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(json.dumps({"schema": "flashrt/demo@1", "batchs": 3, "figure": "speed"}))
    with pytest.raises(InputError, match=r"batchs[\s\S]*figure|figure[\s\S]*batchs"):
        read_plan(tmp_path)


def test_without_a_plan_every_candidate_is_tried(tmp_path: Path) -> None:
    assert read_plan(tmp_path).wants("anything")
