"""Candidates: legal and illegal, with the edge or state that forbids them, compositions, and ready deployments."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import flashrt.apps.worldplay
from flashrt.analysis import analyze_program, evaluate_placement, find_units, read_deployment, read_profile
from flashrt.analysis.ordering import limit_nodes
from flashrt.ir import BuiltProgram, build, build_file, read_document

WORLDPLAY = Path(flashrt.apps.worldplay.__file__).parent
PROFILE = WORLDPLAY / "profiles" / "paper.yaml"
FOLDER = Path(__file__).parent


def worldplay(**changes: Any) -> BuiltProgram:
    """The shipped program; `changes` replace keys of the two op nodes, or the cache's declaration (`kv`)."""
    document = read_document(WORLDPLAY / "program.yaml")
    document["states"]["dit.kv"] = changes.pop("kv", document["states"]["dit.kv"])
    document["graphs"]["app"]["nodes"]["vae"].update(changes)
    document["graphs"]["denoise"]["nodes"]["step"].update(changes)
    return build(document, WORLDPLAY)


def candidates(built: BuiltProgram, profile: Any = None, deployment: Any = None) -> dict[str, dict[str, Any]]:
    result = analyze_program(built, profile, deployment)
    json.dumps(result)
    found = {candidate["id"]: candidate for candidate in result["candidates"]}
    assert len(found) == len(result["candidates"])
    for candidate in found.values():
        assert {"id", "transformation", "targets", "legality", "legal", "bottleneck", "expected"} <= set(candidate)
        assert candidate["legality"]
        assert candidate["bottleneck"]
        assert "deployment" not in candidate or candidate["legal"]
    return found


def test_worldplay_candidates_and_what_they_promise() -> None:
    built = build_file(WORLDPLAY / "program.yaml")
    found = candidates(built, PROFILE)
    legal = {name for name, candidate in found.items() if candidate["legal"]}
    assert {
        "stream:dit.latents->vae.latents",
        "stream:vae.frames->frames",
        "disaggregate:dit|vae",
        "step-pipeline:dit",
        "stream:dit.latents->vae.latents+disaggregate:dit|vae",
        "stream:dit.latents->vae.latents+step-pipeline:dit",
        "disaggregate:dit|vae+step-pipeline:dit",
    } <= legal
    apart = found["disaggregate:dit|vae"]["expected"]
    assert apart["period_ms"] == pytest.approx(387.1)
    assert apart["versus_baseline"]["fps"] == pytest.approx(588.24 / 387.1, abs=1e-5)
    assert apart["num_devices"] == 2
    streamed = found["stream:dit.latents->vae.latents"]["expected"]["versus_baseline"]
    assert streamed["period"] == 1
    assert streamed["first_output"] < 1
    both = found["stream:dit.latents->vae.latents+disaggregate:dit|vae"]["expected"]["versus_baseline"]
    assert both["period"] == apart["versus_baseline"]["period"]
    assert both["first_output"] == streamed["first_output"]
    pipelined = found["disaggregate:dit|vae+step-pipeline:dit"]["expected"]
    assert pipelined["period_ms"] == pytest.approx(201.14)
    assert pipelined["num_devices"] == 5


def test_illegal_ones_name_what_forbids_them() -> None:
    found = candidates(worldplay(degrees=[1], tiles=[]))
    illegal = {name: candidate for name, candidate in found.items() if not candidate["legal"]}
    assert "carried between iterations" in illegal["stream:step.sample->sample"]["legality"]
    assert "declared blocking" in illegal["stream:step.latents->latents"]["legality"]
    assert "declares degrees [1]" in illegal["sequence-parallel:vae"]["legality"]
    assert "tile counts" in illegal["tile:vae"]["legality"]
    assert "vae.cache" in illegal["double-buffer:vae.cache"]["legality"]
    assert "RAW" in illegal["double-buffer:vae.cache"]["legality"]
    assert "event_driven" in illegal["event-driven:vae"]["legality"]


def test_steps_that_share_a_state_are_not_pipelined() -> None:
    built = worldplay(kv={})
    found = candidates(built, PROFILE)["step-pipeline:dit"]
    assert not found["legal"]
    assert "'dit.kv'" in found["legality"]
    assert "'dit/step[3] -> dit/step[0]' (lambda 1, RAW, state 'dit.kv')" in found["legality"]
    assert "no period below 387.1 ms" in found["expected"]
    assert "deployment" not in found
    parallel = analyze_program(built)["parallel"]
    assert not any({"dit/step[0]", "dit/step[1]"} <= set(group["operations"]) for group in parallel)


