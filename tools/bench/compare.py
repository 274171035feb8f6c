"""Comparing finished runs: ratios with intervals, and whether a difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flashrt.bench.intervals import middle_95, ratio_draws, resample_means, usable
from flashrt.bench.resampling import MIN_RESTARTS
from flashrt.errors import Finding, InputError, listed

# (metric, whether more is better)
METRICS: tuple[tuple[str, bool], ...] = (
    ("fps", True),
    ("period_ms", False),
    ("latency_ms.mean", False),
    ("first_output_ms", False),
    ("d0_ms", False),
)


def compare_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare runs with the first: for every metric the ratio, its 95 % interval, and a verdict.

    Where the records hold block means of batches, the ratio's interval resamples both runs' restarts and blocks (see
    `flashrt.bench.intervals`); else it propagates both runs' own intervals. Without either, the verdict is
    ``inconclusive``.

    Raises
    ------
    InputError
        Runs of different scenarios, or runs that are not valid.
    """
    findings = []
    first = runs[0]
    for run in runs:
        if not run.get("valid"):
            findings.append(
                Finding(f"run '{run['run']}'", "a valid run", f"not valid: {'; '.join(run.get('reasons', []))}",
                        "repeat it with bench_run", rule="invalid-run")
            )  # fmt: skip
        if run.get("output") != first.get("output"):
            findings.append(
                Finding(f"run '{run['run']}'", f"figures of output '{first.get('output')}'",
                        f"those of '{run.get('output')}'", "compare runs of one application", rule="other-output")
            )  # fmt: skip
        if run["scenario"] != first["scenario"]:
            findings.append(
                Finding(f"run '{run['run']}'", f"scenario {first['scenario']}", str(run["scenario"]),
                        "compare runs of one scenario", rule="other-scenario")
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return {
        "baseline": first["run"],
        "scenario": first["scenario"],
        "emulated": any(run.get("emulated") for run in runs),
        "comparisons": [{"run": run["run"], "metrics": _compare(first, run)} for run in runs[1:]],
        "notes": _notes(runs),
    }


def _notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        "the runs did not take turns: what changed on the machine between them is part of the ratios, and there is no "
        "noise floor; call bench_compare with systems for a verdict to rely on"
    ]
    few = [str(run["run"]) for run in runs if int(run.get("runs") or 0) < MIN_RESTARTS]
    if few:
        notes.append(f"fewer than {MIN_RESTARTS} restarts in {listed(few)}: their intervals are too narrow")
    return notes


def _compare(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, more_is_better in METRICS:
        base, value = _at(first, name), _at(other, name)
        if not base or not value:
            continue
        ratio = value / base
        interval, method = _ratio_interval(first, other, name, ratio)
        verdict = "inconclusive"
        if interval is not None and not interval[0] <= 1 <= interval[1]:
            verdict = "faster" if (ratio > 1) == more_is_better else "slower"
        found[name] = {
            "baseline": base,
            "value": value,
            "ratio": ratio,
            "confidence_95": interval,
            "confidence_method": method,
            "verdict": verdict,
        }
    return found


def _ratio_interval(
    first: Mapping[str, Any], other: Mapping[str, Any], name: str, ratio: float
) -> tuple[list[float] | None, str | None]:
    sampled = "period_ms" if name == "fps" else name
    runs = [usable(run.get("block_means"), sampled) for run in (first, other)]
    if runs[0] is not None and runs[1] is not None:
        draws = ratio_draws(resample_means(runs[0]), resample_means(runs[1]))
        if name == "fps":
            # The elements of a batch are counted, not estimated: only the period is uncertain.
            periods = (_at(other, "period_ms") or math.nan) / (_at(first, "period_ms") or math.nan)
            draws = ratio * periods / draws
        return middle_95(draws), "block bootstrap"
    spread = [_relative_half_width(run, name) for run in (first, other)]
    if None in spread:
        return None, None
    width = math.hypot(*(part for part in spread if part is not None))
    return [ratio * math.exp(-width), ratio * math.exp(width)], "propagated"


def _at(record: Mapping[str, Any], name: str) -> float | None:
    value: Any = record
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _relative_half_width(run: Mapping[str, Any], name: str) -> float | None:
    interval: Any = run.get("confidence_95")
    for step in name.split("."):
        interval = interval.get(step) if isinstance(interval, Mapping) else None
    value = _at(run, name)
    if not isinstance(interval, list) or not value:
        return None
    return float((interval[1] - interval[0]) / 2 / value)
