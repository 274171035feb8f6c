"""CP-SAT against exhaustive enumeration: with the tree search taken away, its answers have to be the whole front."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction

import pytest

from flashrt.analysis.search import SearchRequest, search_deployments
from flashrt.analysis.search.solve import Boxes, Solver
from flashrt.errors import InputError

from .instances import brute_force, random_instance
from .test_search import chain, check_point, exact, profile_of

NUM_INSTANCES = int(os.environ.get("FLASHRT_CLOSING_INSTANCES", "60"))
BATCH = 20
LIMIT_S = 20.0
"""Most are closed within a second of a machine's core; a busy machine gives a search a part of one."""


@pytest.mark.parametrize("first", range(0, NUM_INSTANCES, BATCH))
def test_without_the_tree_the_front_is_still_that_of_enumeration(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming, states, transfers, memory, islands, pins, overlapping groups and staggers, all on."""
    monkeypatch.setattr(Solver, "_round", lambda self, kernel, deadline: False)
    compared = closed = 0
    for seed in range(first, first + BATCH):
        instance = random_instance(seed)
        wanted = brute_force(instance)
        if wanted is None:
            continue
        request = replace(instance.request, time_limit_s=LIMIT_S)
        if not wanted:
            with pytest.raises(InputError):
                search_deployments(instance.built, instance.profile, request)
            continue
        compared += 1
        try:
            result = search_deployments(instance.built, instance.profile, request)
        except InputError as error:
            # It may have found none in that time; it must not say that there is none.
            if "not proved" not in str(error):
                raise
            continue
        # Whatever is claimed holds, whether or not the time was enough for all.
        gap = Fraction(0) if result.proof.status == "optimal" else Fraction(result.proof.gap or 1000)
        share = (1 + gap) * Fraction(1_000_001, 1_000_000)
        for period, latency in wanted:
            assert any(a <= period * share and b <= latency * share for a, b in map(exact, result.points)), seed
        closed += gap < Fraction(1, 1_000_000)
        for point in result.points:
            check_point(instance.built, instance.profile, request, point)
    assert compared > BATCH // 2
    # Ticks are a picosecond where chunks are thirds, and up to half a millisecond elsewhere.
    assert closed > compared // 5


def test_every_point_has_the_gap_of_the_boxes_beside_it() -> None:
    boxes = Boxes(0, 1000, Fraction(1, 10))
    figures = [(Fraction(100), Fraction(300)), (Fraction(150), Fraction(200))]
    assert boxes.find_open(figures, Fraction(0)) == [(99, 1000), (149, 299), (1000, 199)]
    assert boxes.find_gaps(figures) == [Fraction(1, 10)] * 3
    boxes.empty += [(99, 1000), (149, 299)]
    assert boxes.find_open(figures, Fraction(0)) == [(1000, 199)]
    assert [boxes.gap_of(figures, at) for at in (0, 1)] == [Fraction(100, 99) - 1, Fraction(1, 10)]
    # Half of a box says nothing of what is as fast as its better half.
    boxes.empty = [(124, 299)]
    assert boxes.find_gaps(figures)[1] == Fraction(1, 10)
    boxes.empty = [(146, 294)]
    assert boxes.find_gaps(figures)[1] == Fraction(150, 146) - 1
    boxes.empty = [(149, 289)]
    assert boxes.find_gaps(figures)[1] == Fraction(300, 290) - 1


def test_what_the_tree_leaves_open_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time for the tree, CP-SAT proves the front but for a millionth."""
    built = chain(8, (1, 2, 4))
    profile = profile_of({f"op{i}": {str(d): (7 + 5 * i % 11) / d**0.8 for d in (1, 2, 4)} for i in range(8)})
    whole = search_deployments(built, profile, SearchRequest(8, time_limit_s=250))
    assert whole.proof.status == "optimal"
    monkeypatch.setattr(Solver, "_round", lambda self, kernel, deadline: False)
    closed = search_deployments(built, profile, SearchRequest(8, time_limit_s=250))
    assert closed.proof.status == "gap"
    assert closed.proof.gap is not None
    assert closed.proof.gap < 1e-6
    assert [exact(point) for point in closed.points] == [exact(point) for point in whole.points]
