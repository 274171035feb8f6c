"""Auditing many small programs from one process, which forks for each."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench import write_recording
from flashrt.bench.audit.forks import in_fork
from flashrt.bench.audit.host import audit
from flashrt.bench.process import library_settings

SETTINGS = {**library_settings(), "PYTHONHASHSEED": "0"}
NUM_BATCHES = 4


def items(count: int = NUM_BATCHES) -> list[dict[str, Any]]:
    """Return batches of {x: float32 [6, 4]}; the first element is above zero in the second batch."""
    random = np.random.default_rng(11)
    found = [{"x": random.standard_normal((6, 4)).astype(np.float32)} for _ in range(count)]
    found[1]["x"][0, 0] = 1.0
    return found


def audit_forked(folder: str, document: Mapping[str, Any], ops: str, start: bool) -> dict[str, Any]:
    """Audit a program in a fork of this process."""
    (Path(folder) / "ops.py").write_text(ops)
    return audit_folder(folder, document, items(), {}, start)


def audit_folder(
    folder: str, document: Mapping[str, Any], batches: list[dict[str, Any]], config: Mapping[str, Any], start: bool
) -> dict[str, Any]:
    """Audit a program whose ops lie in `folder`, in a fork of this process."""
    place = Path(folder)
    (place / "program.json").write_text(json.dumps(document))
    files = place / "files"
    files.mkdir()
    write_recording(files / "items.frec", batches)
    spec = {
        "mode": "audit", "program": str(place / "program.json"), "folder": folder, "config": dict(config),
        "items": str(files / "items.frec"), "out": str(files / "inside.json"), "timeout_s": 60, "outputs": "",
        "other_process": start, "baseline": False, "parent": os.getpid(),
    }  # fmt: skip
    result: dict[str, Any] = in_fork(lambda: audit(spec), 120)
    return result


def warm(torch: bool) -> None:
    """Import what audits need, so that forks have it."""
    import flashrt.ir.building  # noqa: F401

    if torch:
        import torch as library

        library.set_num_threads(1)


@contextmanager
def auditors(torch: bool) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of one process that audits; with the settings that systems run with."""
    before, path = dict(os.environ), list(sys.path)
    os.environ.update(SETTINGS)
    # A test that ran the command line in this process may have taken the checkout's folder away.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(warm, torch).result(timeout=280)
            sys.path[:] = path
            yield pool
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)
