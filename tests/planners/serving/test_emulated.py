"""A plan that runs: processes on emulated GPUs reach what was predicted, and none is left."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from flashrt.errors import InputError
from flashrt.planners.serving import Answer, Evaluator, Load, Settings
from flashrt.planners.serving import emulate as emulation
from flashrt.planners.serving.emulate import run_emulated
from flashrt.planners.serving.executor import Engine
from flashrt.planners.serving.record import answer_record, deployment_record
from tests.conftest import flashrt_processes

from .drawn import single
from .steps import plan_serving
from .test_documents import problem


@pytest.fixture(scope="module")
def answer() -> Answer:
    return plan_serving(problem(), 4, Settings(time_limit_s=2, load=Load(num_simulated=5000)))


def test_the_running_plan_reaches_the_predicted_goodput(answer: Answer) -> None:
    evaluator = Evaluator(answer.problem, answer.settings.load)
    found = run_emulated(evaluator, answer.best.plan, answer.best.routes, num_requests=300)
    assert found.num_executors == sum(count for node in answer.best.plan.allocation for _, count in node)
    assert np.isfinite(np.concatenate(found.reached.latency_ms)).all()
    predicted = float(found.predicted.goodput_per_s.sum())
    # Processes on a busy machine are late; the benchmark holds the figure to 5 %.
    assert found.reached.goodput_per_s.sum() > 0.5 * predicted
    assert not flashrt_processes()


def test_an_executor_that_is_killed_is_named_and_all_are_ended(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Evaluator(answer.problem, answer.settings.load)
    send = emulation._Driver._send
    sent = []

    def send_then_kill(driver: emulation._Driver, visit: int) -> None:
        send(driver, visit)
        sent.append(visit)
        if len(sent) == 20:
            psutil.Process(sorted(flashrt_processes())[0]).send_signal(signal.SIGKILL)

    monkeypatch.setattr(emulation._Driver, "_send", send_then_kill)
    with pytest.raises(InputError, match=r"executor \d+ ended"):
        run_emulated(evaluator, answer.best.plan, answer.best.routes, num_requests=200)
    assert not flashrt_processes()


def test_an_engine_batches_by_the_simulators_rules() -> None:
    """The same arrivals through the executor's engine and through the simulator end at the same moments."""
    for batching in ("static", "continuous"):
        found = single({"batching": batching, "latency_ms": {1: {"x": [8.0, 12.0]}, 4: {"x": [20.0, 30.0]}},
                        "cpu_ms": {"x": 5.0}})  # fmt: skip
        found.targets_ms[:] = 1e9
        solved = plan_serving(found, 1, Settings(time_limit_s=1, max_subplans=1, load=Load(num_simulated=400)))
        evaluator = Evaluator(solved.problem, Load(alpha=0.9))
        plan, own = solved.best.plan, solved.best.routes
        (k, _) = plan.allocation[0][0]
        one = found.configurations[k]
        unit, _, draws = evaluator.requests(1, 400, 3)
        arrivals = unit * (1e3 / (0.9 * plan.rate_per_s))
        table = found.latency_ms[one.engine, :, : one.batch].tolist()
        engine = Engine(one.batch, found.is_static(k), table, [1.0], [5.0])
        done: dict[int, float] = {}
        following = 0
        while len(done) < 400:
            next_event = engine.events[0][0] if engine.events else np.inf
            if following < 400 and arrivals[following] <= next_event:
                engine.arrive(float(arrivals[following]), following, 0, float(draws[following, 2]))
                following += 1
                continue
            for visit in engine.due(next_event):
                done[visit] = next_event
        shown = evaluator.simulate(plan, own, num=400, seed=3)
        latency = np.array([done[index] - arrivals[index] for index in range(400)])
        after = arrivals >= 0.1 * arrivals[-1]
        assert np.allclose(np.sort(latency[after]), np.sort(shown.latency_ms[0]))


def test_the_record_says_all_and_the_deployment_adds_up(answer: Answer, tmp_path: Path) -> None:
    from flashrt.planners.serving.plots import write_plots

    record = answer_record(answer)
    assert record["provenance"] == "declared"
    assert record["figures"] == "predicted"
    assert {"bottleneck", "loads", "next_gpu", "merges"} <= set(record["why"])
    assert {"subplans", "bounds", "guided", "simulated", "all"} <= set(record["seconds"])
    assert record["counts"]["physical_candidates"] > 0
    deployment = deployment_record(answer)
    gpus = sum(one["count"] * one["gpus"] for node in deployment["nodes"] for one in node["executors"])
    assert gpus == deployment["gpus"] <= 4
    for routing in deployment["routing"].values():
        assert sum(path["share"] for path in routing["paths"]) == pytest.approx(1)
    for path in write_plots(answer, tmp_path).values():
        assert path.read_bytes().startswith(b"\x89PNG")
