"""What a deployment costs: smallest sustainable period and latency, exactly, with what binds them.

Source: ``spec/cost-model.md``, "Going past the bounds: exact values for a fixed deployment".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from flashrt.analysis.bounds import path_bound, recurrence_bound, resource_bound
from flashrt.analysis.constraints import Arc, Constraints, Variation, build_constraints
from flashrt.analysis.deployment import Deployment, Placement, with_order
from flashrt.analysis.figures import num_frames, visible_latency
from flashrt.analysis.ordering import DEFAULT_NODE_LIMIT, DEFAULT_WORK, Ordered, OrderProof, find_order
from flashrt.analysis.profile import TICKS_PER_MS, Profile, to_ticks
from flashrt.analysis.ratio import longest_walks
from flashrt.ir import BuiltProgram


@dataclass(frozen=True)
class Step:
    """One operation (or chunk of it) on a critical cycle or path, and why the next one waits for it."""

    operation: str
    chunk: int | None
    """Chunk number from 1; None where the operation does not stream."""
    time_ms: float
    lag_ms: float
    """Transfer to the next step."""
    batches: int
    """How many batches later the next step is."""
    cause: str | None
    """The edge, state or device that makes the next step wait; None at the end of a path."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record that ``analyze`` reports."""
        return {
            "operation": self.operation, "chunk": self.chunk, "time_ms": self.time_ms, "lag_ms": self.lag_ms,
            "batches": self.batches, "cause": self.cause,
        }  # fmt: skip


@dataclass(frozen=True)
class DeploymentCost:
    """The figures of one deployment; milliseconds."""

    t_min_ms: float
    """Smallest period that can be sustained: the largest cycle ratio of H, exactly."""
    t_min_resource_ms: float
    """Lower bound: the work of the busiest device (Lemma 8.3)."""
    t_min_recurrence_ms: float
    """Lower bound: the largest cycle through state across batches, devices ignored."""
    period_ms: float
    """The period at which d0 is given: the document's, else `t_min_ms`."""
    d0_ms: float | None
    """Action-to-visible latency at `period_ms`, exactly; None below `t_min_ms`, where it has no bound."""
    d0_bound_ms: float | None
    """Lower bound on d0 at `period_ms`: the best path (Lemma 8.2)."""
    latency_ms: float
    """From a batch being ready to its last output, at `t_min_ms`; equals d0 − T when no output streams."""
    first_output_ms: float
    """From a batch being ready to the first chunk of its main output (the one with most axes), at `t_min_ms`."""
    outputs: dict[str, dict[str, float]]
    """Output -> `first_output_ms` and `latency_ms` of that output, at `t_min_ms`."""
    fps: float | None
    """Frames per second at `t_min_ms`; None where the profile does not say how many frames a batch has."""
    frames_per_batch: int | None
    critical_cycle: tuple[Step, ...]
    """Its times and lags, divided by its batches, are `t_min_ms`."""
    critical_path: tuple[Step, ...]
    """From an entry to the frame that is latest: its times and lags, less its batches times the period, plus one
    period, less the frame's place in the batch, are `d0_ms`."""
    latency_path: tuple[Step, ...]
    """From an entry to the last output: its times and lags, less its batches times `t_min_ms`, are `latency_ms`."""
    latest_frame: int
    """The frame of `critical_path`."""
    order: dict[int, tuple[str, ...]]
    interleave: bool
    order_proof: OrderProof
    num_devices: int
    provenance: str
    deployment: Deployment
    """The document with the order that was found."""
    constraints: Constraints = field(repr=False, compare=False)
    ordered: Ordered = field(repr=False, compare=False)

    @property
    def sustainable(self) -> bool:
        """Whether the document's period can be kept."""
        return self.d0_ms is not None


