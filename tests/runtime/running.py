"""Running small applications through the real runtime: real processes, NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flashrt.bench import resolve_system
from flashrt.bench.drive import Recorder, run_all
from flashrt.bench.process import SystemProcess
from flashrt.ir.values import join

Documents = Mapping[str, Any]


def write_application(folder: Path, program: Documents, ops: str, **deployments: Documents) -> None:
    """Write program.yaml, ops.py and a document for every deployment to `folder`."""
    (folder / "ops.py").write_text(ops)
    (folder / "program.yaml").write_text(yaml.safe_dump(dict(program), sort_keys=False))
    for name, document in deployments.items():
        whole = {"schema": "flashrt/deployment@1", "program": "program.yaml", "devices": "cpu", **document}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))


def start(folder: Path, document: str, items: Sequence[Mapping[str, Any]], **more: Any) -> SystemProcess:
    """Start a document of `folder` as a system."""
    return SystemProcess(resolve_system(document, folder), list(items[0]), log_path=folder / f"{document}.log", **more)


def run(folder: Path, document: str, items: Sequence[Mapping[str, Any]], timeout_s: float = 120) -> Recorder:
    """Run a document of `folder` over all items."""
    with start(folder, document, items) as process:
        process.wait_ready(timeout_s)
        return run_all(process, items, timeout_s)


def outputs_by_batch(recorder: Recorder, count: int) -> list[dict[str, Any]]:
    """Return each batch's outputs, chunks joined."""
    found: list[dict[str, list[Any]]] = [{} for _ in range(count)]
    for write in recorder.written:
        assert write.batch is not None
        found[write.batch].setdefault(write.output, []).append(write.value)
    return [{name: join(parts) for name, parts in batch.items()} for batch in found]


def assert_same(got: Sequence[Mapping[str, Any]], want: Sequence[Mapping[str, Any]]) -> None:
    """Compare outputs batch by batch, bit for bit."""
    assert len(got) == len(want)
    for batch, (have, expected) in enumerate(zip(got, want, strict=True)):
        assert have.keys() == expected.keys(), f"batch {batch}"
        for name, value in expected.items():
            np.testing.assert_array_equal(have[name], value, strict=True, err_msg=f"batch {batch}, output {name}")
