"""Serving profiles from measured profiles of operations: times add up, what is added is inferred, gaps are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt.errors import InputError
from flashrt.planners.serving import (
    Settings,
    make_problem,
    read_model,
    read_serving_profile,
    read_workload,
)
from flashrt.planners.serving.measured import serving_profile
from tests.server.test_plan_serving import command

from .steps import plan_serving

MODEL = {
    "schema": "flashrt/model@1", "name": "pair", "components": ["dit", "vae"],
    "edges": [{"from": "dit", "to": "vae", "colocatable": True}],
}  # fmt: skip
WORKLOAD = {
    "schema": "flashrt/workload@1",
    "types": {
        "clip": {"components": ["dit", "vae"], "fraction": 0.6},
        "latent": {"components": ["dit"], "fraction": 0.4},
    },
}


def measured(step_ms: float, decode_ms: float) -> dict[str, Any]:
    return {
        "schema": "flashrt/profile@1", "device": "cuda-x", "provenance": "measured",
        "operations": {
            "dit/step[0]": {"1": step_ms, "2": step_ms / 2}, "dit/step[1]": {"1": step_ms, "2": step_ms / 2},
            "vae": {"1": decode_ms},
        },
        "samples": {
            "dit/step[0]": {"1": [step_ms - 1, step_ms + 1]}, "dit/step[1]": {"1": [step_ms - 1, step_ms + 1]},
            "vae": {"1": [decode_ms, decode_ms]},
        },
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    operations = {
        "schema": "flashrt/serving-operations@1", "model": "model.yaml", "workload": "workload.yaml",
        "operations": {"dit": ["dit/*"], "vae": ["vae"]},
        "profiles": {kind: {1: "one.yaml", 4: "four.yaml"} for kind in ("clip", "latent")},
    }  # fmt: skip
    documents = {
        "model": MODEL, "workload": WORKLOAD, "one": measured(20, 30), "four": measured(50, 90), "map": operations
    }  # fmt: skip
    for name, document in documents.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return tmp_path


def test_times_of_a_components_operations_add_up(folder: Path) -> None:
    found = serving_profile(folder / "map.yaml")
    assert found.provenance == "inferred"
    assert (found.key.device, found.key.model) == ("cuda-x", read_model(folder / "model.yaml").digest)
    by_engine = {(engine.components, engine.degree): engine for engine in found.engines}
    assert set(by_engine) == {(("dit",), 1), (("dit",), 2), (("vae",), 1), (("dit", "vae"), 1)}
    assert by_engine[("dit",), 1].latency_ms[1]["latent"] == (38.0, 42.0)
    assert by_engine[("dit",), 2].latency_ms[4]["clip"] == (50.0,)
    assert by_engine[("dit", "vae"), 1].latency_ms[1]["clip"] == (68.0, 72.0)
    assert by_engine[("dit", "vae"), 1].latency_ms[1]["latent"] == (38.0, 42.0)
    assert "latent" not in by_engine[("vae",), 1].latency_ms[1]


def test_the_written_profile_can_be_planned_with(folder: Path) -> None:
    done = command("--measured", "map.yaml", "--out", "made", folder=folder)
    assert done.returncode == 0, done.stderr
    problem = make_problem(
        read_model(folder / "model.yaml"), read_workload(folder / "workload.yaml"),
        read_serving_profile(folder / "made" / "serving-profile.yaml"),
    )  # fmt: skip
    assert plan_serving(problem, 3, Settings(time_limit_s=1)).best.plan.rate_per_s > 0


def test_what_is_missing_is_named_at_once(folder: Path) -> None:
    document = yaml.safe_load((folder / "map.yaml").read_text())
    document["operations"] = {"dit": ["transformer/*"], "vea": ["vae"]}
    document["profiles"]["clips"] = {1: "one.yaml"}
    (folder / "map.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as caught:
        serving_profile(folder / "map.yaml")
    rules = {finding.rule for finding in caught.value.findings}
    assert rules == {"unknown-component", "missing-component", "no-operations", "unknown-type"}
