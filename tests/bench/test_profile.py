"""Measuring a profile: real ranks, real hand-overs, real memory; one program that has it all, measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis import check_profile_key, read_profile
from flashrt.bench import resolve_system
from flashrt.bench.profile import measure_profile
from flashrt.bench.profile_layout import Pool, choose_degrees, find_parts, find_pool, place
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram, build_file
from tests.ir.documents import edge, flat_graph
from tests.runtime.running import write_application

WEIGHT_BYTES = 8 << 20
SLEEP_MS = 60
OPS = f"""
import time
from pathlib import Path

import numpy as np

import helper


def load(context):
    # Zeros that nobody touches take no memory from the kernel; they are weights all the same.
    weight = np.zeros({WEIGHT_BYTES} // 8) if "wide" in context.operations else None
    factor = float((Path(__file__).parent / "factor.txt").read_text())

    def warms(inputs, state):
        state["calls"] = (state["calls"] or 0) + 1
        if state["calls"] <= 4:
            time.sleep(0.15)
        return {{"y": inputs["x"] * factor}}

    def wide(inputs, state):
        # Without a collective: rank 0 is done at once.
        if context.degree == 2 and context.rank == 1:
            time.sleep({SLEEP_MS} / 1e3)
        return {{"y": inputs["x"] + weight[0]}}

    def breaks(inputs, state):
        if context.degree == 2:
            raise RuntimeError("not on two")
        return {{"y": helper.same(inputs["x"])}}

    def tied(inputs, state):
        state["kv"] = np.ones(1 << 15)
        return {{"y": inputs["x"], "z": {{"all": inputs["x"], "step": 3}}}}

    def ends(inputs, state):
        kept = state["kv"]
        return {{"y": inputs["a"] + inputs["b"] + inputs["z"]["step"] + kept[0]}}

    return {{"warms": warms, "wide": wide, "breaks": breaks, "tied": tied, "ends": ends}}
"""
INPUTS = """
import numpy as np


def batches(seed, count):
    for batch in range(count):
        yield {"x": np.full(1024, batch, np.float32)}
"""


def write_program(folder: Path) -> BuiltProgram:
    """x -> warms -> wide -> breaks -> ends -> y, and from warms past both of them by way of tied."""
    nodes = {
        "warms": {"op": "warms", "reads": ["calls"], "writes": ["calls"]},
        "wide": {"op": "wide", "degrees": [1, 2]},
        "breaks": {"op": "breaks", "degrees": [1, 2]},
        "tied": {"op": "tied", "degrees": [1, 2], "reads": ["kv"], "writes": ["kv"]},
        "ends": {"op": "ends", "reads": ["kv"]},
    }
    edges = [
        edge("x", "warms.x"), edge("warms.y", "wide.x"), edge("wide.y", "breaks.x"), edge("breaks.y", "ends.a"),
        edge("warms.y", "tied.x"), edge("tied.y", "ends.b"), edge("tied.z", "ends.z"), edge("ends.y", "y"),
    ]  # fmt: skip
    write_application(folder, flat_graph(nodes, edges, states={"calls": {}, "kv": {}}), OPS)
    (folder / "helper.py").write_text("def same(value):\n    return value.copy()\n")
    (folder / "factor.txt").write_text("1.0")
    (folder / "inputs.py").write_text(INPUTS)
    return build_file(folder / "program.yaml")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], BuiltProgram]:
    folder = tmp_path_factory.mktemp("profiled")
    built = write_program(folder)
    job = tmp_path_factory.mktemp("job")
    document = measure_profile(
        resolve_system("program.yaml", folder), built, "inputs.py:batches", folder, job, count=6
    )  # fmt: skip
    assert not (job / "values").exists()
    return json.loads(json.dumps(document)), built


def test_every_operation_has_samples_at_every_degree_that_could_be_measured(measured: Any) -> None:
    document, _ = measured
    degrees = {path: set(by_degree) for path, by_degree in document["samples"].items()}
    assert degrees == {"warms": {"1"}, "wide": {"1", "2"}, "breaks": {"1"}, "tied": {"1"}, "ends": {"1"}}
    for key in ("operations", "spread", "warmup", "memory"):
        assert {path: set(by_degree) for path, by_degree in document[key].items()} == degrees
    assert all(len(samples) >= 3 for found in document["samples"].values() for samples in found.values())
    assert {degree: len(ranks) for degree, ranks in document["ranks"].items()} == {"1": 1, "2": 2}


def test_a_group_s_time_is_the_slowest_rank_s_and_does_not_add_up_over_batches(measured: Any) -> None:
    document, _ = measured
    samples = document["samples"]["wide"]["2"]
    # Only rank 1 sleeps, and rank 0 never waits for it: were it let run ahead, each batch would wait for those before.
    assert min(samples) >= SLEEP_MS
    assert document["operations"]["wide"]["2"] < 3 * SLEEP_MS
    assert min(document["samples"]["wide"]["1"]) < SLEEP_MS


def test_slow_first_calls_are_cut_and_counted(measured: Any) -> None:
    document, _ = measured
    # Four slow calls: one more than the least that is always cut. One more, and no more than half of the ten, is cut
    # where a busy machine makes one of the next calls slow as well.
    assert document["warmup"]["warms"]["1"] in {4, 5}
    assert document["operations"]["warms"]["1"] < 150
    assert "robust deviations" in document["methods"]["warmup"]


def test_what_cannot_be_measured_is_named_and_left_out(measured: Any) -> None:
    document, _ = measured
    notes = "\n".join(document["notes"])
    assert "operation 'breaks', degree 2: not measured" in notes
    assert "not on two" in notes
    assert "operation 'tied', degree 2: not measured, because it shares a state with 'ends'" in notes
    assert "operation 'wide', degree 2: not measured" not in notes


def test_transfers_are_keyed_by_edge_with_the_bytes_that_went_over_it(measured: Any) -> None:
    transfer = measured[0]["transfer"]
    sizes = {
        "warms -> wide": 4096, "wide -> breaks": 8192, "breaks -> ends": 8192, "warms -> tied": 4096,
        "tied -> ends": 8192,
    }  # fmt: skip
    # Edges whose consumer works while the value comes are measured as well, and two ports are one edge.
    assert transfer["bytes"] == sizes
    assert transfer["edges"].keys() == transfer["samples"].keys() == sizes.keys()
    assert all(0 < time_ms < 1e3 for time_ms in transfer["edges"].values())
    assert len(transfer["sizes"]) >= 5
    assert transfer["latency_ms"] >= 0
    assert transfer["fit_error"] >= 0


def test_memory_has_the_weights_of_the_operation_and_of_no_other(measured: Any) -> None:
    document, _ = measured
    assert min(document["memory"]["wide"].values()) >= WEIGHT_BYTES
    assert max(document["memory"]["warms"].values()) < WEIGHT_BYTES
    assert document["states"]["kv"] == 8 << 15
    assert document["memory"]["tied"]["1"] >= 8 << 15


def test_the_document_is_read_and_its_key_is_accepted(measured: Any) -> None:
    document, built = measured
    profile = read_profile(document, built)
    assert profile.degrees("wide") == (1, 2)
    assert profile.memory_bytes("wide", 2) >= WEIGHT_BYTES
    assert profile.transfer_ms("warms", "wide", 4096) == document["transfer"]["edges"]["warms -> wide"]
    assert profile.model_copy() == read_profile(json.loads(profile.model_dump_json(by_alias=True)), built)
    # Code, what it imports, and data that it reads.
    assert {"ops.py", "helper.py", "factor.txt"} <= document["key"]["files"].keys()
    assert document["key"]["inputs"] == {"x": "float32 [1024]"}
    assert check_profile_key(profile, built) == []
    (built.folder / "helper.py").write_text("def same(value):\n    return value + 0\n")
    (finding,) = check_profile_key(profile, built)
    assert "file 'helper.py'" in finding.where


def test_a_program_that_fails_at_its_simplest_says_so_itself(tmp_path: Path) -> None:
    nodes = {"p": {"op": "p"}}
    write_application(
        tmp_path, flat_graph(nodes, [edge("x", "p.x"), edge("p.y", "y")]),
        "def load(context):\n    return {'p': lambda inputs, state: 1 / 0}\n",
    )  # fmt: skip
    (tmp_path / "inputs.py").write_text(INPUTS)
    built = build_file(tmp_path / "program.yaml")
    with pytest.raises(InputError, match=r"operation 'p'.*ZeroDivisionError"):
        measure_profile(
            resolve_system("program.yaml", tmp_path), built, "inputs.py:batches", tmp_path, tmp_path / "job", count=3
        )


def test_degrees_that_nobody_declares_or_that_need_more_devices_are_refused_at_once(tmp_path: Path) -> None:
    built = write_program(tmp_path)
    assert choose_degrees(built, None, None) == (1, 2)
    assert choose_degrees(built, None, 1) == (1,)
    assert choose_degrees(built, [2, 1, 2], 2) == (1, 2)
    with pytest.raises(InputError) as caught:
        choose_degrees(built, [2, 3, 4], 1)
    assert [finding.rule for finding in caught.value.findings] == ["degrees"] * 3
    assert "at most 1, the devices given" in str(caught.value)
    assert "did you mean '2'?" in str(caught.value)
    with pytest.raises(InputError, match="real devices of one kind"):
        find_pool(["emulated-0", "emulated-1"])


def test_parts_that_share_a_written_state_stay_together_and_others_have_devices_of_their_own(tmp_path: Path) -> None:
    built = write_program(tmp_path)
    parts = find_parts(built.flat)
    assert [part.paths for part in parts] == [("warms",), ("wide",), ("breaks",), ("tied", "ends")]
    wide = [part for part in parts if 2 in part.degrees]
    cores = [f"cpu-{number}" for number in range(3)]
    document, devices = place(parts, 2, wide, Pool("cpu", tuple(cores), True))
    assert document["groups"] == {"measured": [0, 1], "rest-1": [2]}
    assert devices == cores
    # Too few: what is not measured is on a device that is measured, and idle meanwhile.
    _, devices = place(parts, 2, wide, Pool("cpu", ("cpu-0", "cpu-1"), True))
    assert devices == ["cpu-0", "cpu-1", "cpu-0"]