def evaluate_placement(
    built: BuiltProgram,
    profile: Profile,
    placement: Placement,
    *,
    variation: Variation | None = None,
    node_limit: int = DEFAULT_NODE_LIMIT,
    work: int = DEFAULT_WORK,
) -> DeploymentCost:
    """Return the exact figures of a placement, with its given order or the best one.

    Parameters
    ----------
    variation
        What a candidate changes in the program (asynchronous operations, double buffers).
    node_limit
        How many nodes the search for the best order may visit before it settles for a heuristic.
    work
        Lowers `node_limit` where a node is large; see `flashrt.analysis.ordering.limit_nodes`.

    Raises
    ------
    InputError
        The profile lacks a time, or the order is a deadlock.
    """
    constraints = build_constraints(built, profile, placement, variation)
    frames = profile.frames_per_batch
    ordered = find_order(constraints, frames, node_limit=node_limit, work=work)
    figures = ordered.figures
    t_min = figures.ratio.ratio
    wanted = placement.document.period_ms
    period = Fraction(to_ticks(wanted)) if wanted is not None else t_min
    num_parts = len(constraints.parts)
    walks = longest_walks(num_parts, ordered.arcs, constraints.entries, period)
    tightest = longest_walks(num_parts, ordered.arcs, constraints.entries, t_min)
    assert tightest is not None, "the smallest period is sustainable"
    visible = visible_latency(constraints, walks, period, num_frames(constraints, frames)) if walks else None
    bound = path_bound(constraints, period, frames)
    path: tuple[Step, ...] = ()
    if walks and visible and visible.part >= 0:
        path = _walk_steps(constraints, ordered.arcs, walks.path(ordered.arcs, visible.part), visible.part)
    latest = figures.latency_part
    return DeploymentCost(
        t_min_ms=to_ms(t_min),
        t_min_resource_ms=to_ms(resource_bound(constraints)[0]),
        t_min_recurrence_ms=to_ms(recurrence_bound(constraints)),
        period_ms=to_ms(period),
        d0_ms=to_ms(visible.d0) if visible else None,
        d0_bound_ms=to_ms(bound) if bound is not None else None,
        latency_ms=to_ms(figures.latency),
        first_output_ms=to_ms(figures.first_output),
        outputs={
            name: {"first_output_ms": to_ms(first), "latency_ms": to_ms(last)}
            for name, (first, last) in figures.by_output.items()
        },
        fps=float(1000 * TICKS_PER_MS * frames / t_min) if frames and t_min else None,
        frames_per_batch=frames,
        critical_cycle=_cycle_steps(constraints, ordered.arcs, figures.ratio.cycle),
        critical_path=path,
        latency_path=_walk_steps(constraints, ordered.arcs, tightest.path(ordered.arcs, latest), latest)
        if latest is not None
        else (),
        latest_frame=visible.frame if visible else 0,
        order=ordered.order,
        interleave=ordered.interleave,
        order_proof=ordered.proof,
        num_devices=placement.num_devices,
        provenance=profile.provenance,
        deployment=with_order(placement, ordered.order, interleave=ordered.interleave if ordered.choice else None),
        constraints=constraints,
        ordered=ordered,
    )


def to_ms(ticks: Fraction | int) -> float:
    """Return ticks as milliseconds."""
    return float(Fraction(ticks) / TICKS_PER_MS)


def _step(constraints: Constraints, part: int, arc: Arc | None) -> Step:
    place = constraints.parts[part]
    return Step(
        operation=place.operation,
        chunk=place.index + 1 if place.count > 1 else None,
        time_ms=to_ms(constraints.times[part]),
        lag_ms=to_ms(arc.lag) if arc else 0.0,
        batches=arc.height if arc else 0,
        cause=arc.cause if arc else None,
    )


def _cycle_steps(constraints: Constraints, arcs: Sequence[Arc], cycle: Sequence[int]) -> tuple[Step, ...]:
    return tuple(_step(constraints, arcs[number].source, arcs[number]) for number in cycle)


def _walk_steps(constraints: Constraints, arcs: Sequence[Arc], path: Sequence[int], end: int) -> tuple[Step, ...]:
    return (*_cycle_steps(constraints, arcs, path), _step(constraints, end, None))
