"""Whatever is wrong with a document, the answer is findings: never a crash of ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashrt.errors import InputError
from flashrt.ir import find_dependencies, flatten, parse_program, reduce_dependencies, to_mermaid, to_svg

from .documents import world

LEAVES = (
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=True)
    | st.sampled_from(["", "x", "app", "denoise", "dit", "vae.latents", "step.latents", "latents", "dit.kv", "[0]"])
    | st.sampled_from([[], {}, ["dit.kv"], {"op": "decode"}, {"graph": "app"}, {"opaque": "decode", "devices": 2}])
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in places(item, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, item in enumerate(value) for place in places(item, (*path, index))]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    document = world()
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.sampled_from(places(document)))
        parent: Any = document
        for step in place[:-1]:
            parent = parent[step]
        how = draw(st.sampled_from(["replace", "remove", "add", "swap"]))
        if how == "remove":
            del parent[place[-1]]
        elif how == "replace":
            parent[place[-1]] = copy.deepcopy(draw(LEAVES))
        elif how == "swap":
            other: Any = document
            for step in draw(st.sampled_from(places(document))):
                other = other[step]
            parent[place[-1]] = other if not isinstance(other, dict | list) else copy.deepcopy(draw(LEAVES))
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(["reads", "writes", "inputs", "graph", "op", "spare", "initial"]))] = (
                copy.deepcopy(draw(LEAVES))
            )
        if not document:
            break
    return document


@settings(max_examples=400, deadline=None)
@given(mutated())
@example({})
@example({"schema": "flashrt/program@1"})
@example({"schema": "flashrt/program@1", "name": "x", "entry": "a", "graphs": {"a": {"nodes": {}}}})
def test_any_mutation_of_a_document_yields_findings_or_a_program(document: dict[str, Any]) -> None:
    try:
        program, findings = parse_program(document, None)
    except InputError:
        return
    assert all(str(finding) for finding in findings)
    if any(finding.severity == "error" for finding in findings):
        return
    flat = flatten(program)
    reduce_dependencies(find_dependencies(flat))
    assert to_mermaid(program).startswith("flowchart")
    assert to_svg(program).startswith("<svg")


@pytest.mark.parametrize("depth", [50, 400, 4000])
def test_nested_graphs_are_flattened_up_to_a_bound(depth: int) -> None:
    graphs: dict[str, Any] = {}
    for level in range(depth):
        node = {"graph": f"g{level + 1}"} if level + 1 < depth else {"op": "f"}
        graphs[f"g{level}"] = {
            "inputs": {"x": {}},
            "outputs": {"y": {}},
            "nodes": {"n": node},
            "edges": [{"from": "x", "to": "n.x", "mode": "blocking"}, {"from": "n.y", "to": "y", "mode": "blocking"}],
        }
    document = {"schema": "flashrt/program@1", "name": "deep", "entry": "g0", "graphs": graphs}
    program, findings = parse_program(document, None)
    errors = [finding.rule for finding in findings if finding.severity == "error"]
    if depth > 64:
        assert errors == ["nested-too-deep"]
        return
    assert not errors
    assert len(flatten(program).operations) == 1
