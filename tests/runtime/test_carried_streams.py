"""A value that is carried between iterations streams where both of its edges do: steps overlap within a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.analysis import analyze_program, read_profile
from flashrt.ir import build_file
from flashrt.ir.interpreter import interpret
from tests.runtime import running

TIMES, CHUNKS = 3, 4
OPS = """
def load(context):
    def step(inputs, state):
        before = state["memory"]
        total = 0.0 if before is None else before
        rows = []
        for row in inputs["x"]:
            total = total + row.sum()
            rows.append(row * 1.5 + total)
        state["memory"] = total
        import numpy as np
        return {"x": np.stack(rows)}
    return {"step": step}
"""


def program(mode: dict[str, Any], shared: bool = False) -> dict[str, Any]:
    """Return a repeated step with a memory of its own (or one for all), whose carried value travels in `mode`."""
    return {
        "schema": "flashrt/program@1", "name": "carry", "ops": "ops.py:load", "entry": "app",
        "states": {"memory": {} if shared else {"per": "iteration"}},
        "graphs": {
            "app": {
                "inputs": {"x": {"dtype": "float64", "shape": ["rows", 2]}}, "outputs": {"x": {}},
                "nodes": {"steps": {"graph": "steps"}},
                "edges": [{"from": "x", "to": "steps.x", "mode": "blocking"},
                          {"from": "steps.x", "to": "x", "mode": "streaming", "chunks": CHUNKS}],
            },
            "steps": {
                "repeat": {"times": TIMES, "carry": {"x": "x"}}, "inputs": {"x": {}}, "outputs": {"x": {}},
                "nodes": {"step": {"op": "step", "reads": ["memory"], "writes": ["memory"]}},
                "edges": [{"from": "x", "to": "step.x", **mode}, {"from": "step.x", "to": "x", **mode}],
            },
        },
    }  # fmt: skip


STREAMING = {"mode": "streaming", "chunks": CHUNKS}
BLOCKING = {"mode": "blocking"}
APART = {
    "groups": {"a": [0], "b": [1], "c": [2]}, "place": {f"steps/step[{n}]": "abc"[n] for n in range(TIMES)},
}  # fmt: skip


def items(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((8, 2))} for _ in range(count)]


def test_only_values_whose_edges_all_stream_travel_in_chunks(tmp_path: Path) -> None:
    running.write_application(tmp_path, program(STREAMING), OPS)
    carried = [flow for flow in build_file(tmp_path / "program.yaml").flat.dataflow if flow.carried]
    assert [flow.chunked for flow in carried] == [True] * (TIMES - 1)
    running.write_application(tmp_path, program(BLOCKING), OPS)
    carried = [flow for flow in build_file(tmp_path / "program.yaml").flat.dataflow if flow.carried]
    assert [flow.chunked for flow in carried] == [False] * (TIMES - 1)


@pytest.mark.parametrize("apart", [True, False])
def test_steps_that_stream_to_each_other_compute_what_the_program_means(tmp_path: Path, apart: bool) -> None:
    together = {"groups": {"a": [0]}, "place": {"steps": "a"}}
    running.write_application(tmp_path, program(STREAMING), OPS, deployment=APART if apart else together)
    batches = items(6)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    recorder = running.run(tmp_path, "deployment.yaml", batches)
    assert len(recorder.written) == 6 * CHUNKS
    running.assert_same(running.outputs_by_batch(recorder, len(batches)), want)


def test_the_model_lets_steps_overlap_within_a_batch(tmp_path: Path) -> None:
    times = {"schema": "flashrt/profile@1", "device": "emulated", "operations": {"steps/step[*]": 8.0},
             "provenance": "declared"}  # fmt: skip
    profile = read_profile(times)
    figures = {}
    for name, mode in (("streaming", STREAMING), ("blocking", BLOCKING)):
        running.write_application(tmp_path, program(mode), OPS)
        document = {"schema": "flashrt/deployment@1", "program": "program.yaml", "devices": "emulated", **APART}
        figures[name] = analyze_program(build_file(tmp_path / "program.yaml"), profile, document)
    # Each step takes 8 ms in 4 chunks of 2: the third begins two chunks after the first.
    assert figures["streaming"]["latency_ms"] == 8 + 2 + 2
    assert figures["streaming"]["first_output_ms"] == 3 * 2
    assert figures["blocking"]["latency_ms"] == 3 * 8


def test_steps_that_share_a_state_do_not_stream(tmp_path: Path) -> None:
    running.write_application(tmp_path, program(STREAMING, shared=True), OPS)
    found = {one["id"]: one for one in analyze_program(build_file(tmp_path / "program.yaml"))["candidates"]}
    assert found["step-pipeline:steps"]["legal"] is False
    assert found["stream:step.x->x"]["legal"] is False
    assert "take turns" in found["stream:step.x->x"]["legality"]
