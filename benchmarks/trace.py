"""What tracing costs: the batches of each application with and without instrumentation, and how large the drafts are.

    python benchmarks/trace.py [--count 8] [--only APP] [--json FILE]

Plain and traced runs take turns (A B, B A), each in a process of its own with FlashRT's settings for systems; set-up is
in neither. Traced time is that of all batches, those that find the stages and the one that is looked at closely
included. Target: below 3 × the plain run. The exit status is 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from flashrt.bench.process import library_settings
from flashrt.clock import monotonic_ns

APPS: dict[str, dict[str, Any]] = {
    "worldplay": {}, "longlive": {}, "background_editor": {}, "conversation": {"num_chunks": 6},
    "omni": {"num_chunks": 6},
}  # fmt: skip
TARGET = 3.0
SEED = 3


def prepare() -> None:
    """Set what systems are run with, before NumPy and torch are loaded."""
    os.environ.update(library_settings())


def plain(folder: str, config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the milliseconds that the reference takes for its batches."""
    from flashrt.bench.io import CLOSED, Inputs, Outputs, SystemIO
    from flashrt.ir.ops import load_function

    items = list(load_function(Path(folder) / "inputs.py", "batches")(SEED, count))
    inputs = Inputs(list(items[0]))
    for item in [*items, dict.fromkeys(items[0], CLOSED)]:
        for name, value in item.items():
            inputs[name].put(value)
    ready: list[int] = []
    io = SystemIO(
        inputs, Outputs(lambda name, value, batch: None), ["cpu"], dict(config), lambda: ready.append(monotonic_ns())
    )
    load_function(Path(folder) / "reference.py", "serve")(io)
    return {"ms": (monotonic_ns() - ready[0]) / 1e6}


def traced(folder: str, config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the milliseconds that the same batches take while they are traced, and what was drafted."""
    from flashrt.bench.trace.draft import draft_program
    from flashrt.bench.trace.measure import trace_reference
    from flashrt.ir.ops import load_function

    items = list(load_function(Path(folder) / "inputs.py", "batches")(SEED, count))
    found = trace_reference(Path(folder) / "reference.py", "serve", items, config=config)
    begin = monotonic_ns()
    with tempfile.TemporaryDirectory() as out:
        draft = draft_program(found, "draft", Path(out))
    return {
        "ms": sum(found.batch_ns) / 1e6,
        "draft_ms": (monotonic_ns() - begin) / 1e6,
        "operations": len(draft.nodes),
        "states": len(draft.program.get("states", {})),
        "questions": len(draft.questions),
    }


def apart(function: Any, *arguments: Any) -> dict[str, Any]:
    """Call a function in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare) as pool:
        found: dict[str, Any] = pool.submit(function, *arguments).result()
    return found


def main() -> int:
    """Measure, print a table, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=8, help="batches (default: 8, what ir_trace runs)")
    parser.add_argument("--pairs", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--only", choices=list(APPS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    import flashrt.apps

    rows = []
    print(f"{'application':<20}{'plain ms':>10}{'traced ms':>11}{'ratio':>8}{'draft ms':>10}  nodes states questions")
    for app in [options.only] if options.only else APPS:
        arguments = (str(Path(flashrt.apps.__path__[0]) / app), APPS[app], options.count)
        pairs = []
        for pair in range(options.pairs):
            order = (plain, traced) if pair % 2 == 0 else (traced, plain)
            found = {function.__name__: apart(function, *arguments) for function in order}
            pairs.append((found["plain"], found["traced"]))
        ratio = median(b["ms"] / a["ms"] for a, b in pairs)
        last = pairs[-1][1]
        row = {
            "app": app, "plain_ms": median(a["ms"] for a, _ in pairs), "traced_ms": median(b["ms"] for _, b in pairs),
            "ratio": ratio, **{key: last[key] for key in ("draft_ms", "operations", "states", "questions")},
        }  # fmt: skip
        rows.append(row)
        print(f"{app:<20}{row['plain_ms']:>10.0f}{row['traced_ms']:>11.0f}{ratio:>8.2f}{row['draft_ms']:>10.0f}"
              f"{row['operations']:>7}{row['states']:>7}{row['questions']:>10}", flush=True)  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    missed = [row["app"] for row in rows if row["ratio"] >= TARGET]
    print(f"target: below {TARGET:g} times; " + (f"missed by {', '.join(missed)}" if missed else "met by all"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
