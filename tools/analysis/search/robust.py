"""How points hold under the profile's measured spread: a seeded bootstrap over its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flashrt.analysis.constraints import Arc
from flashrt.analysis.cost import to_ms
from flashrt.analysis.figures import find_figures
from flashrt.analysis.patterns import best_patterns
from flashrt.analysis.profile import Profile
from flashrt.analysis.search.result import Point
from flashrt.errors import input_error

PERCENTILES = (5, 50, 95)


@dataclass(frozen=True)
class Ranked:
    """One point under resampled times."""

    index: int
    """Its place among the points that were given."""
    on_front: float
    """Share of the draws in which no other of the points is better in period and latency."""
    period_ms: dict[str, float]
    """Percentiles ``p5``, ``p50`` and ``p95``."""
    latency_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "index": self.index, "on_front": self.on_front, "period_ms": self.period_ms, "latency_ms": self.latency_ms,
        }  # fmt: skip


def rank_under_spread(
    profile: Profile, points: Sequence[Point], *, num_draws: int = 200, seed: int = 0
) -> tuple[Ranked, ...]:
    """Return the points by how often they are on the front, the most often first.

    A draw resamples every operation's measured times at every degree, with replacement, and takes the mean; all points
    see the same draws. Operations without samples keep their times.

    Raises
    ------
    InputError
        The profile has no samples of any operation of the points.

    *Source*: B. Efron, "Bootstrap methods: another look at the jackknife", *Annals of Statistics* 7 (1979).
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    wanted = sorted({
        (path, len(devices))
        for point in points
        for path, devices in point.cost.constraints.placement.devices.items()
    })  # fmt: skip
    ratios: dict[tuple[str, int], list[Fraction]] = {}
    for path, degree in wanted:
        measured = _samples(profile, path, degree)
        if len(measured) > 1 and sum(measured) > 0:
            drawn = rng.choice(np.asarray(measured), size=(num_draws, len(measured))).mean(axis=1) / np.mean(measured)
            ratios[path, degree] = [Fraction(round(value * 10**6), 10**6) for value in drawn]
    if points and not ratios:
        raise input_error(
            "profile, samples", "at least two samples of an operation at the degree that a point uses", "none",
            "measure the profile with profile_measure, which keeps its samples; then call again", rule="no-samples",
        )  # fmt: skip
    figures = []
    for draw in range(num_draws):
        shares = {key: drawn[draw] for key, drawn in ratios.items()}
        figures.append([
            _figures(point, {key[0]: shares[key] for key in _placed(point) if key in shares}) for point in points
        ])  # fmt: skip
    ranked = []
    for index in range(len(points)):
        wins = sum(not any(_dominates(other, row[index]) for other in row) for row in figures)
        periods = [to_ms(row[index][0]) for row in figures]
        latencies = [to_ms(row[index][1]) for row in figures]
        ranked.append(Ranked(index, wins / max(num_draws, 1), _percentiles(periods), _percentiles(latencies)))
    return tuple(sorted(ranked, key=lambda one: (-one.on_front, one.index)))


def _placed(point: Point) -> list[tuple[str, int]]:
    return [(path, len(devices)) for path, devices in point.cost.constraints.placement.devices.items()]


def _samples(profile: Profile, path: str, degree: int) -> tuple[float, ...]:
    given = profile.samples or {}
    for pattern in best_patterns(given, path):
        if degree in given[pattern]:
            return given[pattern][degree]
    return ()


def _figures(point: Point, ratios: dict[str, Fraction]) -> tuple[Fraction, Fraction]:
    constraints = point.cost.constraints
    times = tuple(
        round(time * ratios.get(part.operation, Fraction(1)))
        for part, time in zip(constraints.parts, constraints.times, strict=True)
    )
    arcs = tuple(
        Arc(arc.source, arc.target, times[arc.source] + arc.lag, arc.height, arc.lag, arc.kind, arc.cause)
        for arc in point.cost.ordered.arcs
    )
    found = find_figures(replace(constraints, times=times), arcs, point.cost.frames_per_batch)
    return found.ratio.ratio, found.latency


def _dominates(a: tuple[Fraction, Fraction], b: tuple[Fraction, Fraction]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    import numpy as np

    found = np.percentile(np.asarray(values), PERCENTILES)
    return {f"p{share}": round(float(value), 6) for share, value in zip(PERCENTILES, found, strict=True)}
