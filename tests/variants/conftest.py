"""A workspace, evidence for it, and processes that work on it at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrt.variants import Store, VariantQueue, open_store


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def store(workspace: Path) -> Store:
    return open_store(workspace)


@pytest.fixture
def queue(store: Store) -> VariantQueue:
    return VariantQueue(store)


@pytest.fixture
def add(queue: VariantQueue) -> Callable[..., str]:
    """Add a variant with whatever is not the test's subject filled in; returns its id."""

    def run(**given: Any) -> str:
        words = {"hypothesis": "decoding hides behind denoising", "transformation": "stream",
                 "bottleneck": "edge dit -> vae", "legality": "the decoder is causal", **given}  # fmt: skip
        variant = queue.add(**words).variant
        assert variant is not None
        return variant.id

    return run


@pytest.fixture
def prove(store: Store) -> Callable[..., dict[str, str]]:
    """Put a check and a run into the store; returns what variant_update takes."""

    def run(
        digest: str = "aaaa",
        *,
        run_digest: str | None = None,
        baseline: str = "base",
        equivalent: object = True,
        valid: object = True,
        reference: str = "fast.py:serve",
    ) -> dict[str, str]:
        number = len(store.list_records("run"))
        check = {"equivalent": equivalent, "reasons": ["output 'frames' differs"],
                 "baseline": {"reference": "reference.py:serve", "digest": baseline},
                 "candidate": {"reference": reference, "digest": digest}}  # fmt: skip
        bench = {"valid": valid, "rechecked": {"equal": True}, "reasons": ["too few batches"],
                 "system": {"reference": reference, "digest": run_digest or digest}}  # fmt: skip
        store.put_record("equivalence", f"eq-{number}", check)
        store.put_record("run", f"run-{number}", bench)
        return {"equivalence": f"eq-{number}", "run": f"run-{number}"}

    return run


@pytest.fixture
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """Start Python on a script with arguments."""

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return start
