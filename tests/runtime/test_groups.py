"""Groups of several devices, tiles, stages beside the batches, and steps in groups of their own: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.bench.drive import run_all
from flashrt.errors import InputError
from flashrt.ir import Context, build_file, interpret
from flashrt.runtime.wire import Tensor
from tests.ir.documents import edge, flat_graph
from tests.runtime.running import assert_same, outputs_by_batch, run, start, write_application

RANKS = """
import os

import torch
import torch.distributed as dist


def gather(context, part):
    if context.degree == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(context.degree)]
    dist.all_gather(parts, part.contiguous(), group=context.group)
    return torch.cat(parts)


def load(context):
    def p(inputs, state):
        x = inputs["x"]
        out = context.empty("y", x.shape, x.dtype)
        torch.add(x, 1, out=out)
        return {"y": out, "z": x[:1].clone()}

    def mine(value):
        return value.chunk(context.degree, 0)[context.rank]

    def q(inputs, state):
        state["calls"] = (state["calls"] or 0) + 1
        if context.config.get("dies") == state["calls"] and context.rank == 1:
            os.kill(os.getpid(), 9)
        if context.config.get("raises") == state["calls"] and context.rank == 1:
            raise KeyError("gone")
        return {"y": gather(context, mine(inputs["x"]) * 2 + state["calls"])}

    def tile(inputs, state):
        count = context.tiles.get("tile", 1)
        if count == 1:
            return {"y": torch.tanh(inputs["x"])}
        part = inputs["x"].chunk(count, 1)[context.rank]
        return {"y": gather(context, torch.tanh(part).t()).t().contiguous()}

    def told(inputs, state):
        text = f"{context.rank} of {context.degree}: {dict(sorted(context.tiles.items()))}"
        return {"y": [text, inputs["x"]]}

    return {"p": p, "q": q, "tile": tile, "told": told}
"""
STREAM = {"mode": "streaming", "chunks": 4}
WIDE = {"groups": {"a": [0], "b": [0, 1]}, "place": {"p": "a", "q": "b", "tile": "b"}}


def tensors(count: int, rows: int = 8, columns: int = 600) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(count)
    return [{"x": torch.randn(rows, columns, generator=generator)} for _ in range(count)]


def assert_bits(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """Compare tensors, or chunks of them, as the harness has them with the interpreter's."""

    def array(value: Tensor | list[Tensor]) -> np.ndarray:
        return np.concatenate([part.data for part in (value if isinstance(value, list) else [value])])

    assert_same(
        [{name: array(value) for name, value in batch.items()} for batch in got],
        [{name: value.numpy() for name, value in batch.items()} for batch in want],
    )


def ranked(*, streaming: bool) -> dict[str, Any]:
    """Return x -> p -> q (on one or two devices) -> tile (cut in two, or not) -> y; p also goes out."""
    more = STREAM if streaming else {}
    nodes = {
        "p": {"op": "p"},
        "q": {"op": "q", "degrees": [1, 2], "reads": ["calls"], "writes": ["calls"]},
        "tile": {"op": "tile", "degrees": [1, 2], "tiles": [2]},
    }
    edges = [
        edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "tile.x", **more), edge("tile.y", "y", **more),
        edge("p.z", "z"),
    ]  # fmt: skip
    return flat_graph(nodes, edges, outputs={"y": {}, "z": {}}, states={"calls": {}})


GROUPINGS: dict[str, dict[str, Any]] = {
    "one-group": {"groups": {"a": [0, 1]}, "place": {"p": "b", "q": "a", "tile": "a"}},
    "tiled": {"groups": {"a": [0, 1]}, "place": {"p": "b", "q": "a", "tile": "a"}, "tiles": {"tile": 2}},
    "two-groups": {"groups": {"a": [0, 1], "c": [2, 3]}, "place": {"p": "b", "q": "a", "tile": "c"}, "in_flight": 1},
}


@pytest.mark.parametrize(
    ("grouping", "streaming"),
    [("one-group", True), ("tiled", False), ("two-groups", False)],
)
def test_ranks_that_share_the_work_put_out_what_one_device_does(tmp_path: Path, grouping: str, streaming: bool) -> None:
    deployment = GROUPINGS[grouping]
    groups = {**deployment["groups"], "b": [4]}
    write_application(tmp_path, ranked(streaming=streaming), RANKS, it={**deployment, "groups": groups})
    batches = tensors(6)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert_bits(outputs_by_batch(run(tmp_path, "it.yaml", batches), 6), want)


