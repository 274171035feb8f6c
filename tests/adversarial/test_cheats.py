"""Every cheat of ``spec/measuring.md`` is caught by what it did, every honest twin passes.

`make test` runs them on the toy application, `make soak` ten times on WorldPlay too (`FLASHRT_ADVERSARIAL_APP`).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import flashrt.apps.worldplay
from flashrt.bench import CheckSettings, RunSettings, check_equivalence, resolve_system, run_benchmark
from flashrt.bench.recheck import Against
from flashrt.errors import InputError
from tests.conftest import TOY

HERE = Path(__file__).parent
APP = os.environ.get("FLASHRT_ADVERSARIAL_APP", "toy")
TIMES = int(os.environ.get("FLASHRT_ADVERSARIAL_TIMES", "1"))
INPUTS = "inputs.py:batches"

# Who cheats -> by whom it is caught (the check, the timed run, or a process that fails) and in which words.
CHEATS = {
    "replays_the_warm_up": ("run", "in the timed run, output 'frames'"),
    "caches_by_a_fingerprint": ("check", "differs first at|is repeated|stale"),
    "waits_for_later_inputs": ("failed", "all outputs of batch 0"),
    "does_every_second_batch": ("check", "batch 1"),
    "leaves_work_on_a_thread": ("check", r"differs first at \[0"),
    "hands_over_a_lazy_array": ("failed", "Lazy"),
    "replaces_the_timers": ("check", "the system replaced time.monotonic_ns"),
    "looks_for_the_answers": ("check", "differs first at"),
    "changes_its_inputs": ("check", "differs first at"),
    "constant": ("check", "differs first at"),
    "zeros": ("check", "differs first at"),
    "knows_one_input": ("check", "differs first at"),
    "half_precision": ("check", "differs first at"),
    "half_resolution": ("check", "differs first at"),
    "drops_a_frame": ("check", r"\(batch 3\)"),
    "repeats_a_frame": ("check", "repeated|differs first at"),
    "swaps_frames": ("check", "differs first at|order"),
    "calls_the_reference": ("failed", "the reference is hidden"),
    "runs_a_copy_of_the_reference": ("failed", "the reference is hidden"),
    "forges_messages": ("failed", "a message|garbled|framing|verdict"),
    "wrong_later": ("run", "in the timed run, output 'frames'"),
    "wrong_when_timed": ("run", "in the timed run, output 'frames'"),
    "works_at_start": ("check", "differs first at"),
}
SILENCE_S = {"waits_for_later_inputs": 10}
"""How long outputs are waited for that never come; where they do come, a starved machine may take its time."""
TWINS = [node.name for node in ast.parse((HERE / "twins.py").read_text()).body if isinstance(node, ast.FunctionDef)]


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """The application's folder, with cheats and twins in it."""
    source = TOY if APP == "toy" else Path(flashrt.apps.worldplay.__file__).parent
    folder = tmp_path / "app"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("core.py", "cheats.py", "twins.py"):
        shutil.copy(HERE / name, folder)
    return folder


def judge(folder: Path, reference: str) -> tuple[str, list[str]]:
    """Return what stopped a system (``check``, ``run`` or ``failed``; empty: nothing did), and the reasons."""
    baseline, candidate = resolve_system("reference.py:serve", folder), resolve_system(reference, folder)
    checking = CheckSettings(timeout_s=60 if APP == "toy" else 180, measure_noise=False)
    try:
        verdict = check_equivalence(baseline, candidate, INPUTS, folder, folder, checking)
        if not verdict["equivalent"]:
            return "check", verdict["reasons"]
        # By amount, not by time: a busy machine would end before those cheats that begin after `CHECKED` batches.
        settings = RunSettings(
            runs=1, duration_s=80, max_batches=60 if APP == "toy" else 20,
            timeout_s=SILENCE_S.get(reference.removeprefix("cheats.py:"), 90) if APP == "toy" else 90,
            elements_per_batch=verdict["elements_per_batch"],
        )  # fmt: skip
        against = Against(baseline, checking.tolerance)
        result: dict[str, Any] = run_benchmark(candidate, INPUTS, folder, folder, settings, against=against)
    except InputError as error:
        return "failed", [str(error)]
    return "" if result["valid"] else "run", result["reasons"]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught_by_what_it_did(application: Path, name: str) -> None:
    for _ in range(TIMES):
        where, reasons = judge(application, f"cheats.py:{name}")
        wanted, words = CHEATS[name]
        assert where == wanted, (where, reasons)
        assert any(re.search(words, reason) for reason in reasons), reasons


@pytest.mark.parametrize("name", TWINS)
def test_its_honest_twin_passes(application: Path, name: str) -> None:
    for _ in range(TIMES):
        assert judge(application, f"twins.py:{name}") == ("", [])
