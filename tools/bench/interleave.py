"""Two systems in turns on the same devices, each turn a process of its own: A B, B A, A B, …"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench.arrivals import read_trace
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import new_seed
from flashrt.bench.environment import describe_environment
from flashrt.bench.metrics import Timeline, first_outputs_ms, gaps_ms, latencies_ms
from flashrt.bench.run import OneRun, harness_overhead_ms, latest, owed, primary_output, run_once
from flashrt.bench.settings import PLANNED, RunSettings, check_settings
from flashrt.bench.systems import System, changed_files
from flashrt.bench.verdicts import FAMILY_ERROR, decide, turns
from flashrt.errors import Finding, InputError, listed

DEFAULT_PAIRS = 12
# One series a restart: a value a batch.
SERIES = ("period_ms", "latency_ms.mean", "first_output_ms")
# One value a restart.
SINGLE = ("latency_ms.p50", "latency_ms.p90", "d0_ms", "ttfo_ms", "startup_ms")


@dataclass
class Turn:
    """One restart of one system, as it is kept."""

    side: str
    run: OneRun
    figures: dict[str, np.ndarray] = field(default_factory=dict)


def check_pair(systems: Sequence[object], settings: RunSettings, pairs: int) -> None:
    """Refuse what cannot be compared in turns, all at once."""
    findings: list[Finding] = []
    try:
        check_settings(settings)
    except InputError as error:
        findings += error.findings
    if len(systems) != 2:
        findings.append(
            Finding("argument 'systems'", "two systems, the baseline first", f"{len(systems)}",
                    "name two; compare others with the same baseline in further calls", rule="not-a-pair")
        )  # fmt: skip
    if not 2 <= pairs <= 100:
        findings.append(
            Finding("argument 'pairs'", "between 2 and 100; a verdict needs 5", str(pairs), "change it and call again")
        )
    if settings.scenario == "realtime" and settings.period_ms is None:
        findings.append(
            Finding("argument 'period_ms'", "a period that both systems are given", "nothing",
                    "pass period_ms=40, say, and call again", rule="missing-argument")
        )  # fmt: skip
    if findings:
        raise InputError(findings)


def compare_systems(
    systems: Sequence[System],
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: RunSettings,
    *,
    pairs: int = DEFAULT_PAIRS,
    elements: Sequence[Mapping[str, float] | None] = (None, None),
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Let two systems take turns, and say for every figure whether the second is faster than the first.

    A pair with a restart that is not valid is repeated, for at most half as many as there are pairs.

    Parameters
    ----------
    settings
        Of every restart; `runs` does not count here, `pairs` does.
    elements
        What each system owes for a batch, where that is known.

    Raises
    ------
    InputError
        Wrong settings, or a system that fails, hangs or returns early.
    """
    check_pair(systems, settings, pairs)
    trace_s = read_trace(workspace, settings.trace) if settings.trace is not None else None
    per_batch = {
        side: owed(system, inputs, workspace, folder, replace(settings, elements_per_batch=known), progress)
        for side, system, known in zip("AB", systems, elements, strict=True)
    }
    by_side = dict(zip("AB", systems, strict=True))
    overhead_ms = harness_overhead_ms(folder, settings)
    seed = new_seed() if settings.seed is None else settings.seed
    kept: list[tuple[Turn, Turn]] = []
    repeated: list[str] = []
    taken: list[Turn] = []
    attempts = 0
    while len(kept) < pairs and attempts < pairs + pairs // 2:
        order = turns(attempts + 1)[-2:]
        found: dict[str, Turn] = {}
        for side in order:
            progress(0.95 * len(kept) / pairs, f"pair {len(kept) + 1} of {pairs}, {side}: '{by_side[side].reference}'")
            # Both of a pair meet the same arrivals; what comes in them is never the same twice.
            own = replace(settings, seed=(seed + attempts) % 2**32) if settings.scenario in PLANNED[:2] else settings
            log_path = folder / f"turn-{attempts}-{side}.log"
            run = run_once(by_side[side], inputs, workspace, log_path, own, per_batch[side], trace_s=trace_s)
            found[side] = Turn(side, run)
            taken.append(found[side])
        attempts += 1
        problems = [
            f"{side}: {problem}" for side, turn in found.items() for problem in turn.run.problems or _lacks(turn.run)
        ]
        if problems:
            repeated.append(f"pair {attempts}: {'; '.join(problems)}")
        else:
            kept.append((found["A"], found["B"]))
    progress(0.97, "intervals and verdicts")
    return _describe(systems, inputs, folder, settings, pairs, kept, taken, repeated, overhead_ms)


def _lacks(run: OneRun) -> list[str]:
    return [] if run.outputs else ["no output to compare"]


