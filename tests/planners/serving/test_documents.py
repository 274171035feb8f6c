"""Documents that do not fit are refused with every finding at once; a profile of something else is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from flashrt.errors import InputError
from flashrt.planners.serving import (
    ServingModel,
    ServingProfile,
    Settings,
    Workload,
    baseline,
    make_problem,
    read_model,
)

from .steps import plan_serving

MODEL: dict[str, Any] = {
    "name": "m", "components": ["encoder", "llm", "voice"],
    "edges": [{"from": "encoder", "to": "llm", "colocatable": True}, {"from": "llm", "to": "voice"}],
}  # fmt: skip
WORKLOAD: dict[str, Any] = {
    "types": {
        "text": {"components": ["llm"], "fraction": 0.5, "target_ms": 100},
        "image": {"components": ["encoder", "llm"], "fraction": 0.3},
        "spoken": {"components": ["llm", "voice"], "fraction": 0.2},
    }
}
PROFILE: dict[str, Any] = {
    "provenance": "declared",
    "engines": [
        {"components": ["encoder"], "gpus": 1, "latency_ms": {1: {"image": 10}, 4: {"image": 22}}},
        {"components": ["llm"], "gpus": 1, "batching": "continuous",
         "latency_ms": {1: {"text": 30, "image": 40, "spoken": 35}, 8: {"text": 60, "image": 80, "spoken": 70}}},
        {"components": ["encoder", "llm"], "gpus": 1, "latency_ms": {1: {"text": 31, "image": 52, "spoken": 36}}},
        {"components": ["voice"], "gpus": 1, "latency_ms": {1: {"spoken": 20}}},
    ],
}  # fmt: skip


def problem(model: Any = MODEL, workload: Any = WORKLOAD, profile: Any = PROFILE, **more: Any) -> Any:
    return make_problem(
        ServingModel.model_validate(model), Workload.model_validate(workload), ServingProfile.model_validate(profile),
        **more,
    )  # fmt: skip


def refused(**documents: Any) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        problem(**documents)
    return {finding.rule: str(finding) for finding in caught.value.findings}


def changed(document: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    found = copy.deepcopy(document)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return found


@pytest.mark.parametrize(
    ("rule", "documents", "said"),
    [
        ("unknown-component", {"model": changed(MODEL, "edges", 0, "to", to="lm")}, "did you mean 'llm'"),
        ("unknown-component", {"workload": changed(WORKLOAD, "types", "text", "components", to=["llmm"])}, "'llm'"),
        ("unknown-component", {"profile": changed(PROFILE, "engines", 0, "components", to=["encodr"])}, "'encoder'"),
        ("cycle", {"model": changed(MODEL, "edges", 1, to={"from": "llm", "to": "encoder"})}, "without a cycle"),
        ("self-edge", {"model": changed(MODEL, "edges", 1, to={"from": "llm", "to": "llm"})}, "two components"),
        ("component-twice", {"model": changed(MODEL, "components", to=["encoder", "llm", "voice", "llm"])}, "once"),
        ("fractions", {"workload": changed(WORKLOAD, "types", "text", "fraction", to=0.4)}, "a sum of 1, got 0.9"),
        ("no-path", {"workload": changed(WORKLOAD, "types", "text", "components", to=["encoder", "voice"])}, "parts"),
        ("trace", {"workload": {**WORKLOAD, "arrivals": {"process": "trace"}}}, "a file"),
        ("not-colocatable", {"profile": changed(PROFILE, "engines", 3, "components", to=["llm", "voice"])}, "colocat"),
        ("engine-twice", {"profile": changed(PROFILE, "engines", to=[*PROFILE["engines"], PROFILE["engines"][3]])},
         "engine 3"),
        ("missing-type", {"profile": changed(PROFILE, "engines", 1, "latency_ms", 8, to={"text": 60})}, "missing"),
        ("falling-latency", {"profile": changed(PROFILE, "engines", 0, "latency_ms", 4, to={"image": 5})}, "not fall"),
        ("unknown-size", {"profile": changed(PROFILE, "engines", 0, "throughput_per_s", to={2: {"text": 9}})}, "sizes"),
        ("unprofiled-type", {"profile": changed(PROFILE, "engines", to=PROFILE["engines"][:1])}, "measure the profile"),
        ("stale-profile", {"profile": {**PROFILE, "key": {"model": "0" * 16}}}, "its components or edges are others"),
        ("foreign-profile", {"profile": {**PROFILE, "key": {"device": "A100"}}, "device": "H100"}, "'H100'"),
        ("stale-profile",
         {"profile": {**PROFILE, "types": {"text": {"tokens": 10}}},
          "workload": changed(WORKLOAD, "types", "text", "characteristics", to={"tokens": 4000})}, "4000"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_rule(rule: str, documents: dict[str, Any], said: str) -> None:
    assert said in refused(**documents)[rule]


def test_all_findings_come_at_once() -> None:
    found = refused(
        model=changed(MODEL, "edges", 1, to={"from": "llm", "to": "llm"}),
        workload=changed(WORKLOAD, "types", "text", to={"components": ["nothing"], "fraction": 0.1}),
        profile={**PROFILE, "key": {"model": "0" * 16}},
    )
    assert {"self-edge", "unknown-component", "fractions", "stale-profile"} <= set(found)


@pytest.mark.parametrize("wrong", [0, -1, float("inf")])
def test_a_capacity_of_nothing_is_refused_where_it_stands(wrong: float) -> None:
    with pytest.raises(ValueError, match="latency_ms"):
        ServingProfile.model_validate(changed(PROFILE, "engines", 0, "latency_ms", 1, to={"image": wrong}))


def test_an_impossible_target_names_the_least_latency() -> None:
    found = problem(workload=changed(WORKLOAD, "types", "text", "target_ms", to=5))
    with pytest.raises(InputError, match=r"at least 30 ms.*got 5"):
        plan_serving(found, 4, Settings(time_limit_s=1))


def test_too_few_gpus_say_how_many_it_takes() -> None:
    with pytest.raises(InputError, match="2 at least"):
        plan_serving(problem(), 1, Settings(time_limit_s=1))


def test_a_restriction_that_serves_a_type_nowhere_names_the_type() -> None:
    found = problem(profile=changed(PROFILE, "engines", to=[PROFILE["engines"][0], *PROFILE["engines"][2:]]))
    with pytest.raises(InputError, match="type 'text'"):
        plan_serving(
            found, 8, Settings(time_limit_s=1), allowed=baseline(found.model, [["encoder"], ["llm"], ["voice"]]).allowed
        )


def test_new_fractions_and_numbers_use_the_same_profile() -> None:
    workload = changed(WORKLOAD, "types", "text", "fraction", to=0.2)
    workload = changed(workload, "types", "spoken", "fraction", to=0.5)
    for gpus in (3, 5):
        answer = plan_serving(problem(workload=workload), gpus, Settings(time_limit_s=2))
        assert answer.best.plan.num_gpus(answer.problem) <= gpus


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("monolitic", "did you mean 'monolithic'"), ([["llm"], ["voice"]], "encoder"), ([["x"]], "'x'")],
)
def test_a_wrong_restriction_is_named(wanted: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        baseline(ServingModel.model_validate(MODEL), wanted)


def test_a_file_with_errors_names_them(tmp_path: Any) -> None:
    (tmp_path / "model.yaml").write_text("name: m\ncomponents: []\nedgs: []\n")
    with pytest.raises(InputError) as caught:
        read_model(tmp_path / "model.yaml")
    assert len(caught.value.findings) == 2