def test_degrees_tiles_and_missing_times() -> None:
    built = worldplay(degrees=[1, 2, 4, 8], tiles=[4])
    found = candidates(built, PROFILE)
    assert found["sequence-parallel:dit@4"]["expected"]["period_ms"] == pytest.approx(4 * 67.72 + 201.14)
    assert found["sequence-parallel:dit@4"]["deployment"]["groups"] == {"a": [0, 1, 2, 3], "b": [0]}
    assert "never extrapolated" in found["sequence-parallel:dit@8"]["expected"]
    assert found["co-locate:dit|vae@2"]["expected"]["fps"] == pytest.approx(25.5, abs=0.05)
    assert found["disaggregate:dit|vae+sequence-parallel:dit@2"]["expected"]["num_devices"] == 3
    assert found["tile:vae@4"]["legal"]
    assert "perceptually" in found["tile:vae@4"]["legality"]


def test_ready_deployments_run_as_they_stand() -> None:
    for built in (build_file(WORLDPLAY / "program.yaml"), worldplay(degrees=[1, 2, 4])):
        profile = read_profile(PROFILE, built)
        found = [c for c in candidates(built, PROFILE).values() if "deployment" in c]
        assert len(found) > 5
        for candidate in found:
            cost = evaluate_placement(built, profile, read_deployment(candidate["deployment"], built))
            assert cost.t_min_ms == candidate["expected"]["period_ms"]
            assert cost.latency_ms == candidate["expected"]["latency_ms"]
            assert cost.first_output_ms == candidate["expected"]["first_output_ms"]


def app(nodes: dict[str, Any], edges: list[tuple[str, str]], states: dict[str, Any], **more: Any) -> BuiltProgram:
    def edge(source: str, target: str) -> dict[str, Any]:
        mode = {"mode": "streaming", "chunks": 2} if target in more.get("streams", ()) else {"mode": "blocking"}
        return {"from": source, "to": target, **mode}

    return build(
        {
            "schema": "flashrt/program@1", "name": "small", "entry": "app", "states": states,
            "graphs": {"app": {"inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": nodes,
                               "edges": [edge(source, target) for source, target in edges]}},
        },
        FOLDER,
    )  # fmt: skip


def declared(**times: Any) -> dict[str, Any]:
    return {"schema": "flashrt/profile@1", "device": "d", "provenance": "declared", "operations": times}


def test_double_buffering_removes_a_wait_for_readers() -> None:
    built = app(
        {"w": {"op": "w", "writes": ["s"]}, "r": {"op": "r", "reads": ["s"]}},
        [("x", "w.x"), ("w.y", "r.x"), ("r.y", "y")],
        {"s": {}},
    )
    found = candidates(built, declared(w=10, r=20))
    assert found["disaggregate:w|r"]["expected"]["period_ms"] == 30
    double = found["double-buffer:s"]
    assert double["legal"]
    assert "'r -> w' (lambda 1, WAR, state 's')" in double["legality"]
    assert double["expected"]["period_ms"] == 20
    assert "deployment" not in double
    assert double["program_change"] == {"state": "s", "copies": 2}


def test_streaming_is_illegal_where_the_ends_share_a_state() -> None:
    built = app(
        {"u": {"op": "u", "writes": ["s"]}, "v": {"op": "v", "reads": ["s"]}},
        [("x", "u.x"), ("u.y", "v.x"), ("v.y", "y")],
        {"s": {}},
        streams=("v.x", "y"),
    )
    found = candidates(built, declared(u=10, v=20))
    assert not found["stream:u.y->v.x"]["legal"]
    assert "state 's'" in found["stream:u.y->v.x"]["legality"]
    assert found["stream:v.y->y"]["legal"]


def test_an_event_driven_stage_leaves_the_path() -> None:
    nodes = {"ear": {"op": "e", "event_driven": True}, "dit": {"op": "d"}}
    built = app(nodes, [("x", "ear.x"), ("x", "dit.x"), ("ear.y", "dit.e"), ("dit.y", "y")], {})
    found = candidates(built, declared(ear=30, dit=10))
    stage = found["event-driven:ear"]
    assert stage["legal"]
    assert stage["expected"]["latency_ms"] == 10
    assert stage["expected"]["versus_baseline"]["latency"] == 0.25
    assert not found["event-driven:dit"]["legal"]


