"""How far a deployment's period and latency move with the time of each operation, exactly and to either side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flashrt.analysis.constraints import Arc, Constraints
from flashrt.analysis.cost import DeploymentCost, to_ms
from flashrt.analysis.figures import find_figures

STEP = Fraction(1, 10**6)
"""Relative change of a time whose effect stands for the derivative: figures are piecewise linear in the times."""


@dataclass(frozen=True)
class Sensitivity:
    """Milliseconds by which a figure moves for each percent of an operation's time, to either side.

    The two sides differ where the operation is on one of several critical cycles or paths: making it slower then
    counts, making it faster does not.
    """

    operation: str
    period_slower_ms: float
    """Change of the period when the operation takes 1 % more."""
    period_faster_ms: float
    """Change of the period when it takes 1 % less (0 or negative)."""
    d0_slower_ms: float
    """Change of the action-to-visible latency, at the smallest period, when it takes 1 % more."""
    d0_faster_ms: float
    latency_slower_ms: float
    latency_faster_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "operation": self.operation,
            "period_ms_per_percent": [self.period_faster_ms, self.period_slower_ms],
            "d0_ms_per_percent": [self.d0_faster_ms, self.d0_slower_ms],
            "latency_ms_per_percent": [self.latency_faster_ms, self.latency_slower_ms],
        }


def find_sensitivity(cost: DeploymentCost) -> tuple[Sensitivity, ...]:
    """Return the one-sided derivatives of a deployment's figures by each operation's time, orders as they are.

    The period is a maximum over cycles of sums of times, d0 and the latency maxima over walks at that period: each is
    piecewise linear, or a quotient of such, in one operation's time. So a change that is too small to make another
    cycle or walk critical gives the derivative of either side; it is made on exact integers (times scaled by 10^6).
    """
    constraints, arcs = cost.constraints, cost.ordered.arcs
    base = _figures(constraints, arcs, cost.frames_per_batch, None, 0)
    found = []
    for path in constraints.first:
        slower = _figures(constraints, arcs, cost.frames_per_batch, path, 1)
        faster = _figures(constraints, arcs, cost.frames_per_batch, path, -1)
        up = [to_ms((new - old) / STEP / 100) for new, old in zip(slower, base, strict=True)]
        down = [to_ms((new - old) / STEP / 100) for new, old in zip(faster, base, strict=True)]
        found.append(Sensitivity(path, up[0], down[0], up[1], down[1], up[2], down[2]))
    return tuple(found)


def _figures(
    constraints: Constraints, arcs: tuple[Arc, ...], frames: int | None, path: str | None, direction: int
) -> tuple[Fraction, Fraction, Fraction]:
    scale = STEP.denominator
    changed = set(constraints.parts_of(path)) if path is not None else set()
    times = tuple(
        time * (scale + direction if part in changed else scale) for part, time in enumerate(constraints.times)
    )
    moved = tuple(
        Arc(
            arc.source,
            arc.target,
            times[arc.source] + arc.lag * scale,
            arc.height,
            arc.lag * scale,
            arc.kind,
            arc.cause,
        )
        for arc in arcs
    )
    figures = find_figures(replace(constraints, times=times), moved, frames)
    return figures.ratio.ratio / scale, figures.visible.d0 / scale, figures.latency / scale
