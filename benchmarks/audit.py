"""What an audit costs, against the interpreter on the same batches, for every shipped application.

Two ratios of walls: of the work alone (nothing imported or loaded in it), and of everything, from a process that starts
to the result; with the degrees, which start processes of their own, said apart. The interpreter is timed in a fork of
the audit's own process, right after it, and as a process of its own. ``--apps worldplay,omni``, ``--no-degrees``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import flashrt.apps
from flashrt.bench import resolve_system
from flashrt.bench.audit import audit_program
from flashrt.bench.process import library_settings
from flashrt.clock import monotonic_ns
from flashrt.ir import build_file

APPS = ("background_editor", "conversation", "longlive", "omni", "worldplay")
NUM_BATCHES = 6
TARGET = 10.0
PLAIN = """
import json, sys
from pathlib import Path
from flashrt.bench.record import read_recording
from flashrt.ir import Context, Interpreter, build_file
folder, items = Path(sys.argv[1]), read_recording(Path(sys.argv[2]), torch=True)
built = build_file(folder / "program.yaml")
interpreter = Interpreter(built.flat, folder, Context())
for item in items:
    interpreter.run_batch(item)
"""
WORK = ("observed run", "replays", "old values", "streams", "other orders", "edges that could stream")


def interpret_apart_s(folder: Path, items: Path) -> float:
    """Return how long a process takes that imports, loads and interprets, in seconds."""
    begun = monotonic_ns()
    subprocess.run(
        [sys.executable, "-P", "-c", PLAIN, str(folder), str(items)], check=True, cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **library_settings()},
    )  # fmt: skip
    return (monotonic_ns() - begun) / 1e9


def measure(app: str, folder: Path, degrees: list[int] | None) -> dict[str, Any]:
    """Return the seconds and ratios of one application."""
    place = folder / app
    shutil.copytree(Path(flashrt.apps.__path__[0]) / app, place, ignore=shutil.ignore_patterns("__pycache__"))
    system, built = resolve_system("program.yaml", place), build_file(place / "program.yaml")
    found = audit_program(
        system, built, "inputs.py:batches", place, place / "files", count=NUM_BATCHES, seed=7, degrees=degrees,
        baseline=True,
    )  # fmt: skip
    apart_s = interpret_apart_s(place, place / "files" / "items.frec")
    seconds = found["seconds"]
    work_s = sum(seconds[name] for name in WORK)
    return {
        "app": app, "clean": found["clean"], "findings": len(found["findings"]), "claims": len(found["claims"]),
        "confirmed": len(found["audited"]), "interpreter_s": seconds["interpreter"], "audit_work_s": round(work_s, 2),
        "ratio_work": round(work_s / seconds["interpreter"], 2), "interpreter_process_s": round(apart_s, 2),
        "audit_process_s": round(seconds["all"] - seconds["degrees"], 2),
        "ratio_process": round((seconds["all"] - seconds["degrees"]) / apart_s, 2),
        "degrees_s": seconds["degrees"], "ratio_all": round(seconds["all"] / apart_s, 2),
    }  # fmt: skip


def main() -> int:
    """Print a row an application; return 1 where a ratio misses its target."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--apps", default=",".join(APPS))
    parser.add_argument("--no-degrees", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for app in options.apps.split(","):
            row = measure(app, Path(folder), [] if options.no_degrees else None)
            rows.append(row)
            print(
                f"{app}: work {row['audit_work_s']:.2f} s against {row['interpreter_s']:.2f} s of the interpreter, "
                f"ratio {row['ratio_work']:.1f}; processes {row['audit_process_s']:.1f} against "
                f"{row['interpreter_process_s']:.1f} s, ratio {row['ratio_process']:.1f}, with degrees "
                f"({row['degrees_s']:.1f} s) {row['ratio_all']:.1f}; {row['confirmed']} of {row['claims']} claims "
                f"confirmed, {row['findings']} findings", flush=True,
            )  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    worst = max(max(row["ratio_work"], row["ratio_process"], row["ratio_all"]) for row in rows)
    print(f"largest ratio {worst:.1f} (target below {TARGET:g})")
    return 0 if worst < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
