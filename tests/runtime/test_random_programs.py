"""Random programs under random deployments: what the runtime puts out is what the interpreter does, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from flashrt.bench import read_inputs
from flashrt.ir import BuiltProgram, build_file, interpret
from tests.runtime.programs import ProgramMaker, draw_deployment
from tests.runtime.running import assert_same, outputs_by_batch, run

NUM_BATCHES = 5
NUM_PROGRAMS = int(os.environ.get("FLASHRT_RANDOM_PROGRAMS", "10"))


def states_of(built: BuiltProgram) -> dict[str, set[str]]:
    return {operation.path: set(operation.accesses) for operation in built.flat.operations}


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_deployment_puts_out_what_the_interpreter_does(tmp_path: Path, seed: int) -> None:
    streaming = ProgramMaker(seed).make(tmp_path)
    built = build_file(tmp_path / "program.yaml")
    paths = [operation.path for operation in built.flat.operations]
    wide = {operation.path for operation in built.flat.operations if 2 in operation.degrees}
    deployment = draw_deployment(seed, paths, states_of(built), streaming, wide)
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(deployment, sort_keys=False))
    items = read_inputs("inputs.py:batches", tmp_path, seed, NUM_BATCHES)
    want, notes = interpret(built.flat, tmp_path, items)
    assert not notes
    recorder = run(tmp_path, "deployment.yaml", items)
    assert recorder.batches_done == len(recorder.ends) == NUM_BATCHES
    assert_same(outputs_by_batch(recorder, NUM_BATCHES), want)
    # Every part of a batch comes before the batch is said to be done.
    for index, write in enumerate(recorder.written):
        assert index < recorder.ends[write.batch or 0]
