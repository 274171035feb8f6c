"""The cost model's propositions: in the simulation, path by path, and as what the deployment search chooses.

``test_golden.py`` has the table's figures as `evaluate_placement` gives them; here they are what happens.

*Source*: ``spec/cost-model.md``, "Propositions that the analysis must reproduce" and "The two figures of a deployment".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashrt.analysis import Placement, Profile, evaluate_placement, read_deployment, read_profile, simulate
from flashrt.analysis.search import Point, SearchRequest, search_deployments
from flashrt.ir import BuiltProgram, build

from .drawn import deployed, device_parts
from .search.checker import Arc, Checker, Part

EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TIME = st.integers(1, 400).map(lambda eighths: Fraction(eighths, 8))
LAG = st.integers(0, 80).map(lambda eighths: Fraction(eighths, 8))
NUM_STEPS = st.integers(2, 4)


def chain(num: int, degrees: list[int], *, shared: bool = False) -> BuiltProgram:
    """Return op0 → op1 → …, each with a state of its own, or all with one."""
    names = [f"op{index}" for index in range(num)]
    states = {name: "s" if shared else f"s{name}" for name in names}
    ends = [("x", "op0.x"), *((f"{a}.y", f"{b}.x") for a, b in itertools.pairwise(names)), (f"{names[-1]}.y", "y")]
    graph = {
        "inputs": {"x": {}}, "outputs": {"y": {}},
        "nodes": {n: {"op": n, "degrees": degrees, "reads": [states[n]], "writes": [states[n]]} for n in names},
        "edges": [{"from": a, "to": b, "mode": "blocking"} for a, b in ends],
    }  # fmt: skip
    document = {"schema": "flashrt/program@1", "name": "chain", "entry": "app", "graphs": {"app": graph},
                "states": {state: {} for state in states.values()}}  # fmt: skip
    return build(document, Path(__file__).parent)


def profile_of(times: Mapping[str, Mapping[int, Fraction]], lag: Fraction) -> Profile:
    """Return a profile of one frame a batch."""
    operations = {name: {degree: float(value) for degree, value in by.items()} for name, by in times.items()}
    return read_profile(
        {"schema": "flashrt/profile@1", "device": "d", "provenance": "declared", "frames_per_batch": 1,
         "operations": operations, "transfer": {"latency_ms": float(lag)}}
    )  # fmt: skip


def check_row(
    built: BuiltProgram, profile: Profile, groups: list[list[int]], t_min: Fraction, latency: Fraction
) -> None:
    """Check that the deployment of op0, op1, … on `groups` keeps up at exactly `t_min`, and at nothing less."""
    names = [operation.path for operation in built.flat.operations]
    document = {
        "groups": {f"g{index}": group for index, group in enumerate(groups)},
        "place": {name: f"g{index}" for index, name in enumerate(names)},
    }
    placement = read_deployment(document, built)
    on = {device: [name for name in names if device in placement.devices[name]] for device in placement.by_device}
    parts = {device: [(name, 0) for name in listing] for device, listing in on.items()}
    run = simulate(built, profile, placement, parts, t_min, 40)
    assert run.finite
    assert run.d0_ms == t_min + latency
    assert {run.latency_by_batch_ms[0], *run.latency_by_batch_ms} == {latency}
    assert not simulate(built, profile, placement, parts, t_min * Fraction(999, 1000), 40).finite


@EXAMPLES
@given(TIME, TIME, TIME, TIME, LAG)
def test_one_group_or_two_in_the_simulation(
    d: Fraction, v: Fraction, d2: Fraction, v3: Fraction, lag: Fraction
) -> None:
    built = chain(2, [1, 2, 3, 5])
    profile = profile_of({"op0": {5: d, 2: d2}, "op1": {5: v, 3: v3}}, lag)
    check_row(built, profile, [[0, 1, 2, 3, 4]] * 2, d + v, d + v)
    # The slower of two stages sets the pace; where the first is faster, its values wait, and at T_min they do not.
    check_row(built, profile, [[0, 1], [2, 3, 4]], max(d2, v3), d2 + lag + v3)


@EXAMPLES
@given(NUM_STEPS, TIME, TIME, LAG)
def test_steps_in_the_simulation(n: int, t1: Fraction, tn: Fraction, lag: Fraction) -> None:
    profile = profile_of({f"op{index}": {1: t1, n: tn} for index in range(n)}, lag)
    alone = [[index] for index in range(n)]
    check_row(chain(n, [1, n]), profile, [list(range(n))] * n, n * tn, n * tn)
    check_row(chain(n, [1, n]), profile, alone, t1, n * t1 + (n - 1) * lag)
    # One state goes around once a batch: from each step to the next, and from the last to the first of the next batch.
    check_row(chain(n, [1, n], shared=True), profile, alone, n * t1 + n * lag, n * t1 + (n - 1) * lag)


def paths_to(end: Part, arcs: list[Arc], entries: set[Part]) -> Iterator[list[Arc]]:
    """Yield every path without repeated parts from an entry to `end`, as arcs."""
    into: dict[Part, list[Arc]] = {}
    for arc in set(arcs):
        into.setdefault(arc[1], []).append(arc)
    stack: list[tuple[Part, list[Arc]]] = [(end, [])]
    while stack:
        part, path = stack.pop()
        if part in entries:
            yield path
        seen = {end, *(arc[0] for arc in path)}
        stack += [(arc[0], [arc, *path]) for arc in into.get(part, ()) if arc[0] not in seen]


@EXAMPLES
@given(deployed(max_nodes=4), st.integers(100, 250))
def test_no_path_and_no_device_is_faster_than_its_bound(
    case: tuple[BuiltProgram, Profile, Placement], percent: int
) -> None:
    """Lemmas 8.2 and 8.3, each path enumerated and each device's work added up by the checker, which shares no code."""
    built, profile, placement = case
    t_min = evaluate_placement(built, profile, placement).ordered.figures.ratio.ratio / 10**9
    checker = Checker(built, profile)
    work: dict[int, Fraction] = {}
    for path, devices in placement.devices.items():
        for device in devices:
            work[device] = work.get(device, Fraction(0)) + checker.time(path, len(devices))
    assert max(work.values()) <= t_min

    period = Fraction(round(t_min * percent / 100 * 10**6) + 1, 10**6)
    wanted = placement.document.model_copy(update={"period_ms": float(period)})
    cost = evaluate_placement(built, profile, read_deployment(wanted, built))
    assert cost.ordered.figures.ratio.ratio / 10**9 == t_min
    assert cost.d0_ms is not None
    times, arcs, entries, outputs, _ = checker.graph(placement.devices)
    bounds = []
    frames = cost.frames_per_batch or max(len(output.parts) for output in cost.constraints.outputs)
    for output in cost.constraints.outputs:
        # The last part of an output releases its last frame, and all of them where it is the only one.
        frame = 0 if len(output.parts) == 1 else frames - 1
        last = cost.constraints.parts[output.parts[-1]]
        end = (last.operation, last.index)
        assert end in outputs
        for path in itertools.islice(paths_to(end, arcs, entries), 3000):
            length = sum((arc[2] for arc in path), start=times[end])
            bounds.append(length + (1 - sum(arc[3] for arc in path)) * period - frame * period / frames)
    assert bounds
    assert float(max(bounds)) <= cost.d0_ms + 1e-9


