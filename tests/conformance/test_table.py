"""The judge of `make conformance` judges: what fails, is missing, or passes unexpectedly ends it with 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "conformance_table.py"
EXPECTED = "fixture: [known, partly:one]\n"


def judge(folder: Path, scenarios: str, **results: dict[str, str]) -> tuple[int, str]:
    expected = folder / "expected.yaml"
    expected.write_text(EXPECTED)
    for name, checks in results.items():
        place = folder / "results" / f"server-{name}-2026-01-01T00-00-00-000Z"
        place.mkdir(parents=True)
        record = [{"id": id, "status": status, "errorMessage": f"about {id}"} for id, status in checks.items()]
        (place / "checks.json").write_text(json.dumps(record))
    line = [sys.executable, str(SCRIPT), str(expected), "fixture", str(folder / "results"), scenarios]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


GOOD = {"one": "SUCCESS", "two": "SUCCESS"}


def test_what_passes_and_what_is_known_to_fail_is_fine(tmp_path: Path) -> None:
    status, said = judge(
        tmp_path, "plain known partly", plain=GOOD, known={"one": "FAILURE"},
        partly={"one": "FAILURE", "two": "SUCCESS"},
    )  # fmt: skip
    assert status == 0, said
    assert "0 unexpected" in said


@pytest.mark.parametrize(
    ("scenarios", "results", "words"),
    [
        ("plain", {"plain": {"one": "SUCCESS", "two": "FAILURE"}}, "plain, two: about two"),
        ("plain gone", {"plain": GOOD}, "gone: did not run"),
        ("plain", {}, "plain: did not run"),
        ("partly", {"partly": {"one": "FAILURE", "two": "FAILURE"}}, "partly, two"),
        ("known", {"known": GOOD}, "known: passes"),
        ("partly", {"partly": GOOD}, "partly: passes"),
    ],
)
def test_everything_else_ends_it_with_1(
    tmp_path: Path, scenarios: str, results: dict[str, dict[str, str]], words: str
) -> None:
    status, said = judge(tmp_path, scenarios, **results)
    assert status == 1
    assert f"UNEXPECTED  {words}" in said
