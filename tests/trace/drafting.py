"""Tracing references and running their drafts beside them, in a process of its own with FlashRT's settings."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

SEED = 7


def prepare() -> None:
    """Set what `SystemProcess` sets; before NumPy and torch are loaded."""
    os.environ.update(
        MKL_CBWR="AVX2,STRICT", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
        PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip


def play(path: Path, function: str, batches: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Any:
    """Run a reference as it is; return output -> what it wrote."""
    from flashrt.bench.io import CLOSED, Inputs, Outputs, SystemIO
    from flashrt.ir.ops import load_function

    written: dict[str, list[Any]] = {}
    inputs = Inputs(list(batches[0]))
    for batch in batches:
        for name, value in batch.items():
            inputs[name].put(value)
    for name in inputs:
        inputs[name].put(CLOSED)
    io = SystemIO(
        inputs, Outputs(lambda name, value, batch: written.setdefault(name, []).append(value)), ["cpu"], dict(config),
        lambda: None,
    )  # fmt: skip
    with suppress(EOFError):
        load_function(path, function)(io)
    return written


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    import numpy as np

    if hasattr(left, "shape"):
        a, b = np.asarray(left), np.asarray(right)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(left) is type(right) and bool(left == right)


def _flat(values: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate([np.asarray(one) for one in values]) if hasattr(values[0], "shape") else list(values)


def drafted(
    path: str, function: str, inputs: str, folder: str, count: int, depth: int, config: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Trace a reference, then run the draft and the reference on other batches; return what tests look at."""
    from flashrt.bench.trace.draft import draft_program
    from flashrt.bench.trace.measure import trace_reference
    from flashrt.ir.building import build_file
    from flashrt.ir.ops import load_function

    generate = load_function(Path(inputs), "batches")
    traced = trace_reference(Path(path), function, list(generate(SEED, count)), config=config, depth=depth)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    draft = draft_program(traced, name, out)
    (out / "program.yaml").write_text(draft.yaml)
    (out / "ops.py").write_text(draft.ops)
    (out / "profile.json").write_text(json.dumps(draft.profile))
    built = build_file(out / "program.yaml")
    return {
        "operations": [operation.path for operation in built.flat.operations],
        "warnings": [str(finding) for finding in built.findings],
        "program": draft.program,
        "questions": draft.questions,
        "nodes": draft.nodes,
        "notes": draft.notes,
        "yaml": draft.yaml,
        "ops": draft.ops,
        "equal": equal(path, function, inputs, folder, count, config),
    }


def equal(path: str, function: str, inputs: str, folder: str, count: int, config: Mapping[str, Any]) -> dict[str, bool]:
    """Interpret a draft over batches that were not traced; return output -> whether it is the reference's."""
    from flashrt.ir.building import build_file
    from flashrt.ir.interpreter import Interpreter
    from flashrt.ir.ops import Context, load_function

    generate = load_function(Path(inputs), "batches")
    items = list(generate(SEED + 1, count))
    built = build_file(Path(folder) / "program.yaml")
    interpreter = Interpreter(built.flat, built.folder, Context(config=config))
    got = list(interpreter.run(items))
    want = play(Path(path), function, list(generate(SEED + 1, count)), config)
    return {name: same(_flat([batch[name] for batch in got]), _flat(values)) for name, values in want.items()}


def failure(path: str, function: str, inputs: str, count: int) -> str:
    """Return what tracing a reference says, where it is refused."""
    from flashrt.bench.trace.measure import trace_reference
    from flashrt.errors import InputError
    from flashrt.ir.ops import load_function

    generate = load_function(Path(inputs), "batches")
    try:
        trace_reference(Path(path), function, list(generate(SEED, count)))
    except InputError as error:
        return str(error)
    return ""


def pool() -> ProcessPoolExecutor:
    """Return a process of its own."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=prepare)
