"""``cluster: ray``: workers as actors on the nodes of a Ray cluster; here all nodes are on this host."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from flashrt.analysis.deployment import read_deployment
from flashrt.bench.drive import run_all
from flashrt.bench.process import SystemProcess
from flashrt.errors import InputError
from flashrt.ir import build_file
from flashrt.ir.interpreter import interpret
from flashrt.planners.serving import Evaluator, Load, Settings, plan_serving
from flashrt.planners.serving.emulate import run_emulated
from flashrt.runtime import cluster as backend
from flashrt.runtime.actor import WorkerActor, note_of_priority
from flashrt.runtime.messages import Failed, Join, Message
from flashrt.runtime.serve import plan_workers, start_workers
from flashrt.runtime.wire import Connection
from tests.ir.documents import edge, flat_graph
from tests.planners.serving.test_documents import problem
from tests.runtime.running import assert_same, outputs_by_batch, run, start, write_application

OPS = """
import os
import numpy as np

def load(context):
    def p(inputs, state):
        state["n"] = (state["n"] or 0) + 1
        for part in range(3):
            yield {"y": inputs["x"][part::3] * state["n"]}

    def wide(inputs, state):
        import torch
        import torch.distributed as dist

        part = torch.from_numpy(np.array_split(inputs["x"], context.degree)[context.rank].copy()) * 2
        if context.degree > 1:
            parts = [torch.empty_like(part) for _ in range(context.degree)]
            dist.all_gather(parts, part, group=context.group)
            part = torch.cat(parts)
        return {"y": part.numpy()}

    def end(inputs, state):
        if inputs["x"].max() > 1e6:
            raise KeyError("asked for")
        return {"y": inputs["x"] + inputs["z"], "pid": np.full(1, os.getpid())}

    return {"p": p, "q": lambda inputs, state: {"y": inputs["x"] + 1}, "wide": wide, "end": end}
"""
NODES = {
    "p": {"op": "p", "reads": ["n"], "writes": ["n"]},
    "q": {"op": "q"},
    "wide": {"op": "wide", "degrees": [1, 2]},
    "end": {"op": "end"},
}
EDGES = [
    edge("x", "p.x"),
    edge("p.y", "q.x", "streaming", chunks=3),
    edge("q.y", "wide.x"),
    edge("p.y", "end.z"),
    edge("wide.y", "end.x"),
    edge("end.y", "y"),
    edge("end.pid", "pid"),
]
DOCUMENT = flat_graph(NODES, EDGES, states={"n": {}}, outputs={"y": {}, "pid": {}})
# Two workers fit on a node: some channels stay on one, others cross.
SPREAD = {
    "groups": {"a": [0], "b": [1], "c": [2, 3], "d": [4]},
    "place": {"p": "a", "q": "b", "wide": "c", "end": "d"},
    "cluster": "ray",
}
# Three workers on two nodes: enough for one to be lost.
SHORT = flat_graph(
    {name: NODES[name] for name in ("p", "q", "end")},
    [edge("x", "p.x"), edge("p.y", "q.x", "streaming", chunks=3), edge("p.y", "end.z"), edge("q.y", "end.x"),
     edge("end.y", "y"), edge("end.pid", "pid")],
    states={"n": {}}, outputs={"y": {}, "pid": {}},
)  # fmt: skip
SHORT_SPREAD = {
    "groups": {"a": [0], "b": [1], "d": [2]},
    "place": {"p": "a", "q": "b", "end": "d"},
    "cluster": "ray",
}
pytestmark = pytest.mark.slow


def items(count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [{"x": generator.standard_normal((6, 1000)).astype(np.float32)} for _ in range(count)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three nodes with two workers' room each; the head alone has this host's own address, so drivers attach to it."""
    # Ray takes a node for dead that does not answer in time, which a busy machine makes of any. Where a node's process
    # is gone the check fails at once: it need not be repeated often.
    patient = {
        "health_check_timeout_ms": 60_000,
        "health_check_period_ms": 1_000,
        "health_check_failure_threshold": 4,
        # By default Ray's workers have 15: beside two other tests they would hardly ever run.
        "worker_niceness": 1,
    }
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": patient}
    )
    try:
        for number in (2, 3):
            made.add_node(num_cpus=2, node_ip_address=f"127.0.0.{number}")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def address(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)


def strip(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"y": batch["y"]} for batch in batches]


def test_the_same_document_gives_the_same_results_and_what_breaks_is_named(tmp_path: Path) -> None:
    write_application(tmp_path, DOCUMENT, OPS, it=SPREAD)
    batches = items(6)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    got = outputs_by_batch(run(tmp_path, "it.yaml", batches, 120), 6)
    assert_same(strip(got), strip(want))

    broken = [*items(2), {"x": np.full((6, 4), 1e9, np.float32)}]
    with pytest.raises(InputError, match=r"group 'd'.*batch 2, operation 'end'.*KeyError: 'asked for'"):
        run(tmp_path, "it.yaml", broken, 120)

    with start(tmp_path, "it.yaml", batches) as process:
        process.wait_ready(120)
        recorder = run_all(process, batches, 120)
        notes = [event for event in process.events if event["kind"] == "note" and "niceness 1" in event["text"]]
        (pid,) = {int(write.value[0]) for write in recorder.written if write.output == "pid"}
    # One from each node, of which five workers with two to a node need three.
    assert len(notes) == 3
    # The actors go with their supervisor.
    assert not psutil.pid_exists(pid) or not psutil.Process(pid).is_running()


