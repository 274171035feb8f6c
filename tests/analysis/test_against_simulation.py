"""Random programs on random deployments: the exact figures against the event simulator, and the proofs re-checked."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashrt.analysis import (
    Placement,
    Profile,
    build_constraints,
    device_sequences,
    evaluate_placement,
    read_deployment,
    resource_arcs,
    simulate,
)
from flashrt.analysis.figures import find_figures
from flashrt.analysis.profile import TICKS_PER_MS
from flashrt.analysis.ratio import find_zero_cycle
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram

from .drawn import deployed, device_parts

EXAMPLES = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def _ms(ticks: Fraction) -> Fraction:
    return ticks / TICKS_PER_MS


@EXAMPLES
@given(deployed())
def test_period_and_latency_are_those_of_the_simulation(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    figures = cost.ordered.figures
    num_parts = len(cost.constraints.parts)
    t_min = _ms(figures.ratio.ratio)
    run = simulate(built, profile, placement, device_parts(cost), t_min, 3 * num_parts + 3)
    assert run.finite
    assert run.d0_ms == _ms(figures.visible.d0)
    assert max(run.latency_by_batch_ms) == _ms(figures.latency)

    if t_min == 0:
        return
    everything = sum(_ms(Fraction(arc.weight)) for arc in cost.constraints.arcs) + sum(
        _ms(Fraction(time)) for time in cost.constraints.times
    )
    num_batches = min(400, math.ceil(8 * everything / t_min) + 3 * num_parts)
    slower = simulate(built, profile, placement, device_parts(cost), t_min * 3 / 4, num_batches)
    assert not slower.finite


@EXAMPLES
@given(deployed(), st.integers(101, 300))
def test_d0_at_a_wanted_period(case: tuple[BuiltProgram, Profile, Placement], percent: int) -> None:
    built, profile, placement = case
    t_min_ms = evaluate_placement(built, profile, placement).t_min_ms
    assume(t_min_ms > 0)
    wanted = round(t_min_ms * percent / 100, 3)
    document = placement.document.model_copy(update={"period_ms": wanted})
    cost = evaluate_placement(built, profile, read_deployment(document, built))
    run = simulate(
        built, profile, placement, device_parts(cost), Fraction(str(wanted)), 2 * len(cost.constraints.parts) + 3
    )
    assert cost.d0_ms == float(run.d0_ms)
    early = document.model_copy(update={"period_ms": t_min_ms * 0.9})
    refused = evaluate_placement(built, profile, read_deployment(early, built))
    assert refused.d0_ms is None
    assert not refused.sustainable


@EXAMPLES
@given(deployed())
def test_certificates_hold(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    arcs, ratio = cost.ordered.arcs, cost.ordered.figures.ratio
    for before, after in itertools.pairwise([*ratio.cycle, *ratio.cycle[:1]]):
        assert arcs[before].target == arcs[after].source
    if ratio.cycle:
        height = sum(arcs[number].height for number in ratio.cycle)
        assert Fraction(sum(arcs[number].weight for number in ratio.cycle), height) == ratio.ratio
    scale = ratio.ratio.denominator
    for arc in arcs:
        gain = scale * arc.weight - ratio.ratio.numerator * arc.height
        assert ratio.potentials[arc.target] >= ratio.potentials[arc.source] + gain
    length = sum(step.time_ms + step.lag_ms for step in cost.critical_path)
    late = cost.period_ms * (1 - sum(step.batches for step in cost.critical_path)) + length
    frames = cost.frames_per_batch or max(len(output.parts) for output in cost.constraints.outputs)
    assert cost.d0_ms is not None
    assert math.isclose(late - cost.latest_frame * cost.period_ms / frames, cost.d0_ms, abs_tol=1e-6)
    length = sum(step.time_ms + step.lag_ms - step.batches * cost.t_min_ms for step in cost.latency_path)
    assert math.isclose(length, cost.latency_ms, abs_tol=1e-6)


@EXAMPLES
@given(deployed())
def test_bounds_never_exceed_the_exact_figures(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    assert max(cost.t_min_resource_ms, cost.t_min_recurrence_ms) <= cost.t_min_ms
    assert cost.d0_ms is not None
    assert cost.d0_bound_ms is not None
    assert cost.d0_bound_ms <= cost.d0_ms
    assert cost.first_output_ms <= cost.latency_ms
    if all(len(output.parts) == 1 for output in cost.constraints.outputs):
        assert math.isclose(cost.d0_ms - cost.t_min_ms, cost.latency_ms, abs_tol=1e-6)


@EXAMPLES
@given(deployed())
def test_the_order_found_is_the_best_of_all(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    assert cost.order_proof == "optimal"
    choices = [list(itertools.permutations(paths)) for paths in placement.by_device.values()]
    assume(math.prod(len(choice) for choice in choices) <= 800)
    constraints = build_constraints(built, profile, placement)
    best: tuple[Fraction, Fraction] | None = None
    for combination in itertools.product(*choices):
        order = dict(zip(placement.by_device, combination, strict=True))
        for interleave in (False, True) if placement.document.interleave is None else (False,):
            sequences = device_sequences(constraints, order, interleave=interleave)
            arcs = [*constraints.arcs, *resource_arcs(constraints, sequences)]
            if find_zero_cycle(len(constraints.parts), arcs) is None:
                rank = find_figures(constraints, arcs, profile.frames_per_batch).rank[:2]
                best = rank if best is None else min(best, rank)
    assert best == cost.ordered.figures.rank[:2]


@EXAMPLES
@given(deployed(ordered=True))
def test_a_given_order_is_kept_or_its_deadlock_named(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    constraints = build_constraints(built, profile, placement)
    sequences = device_sequences(constraints, placement.order, interleave=False)
    arcs = [*constraints.arcs, *resource_arcs(constraints, sequences)]
    if find_zero_cycle(len(constraints.parts), arcs) is not None:
        with pytest.raises(InputError, match="a deadlock, each waiting for the one before") as caught:
            evaluate_placement(built, profile, placement)
        assert [finding.rule for finding in caught.value.findings] == ["deadlock"]
        parts = {
            device: [(constraints.parts[number].operation, constraints.parts[number].index) for number in sequence]
            for device, sequence in sequences.items()
        }
        with pytest.raises(InputError, match="a deadlock"):
            simulate(built, profile, placement, parts, 100.0, 3)
        return
    cost = evaluate_placement(built, profile, placement)
    assert cost.order == placement.order
    again = evaluate_placement(built, profile, read_deployment(cost.deployment, built))
    assert (again.t_min_ms, again.latency_ms, again.d0_ms) == (cost.t_min_ms, cost.latency_ms, cost.d0_ms)
