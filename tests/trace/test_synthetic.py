"""Drafts of small references, each with one thing to see: they validate, mean the reference, and have its stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis import analyze_program
from flashrt.ir.building import build_file
from tests.trace import drafting
from tests.trace.cases import INPUTS
from tests.trace.references import CASES
from tests.trace.refused import FAILS, LEFT_EARLY, NO_LOOP

COUNT = 6


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with drafting.pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def drafts(process: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("synthetic")
    found = {}
    for name, case in CASES.items():
        folder = root / name
        folder.mkdir()
        (folder / "reference.py").write_text(case.code)
        (folder / "inputs.py").write_text(case.inputs)
        found[name] = process.submit(
            drafting.drafted, str(folder / "reference.py"), "serve", str(folder / "inputs.py"),
            str(root / "drafts" / name), COUNT, 2, {}, name,
        )  # fmt: skip
    return {name: (future.result(timeout=240), root / "drafts" / name) for name, future in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_draft_means_the_reference_and_breaks_no_rule(name: str, drafts: dict[str, Any]) -> None:
    draft, _ = drafts[name]
    assert draft["equal"]
    assert all(draft["equal"].values())
    assert draft["warnings"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_draft_has_the_stages_states_loops_and_questions(name: str, drafts: dict[str, Any]) -> None:
    draft, _ = drafts[name]
    case = CASES[name]
    for wanted in case.operations:
        assert any(wanted in path for path in draft["operations"]), draft["operations"]
    assert set(case.states) <= set(draft["program"].get("states", {}))
    assert bool(draft["program"].get("states")) is bool(case.states)
    assert set(case.kinds) <= {question["kind"] for question in draft["questions"]}
    assert sum("repeat" in graph for graph in draft["program"]["graphs"].values()) == case.repeats


@pytest.mark.parametrize("name", CASES)
def test_each_question_stands_beside_what_it_is_about(name: str, drafts: dict[str, Any]) -> None:
    draft, folder = drafts[name]
    text = (folder / "program.yaml").read_text()
    assert text.count("# question (") == len(draft["questions"])
    for question in draft["questions"]:
        assert question["question"] in text
        assert len(question["choices"]) >= 2
        assert question["drafted"] == question["choices"][0]["answer"]
        part: Any = draft["program"]
        if question["where"] != "document":
            kind, _, rest = question["where"].partition(".")
            if kind == "states":
                assert rest in part["states"]
            else:
                graph, _, edge = rest.partition(".edges.")
                assert edge in {f"{one['from']} -> {one['to']}" for one in part["graphs"][graph]["edges"]}


@pytest.mark.parametrize("name", ["loop_with_carry", "nested_modules", "opened_function"])
def test_times_of_the_trace_are_a_profile_of_the_draft(name: str, drafts: dict[str, Any]) -> None:
    _, folder = drafts[name]
    built = build_file(folder / "program.yaml")
    deployment = {
        "schema": "flashrt/deployment@1", "program": "program.yaml", "devices": "cpu", "groups": {"all": [0]},
        "place": {operation.path: "all" for operation in built.flat.operations},
    }  # fmt: skip
    found = analyze_program(built, json.loads((folder / "profile.json").read_text()), deployment)
    assert found["t_min_ms"] > 0


def test_the_same_reference_gives_the_same_draft_in_another_process(drafts: dict[str, Any]) -> None:
    name = "generator_outside"
    draft, folder = drafts[name]
    reference = folder.parents[1] / name
    with drafting.pool() as process:
        again = process.submit(
            drafting.drafted, str(reference / "reference.py"), "serve", str(reference / "inputs.py"), str(folder),
            COUNT, 2, {}, name,
        ).result(timeout=240)  # fmt: skip
    assert again["yaml"] == draft["yaml"]
    assert again["ops"] == draft["ops"]


def test_a_branch_that_no_batch_took_is_asked_about(drafts: dict[str, Any]) -> None:
    draft, _ = drafts["rare_branch"]
    (question,) = [one for one in draft["questions"] if one["kind"] == "untaken-branch"]
    assert question["source"] == "reference.py:18"


def test_no_operation_that_is_not_asked_for_is_loaded(drafts: dict[str, Any]) -> None:
    _, folder = drafts["opened_function"]
    text = (folder / "ops.py").read_text()
    needs = json.loads(text.partition("NEEDS: dict[str, list[int]] = ")[2].partition("\n}")[0].replace("'", '"')
                       .rstrip().rstrip(",") + "}")  # fmt: skip
    assert set(needs) == {"encode", "decode"}
    assert len(needs["decode"]) < len(needs["encode"])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LEFT_EARLY, ["'continue' at reference.py:6", "call ir_trace again"]),
        (FAILS, ["reference.py:12", "LinAlgError", "raised at reference.py:6"]),
        (NO_LOOP, ["a loop over the inputs", "no loop that reads an input"]),
    ],
)
def test_what_cannot_be_traced_is_said_with_its_place(
    code: str, said: list[str], process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    (tmp_path / "reference.py").write_text(code)
    (tmp_path / "inputs.py").write_text(INPUTS)
    text = process.submit(
        drafting.failure, str(tmp_path / "reference.py"), "serve", str(tmp_path / "inputs.py"), COUNT
    ).result(timeout=240)  # fmt: skip
    for words in said:
        assert words in text
