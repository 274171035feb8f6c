"""A source of chance is named only if draws tell it apart from coincidence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from scipy import stats

from flashrt.bench.audit.chance import MAX_COINCIDENCE, MAX_DRAWS, Draws, coincidence


def drawing(values: Iterable[int | None]) -> Callable[[], int | None]:
    iterator = iter(values)
    return lambda: next(iterator)


def decided(free: Iterable[int | None], fixed: Iterable[int | None]) -> bool:
    return Draws(drawing(free), int.__eq__).decided_by(drawing(fixed))


def test_a_constant_among_results_that_all_differ_is_the_source() -> None:
    assert decided(itertools.count(), itertools.repeat(-1))


def test_a_constant_that_is_one_of_two_results_is_the_source() -> None:
    assert decided(itertools.cycle([0, 1]), itertools.repeat(1))


def test_draws_that_coincide_at_first_do_not_name_a_source() -> None:
    # Of 256 results two in a row are equal once in 256 runs: the third tells.
    assert not decided(itertools.count(), [7, 7, 3])


@pytest.mark.parametrize("rare", [5, 12, MAX_DRAWS - 1])
def test_a_result_that_is_rare_anyway_names_no_source(rare: int) -> None:
    free = [0] * rare + [1] + [0] * MAX_DRAWS
    assert not decided(free, itertools.repeat(0))


def test_runs_that_fail_name_no_source() -> None:
    assert not decided(itertools.count(), [None])
    assert not decided(itertools.count(), [4, 4, None])


def test_free_draws_are_shared_between_sources() -> None:
    drawn = itertools.count()
    draws = Draws(lambda: next(drawn), int.__eq__)
    assert not draws.decided_by(drawing([5, 5, 5, 6]))
    assert draws.decided_by(lambda: -1)
    assert next(drawn) < MAX_DRAWS


def test_the_measure_is_fisher_s_exact_test() -> None:
    for free, fixed, same in ((7, 7, 0), (20, 20, 11), (9, 5, 9), (24, 24, 12)):
        table = [[fixed, 0], [same, free - same]]
        assert coincidence(free, fixed, same) == pytest.approx(stats.fisher_exact(table, "greater").pvalue)
    assert coincidence(MAX_DRAWS, MAX_DRAWS, MAX_DRAWS // 2) < MAX_COINCIDENCE
