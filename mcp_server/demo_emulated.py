"""The demonstration, second half: published deployments on emulated devices; paper, model and measured in a row."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashrt.ir.documents import read_document
from flashrt.mcp_server.client import Answer
from flashrt.mcp_server.demo_plan import DemoPlan, Emulated, EmulatedRun, deployment_of

Call = Callable[..., Awaitable[Answer]]
DURATION_S = 120.0
MARGIN = 1.02
BATCHES_SUSTAINED = 10
"""Batches that are measured where a rate is sustained."""
WARM_UP = 3
BATCHES_WITHIN = 5
"""Turns that are measured where a rate is one within a batch."""
STARTUP_S = 15.0
"""Until the processes of a deployment have loaded their libraries, on two cores."""


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
    call: Call,
    workspace: Path,
    plan: DemoPlan,
    program: str,
    profile_ms: Mapping[str, float],
    deadline_s: float | None,
) -> list[EmulatedRow]:
    """Run published deployments on emulated devices, in their order.

    Parameters
    ----------
    call
        Calls a tool: ``call(tool, step, **arguments)``.
    profile_ms
        Operation -> its time on this machine, for plans that want that.
    deadline_s
        On the monotonic clock: the first that would end later ends the list; None: all are run.
    """
    emulated = plan.emulated
    if emulated is None or (deadline_s is not None and time.monotonic() >= deadline_s):
        return []
    records = workspace / ".flashrt" / "demo"
    records.mkdir(parents=True, exist_ok=True)
    if emulated.profile == "measured":
        times: Any = {path: {"1": time_ms} for path, time_ms in profile_ms.items()}
        document = {"schema": "flashrt/profile@1", "device": "emulated", "operations": times, "provenance": "declared"}
    else:
        document = dict(read_document(workspace / emulated.profile))
    # In the workspace's own records: files beside the application would change the digest of its systems.
    profile, slowed = ".flashrt/demo/profile.json", ".flashrt/demo/slowed.json"
    (workspace / profile).write_text(json.dumps(document, indent=1))
    document["operations"] = _times(document["operations"], emulated.slower)
    (workspace / slowed).write_text(json.dumps(document, indent=1))
    analysis = await call("analyze", "streaming edges", program=program, profile=profile)
    streaming = [edge["edge"] for edge in analysis.record["streaming"] if edge["streams"]]
    rows = []
    for number, run in enumerate(emulated.runs):
        path = f".flashrt/demo/emulated-{number}.json"
        document = deployment_of(run, "program.yaml", slowed, streaming, emulated.config)
        (workspace / path).write_text(json.dumps(document, indent=1))
        model = await call("analyze", f"{run.name}: model", program=program, profile=profile, deployment=path)
        if deadline_s is not None and time.monotonic() + _seconds(model.record, emulated, run) > deadline_s:
            break
        rows.append(await _one(call, plan, emulated, run, model.record, path))
    return rows


def _seconds(model: Mapping[str, Any], emulated: Emulated, run: EmulatedRun) -> float:
    """Return about how long a deployment's run takes."""
    if not run.runs:
        return 0.0
    within = emulated.rate == "within_batch"
    each_ms = model["latency_ms"] if within else model["t_min_ms"]
    count = 1 + BATCHES_WITHIN if within else WARM_UP + BATCHES_SUSTAINED
    return STARTUP_S + float(each_ms * emulated.slower * count) / 1000.0


def _times(value: Any, factor: float) -> Any:
    """Return times, and mappings of them, so many times as long."""
    return {key: _times(one, factor) for key, one in value.items()} if isinstance(value, dict) else value * factor


async def _one(
    call: Call, plan: DemoPlan, emulated: Emulated, run: EmulatedRun, predicted: Mapping[str, Any], path: str
) -> EmulatedRow:
    within = emulated.rate == "within_batch"
    settings: dict[str, Any] = {"scenario": "single_stream", "max_batches": BATCHES_WITHIN, "warmup": 1}
    if not within:
        # Offered just what the model says that it sustains, less a margin: a lower rate is measured where it does not.
        period_ms = predicted["t_min_ms"] * emulated.slower * MARGIN
        settings = {"scenario": "realtime", "period_ms": period_ms, "max_batches": BATCHES_SUSTAINED, "warmup": WARM_UP}
    model = {key: predicted.get(key) for key in ("latency_ms", "first_output_ms", "fps")}
    found: dict[str, float | None] = dict.fromkeys(model)
    reasons, identity = "", ""
    if run.runs:
        measured = (
            await call(
                "bench_run", f"{run.name}, emulated", system=path, inputs="inputs.py:batches", runs=1,
                duration_s=DURATION_S, media_rate=plan.media_rate, **settings,
            )
        ).record  # fmt: skip
        found = {
            "latency_ms": measured["latency_ms"]["p50"] / emulated.slower,
            "first_output_ms": measured["first_output_ms"] / emulated.slower,
            "fps": measured["fps"] * emulated.slower,
        }
        reasons, identity = "" if measured["valid"] else "not valid: " + "; ".join(measured["reasons"]), measured["run"]
    if within:
        model["fps"], found["fps"] = _rate_within(model, emulated, run), _rate_within(found, emulated, run)
        # Where an answer comes in chunks, latency is that of the first.
        model["latency_ms"], found["latency_ms"] = model["first_output_ms"], found["first_output_ms"]
    paper = {"latency_ms": run.published.latency_ms, "fps": run.published.fps}
    return EmulatedRow(
        run.name, run.num_devices, paper, model, found, "; ".join(x for x in (run.note, reasons) if x), identity
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
            source, kind = "this machine's own times", "predicted"
        slowed = f", run {plan.emulated.slower:g} times as slow and divided back" if plan.emulated.slower > 1 else ""
        title = f"on emulated devices with {source}: paper (published), model ({kind}), measured (emulated{slowed})"
        if plan.emulated.rate == "sustained":
            title += f"; offered {1 / MARGIN:.0%} of the model's rate"
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