def test_opaque_nodes_keep_their_devices() -> None:
    nodes = {"llm": {"opaque": "engine", "devices": 2}, "tts": {"op": "t", "degrees": [1, 2]}}
    built = app(nodes, [("x", "llm.x"), ("llm.y", "tts.x"), ("tts.y", "y")], {})
    found = candidates(built, declared(llm={"2": 10}, tts={"1": 5, "2": 3}))
    assert not found["co-locate:llm|tts"]["legal"]
    assert "opaque" in found["co-locate:llm|tts"]["legality"]
    assert "opaque" in found["sequence-parallel:llm"]["legality"]
    assert found["sequence-parallel:tts@2"]["expected"]["num_devices"] == 4


def test_parallel_groups_within_and_across_batches() -> None:
    built = app(
        {"a": {"op": "a"}, "b": {"op": "b"}, "c": {"op": "c"}, "d": {"op": "d", "reads": ["s"], "writes": ["s"]}},
        [("x", "a.x"), ("a.y", "b.x"), ("a.y", "c.x"), ("b.y", "d.b"), ("c.y", "d.c"), ("d.y", "y")],
        {"s": {}},
    )
    groups = analyze_program(built)["parallel"]
    assert {"b", "c"} in [set(group["operations"]) for group in groups if group["when"] == "within a batch"]
    assert {"a", "b", "c", "d"} in [set(group["operations"]) for group in groups if group["when"] == "across batches"]
    assert all(group["reason"] for group in groups)


def test_the_bottleneck_is_told_from_the_given_deployment() -> None:
    built = build_file(WORLDPLAY / "program.yaml")
    deployment = {"groups": {"a": [0], "b": [1]}, "place": {"dit/*": "a", "vae": "b"}, "period_ms": 400}
    result = analyze_program(built, PROFILE, deployment)
    assert result["t_min_ms"] == pytest.approx(387.1)
    assert result["t_min_resource_ms"] == pytest.approx(387.1)
    assert result["t_min_recurrence_ms"] == pytest.approx(201.14)
    assert result["d0_ms"] == pytest.approx(400 + 387.1 + 201.14 / 3, abs=1e-6)
    assert result["latency_ms"] == pytest.approx(588.24)
    assert result["order_proof"] == "optimal"
    assert result["provenance"] == "inferred"
    assert {step["operation"] for step in result["critical_cycle"]} == {f"dit/step[{i}]" for i in range(4)}
    assert sum(step["time_ms"] for step in result["critical_cycle"]) == pytest.approx(387.1)
    pipeline = next(c for c in result["candidates"] if c["id"] == "step-pipeline:dit")
    assert "387.1 of the 387.1 ms of the critical cycle" in pipeline["bottleneck"]


def test_units_look_through_a_wrapper() -> None:
    built = build(
        {
            "schema": "flashrt/program@1", "name": "wrapped", "entry": "outer",
            "graphs": {
                "outer": {"inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": {"inner": {"graph": "app"}},
                          "edges": [{"from": "x", "to": "inner.x", "mode": "blocking"},
                                    {"from": "inner.y", "to": "y", "mode": "blocking"}]},
                "app": {"inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": {"a": {"op": "a"}, "b": {"op": "b"}},
                        "edges": [{"from": "x", "to": "a.x", "mode": "blocking"},
                                  {"from": "a.y", "to": "b.x", "mode": "blocking"},
                                  {"from": "b.y", "to": "y", "mode": "blocking"}]},
            },
        },
        FOLDER,
    )  # fmt: skip
    assert [unit.name for unit in find_units(built)] == ["inner/a", "inner/b"]
    assert candidates(built)["disaggregate:inner/a|inner/b"]["deployment"]["place"] == {"inner/a": "a", "inner/b": "b"}


def test_a_long_chain_is_analysed_within_seconds() -> None:
    names = [f"n{index}" for index in range(60)]
    ends = [*zip(["x", *(f"{name}.y" for name in names)], [*(f"{name}.x" for name in names), "y"], strict=True)]
    graph = {
        "inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": {name: {"op": name} for name in names},
        "edges": [{"from": source, "to": target, "mode": "blocking"} for source, target in ends],
    }  # fmt: skip
    built = build({"schema": "flashrt/program@1", "name": "chain", "entry": "app", "graphs": {"app": graph}}, FOLDER)
    times = {"schema": "flashrt/profile@1", "device": "x", "provenance": "declared", "operations": {"*": 10}}
    began = time.process_time()
    assert candidates(built, times)
    assert time.process_time() - began < 15


def test_the_search_for_an_order_shrinks_with_the_program() -> None:
    assert limit_nodes(2000, 400_000, 50) == 2000
    assert limit_nodes(2000, 400_000, 5000) == 80
    assert limit_nodes(2000, 400_000, 10**9) == 4
