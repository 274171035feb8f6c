"""Faster, slower or inconclusive: the verdict on two systems from restarts that took turns. Pure.

Source: ``spec/measuring.md``, points 6 and 7; Kalibera & Jones (2013), "Rigorous benchmarking in reasonable time", for
restarts as the unit that is repeated; Holm (1979) for several figures at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt.bench.resampling import MIN_RESTARTS, NUM_DRAWS, SEED, resampled_means, restarts_drawn

FAMILY_ERROR = 0.02
FLOOR_QUANTILE = 0.95
MAX_DUOS = 9

# Figure -> restarts in the order of pairs, each with its series: one value, or one a batch.
Figures = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class Effect:
    """A figure of B relative to A, and how sure that is; logarithms of ratios.

    Attributes
    ----------
    log_ratio, error
        Mean over the pairs, and its standard error.
    floor
        What halves of one system's own restarts differ by, at most: the noise between a system and itself.
    p_value
        Chance of a difference as large as this one between equal systems.
    """

    name: str
    log_ratio: float
    error: float
    floor: float
    p_value: float
    num_pairs: int
    base: float
    value: float

    @property
    def confidence_95(self) -> list[float]:
        """The interval of the ratio."""
        from scipy import stats

        width = float(stats.t.ppf(0.975, self.num_pairs - 1)) * self.error
        return [math.exp(self.log_ratio - width), math.exp(self.log_ratio + width)]


def turns(num_pairs: int) -> str:
    """Return whose turn it is, pair by pair: A B, B A, A B, … so that a drift of the machine hits both alike."""
    return "".join("AB" if pair % 2 == 0 else "BA" for pair in range(num_pairs))


def effect(name: str, base: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Effect:
    """Return how one figure of B compares with A's.

    The two restarts of a pair were neighbours in time, so each pair gives one ratio. Its resampled copies come from
    blocks of neighbouring batches within both restarts; pairs are drawn on top. The bootstrap's standard error is
    read with Student's t over the pairs: percentiles of so few are too narrow. It is never below what the noise
    within restarts asks for, however alike a few pairs happen to be.
    """
    from scipy import stats

    num = len(base)
    assert num == len(other) >= 2, "restarts come in pairs"
    generator = np.random.default_rng(SEED)
    sides = [np.log([restart.mean() for restart in side]) for side in (base, other)]
    draws = np.log(
        np.stack([resampled_means(restart, NUM_DRAWS, generator) for restart in other])
        / np.stack([resampled_means(restart, NUM_DRAWS, generator) for restart in base])
    )
    by_pair = sides[1] - sides[0]
    log_ratio = float(by_pair.mean())
    error = float(restarts_drawn(by_pair, draws, generator).std())
    if error > 0:
        p_value = float(2 * stats.t.sf(abs(log_ratio) / error, num - 1))
    else:
        p_value = 1.0 if log_ratio == 0 else 0.0
    floor = max(halves_differ(side) for side in sides)
    values = [float(np.mean([restart.mean() for restart in side])) for side in (base, other)]
    return Effect(name, log_ratio, error, floor, p_value, num, values[0], values[1])


def halves_differ(logs: np.ndarray) -> float:
    """Return by how much halves of one system's restarts differ (95th percentile over the splits), as a log ratio.

    The halves take turns as two systems do: of two restarts that follow each other, each half has one.
    """
    duos = len(logs) // 2
    differences = logs[1 : 2 * duos : 2] - logs[0 : 2 * duos : 2]
    if duos <= MAX_DUOS:
        signs = np.asarray(list(itertools.product((1, -1), repeat=duos)))
    else:
        signs = np.random.default_rng(SEED).choice((1, -1), size=(2**MAX_DUOS, duos))
    return float(np.quantile(np.abs(signs @ differences) / duos, FLOOR_QUANTILE))


def decide(base: Figures, other: Figures, more_is_better: Mapping[str, bool]) -> dict[str, dict[str, Any]]:
    """Return for every figure of both its ratio B to A, interval, noise floor, and verdict on B.

    ``faster`` and ``slower`` need both: a difference that equal systems would show in any of the figures with a
    chance of `FAMILY_ERROR` at most, and one beyond the noise floor. All else is ``inconclusive``, with the reason.
    """
    names = [name for name in base if name in other and _is_usable(base[name]) and _is_usable(other[name])]
    effects = [effect(name, base[name], other[name]) for name in names]
    adjusted = holm([one.p_value for one in effects])
    return {
        one.name: _describe(one, p_value, more_is_better[one.name])
        for one, p_value in zip(effects, adjusted, strict=True)
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that hold for all of several figures at once (Holm's step-down)."""
    found, worst = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        found[index] = worst
    return found


def _is_usable(restarts: Sequence[np.ndarray]) -> bool:
    return len(restarts) >= 2 and all(len(one) and np.isfinite(one).all() and one.mean() > 0 for one in restarts)


def _describe(one: Effect, adjusted: float, more_is_better: bool) -> dict[str, Any]:
    verdict, reason = "inconclusive", None
    if one.num_pairs < MIN_RESTARTS:
        reason = f"{one.num_pairs} pairs of restarts; {MIN_RESTARTS} are needed: raise pairs"
    elif adjusted > FAMILY_ERROR:
        reason = (
            f"equal systems differ as much with a chance of {adjusted:.2g} (at most {FAMILY_ERROR} is taken): "
            "raise pairs or duration_s, or take them as equal within the interval"
        )
    elif abs(one.log_ratio) <= one.floor:
        reason = f"halves of one system's own restarts differ by {math.expm1(one.floor):.2%}, no less than the two do"
    else:
        verdict = "faster" if (one.log_ratio > 0) == more_is_better else "slower"
    return {
        "baseline": one.base,
        "value": one.value,
        "ratio": math.exp(one.log_ratio),
        "confidence_95": one.confidence_95,
        "confidence_method": "block bootstrap over pairs of restarts, Student's t",
        "noise_floor": math.expm1(one.floor),
        "p_adjusted": adjusted,
        "verdict": verdict,
        **({"reason": reason} if reason else {}),
    }
