"""Documents are refused in FlashRT's words: allowed values by name, the nearest one, nothing of the validator's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis.profile import read_profile
from flashrt.errors import InputError
from flashrt.ir import read_document
from flashrt.ir.building import build


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "Input should" not in text
    return text


def test_a_wrong_mode_and_wrong_numbers_are_named(workspace: Path) -> None:
    document = copy.deepcopy(read_document(workspace / "program.yaml"))
    edge = document["graphs"]["app"]["edges"][0]
    edge.update(mode="blockng", chunks=0, axis="one")
    text = refusal(build, document, workspace)
    assert "expected one of 'blocking', 'streaming', got 'blockng' (did you mean 'blocking'?)" in text
    assert "expected greater than or equal to 1, got 0" in text
    assert "expected an integer, got 'one'" in text
    document["graphs"]["app"]["edges"][1]["chunks"] = 2.5
    document["graphs"]["app"]["inputs"] = "actions"
    text = refusal(build, document, workspace)
    assert "expected an integer, got 2.5" in text
    assert "expected a mapping, got 'actions'" in text
    document = copy.deepcopy(read_document(workspace / "program.yaml"))
    edge = document["graphs"]["app"]["edges"][0]
    del edge["mode"]
    assert "key 'mode': one of 'blocking', 'streaming' (there is no default)" in refusal(build, document, workspace)


def test_a_deployment_in_a_profiles_place_is_one_finding(workspace: Path) -> None:
    path = workspace / "deployment.yaml"
    path.write_text("schema: flashrt/deployment@1\nprogram: program.yaml\ngroups: {a: [0]}\nplace: {dit: a}\n")
    text = refusal(read_profile, path)
    assert "profile 'deployment.yaml', key 'schema': expected a profile ('flashrt/profile@1'), got a deployment" in text
    assert len(text.splitlines()) == 1


def test_a_missing_provenance_says_what_it_may_be() -> None:
    text = refusal(read_profile, {"schema": "flashrt/profile@1", "device": "cpu", "operations": {"a": 1.0}})
    assert "key 'provenance': one of 'measured', 'declared', 'inferred', 'predicted' (there is no default)" in text
