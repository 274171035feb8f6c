"""Lies and honest programs, side by side: every lie is found at its node and state, no honest one is accused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt.ir import load_function
from tests.runtime.programs import ProgramMaker

from .auditing import audit_folder, audit_forked, auditors
from .programs import HONEST, LIES, Case


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[bool, ProcessPoolExecutor]]:
    with auditors(torch=False) as plain, auditors(torch=True) as tensors:
        yield {False: plain, True: tensors}


def audited(pools: dict[bool, ProcessPoolExecutor], case: Case, folder: Path) -> dict[str, Any]:
    future = pools[case.torch].submit(audit_forked, str(folder), case.document(), case.ops(), case.start)
    return future.result(timeout=280)


def told(result: dict[str, Any], *severities: str) -> list[tuple[str, str, str]]:
    return [
        (one["kind"], template, one["subject"])
        for one, template in zip(result["findings"], result["templates"], strict=True)
        if one["severity"] in severities
    ]


@pytest.mark.parametrize("case", LIES, ids=lambda case: case.name)
def test_a_lie_is_found_with_its_node_and_state(
    pools: dict[bool, ProcessPoolExecutor], case: Case, tmp_path: Path
) -> None:
    result = audited(pools, case, tmp_path)
    found = told(result, "error", "warning")
    for kind, node, subject in case.finds:
        assert any(k == kind and n == node and subject in s for k, n, s in found), (found, result["unchecked"])
    accused = {node for _, node, _ in found}
    assert accused == {node for _, node, _ in case.finds}, found
    assert all(one["fix"] and one["evidence"] for one in result["findings"])


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_program_is_not_accused(pools: dict[bool, ProcessPoolExecutor], case: Case, tmp_path: Path) -> None:
    result = audited(pools, case, tmp_path)
    assert told(result, "error", "warning") == [], result["findings"]
    assert set(case.hints) <= {kind for kind, _, _ in told(result, "hint")}
    states = {name: status for name, (status, _) in result["claims"].items() if name.startswith("states:")}
    assert set(states.values()) == {"confirmed"}, result["claims"]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_not_accused(pools: dict[bool, ProcessPoolExecutor], seed: int, tmp_path: Path) -> None:
    ProgramMaker(seed).make(tmp_path)
    document = yaml.safe_load((tmp_path / "program.yaml").read_text())
    batches = list(load_function(tmp_path / "inputs.py", "batches")(seed, 4))
    result = pools[False].submit(audit_folder, str(tmp_path), document, batches, {}, False).result(timeout=280)
    assert told(result, "error", "warning") == [], result["findings"]
    assert {status for status, _ in result["claims"].values()} <= {"confirmed"}


def test_there_are_forty_of_each() -> None:
    assert len({case.name for case in LIES}) == len(LIES) >= 40
    assert len({case.name for case in HONEST}) == len(HONEST) >= 40