def test_loading_may_hold_the_lock_for_longer_than_a_worker_may_be_silent(tmp_path: Path) -> None:
    # PyDLL keeps Python's lock, as loading a native library does.
    holds = OPS.replace("def load(context):", "def load(context):\n    import ctypes; ctypes.PyDLL(None).sleep(6)")
    assert holds != OPS
    assert backend.SILENCE_S < 6
    write_application(tmp_path, SHORT, holds, it=SHORT_SPREAD)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, items(2))
    assert_same(strip(outputs_by_batch(run(tmp_path, "it.yaml", items(2), 120), 2)), strip(want))


@pytest.mark.parametrize("how", ["node", "silence"])
def test_a_lost_node_is_reported_with_what_was_lost(tmp_path: Path, nodes: Cluster, how: str) -> None:
    write_application(tmp_path, SHORT, OPS, it=SHORT_SPREAD)
    batches = items(1)
    with start(tmp_path, "it.yaml", batches) as process:
        process.wait_ready(120)
        process.send(batches[0])
        pid = None
        while pid is None:
            message = process.next_arrival(60, "outputs").message
            if message["kind"] == "output" and message["name"] == "pid":
                pid = int(message["value"][0])
        if how == "node":
            node = next(node for node in nodes.worker_nodes if has_actor(node))
            nodes.remove_node(node, allow_graceful=False)
        else:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(InputError) as caught:
                wait_for_the_end(process)
        finally:
            if how == "node":
                nodes.add_node(num_cpus=2, node_ip_address="127.0.0.4")
                # Until Ray has noticed, it gives actors to the node that is gone.
                nodes.wait_for_nodes(timeout=90)
    text = str(caught.value)
    words = "nothing was heard from it for 4 s" if how == "silence" else "its process ended"
    assert "group '" in text
    assert f"{words}" in text
    assert "on node " in text


def wait_for_the_end(process: SystemProcess) -> None:
    while True:
        process.next_arrival(60, "the end")


def has_actor(node: Any) -> bool:
    """Return whether a worker runs on a node: it is a child of one of the node's processes."""
    home = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    names = [child.name() for process in home for child in process.children(recursive=True)]
    return any("WorkerActor" in name for name in names)


def test_a_worker_that_cannot_join_says_why() -> None:
    """Its pulse would go on, and the supervisor would wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        orders = {"supervisor": listener.getsockname(), "name": "a", "token": "t", "beat_s": 60.0, "is_first": False,
                  "hub": {"endpoints": ["a"]}}  # fmt: skip
        caught: list[BaseException] = []

        def run_actor() -> None:
            try:
                WorkerActor().run(orders)
            except KeyError as error:
                caught.append(error)

        thread = threading.Thread(target=run_actor)
        thread.start()
        stream, _ = listener.accept()
        control = Connection(stream, torch=False)
        said: list[Message | None] = []
        while not any(isinstance(message, Failed) for message in said):
            said.append(Message.receive(control))
            assert said[-1] is not None
        thread.join()
        control.close()
    assert isinstance(said[0], Join)
    assert isinstance(said[-1], Failed)
    assert "KeyError: 'channels'" in said[-1].text
    assert caught


def test_workers_that_yield_to_others_are_named() -> None:
    assert note_of_priority(0) is None
    assert "niceness 15" in str(note_of_priority(15))
    assert "RAY_worker_niceness=0" in str(note_of_priority(15))


def test_too_few_resources_and_no_cluster_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PLACE_TIMEOUT_S", 2)
    groups = {name: [number] for number, name in enumerate("abcdefg")}
    chain = {name: {"op": "q"} for name in groups}
    edges = [edge("x", "a.x"), edge("g.y", "y")]
    edges += [edge(f"{first}.y", f"{second}.x") for first, second in zip("abcdef", "bcdefg", strict=True)]
    document = {"groups": groups, "place": {name: name for name in groups}, "cluster": "ray"}
    write_application(tmp_path, flat_graph(chain, edges), OPS, it=document)
    built = build_file(tmp_path / "program.yaml")
    placement = read_deployment(tmp_path / "it.yaml", built)
    layout = plan_workers(built, placement, [])

    def begin() -> None:
        start_workers(built, tmp_path / "program.yaml", placement, layout, {}, lambda event: None)

    with pytest.raises(InputError, match=r"free resources for 7 workers.*use fewer devices"):
        begin()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ray.shutdown()
    with pytest.raises(InputError, match=r"a Ray cluster at 127.0.0.1:1.*ray start --head"):
        begin()


def test_a_serving_plan_runs_on_the_nodes() -> None:
    """Ray places the plan's executors; requests go to them directly, and no actor is left."""
    answer = plan_serving(problem(), 4, Settings(time_limit_s=1, load=Load(num_simulated=2000)))
    evaluator = Evaluator(answer.problem, answer.settings.load)
    found = run_emulated(evaluator, answer.best.plan, answer.best.routes, num_requests=100, cluster=True)
    assert np.isfinite(np.concatenate(found.reached.latency_ms)).all()
    assert found.num_executors == sum(count for node in answer.best.plan.allocation for _, count in node)