def test_every_rank_is_told_who_it_is_and_which_ops_are_cut(tmp_path: Path) -> None:
    nodes = {"told": {"op": "told", "degrees": [2], "tiles": [2]}}
    program = flat_graph(nodes, [edge("x", "told.x"), edge("told.y", "y")])
    deployment = {"groups": {"a": [0, 1]}, "place": {"told": "a"}, "tiles": {"told": 2}}
    write_application(tmp_path, program, RANKS, it=deployment)
    with start(tmp_path, "it.yaml", [{"x": 5}]) as process:
        process.wait_ready(120)
        # The system itself, and a process for each rank.
        assert len(process.members()) == 3
        (batch,) = outputs_by_batch(run_all(process, [{"x": 5}], 120), 1)
    assert batch["y"] == ["0 of 2: {'told': 2}", 5]


@pytest.mark.parametrize(("fault", "text"), [("raises", "KeyError"), ("dies", "SIGKILL|rank 0.*peer|rank 0.*closed")])
def test_a_rank_that_breaks_ends_its_group_with_a_reason(tmp_path: Path, fault: str, text: str) -> None:
    deployment = {"groups": {"a": [0, 1], "b": [2]}, "place": {"p": "b", "q": "a", "tile": "a"}, "config": {fault: 3}}
    write_application(tmp_path, ranked(streaming=False), RANKS, it=deployment)
    with pytest.raises(InputError, match=f"(?s)group 'a', rank [01].*({text})"):
        run(tmp_path, "it.yaml", tensors(6))


BESIDE = """
import time
from pathlib import Path

import numpy as np


def wait_for(path):
    deadline = time.monotonic() + 100
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.002)


def load(context):
    gate = Path(context.config["gate"])
    count = {"event": 0, "use": 0}

    def event(inputs, state):
        batch, count["event"] = count["event"], count["event"] + 1
        if batch == 1:
            wait_for(gate)
        value = np.full((4, 3), inputs["x"][0, 0])
        if context.config.get("chunks"):
            return iter([{"y": value[:2]}, {"y": value[2:]}])
        return {"y": value}

    def use(inputs, state):
        batch, count["use"] = count["use"], count["use"] + 1
        if batch == context.config["opens"]:
            gate.touch()
        return {"y": inputs["x"] * 2, "batch": np.full(len(inputs["x"]), batch)}

    return {"event": event, "use": use, "same": lambda inputs, state: {"y": inputs["x"]}}
"""


def beside(*, own_input: bool, streaming: bool = False) -> dict[str, Any]:
    """Return x -> event -> use -> y, where `use` also takes the batch's other input, or not."""
    more = {"mode": "streaming", "chunks": 2} if streaming else {}
    edges = [edge("x", "event.x"), edge("event.y", "use.x", **more), edge("use.y", "y"), edge("use.batch", "batch")]
    inputs: dict[str, Any] = {"x": {}}
    if own_input:
        edges.append(edge("own", "use.own"))
        inputs["own"] = {}
    nodes = {"event": {"op": "event", "event_driven": True}, "use": {"op": "use"}}
    return flat_graph(nodes, edges, inputs=inputs, outputs={"y": {}, "batch": {}})


def events(count: int, *, own_input: bool, constant: bool = False) -> list[dict[str, Any]]:
    own = {"own": np.zeros(1)} if own_input else {}
    return [{"x": np.full((4, 3), 7.0 if constant else float(batch)), **own} for batch in range(count)]


@pytest.mark.parametrize(
    ("own_input", "streaming", "opens"),
    [(True, False, 9), (True, True, 9), (False, False, 9), (True, False, 40), (False, True, 40)],
)
def test_consumers_go_on_with_the_last_value_while_a_stage_beside_them_is_held_back(
    tmp_path: Path, opens: int, own_input: bool, streaming: bool
) -> None:
    deployment = {
        "groups": {"a": [0], "b": [1]}, "place": {"event": "a", "use": "b"}, "asynchronous": ["event"],
        "config": {"gate": str(tmp_path / "gate"), "opens": opens * (2 if streaming else 1), "chunks": streaming},
    }  # fmt: skip
    write_application(tmp_path, beside(own_input=own_input, streaming=streaming), BESIDE, it=deployment)
    count = opens + 10
    got = outputs_by_batch(run(tmp_path, "it.yaml", events(count, own_input=own_input), timeout_s=120), count)
    used = [float(batch["y"][0, 0]) / 2 for batch in got]
    assert all(batch["y"].shape == (4, 3) for batch in got)
    assert all((batch["y"] == batch["y"][0, 0]).all() for batch in got)
    # Only the first value was waited for, and none comes from a later batch or from before the last one.
    assert used[: opens + 1] == [0.0] * (opens + 1)
    assert all(value <= batch for batch, value in enumerate(used))
    assert used == sorted(used)


