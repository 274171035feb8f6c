"""What a deployment may choose beside the place of its operations: tiles, nodes beside the batches, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis import read_deployment
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram, build
from tests.ir.documents import edge, flat_graph

GROUPS = {"g": [0], "h": [1], "two": [2, 3], "three": [4, 5, 6]}
PLACE = {"prompt": "g", "paint": "two", "steps": "h"}


def program() -> BuiltProgram:
    """Return x -> prompt (event driven) -> paint (tiles) -> a repeated graph with a tiled node -> y."""
    nodes = {
        "prompt": {"op": "prompt", "event_driven": True, "degrees": [1, 2]},
        "paint": {"op": "paint", "tiles": [2, 3]},
        "steps": {"graph": "steps"},
    }
    edges = [
        edge("x", "prompt.x"),
        edge("prompt.y", "paint.x"),
        edge("paint.y", "steps.x"),
        edge("steps.latents", "y"),
    ]
    steps = {
        "repeat": {"times": 2, "carry": {"latents": "x"}},
        "inputs": {"x": {}},
        "outputs": {"latents": {}},
        "nodes": {"step": {"op": "step", "tiles": [2]}},
        "edges": [edge("x", "step.x"), edge("step.y", "latents")],
    }
    document = flat_graph(nodes, edges)
    del document["ops"]
    return build({**document, "graphs": {**document["graphs"], "steps": steps}}, Path(__file__).parent)


def read(**changes: Any) -> Any:
    return read_deployment({"groups": GROUPS, "place": PLACE, "tiles": {"paint": 2}, **changes}, program())


def test_tiles_stand_in_for_a_degree_and_reach_every_iteration() -> None:
    placement = read(place={**PLACE, "steps": "two"}, tiles={"paint": 2, "steps": 2})
    assert placement.devices["paint"] == placement.devices["steps/step[1]"] == (2, 3)
    assert read(place={**PLACE, "paint": "three"}, tiles={"paint": 3}).devices["paint"] == (4, 5, 6)


def test_event_driven_nodes_run_beside_the_batches() -> None:
    assert read().asynchronous == frozenset()
    assert read(asynchronous=["prompt"]).asynchronous == {"prompt"}
    # A node whose consumers have devices that are its own in part is refused below; a wide group is not.
    assert read(asynchronous=["prompt"], place={**PLACE, "prompt": "three", "paint": "two"}, groups={
        **GROUPS, "three": [4, 5]}).asynchronous == {"prompt"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rules", "text"),
    [
        ({"tiles": {"pain": 2, "paint": 2}}, ["unknown-operation"], "tiles, 'pain'.*did you mean 'paint'"),
        ({"tiles": {"paint": 4}}, ["tile-count"], "tiles, 'paint': expected one of the tile counts.*'2', '3', got 4"),
        ({"tiles": {"paint": 2, "prompt": 2}}, ["tile-count"], "tiles, 'prompt'.*none, got 2"),
        ({"tiles": {"paint": 3}}, ["tile-group"], r"a group of 3 devices, one a tile, got \[2, 3\]"),
        ({"tiles": {"paint": 2, "steps": 2}}, ["tile-group", "tile-group"], r"tiles, 'steps'.*got \[1\]"),
        ({"tiles": {}}, ["degree"], "operation 'paint'.*degrees '1'"),
        ({"tiles": {"paint": 0}}, ["greater_than_equal"], "tiles.*greater than or equal to 1"),
        ({"asynchronous": ["paint"]}, ["not-event-driven"], "asynchronous, 'paint'.*event_driven: true"),
        ({"asynchronous": ["promt"]}, ["unknown-operation"], "asynchronous, 'promt'.*did you mean 'prompt'"),
        (
            {"asynchronous": ["prompt"], "place": {**PLACE, "steps": "g"}},
            ["asynchronous-shares"],
            r"asynchronous, 'prompt': expected devices of its own, got it shares them with 'steps/step\[0\]'",
        ),
        (
            {"asynchronous": ["prompt"], "place": {**PLACE, "prompt": "part"}, "groups": {**GROUPS, "part": [3]}},
            ["asynchronous-shares"],
            "shares them with 'paint'",
        ),
        ({"nan": "ignore"}, ["literal_error"], "key 'nan'.*one of 'refuse', 'pass'"),
        ({"operation_timeout_s": 0}, ["greater_than"], "operation_timeout_s.*greater than 0"),
        ({"operation_timeout_s": float("inf")}, ["finite_number"], "operation_timeout_s.*finite"),
        ({"in_flight": 0}, ["greater_than_equal"], "in_flight.*greater than or equal to 1"),
        ({"in_flight": 1001}, ["less_than_equal"], "in_flight.*less than or equal to 1000"),
        ({"transport": "pigeon"}, ["literal_error"], "transport.*'shared_memory'"),
        ({"spin_us": -1}, ["greater_than_equal"], "spin_us.*greater than or equal to 0"),
        ({"cluster": "slurm"}, ["literal_error"], "cluster.*'ray'"),
    ],
)  # fmt: skip
def test_each_finding_is_named(change: dict[str, Any], rules: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        read(**change)
    assert [finding.rule for finding in caught.value.findings] == rules, str(caught.value)


def test_findings_of_all_kinds_come_together() -> None:
    with pytest.raises(InputError) as caught:
        read(tiles={"zz": 2, "paint": 3}, asynchronous=["paint", "yy"], blocking=["a -> b"])
    assert sorted(finding.rule for finding in caught.value.findings) == [
        "not-event-driven", "tile-group", "unknown-edge", "unknown-operation", "unknown-operation",
    ]  # fmt: skip
