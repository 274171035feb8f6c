"""The demonstration, second half: published deployments on emulated devices; paper, model and measured in a row."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashrt.mcp_server.client import Answer
from flashrt.mcp_server.demo_plan import DemoPlan, Emulated, EmulatedRun, deployment_of

Call = Callable[..., Awaitable[Answer]]
DURATION_S = 4.0
BATCHES_WITHIN = 5
"""Turns that are measured where a rate is one within a batch."""


@dataclass(frozen=True)
class EmulatedRow:
    """One published deployment: what the paper says, what the model says, what ran."""

    name: str
    gpus: int
    paper: Mapping[str, float | None]
    model: Mapping[str, float | None]
    measured: Mapping[str, float | None]
    note: str
    run: str


async def run_emulated(
    call: Call, workspace: Path, plan: DemoPlan, program: str, profile_ms: Mapping[str, float], *, quick: bool
) -> list[EmulatedRow]:
    """Run every published deployment on emulated devices.

    Parameters
    ----------
    call
        Calls a tool: ``call(tool, step, **arguments)``.
    profile_ms
        Operation -> its time on this machine, for plans that want that.
    quick
        Only the first two deployments.
    """
    emulated = plan.emulated
    if emulated is None:
        return []
    used = emulated.profile
    if used == "measured":
        # Slower than here: what an emulated operation really computes has to fit into its time.
        times = {path: {"1": time_ms * emulated.slower} for path, time_ms in profile_ms.items()}
        used = ".flashrt/demo/profile.json"
        document = {"schema": "flashrt/profile@1", "device": "emulated", "operations": times, "provenance": "declared"}
        (workspace / used).parent.mkdir(parents=True, exist_ok=True)
        (workspace / used).write_text(json.dumps(document, indent=1))
    analysis = await call("analyze", "streaming edges", program=program, profile=used)
    streaming = [edge["edge"] for edge in analysis.record["streaming"] if edge["streams"]]
    rows = []
    for number, run in enumerate(emulated.runs[: 2 if quick else None]):
        # In the workspace's own records: a file beside the application would change the digest of its systems.
        path = f".flashrt/demo/emulated-{number}.json"
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        document = deployment_of(run, "program.yaml", used, streaming)
        (workspace / path).write_text(json.dumps(document, indent=1))
        rows.append(await _one(call, plan, emulated, run, program, used, path))
    return rows


async def _one(
    call: Call, plan: DemoPlan, emulated: Emulated, run: EmulatedRun, program: str, profile: str, path: str
) -> EmulatedRow:
    within = emulated.rate == "within_batch"
    predicted = (await call("analyze", f"{run.name}: model", program=program, profile=profile, deployment=path)).record
    settings: dict[str, Any] = {"scenario": "max_rate", "duration_s": DURATION_S}
    if within:
        settings = {"scenario": "single_stream", "max_batches": BATCHES_WITHIN, "warmup": 1, "duration_s": 60.0}
    measured = (
        await call(
            "bench_run", f"{run.name}, emulated", system=path, inputs="inputs.py:batches", runs=1,
            media_rate=plan.media_rate, **settings,
        )
    ).record  # fmt: skip
    model = {key: predicted.get(key) for key in ("latency_ms", "first_output_ms", "fps")}
    found = {
        "latency_ms": measured["latency_ms"]["p50"], "first_output_ms": measured["first_output_ms"],
        "fps": measured["fps"],
    }  # fmt: skip
    if within:
        model["fps"], found["fps"] = _rate_within(model, emulated, run), _rate_within(found, emulated, run)
        # Where an answer comes in chunks, latency is that of the first.
        model["latency_ms"], found["latency_ms"] = model["first_output_ms"], found["first_output_ms"]
    paper = {"latency_ms": run.published.latency_ms, "fps": run.published.fps}
    reasons = "" if measured["valid"] else "not valid: " + "; ".join(measured["reasons"])
    return EmulatedRow(
        run.name, run.num_devices, paper, model, found, "; ".join(x for x in (run.note, reasons) if x), measured["run"]
    )


def _rate_within(figures: Mapping[str, float | None], emulated: Emulated, run: EmulatedRun) -> float | None:
    first, last, frames = figures["first_output_ms"], figures["latency_ms"], emulated.frames_after_first
    if run.whole or first is None or last is None or last <= first or frames is None:
        return None
    return frames * 1000.0 / (last - first)


def print_emulated(console: Console, rows: list[EmulatedRow], plan: DemoPlan) -> None:
    """Print the table, and what could not be derived."""
    if rows:
        assert plan.emulated is not None
        source, kind = plan.emulated.profile, "inferred"
        if source == "measured":
            source, kind = f"this machine's own times, {plan.emulated.slower:g} times as long", "predicted"
        title = f"on emulated devices with {source}: paper (published), model ({kind}), measured (emulated)"
        table = Table(title=title, title_justify="left")
        table.add_column("deployment")
        table.add_column("devices", justify="right")
        within = plan.emulated.rate == "within_batch"
        for figure in ("first output ms" if within else "latency ms", "FPS"):
            for column in ("paper", "model", "measured"):
                table.add_column(f"{figure} {column}", justify="right")
        for row in rows:
            sources = (row.paper, row.model, row.measured)
            cells = [_text(values, key) for key in ("latency_ms", "fps") for values in sources]
            table.add_row(row.name, str(row.gpus), *cells)
        console.print(table)
        for row in rows:
            if row.note:
                console.print(f"{row.name}: {row.note}", markup=False, style="dim")
    for line in plan.said:
        console.print(f"note: {line}", markup=False, style="dim")


def _text(values: Mapping[str, float | None], key: str) -> str:
    value = values.get(key)
    if value is None:
        return ""
    return f"{value:.0f}" if key == "latency_ms" else f"{value:.2f}"