def test_a_stage_beside_the_batches_that_always_says_the_same_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    deployment = {
        "groups": {"a": [0], "b": [1]}, "place": {"event": "a", "use": "b"}, "asynchronous": ["event"],
        "config": {"gate": str(tmp_path / "gate"), "opens": -1},
    }  # fmt: skip
    write_application(tmp_path, beside(own_input=True), BESIDE, it=deployment)
    batches = events(30, own_input=True, constant=True)
    flat = build_file(tmp_path / "program.yaml").flat
    want, _ = interpret(flat, tmp_path, batches, Context(config=deployment["config"]))
    assert_same(outputs_by_batch(run(tmp_path, "it.yaml", batches), 30), want)


def test_without_the_strategy_an_event_driven_node_runs_for_every_batch(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    config = {"gate": str(tmp_path / "gate"), "opens": -1}
    deployment = {"groups": {"a": [0], "b": [1]}, "place": {"event": "a", "use": "b"}, "config": config}
    write_application(tmp_path, beside(own_input=False), BESIDE, it=deployment)
    got = outputs_by_batch(run(tmp_path, "it.yaml", events(12, own_input=False)), 12)
    assert [float(batch["y"][0, 0]) for batch in got] == [2.0 * batch for batch in range(12)]


STEPS = """
import numpy as np


def load(context):
    def noise(inputs, state):
        state["drawn"] = (state["drawn"] or 0) + 1
        return np.random.default_rng(state["drawn"]).standard_normal((5, 4))

    def step(inputs, state):
        before = state["kv"]
        state["kv"] = inputs["latents"].sum() + (0 if before is None else before * 0.5)
        return {"latents": np.tanh(inputs["latents"] + inputs["x"]) + state["kv"]}

    return {"noise": noise, "step": step}
"""


@pytest.mark.parametrize("num_groups", [2, 3])
def test_steps_of_a_repeated_graph_run_in_groups_of_their_own(tmp_path: Path, num_groups: int) -> None:
    steps = {
        "repeat": {"times": 3, "carry": {"latents": "latents"}},
        "inputs": {"x": {}, "latents": {"initial": {"op": "noise", "reads": ["drawn"], "writes": ["drawn"]}}},
        "outputs": {"latents": {}},
        "nodes": {"step": {"op": "step", "reads": ["kv"], "writes": ["kv"]}},
        "edges": [edge("x", "step.x"), edge("latents", "step.latents"), edge("step.latents", "latents")],
    }
    document = flat_graph({"dit": {"graph": "steps"}}, [edge("x", "dit.x"), edge("dit.latents", "y")])
    document["graphs"]["steps"] = steps
    document["states"] = {"kv": {"per": "iteration"}, "drawn": {}}
    place = {f"dit/step[{index}]": "abc"[index % num_groups] for index in range(3)}
    groups = {name: [number] for number, name in enumerate("abc"[:num_groups])}
    write_application(tmp_path, document, STEPS, it={"groups": groups, "place": place})
    batches = [{"x": np.full((5, 4), float(batch))} for batch in range(8)]
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert_same(outputs_by_batch(run(tmp_path, "it.yaml", batches), 8), want)


def test_a_state_that_two_groups_share_is_refused_where_steps_are_spread(tmp_path: Path) -> None:
    nodes = {"p": {"op": "step", "reads": ["kv"], "writes": ["kv"]}, "q": {"op": "step", "reads": ["kv"]}}
    edges = [edge("x", "p.x"), edge("p.latents", "q.x"), edge("q.latents", "y")]
    document = flat_graph(nodes, edges, states={"kv": {}})
    write_application(tmp_path, document, STEPS, it={"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "q": "b"}})
    with pytest.raises(InputError, match="state 'kv'") as caught:
        run(tmp_path, "it.yaml", [{"x": np.ones(3)}])
    assert caught.value.findings[0].rule == "state-across-groups"
