"""Degrees, the offline bound, the simulator's figures, and documents that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import InputError
from flashrt.planners.elastic import (
    DATA,
    DDIT,
    ELASTIC,
    choose_policies,
    compare,
    find_policy,
    gains,
    make_classes,
    make_islands,
    make_question,
    offline_bound,
    optimal_degree,
    read_elastic_profile,
    read_elastic_workload,
    simulate,
)
from flashrt.planners.elastic.bound import num_groups
from flashrt.planners.elastic.documents import (
    Arrivals,
    ClassKey,
    ClassTimes,
    Conservative,
    ElasticProfile,
    ElasticWorkload,
    WorkloadClass,
)
from flashrt.planners.elastic.load import draw_loads
from flashrt.planners.elastic.partitions import divide
from flashrt.planners.elastic.plots import write_plots
from flashrt.planners.elastic.request import DONE
from tests.planners.elastic.classes import classes_of, make_class, shipped, workload_of

# golden.json, "ddit": the optimal degrees, and the public profile in ms.
OPTIMAL = {"144p": 1, "240p": 2, "360p": 4}
PUBLIC = {
    "512": {1: 155, 2: 161, 4: 172}, "1024": {1: 605, 2: 350, 4: 207}, "1536": {1: 1557, 2: 880, 4: 464},
}  # fmt: skip


def test_the_golden_degrees_come_out() -> None:
    assert {one.name: one.best for one in classes_of("video")} == OPTIMAL
    profile = shipped("public")
    assert {name: dict(times.step_ms) for name, times in profile.classes.items()} == PUBLIC
    assert {one.name: one.best for one in classes_of("public")} == {"512": 1, "1024": 4, "1536": 4}
    assert all(gain < 0 for gain in gains(PUBLIC["512"]).values())
    assert gains(PUBLIC["1024"])[2] == pytest.approx(1 - 350 / 605)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=5), st.floats(0.01, 0.9))
def test_b_is_the_last_doubling_before_one_that_gains_too_little(times: list[float], threshold: float) -> None:
    by_degree = {2**place: time for place, time in enumerate(times)}
    best = optimal_degree(by_degree, threshold)
    z = gains(by_degree)
    assert all(z[degree] >= threshold for degree in by_degree if 1 < degree <= best)
    assert 2 * best not in by_degree or z[2 * best] < threshold
    if len(times) > 1 and z[2] < 0:
        assert best == 1
    # What lies behind a gap was not profiled as a doubling, and is not used.
    assert optimal_degree({1: 100, 4: 10}, threshold) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(0, 7), min_size=1, max_size=2), st.data())
def test_the_bound_is_the_least_of_all_divisions(
    num_devices: int, island: int, counts: list[int], data: st.DataObject
) -> None:
    islands = make_islands(num_devices, island)
    classes = [
        make_class(str(place), steps=2, times={degree: data.draw(st.integers(10, 90)) for degree in (1, 2, 4)},
                   vae={1: 5}, best=4)
        for place in range(len(counts))
    ]  # fmt: skip
    found = offline_bound(classes, counts, islands)
    order = [number for number, group in enumerate(islands) for _ in group]

    def cheapest(place: int, begin: int) -> float:
        """Try every stretch of devices behind `begin` for this class, and all that follow it."""
        if place == len(classes):
            return 0.0
        if not counts[place]:
            return cheapest(place + 1, begin)
        tried = [float("inf")]
        for first, last in itertools.combinations(range(begin, num_devices + 1), 2):
            for degree in (1, 2, 4):
                alpha = num_groups(range(first, last), order, degree)
                if alpha:
                    rounds = -(-counts[place] // alpha)
                    cost = (last - first) * rounds * 2 * classes[place].step_ns[degree] + counts[place] * 5
                    tried.append(cost + cheapest(place + 1, last))
        return min(tried)

    assert (float("inf") if found is None else found.gpu_ns) == cheapest(0, 0)


def test_fragments_form_fewer_groups() -> None:
    # DDiT, section 8: seven free devices on two hosts form seven groups of one, but only one of four.
    place = [0, 0, 0, 0, 1, 1, 1]
    assert [num_groups(range(7), place, degree) for degree in (1, 2, 4)] == [7, 3, 1]


@given(st.integers(1, 64), st.lists(st.floats(0, 100), min_size=1, max_size=6), st.integers(0, 3))
def test_divisions_use_every_device_once(num_devices: int, demand: list[float], least: int) -> None:
    found = divide(num_devices, demand, at_least=least)
    wanting = sum(one > 0 for one in demand)
    assert sum(found) == (num_devices if wanting else 0)
    assert all(one >= 0 for one in found)
    if wanting and num_devices >= least * wanting:
        assert all(one >= least for one, want in zip(found, demand, strict=True) if want > 0)


def test_a_lone_request_takes_its_time_alone() -> None:
    for one in classes_of("video"):
        run = simulate([one], ELASTIC, make_islands(8), [7], [0])
        (request,) = run.requests
        assert request.ended_ns - 7 == one.steps * one.step_ns[one.best] + one.vae_ns[1]
        assert request.gpu_ns == one.work_ns(one.best)
        # An arrival, every step, the VAE.
        assert run.num_events == one.steps + 2


def test_figures_hold_together_and_the_method_is_better() -> None:
    profile = shipped("video")
    workload = workload_of(profile, num_requests=150, repeats=2, rate=0.75)
    question = make_question(profile, workload, make_islands(8), Path())
    policies, notes = choose_policies(question)
    assert notes == []
    assert len(policies) == 2 + 4 + 3 + 2
    record, simulations = compare(question, policies)
    for name, one in record["policies"].items():
        of_classes = one["classes"].values()
        assert one["all"]["num_requests"] == 300 == sum(row["num_requests"] for row in of_classes)
        assert one["all"]["gpu_s"] == pytest.approx(sum(row["gpu_s"] for row in of_classes), abs=0.01)
        assert one["all"]["p50_ms"] <= one["all"]["p99_ms"]
        assert one["cost_ratio"] >= 1 - 1e-9, name
        assert (one["all"]["promotions"] > 0) == find_policy(name).promotes
        for run in simulations[name]:
            busy = sum(request.gpu_ns for request in run.requests)
            assert busy <= 8 * run.end_ns, "no more device time than there is"
            starts = [request.started_ns for request in run.requests]
            if find_policy(name).partition == "none":
                assert starts == sorted(starts)
    for key in ("p99_ms", "mean_ms"):
        assert record["against_best_static"][key]["change_percent"]["elastic"] < -10
    assert record["policies"]["elastic"]["cost_ratio"] <= 1.39
    few = make_question(profile, workload, make_islands(2), Path())
    assert "static_partition" in choose_policies(few)[1][0]


def test_plots_are_written(tmp_path: Path) -> None:
    profile = shipped("video")
    question = make_question(profile, workload_of(profile, rate=1.0), make_islands(8), tmp_path)
    record, simulations = compare(question, [ELASTIC, find_policy("static_2")])
    paths = write_plots(record, simulations, "video", tmp_path / "plots")
    assert sorted(paths) == ["cdf", "cost", "timeline"]
    assert all(path.stat().st_size > 5000 for path in paths.values())


def test_loads_have_their_rates(tmp_path: Path) -> None:
    profile = shipped("video")
    moments = np.cumsum(np.random.default_rng(0).exponential(2.0, 500))
    (tmp_path / "trace.csv").write_text("timestamp\n" + "\n".join(f"{moment:.6f}" for moment in moments))
    for arrivals in (
        {"rate": 2.0, "unit": "per_s"},
        {"rate": 2.0, "unit": "per_s", "process": "burst", "burst_size": 4},
        {"rate": 2.0, "unit": "per_s", "process": "trace", "trace": "trace.csv"},
        {"process": "trace", "trace": "trace.csv"},
    ):
        workload = workload_of(profile, num_requests=500, repeats=2, **arrivals)
        loads, rate = draw_loads(workload, make_classes(profile, workload)[0], 8, tmp_path)
        wanted = arrivals.get("rate", 0.5)
        assert rate == pytest.approx(wanted, rel=0.1)
        for load in loads:
            assert list(load.arrivals_ns) == sorted(load.arrivals_ns)
            assert len(load.kinds) / (load.arrivals_ns[-1] / 1e9) == pytest.approx(wanted, rel=0.25)
        assert loads[0].kinds != loads[1].kinds
    burst = draw_loads(workload_of(profile, process="burst", rate=1, burst_size=4, num_requests=40),
                       classes_of("video"), 8, tmp_path)[0][0]  # fmt: skip
    assert all(len(set(burst.arrivals_ns[begin : begin + 4])) == 1 for begin in range(0, 40, 4))


def write(path: Path, source: Any, **changes: Any) -> Path:
    found = yaml.safe_load((DATA / source).read_text()) if isinstance(source, str) else source
    found.update(changes)
    path.write_text(yaml.safe_dump(found, sort_keys=False))
    return path


def test_what_was_not_profiled_is_refused_or_runs_as_declared(tmp_path: Path) -> None:
    profile = shipped("video")
    classes = {"360p": {"share": 1, "key": {"frames": 102}}, "361p": {"share": 1}, "144p": {"share": 1}}
    workload = read_elastic_workload(write(tmp_path / "w.yaml", "workload-half.yaml", classes=classes))
    with pytest.raises(InputError) as refused:
        make_classes(profile, workload)
    text = str(refused.value)
    for words in ("'361p'", "did you mean '360p'", "frames is 102, profiled was 51", "conservative"):
        assert words in text
    declared = {"degree": 2, "steps": 10, "step_ms": 500, "vae_ms": 900}
    able = read_elastic_profile(write(tmp_path / "p.yaml", "video.yaml", conservative=declared))
    found, notes = make_classes(able, workload)
    assert [one.is_profiled for one in found] == [False, False, True]
    assert len(notes) == 2
    assert "never promoted" in notes[0]
    run = simulate(found, DDIT, make_islands(4), [0, 1, 2], [0, 0, 2], keeps_history=True)
    assert all(len(devices) <= 2 for one in run.requests[:2] for _, devices, _ in one.history)
    assert sum(one.promotions for one in run.requests[:2]) == 0
    # More of them at once than there are devices for: they go on one after the other.
    queued = simulate(found, ELASTIC, make_islands(2), [0] * 7, [0, 1, 0, 2, 1, 2, 0])
    assert all(one.phase is DONE for one in queued.requests)
    with pytest.raises(InputError, match="larger islands"):
        make_question(able, workload, make_islands(4, 1), tmp_path)


def test_wrong_documents_say_everything_that_is_wrong(tmp_path: Path) -> None:
    source = yaml.safe_load((DATA / "video.yaml").read_text())
    del source["classes"]["144p"]["step_ms"][1]
    del source["setup_ms"][8]
    with pytest.raises(InputError) as refused:
        read_elastic_profile(write(tmp_path / "p.yaml", source))
    assert "degree 1" in str(refused.value)
    assert "setup_ms" in str(refused.value)
    with pytest.raises(InputError, match="key 'rate'"):
        read_elastic_workload(write(tmp_path / "w.yaml", "workload-half.yaml", arrivals={"process": "poisson"}))
    with pytest.raises(InputError, match="did you mean 'elastic'"):
        find_policy("elastc")
    assert Arrivals(rate=1).unit == "nominal"


def test_the_page_on_documents_has_every_key() -> None:
    text = (Path(__file__).parents[3] / "docs" / "documents.md").read_text()
    models = {
        "Elastic profile": (ElasticProfile, ClassTimes, ClassKey, Conservative),
        "Elastic workload": (ElasticWorkload, WorkloadClass, Arrivals),
    }
    for heading, kinds in models.items():
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        for model in kinds:
            for field, info in model.model_fields.items():
                assert f"{info.alias or field}`" in section or f".{field}`" in section, f"{heading}: {field}"
