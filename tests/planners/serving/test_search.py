"""Policies, bounds and counts of the search, and routing against a linear program of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from flashrt.errors import InputError
from flashrt.planners.serving import Load, Settings
from flashrt.planners.serving.flow import best_routing, grid_routings, is_redundant, node_routing, rate_of
from flashrt.planners.serving.policies import most_value, undominated, value_of
from flashrt.planners.serving.search import Policy
from flashrt.planners.serving.space import make_space

from .drawn import problem
from .steps import fewest_gpus, plan_serving
from .test_documents import problem as fixed

QUICK = Settings(time_limit_s=2, load=Load(num_simulated=4000, num_estimated=400))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000))
def test_a_node_is_routed_as_well_as_a_linear_program_can(seed: int) -> None:
    found = problem(seed % 400, most_components=2)
    draw = np.random.default_rng(seed)
    mask = found.configurations[int(draw.integers(len(found.configurations)))].mask
    numbers = found.configurations_of(mask)
    chosen = draw.permutation(numbers)[: int(draw.integers(1, 4))]
    executors = tuple(sorted((int(k), int(draw.integers(1, 4))) for k in chosen))
    capacity = found.capacity[[k for k, _ in executors]]
    coming = found.fractions * (capacity.max(axis=0) > 0) * (draw.random(len(found.types)) < 0.8)
    rate, split = node_routing(found, executors, tuple(coming), {})
    types = np.flatnonzero(coming > 0)
    if not len(types):
        assert np.isinf(rate)
        return
    assert split[types].sum(axis=1) == pytest.approx(1)
    load = np.array([count for _, count in executors])[:, None] * capacity[:, types]
    num = len(executors) * len(types)
    upper = np.zeros((len(executors), num + 1))
    for slot in range(len(executors)):
        upper[slot, 0] = -1
        for index, place in enumerate(types):
            able = load[slot, index]
            upper[slot, 1 + slot * len(types) + index] = coming[place] / able if able > 0 else 1e9
    equal = np.zeros((len(types), num + 1))
    for index in range(len(types)):
        equal[index, 1 + index :: len(types)] = 1
    solved = linprog([1, *[0] * num], upper, np.zeros(len(executors)), equal, np.ones(len(types)), method="highs")
    assert rate == pytest.approx(1 / solved.x[0], rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(2, 4))
def test_no_plan_exceeds_its_bound_and_no_grid_routing_the_best(seed: int, num_gpus: int) -> None:
    found = problem(seed)
    space = make_space(found, num_gpus)
    for number, chosen in enumerate(space.all_logical()):
        if number % 7 or number > 60:
            continue
        logical, own = space.logical(chosen)
        for index, allocation in enumerate(space.allocations(chosen, 0.0)):
            if index > 12:
                break
            plan = best_routing(found, own, logical, allocation)
            assert plan.rate_per_s <= space.bound_per_s(chosen) * (1 + 1e-6)
            if plan.rate_per_s > 0:
                again = rate_of(found, own, allocation, plan.path_share, plan.split)
                assert again == pytest.approx(plan.rate_per_s, rel=1e-6)
            for tried, other in enumerate(grid_routings(found, own, logical, allocation, 0.5)):
                if tried > 200:
                    break
                assert other.rate_per_s <= plan.rate_per_s * (1 + 1e-4)


def test_an_executor_that_nothing_needs_is_redundant() -> None:
    found = fixed()
    space = make_space(found, 6)
    chosen = next(one for one in space.all_logical() if len(space.logical(one)[0].nodes) == 3)
    logical, own = space.logical(chosen)
    least = tuple(((found.configurations_of(mask)[0], 1),) for _, mask in logical.nodes)
    plan = best_routing(found, own, logical, least)
    assert not is_redundant(found, own, plan)
    loads = [1 / best_routing(found, own, logical, least).rate_per_s]
    assert loads
    for node, ((k, _),) in enumerate(least):
        more = (*least[:node], ((k, 2),), *least[node + 1 :])
        raised = best_routing(found, own, logical, more)
        assert is_redundant(found, own, raised) == (raised.rate_per_s <= plan.rate_per_s * (1 + 1e-9))


@pytest.mark.parametrize("policy", ["total", "weighted", "fair"])
def test_a_policys_plan_is_the_best_by_its_own_measure(policy: Policy) -> None:
    answers = {
        name: plan_serving(fixed(), 5, Settings(time_limit_s=3, policy=name, load=QUICK.load))
        for name in ("total", "weighted", "fair")
    }  # fmt: skip
    values = {}
    for name, answer in answers.items():
        shown = answer.best.simulated
        assert shown is not None
        values[name] = value_of(answer.problem, policy, shown.goodput_per_s)
        assert value_of(answer.problem, policy, shown.goodput_per_s) <= most_value(
            answer.problem, policy, shown.offered_per_s * 1.1
        )
    assert values[policy] >= 0.93 * max(values.values())


def test_the_fewest_gpus_reach_what_is_wanted_and_one_less_does_not() -> None:
    whole = plan_serving(fixed(), 6, QUICK)
    assert whole.best.simulated is not None
    wanted = 0.5 * float(whole.best.simulated.goodput_per_s.sum())
    found = fewest_gpus(fixed(), 6, wanted, Settings(time_limit_s=8, policy="least_gpus", load=QUICK.load))
    assert found.best.simulated is not None
    assert found.best.simulated.goodput_per_s.sum() >= wanted
    num_gpus = found.best.plan.num_gpus(found.problem)
    assert num_gpus < 6
    with pytest.raises(InputError, match="goodput_per_s"):
        fewest_gpus(fixed(), 6, 1e6, QUICK)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_what_is_left_out_is_dominated_and_what_is_kept_is_not(pairs: list[tuple[int, int]]) -> None:
    vectors = [np.array(pair, float) for pair in pairs]
    kept = undominated(vectors)
    for index, own in enumerate(vectors):
        beaten = any((other >= own).all() and (other > own).any() for other in vectors)
        repeated = any((vectors[one] == own).all() for one in kept if one != index)
        assert (index in kept) == (not beaten and not (repeated and index not in kept))