@settings(EXAMPLES, max_examples=40)
@given(deployed(max_nodes=3))
def test_a_period_slightly_below_the_smallest_is_not_kept(case: tuple[BuiltProgram, Profile, Placement]) -> None:
    built, profile, placement = case
    cost = evaluate_placement(built, profile, placement)
    t_min = cost.ordered.figures.ratio.ratio / 10**9
    assume(t_min > 0)
    num_parts = len(cost.constraints.parts)
    assert simulate(built, profile, placement, device_parts(cost), t_min, 3 * num_parts + 3).finite
    # Lateness grows by a hundredth of the period a batch from when the critical cycle is what everything waits for.
    slack = sum(arc.weight for arc in cost.ordered.arcs) / Fraction(10**9) / t_min
    num_batches = math.ceil(100 * 3 * slack)
    assume(num_batches * num_parts <= 40_000)
    assert not simulate(built, profile, placement, device_parts(cost), t_min * Fraction(99, 100), num_batches).finite


def best(built: BuiltProgram, profile: Profile, num_devices: int, objective: Any, **more: Any) -> Point:
    (point,) = search_deployments(built, profile, SearchRequest(num_devices, objective=objective, **more)).points
    assert point.proof.status == "optimal"
    return point


def exact(point: Point) -> tuple[Fraction, Fraction]:
    figures = point.cost.ordered.figures
    return figures.ratio.ratio / 10**9, figures.latency / 10**9