def _describe(
    systems: Sequence[System],
    inputs: str,
    folder: Path,
    settings: RunSettings,
    pairs: int,
    kept: Sequence[tuple[Turn, Turn]],
    taken: Sequence[Turn],
    repeated: Sequence[str],
    overhead_ms: Mapping[str, float],
) -> dict[str, Any]:
    outputs = [primary_output([pair[side].run for pair in kept]) for side in (0, 1)] if kept else ["", ""]
    reasons = []
    if len(kept) < pairs:
        reasons.append(
            f"{len(kept)} of {pairs} pairs are valid after {len(repeated)} were repeated; the last: {repeated[-1]}"
        )
    if outputs[0] != outputs[1]:
        reasons.append(f"output '{outputs[0]}' of the baseline cannot be compared with '{outputs[1]}'")
    for system in systems:
        if changed := changed_files(system):
            reasons.append(f"files of '{system.reference}' changed meanwhile: {listed(changed, 5)}")
    metrics: dict[str, Any] = {}
    if kept and outputs[0] == outputs[1]:
        for pair in kept:
            for turn in pair:
                turn.figures = figures_of(turn.run, outputs[0], settings)
        metrics = _metrics(kept)
    if reasons:
        for found in metrics.values():
            found["verdict"], found["reason"] = "inconclusive", "the comparison is not valid: see reasons"
    result = {
        "valid": not reasons,
        "reasons": reasons,
        "notes": list(dict.fromkeys(note for turn in taken for note in turn.run.neighbours.notes)),
        "baseline": systems[0].reference,
        "systems": [system.as_record() for system in systems],
        "inputs": inputs,
        "scenario": settings.scenario,
        "emulated": any(system.emulated for system in systems) or settings.emulated,
        "output": outputs[0],
        "pairs": len(kept),
        "order": "".join(turn.side for turn in taken),
        "repeated": list(repeated),
        "family_error": FAMILY_ERROR,
        "comparisons": [{"run": systems[1].reference, "metrics": metrics}],
        "seeds": [turn.run.seeds for turn in taken],
        "load": [turn.run.load for turn in taken],
        "neighbours": [turn.run.neighbours.found for turn in taken],
        "harness_overhead_ms": overhead_ms,
        "measured": "buffer to buffer",
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("config", "runs")},
        "environment": describe_environment(settings.devices),
    }
    result["artifacts"] = _write(folder, result, kept)
    return result


def figures_of(run: OneRun, output: str, settings: RunSettings) -> dict[str, np.ndarray]:
    """Return what one restart brings to a comparison: series of batches, and single values.

    Where the scenario says when items come, their period is the sender's and no figure of the system.
    """
    line: Timeline = next(line.since(run.start) for line in run.attribution.timelines if line.output == output)
    measured = {**run.outputs[output], **latest(run), **run.metrics}
    found = {"latency_ms.mean": latencies_ms(line), "first_output_ms": first_outputs_ms(line)}
    if settings.scenario in ("single_stream", "max_rate"):
        found["period_ms"] = gaps_ms(line)
    if len(run.outputs) > 1:
        # The batch's latency may be another output's than the one whose batches are the series.
        found["latency_ms.mean"] = np.asarray([measured["latency_ms"]["mean"]])
    # A median stands still where a busy host makes a few batches late; a mean does not.
    single = {**measured, **{f"latency_ms.{share}": measured["latency_ms"][share] for share in ("p50", "p90")}}
    found |= {name: np.asarray([float(single[name])]) for name in SINGLE if single.get(name) is not None}
    found["elements_per_batch"] = np.asarray([float(measured["elements_per_batch"])])
    return found


def _metrics(kept: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    sides = [
        {name: [pair[side].figures[name] for pair in kept] for name in (*SERIES, *SINGLE)
         if all(name in pair[side].figures for pair in kept)}
        for side in (0, 1)
    ]  # fmt: skip
    found = decide(sides[0], sides[1], dict.fromkeys((*SERIES, *SINGLE), False))
    if "period_ms" in found:
        found = {"fps": _rate(found["period_ms"], kept), **found}
    return found


def _rate(period: Mapping[str, Any], kept: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Return the rate's comparison: the period's, turned round; the elements of a batch are counted, not estimated."""
    counts = [float(np.mean([pair[side].figures["elements_per_batch"].mean() for pair in kept])) for side in (0, 1)]
    share = counts[1] / counts[0]
    low, high = period["confidence_95"]
    found = {
        **period,
        "baseline": counts[0] * 1e3 / period["baseline"],
        "value": counts[1] * 1e3 / period["value"],
        "ratio": share / period["ratio"],
        "confidence_95": [share / high, share / low],
    }
    if not 1 - 1e-9 < share < 1 + 1e-9 and period["verdict"] != "inconclusive":
        found["verdict"] = "inconclusive"
        found["reason"] = f"batches have {counts[0]:g} and {counts[1]:g} elements: read period_ms, and the ratio here"
    return found


def _write(folder: Path, result: Mapping[str, Any], kept: Sequence[tuple[Turn, Turn]]) -> dict[str, str]:
    """Write the record and every raw stamp."""
    arrays: dict[str, np.ndarray] = {}
    for number, pair in enumerate(kept):
        for turn in pair:
            key = f"pair{number}_{turn.side}"
            arrays[f"{key}_start"] = np.asarray(turn.run.start)
            arrays[f"{key}_intended_ns"] = np.asarray(turn.run.recorder.intended_ns)
            arrays[f"{key}_sent_ns"] = np.asarray(turn.run.recorder.sent_ns)
            for line in turn.run.attribution.timelines:
                arrays[f"{key}_visible_ns_{line.output}"] = line.visible_ns
                arrays[f"{key}_counts_{line.output}"] = line.counts
            for name, values in turn.figures.items():
                arrays[f"{key}_figure_{name}"] = values
    samples, record = folder / "samples.npz", folder / "comparison.json"
    np.savez_compressed(samples, **arrays)  # type: ignore[arg-type]
    record.write_text(json.dumps(result, indent=1, default=str))
    return {"result": str(record), "samples": str(samples)}
