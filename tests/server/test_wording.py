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
    assert "expected a valid integer" in text
    del edge["mode"]
    assert "key 'mode': one of 'blocking', 'streaming' (there is no default)" in refusal(build, document, workspace)


def test_a_missing_provenance_says_what_it_may_be() -> None:
    text = refusal(read_profile, {"schema": "flashrt/profile@1", "device": "cpu", "operations": {"a": 1.0}})
    assert "key 'provenance': one of 'measured', 'declared', 'inferred', 'predicted' (there is no default)" in text
