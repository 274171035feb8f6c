"""What a result leaves out, does not cover, or cannot run is said: in `left_out`, in the proof, and in the notes."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.analysis import Deployment, Placement, Profile, read_profile
from flashrt.analysis.search import Pins, SearchRequest, search_deployments
from flashrt.analysis.search.layout import Found
from flashrt.analysis.search.model import MAX_BLOCKING_CHOICES
from flashrt.analysis.search.thin import thin_front, untried_edges
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram, build

PLACEMENT = Placement(Deployment(groups={}, place={}), {}, {})
STEPS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12)


def front(steps: list[tuple[int, int]]) -> list[Found]:
    """Return points of which none is better than another: periods rise, latencies fall."""
    periods = list(itertools.accumulate((step[0] for step in steps), initial=1000))
    latencies = list(itertools.accumulate((step[1] for step in steps), initial=1000))[::-1]
    return [Found(Fraction(p), Fraction(q), PLACEMENT) for p, q in zip(periods, latencies, strict=True)]


@settings(deadline=None, max_examples=200)
@given(STEPS, st.sampled_from([0.0, 0.005, 0.02, 0.3]))
def test_whatever_is_left_out_has_one_that_stands_for_it(steps: list[tuple[int, int]], min_gain: float) -> None:
    found = front(steps)
    kept, left = thin_front(found, min_gain)
    share = 1 + Fraction(str(min_gain))

    def covers(one: Found, other: Found) -> bool:
        return one.period <= other.period * share and one.latency <= other.latency * share

    assert len(kept) + len(left) == len(found)
    assert kept == sorted(kept, key=lambda one: one.period)
    assert not any(covers(one, other) for one, other in itertools.permutations(kept, 2))
    for one in left:
        assert one.period_percent <= min_gain * 100 + 1e-6
        assert one.latency_percent <= min_gain * 100 + 1e-6
        assert 0 <= one.instead < len(kept)
    if not min_gain:
        assert left == []


def relay(num: int) -> tuple[BuiltProgram, Profile]:
    """A chain whose streams are cut into two and three chunks by turns, so that each might be better run whole."""
    names = [f"op{index}" for index in range(num)]
    edges: list[dict[str, Any]] = [{"from": "x", "to": "op0.x", "mode": "blocking"}]
    for index, (a, b) in enumerate(itertools.pairwise(names)):
        edges.append({"from": f"{a}.y", "to": f"{b}.x", "mode": "streaming", "chunks": 2 + index % 2})
    edges.append({"from": f"{names[-1]}.y", "to": "y", "mode": "blocking"})
    graph = {"inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": {name: {"op": name} for name in names}, "edges": edges}
    document = {"schema": "flashrt/program@1", "name": "relay", "entry": "app", "graphs": {"app": graph}}
    times = {"schema": "flashrt/profile@1", "device": "d", "provenance": "declared",
             "operations": dict.fromkeys(names, 1.0)}  # fmt: skip
    return build(document, Path(__file__).parent), read_profile(times)


def test_a_proof_claims_no_more_than_was_searched() -> None:
    built, profile = relay(MAX_BLOCKING_CHOICES + 3)
    (untried,) = untried_edges(built)
    found = search_deployments(built, profile, SearchRequest(1))
    for proof in (found.proof, *(point.proof for point in found.points)):
        assert proof.status == "partial"
        record = proof.as_dict()
        assert isinstance(record, dict)
        assert record["gap"] is None
        assert record["within"]["gap"] == 0
        assert untried in record["within"]["scope"]
        assert str(proof) == f"optimal, among deployments in which '{untried}' streams"
    (note,) = found.notes
    assert untried in note
    assert "mode: blocking" in note
    with pytest.raises(InputError) as refused:
        search_deployments(built, profile, SearchRequest(1, max_latency_ms=1))
    assert [finding.rule for finding in refused.value.findings] == ["latency-not-reached", "not-all-searched"]


def test_a_proof_of_everything_is_plainly_optimal() -> None:
    built, profile = relay(MAX_BLOCKING_CHOICES + 2)
    assert untried_edges(built) == []
    found = search_deployments(built, profile, SearchRequest(1))
    assert (found.proof.as_dict(), found.notes) == ("optimal", ())


def test_what_the_runtime_refuses_is_noted_and_what_it_obeys_is_not() -> None:
    built, profile = relay(3)
    nested = build(
        {**{key: value for key, value in _document(built).items() if key != "graphs"}, "graphs": {"app": {
            **_document(built)["graphs"]["app"], "nodes": {f"op{n}": {"op": "f", "degrees": [1, 2]} for n in range(3)},
        }}},
        Path(__file__).parent,
    )  # fmt: skip
    wide = read_profile({
        "schema": "flashrt/profile@1", "device": "d", "provenance": "declared",
        "operations": {f"op{n}": {1: 2.0, 2: 1.0} for n in range(3)},
    })  # fmt: skip
    pins = Pins(place={"op0": [0, 1], "op1": [0], "op2": [1]})
    (point,) = search_deployments(nested, wide, SearchRequest(2, overlap="aligned", pins=pins)).points
    assert not point.runnable
    assert "share devices" in point.notes[0]
    for stagger in (0, 1):
        for point in search_deployments(built, profile, SearchRequest(2, max_stagger=stagger)).points:
            assert point.runnable
            assert point.notes == ()


def _document(built: BuiltProgram) -> dict[str, Any]:
    from flashrt.ir import dump

    return dump(built.program)
