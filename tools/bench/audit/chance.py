"""Which source decides what chance decides: repeated draws with a source as it is, and with it made constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_DRAWS = 24
"""At most so many draws of each kind: with fewer, a source of two equally likely results looks like a constant."""
MAX_COINCIDENCE = 1e-3


class Draws(Generic[T]):
    """Results of the same call with every source as it is, drawn when they are needed and kept.

    Parameters
    ----------
    draw
        Runs the call once more; None where it failed.
    same
        Whether two results are the same.
    """

    def __init__(self, draw: Callable[[], T | None], same: Callable[[T, T], bool]) -> None:
        self._draw = draw
        self._same = same
        self._free: list[T | None] = []

    def decided_by(self, fixed: Callable[[], T | None]) -> bool:
        """Return whether a source decides the results, by draws with it made constant.

        It does if those are all the same, and would hardly be if the source had no part in it. The measure is Fisher's
        exact test: n draws with the source as it is, k with it constant; of all of them s are the same as the
        constant's. If the source has no part, the chance that all k are among those s is C(s, k) / C(n + k, k).

        Parameters
        ----------
        fixed
            Runs the call once with the source made constant; None where it failed.
        """
        value = fixed()
        if value is None:
            return False
        for count in range(2, MAX_DRAWS + 1):
            again = fixed()
            if again is None or not self._same(value, again):
                return False
            while len(self._free) < count:
                self._free.append(self._draw())
            likes = sum(one is not None and self._same(value, one) for one in self._free)
            if coincidence(len(self._free), count, likes) < MAX_COINCIDENCE:
                return True
        return False


def coincidence(num_free: int, num_fixed: int, num_same: int) -> float:
    """Return how likely it is that all of `num_fixed` draws are the same where fixing them did nothing.

    Parameters
    ----------
    num_free, num_fixed
        Draws of each kind.
    num_same
        How many of the free ones are the same as the fixed ones.
    """
    return math.comb(num_same + num_fixed, num_fixed) / math.comb(num_free + num_fixed, num_fixed)