def groups_of(point: Point) -> list[tuple[int, ...]]:
    return list(point.cost.constraints.placement.devices.values())


@st.composite
def two_stages(draw: st.DrawFn) -> tuple[int, dict[int, Fraction], dict[int, Fraction], Fraction]:
    """Devices, times of both stages at every degree, and the lag."""
    num = draw(st.integers(2, 5))
    d, v = ({degree: draw(TIME) for degree in range(1, num + 1)} for _ in range(2))
    return num, d, v, draw(LAG)


@EXAMPLES
@given(two_stages())
def test_splitting_wins_the_rate_where_its_slower_half_beats_the_sum(
    case: tuple[int, dict[int, Fraction], dict[int, Fraction], Fraction],
) -> None:
    num, d, v, lag = case
    point = best(chain(2, sorted(d)), profile_of({"op0": d, "op1": v}, lag), num, "rate")
    together = {(d[g] + v[g], d[g] + v[g]) for g in d}
    apart = {(max(d[x], v[y]), d[x] + lag + v[y]) for x in d for y in v if x + y <= num}
    assert exact(point) == min(together | apart)
    d_group, v_group = groups_of(point)
    if min(apart)[0] < min(together)[0]:
        assert not set(d_group) & set(v_group)
        assert len(d_group) + len(v_group) <= num
    elif min(together)[0] < min(apart)[0]:
        assert d_group == v_group


@EXAMPLES
@given(two_stages())
def test_one_group_of_all_devices_wins_the_latency_where_times_shrink_with_it(
    case: tuple[int, dict[int, Fraction], dict[int, Fraction], Fraction],
) -> None:
    num, d, v, lag = case
    d, v = ({g: min(by[k] for k in range(1, g + 1)) for g in by} for by in (d, v))
    point = best(chain(2, sorted(d)), profile_of({"op0": d, "op1": v}, lag), num, "latency")
    assert exact(point)[1] == d[num] + v[num]
    if lag or all(d[x] + v[y] > d[num] + v[num] for x in d for y in v if x + y <= num):
        d_group, v_group = groups_of(point)
        assert d_group == v_group
        assert exact(point)[0] == d[num] + v[num]


@EXAMPLES
@given(NUM_STEPS, TIME, TIME, LAG)
def test_pipelining_the_steps_wins_the_rate_where_one_is_no_longer_than_all_in_parallel(
    n: int, t1: Fraction, tn: Fraction, lag: Fraction
) -> None:
    profile = profile_of({f"op{index}": {1: t1, n: tn} for index in range(n)}, lag)
    point = best(chain(n, [1, n]), profile, n, "rate")
    assert exact(point)[0] == min(t1, n * tn)
    if t1 < n * tn:
        assert sorted(groups_of(point)) == [(index,) for index in range(n)]
        assert exact(point)[1] == n * t1 + (n - 1) * lag
    if t1 > n * tn:
        assert set(groups_of(point)) == {tuple(range(n))}

    # With one state for all of them it is not legal, and would not pay: the state goes around once a batch.
    tied = chain(n, [1, n], shared=True)
    together = best(tied, profile, n, "rate")
    assert len(set(groups_of(together))) == 1
    assert exact(together) == (n * min(t1, tn),) * 2
    moved = best(tied, profile, n, "rate", split_states=True)
    assert exact(moved)[0] == n * min(t1, tn)
