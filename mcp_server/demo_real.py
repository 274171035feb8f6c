"""``flashrt demo APP --real``: the part of an application that runs with trained weights, offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashrt.errors import input_error
from flashrt.mcp_server.client import started_server
from flashrt.mcp_server.demo_plan import DemoFailedError

NUM_QUESTIONS = 3
MAX_QUESTIONS = 6
SAMPLE_RATE_HZ = 22_050
TIMEOUT_S = 600.0


def real_folder(app: str, folder: Path, known: dict[str, Path]) -> Path:
    """Return where an application has its trained part.

    Raises
    ------
    InputError
        It has none; names those that have.
    """
    found = folder / "real"
    if not (found / "program.yaml").exists():
        having = [name for name, path in known.items() if (path / "real" / "program.yaml").exists()]
        raise input_error(
            "demo --real", f"an application with trained weights: {', '.join(having)}", f"'{app}'", "name one of them",
            valid=having, name=app,
        )  # fmt: skip
    return found


async def run_real(folder: Path, console: Console) -> dict[str, Any]:
    """Prove the trained program and a deployment of it equal to the reference, and show what was said.

    Raises
    ------
    DemoFailedError
        A step failed; with the tool's own words.
    """
    begin = time.monotonic()
    async with started_server(folder) as caller:

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            answer = await caller.call(tool, arguments)
            if not answer.ok:
                raise DemoFailedError(f"{tool}: {answer.text}")
            return dict(answer.record)

        built = await call("ir_build", document="program.yaml")
        given = {"inputs": "inputs.py:batches", "count": NUM_QUESTIONS, "timeout_s": TIMEOUT_S}
        proof = await call("ir_interpret", program=built["program"], baseline="reference.py:serve", **given)
        if not proof["equivalent"]:
            raise DemoFailedError("; ".join(proof["equality"]["reasons"]))
        console.print("the program equals the reference, element by element")
        check = await call("equivalence_check", baseline="reference.py:serve", candidate="split.yaml", **given)
        if not check["equivalent"]:
            raise DemoFailedError("; ".join(check["reasons"]))
        console.print("two processes equal the reference, element by element")
        _show(folder / proof["outputs"], console)
        run = await call(
            "bench_run", system="split.yaml", inputs="inputs.py:batches", runs=1, duration_s=60, warmup=1,
            max_batches=MAX_QUESTIONS,
            media_rate={"speech": SAMPLE_RATE_HZ}, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        validity = "valid" if run["valid"] else "not valid: " + "; ".join(run["reasons"])
        console.print(
            f"from a question's end to its answer's: {run['latency_ms']['p50']:.0f} ms (median, {validity}); "
            f"{time.monotonic() - begin:.0f} s in all"
        )
    return {"equivalent": True, "latency_ms": run["latency_ms"]["p50"], "valid": run["valid"]}


def _show(outputs: Path, console: Console) -> None:
    from flashrt.bench.record import read_recording

    table = Table(title="what was heard, and what was answered", title_justify="left")
    for heading in ("heard", "answer", "seconds of speech"):
        table.add_column(heading)
    for batch in read_recording(outputs):
        table.add_row(batch["heard"], batch["answer"], f"{len(batch['speech'].data) / SAMPLE_RATE_HZ:.1f}")
    console.print(table)
