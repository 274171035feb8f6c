"""A benchmark run: a scenario driven through a system's own buffers, over several process restarts."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench import null, report
from flashrt.bench.arrivals import plan_s, read_trace
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import Recorder, drain, new_seed, one_by_one, run_all
from flashrt.bench.environment import describe_environment
from flashrt.bench.guards import guard_records, judge_guards, private_files, reference_files
from flashrt.bench.intervals import METHOD, one_a_restart_95
from flashrt.bench.metrics import (
    Attribution,
    Timeline,
    attribute,
    batch_intervals,
    busy_shares,
    combine,
    latencies_ms,
    measure,
    samples_of,
)
from flashrt.bench.neighbours import NeighbourWatch
from flashrt.bench.playback import change_point, skew_ms, suffice
from flashrt.bench.process import SystemProcess
from flashrt.bench.recheck import Against, Sampler, recheck
from flashrt.bench.record import read_inputs
from flashrt.bench.scenarios import (
    MIN_MEASURED_BATCHES,
    describe_load,
    judge,
    lag_ms,
    last_latency_ms,
    paced,
    planned,
)
from flashrt.bench.search import CONFIDENCE, growth_interval, search_rate
from flashrt.bench.settings import PLANNED, RunSettings, check_settings
from flashrt.bench.systems import System, changed_files, remove_bytecode
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error, listed
from flashrt.runtime.trace import ACTIVITIES, utilisation

MAX_OVERRUN_SHARE = 0.1


@dataclass(frozen=True)
class OneRun:
    """What one process restart yielded."""

    metrics: dict[str, Any]
    outputs: dict[str, dict[str, Any]]
    problems: list[str]
    recorder: Recorder
    items: list[Mapping[str, Any]]
    """What the system was sent."""
    start: int
    activities: list[Mapping[str, Any]]
    attribution: Attribution
    guards: Mapping[str, Any]
    load: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int | None] = field(default_factory=dict)
    neighbours: NeighbourWatch = field(default_factory=lambda: NeighbourWatch(()))
    said: Sequence[str] = ()
    """Notes of the system's own processes."""


def run_benchmark(
    system: System,
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: RunSettings,
    progress: Report = ignore_progress,
    against: Against | None = None,
) -> dict[str, Any]:
    """Benchmark a system and write result, samples, trace and plot to `folder`.

    Parameters
    ----------
    against
        The baseline that the system was found equal to: what the system puts out in one restart, chosen in secret, is
        held against what the baseline makes of the same items afterwards. None: nothing is known to compare with.

    Returns
    -------
    The record of ``bench_run``: `valid` with reasons, metrics with intervals, artefact paths.

    Raises
    ------
    InputError
        Wrong settings, or a system (or the baseline) that fails, hangs or returns early.
    """
    check_settings(settings)
    settings = replace(settings, media_rate={**system.media_rates(), **(settings.media_rate or {})})
    hidden = reference_files(system, against.baseline if against else None)
    trace_s = read_trace(workspace, settings.trace) if settings.trace is not None else None
    per_batch = owed(system, inputs, workspace, folder, settings, progress, hidden)
    overhead_ms = harness_overhead_ms(folder, settings)
    done: list[OneRun] = []
    checked = secrets.randbelow(settings.runs)
    for run in range(settings.runs):
        progress((run + 0.2) / (settings.runs + 1), f"run {run + 1} of {settings.runs}, {settings.scenario}")
        log_path = folder / f"process-{run}.log"
        sampler = Sampler() if against is not None and run == checked else None
        done.append(
            run_once(
                system, inputs, workspace, log_path, settings, per_batch, restart=run, trace_s=trace_s,
                sampler=sampler, hidden=hidden,
            )
        )  # fmt: skip
    rechecked = None
    if against is not None:
        progress(settings.runs / (settings.runs + 1), f"the baseline over the {len(done[checked].items)} timed batches")
        rechecked = recheck(
            against, done[checked].items, done[checked].recorder, folder / "baseline.log",
            devices=settings.devices, config=settings.config, timeout_s=settings.timeout_s,
        )  # fmt: skip
    progress((settings.runs + 0.9) / (settings.runs + 1), "metrics, trace and plot")
    primary = primary_output(done)
    metrics, intervals = combine([{**run.outputs.get(primary, {}), **latest(run), **run.metrics} for run in done])
    parts = [line.since(run.start) for run in done for line in run.attribution.timelines if line.output == primary]
    parts = [part for part in parts if len(part.due_ns)]
    samples = samples_of(parts)
    if parts:
        own = batch_intervals(parts, samples)
        if any(len(run.outputs) > 1 for run in done):
            # The batch's latency may be another output's than the one whose batches were sampled.
            own.pop("latency_ms", None)
        intervals = _merged(intervals, own)
    if settings.scenario == "max_rate":
        intervals = bracketed(intervals, [run.search for run in done], metrics)
    problems = list(dict.fromkeys(problem for run in done for problem in run.problems))
    if rechecked is not None and not rechecked["equal"]:
        problems += [f"in the timed run, {reason}" for reason in rechecked["reasons"]]
    if changed := changed_files(system):
        problems.append(f"the system's files changed during the run: {listed(changed, 5)}")
    result = {
        "valid": not problems,
        "reasons": problems,
        "notes": _notes(settings, done, rechecked),
        "rechecked": rechecked,
        "guards": dict(done[-1].guards),
        "system": system.as_record(),
        "inputs": inputs,
        "scenario": settings.scenario,
        "runs": settings.runs,
        "emulated": settings.emulated,
        "output": primary,
        "batches_measured": [len(run.recorder.sent_ns) - run.start for run in done],
        **metrics,
        "percentiles": suffice(num_measured(done)),
        "confidence_95": intervals,
        "confidence_method": METHOD,
        "block_means": samples,
        "outputs": {name: combine([run.outputs[name] for run in done if name in run.outputs])[0]
                    for name in dict.fromkeys(name for run in done for name in run.outputs)},
        "load": [run.load for run in done],
        **({"search": [run.search for run in done]} if settings.scenario == "max_rate" else {}),
        "seeds": [run.seeds for run in done],
        "neighbours": [run.neighbours.found for run in done],
        "harness_overhead_ms": overhead_ms,
        "measured": "buffer to buffer",
        "settings": {k: v for k, v in asdict(settings).items() if k != "config"},
        "environment": describe_environment(settings.devices),
    }  # fmt: skip
    result["artifacts"] = _write_artifacts(folder, result, done)
    return result


def owed(
    system: System,
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: RunSettings,
    progress: Report,
    hidden: Sequence[Path] = (),
) -> Mapping[str, float] | None:
    """Return what a system owes for a batch, as known or found by a calibration run; None where it says itself."""
    # Documents say themselves when a batch is done; so does code whose batches differ, where the mean says nothing.
    known = settings.elements_per_batch if system.kind == "code" else None
    per_batch = known if known and all(float(count).is_integer() for count in known.values()) else None
    if per_batch is None and system.kind == "code":
        progress(0.0, "calibration: how much a batch yields")
        per_batch = calibrate(system, inputs, workspace, folder, settings, hidden)
    return per_batch


def bracketed(
    intervals: Mapping[str, Any], searches: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the intervals with those of rate and period widened to what the searches left open.

    A period that was found by search is as uncertain as its bracket, however steadily batches came at it.
    """
    found, lows = intervals.get("period_ms"), [search["bracket_ms"][0] for search in searches]
    if found is None or None in lows:
        return dict(intervals)
    spread = one_a_restart_95(lows)
    low, high = min(found[0], spread[0] if spread else min(lows)), found[1]
    elements = float(metrics["fps"]) * float(metrics["period_ms"])
    return {**intervals, "period_ms": [low, high], "fps": [elements / high, elements / low]}


def latest(run: OneRun) -> dict[str, Any]:
    """Return latency and offset of the batch as a whole: those of the output that is latest."""
    found: dict[str, Any] = {}
    if run.outputs:
        found["latency_ms"] = max((one["latency_ms"] for one in run.outputs.values()), key=lambda one: one["mean"])
    offsets = [one["d0_ms"] for one in run.outputs.values() if one.get("d0_ms") is not None]
    return {**found, "d0_ms": max(offsets)} if offsets else found


def primary_output(done: Sequence[OneRun]) -> str:
    """Return the output whose figures stand for the run: frames before samples before tokens.

    That is the one whose values have most axes; among equals the one with the fewest elements that come in numbers,
    then by name. It does not depend on what was measured, so that runs of one application can be compared.
    """
    known: dict[str, tuple[int, bool, float, str]] = {}
    for run in done:
        for name, found in run.outputs.items():
            elements = float(found["elements_per_batch"])
            known[name] = (-run.recorder.num_axes.get(name, 0), elements <= 1, elements, name)
    return min(known, key=lambda name: known[name], default="")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in over.items():
        both[key] = _merged(base[key], value) if isinstance(base.get(key), Mapping) else value
    return both


def _notes(settings: RunSettings, done: Sequence[OneRun], rechecked: Mapping[str, Any] | None) -> list[str]:
    notes = []
    if rechecked is None:
        notes.append(
            "nothing that was put out while timed was compared: no passed equivalence_check of this system is known"
        )
    if settings.runs < 5:
        notes.append(
            f"{settings.runs} process restarts; an interval to be relied on wants at least 5: d0_ms, ttfo_ms, "
            "startup_ms and others with one value a restart have Student's t here, which takes them as normal"
            + ("" if settings.runs > 1 else "; none for a single restart")
        )
    for share, found in suffice(num_measured(done)).items():
        if not found["suffices"]:
            notes.append(
                f"{share} is indicative: {found['samples']} batches, {found['needed']} needed at 99 % confidence"
            )
    notes += _media_notes(settings, done)
    notes += dict.fromkeys(note for run in done for note in run.neighbours.notes)
    notes += dict.fromkeys(note for run in done for note in run.said)
    for run in done:
        warmup = run.metrics.get("warmup") or {}
        if warmup.get("level_change_left_in"):
            notes.append(
                f"latency changes its level {warmup['level_change_left_in']} batches after warm-up: raise warmup, or "
                "look for a stall there"
            )
        if warmup.get("drifts"):
            drift = warmup["drift_ms_per_batch"]
            notes.append(f"latency drifts by {drift['low']:.3g} to {drift['high']:.3g} ms a batch after warm-up")
    limit = settings.max_batches + settings.warmup
    if any(len(run.recorder.sent_ns) >= limit for run in done):
        notes.append(
            f"a restart ended after all of its {settings.max_batches} batches; raise max_batches to measure longer"
        )
    if any(run.search and run.search["bracket_ms"][0] is None for run in done):
        notes.append(
            "max_rate: no shorter period was shown to be too short (for want of time or items), so the "
            "intervals of fps and period_ms leave that side out; raise duration_s or max_batches"
        )
    if dropped := sum(run.load.get("num_dropped", 0) for run in done):
        due = sum(run.load["num_due"] for run in done)
        notes.append(f"{dropped} of {due} items that were due were not sent: inputs ran out; raise max_batches")
    return notes


def num_measured(done: Sequence[OneRun]) -> int:
    """Return how many batches were measured, over all restarts."""
    return sum(len(run.recorder.sent_ns) - run.start for run in done)


def _media_notes(settings: RunSettings, done: Sequence[OneRun]) -> list[str]:
    outputs = list(dict.fromkeys(name for run in done for name in run.outputs))
    rates = settings.media_rate or {}
    unknown = [name for name in outputs if name not in rates]
    foreign = [name for name in rates if outputs and name not in outputs]
    notes = []
    if unknown:
        notes.append(
            f"no real-time factor for {listed(unknown)}: their rate is not known; pass media_rate, elements a second, "
            "or give the program's output a rate_hz"
        )
    if foreign:
        notes.append(f"media_rate names {listed(foreign)}, which the system does not write ({listed(outputs)})")
    return notes


def calibrate(
    system: System,
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: RunSettings,
    hidden: Sequence[Path] = (),
) -> dict[str, float] | None:
    """Return how many elements a batch yields on each output, from a short run of its own.

    None where the system itself tells when a batch is done.

    Raises
    ------
    InputError
        It writes nothing, or amounts that differ from batch to batch without telling where batches end.
    """
    items = read_inputs(inputs, workspace, new_seed(), 3)
    log_path = folder / "calibration.log"
    with SystemProcess(
        system, list(items[0]), devices=settings.devices, config=settings.config, log_path=log_path, hidden=hidden
    ) as process:
        process.wait_ready(settings.timeout_s)
        recorder = run_all(process, items, settings.timeout_s)
    if not recorder.elements:
        raise input_error(
            f"system '{system.reference}'", "outputs", "none for 3 batches", "write to io.outputs[name]",
            rule="too-few-outputs",
        )  # fmt: skip
    if len(recorder.ends) == len(items):
        return None
    for name, count in recorder.elements.items():
        if count % len(items):
            raise input_error(
                f"system '{system.reference}', output '{name}'", "the same number of elements for every batch",
                f"{count} elements for {len(items)} batches",
                "call io.batch_done(batch) when a batch's outputs are written, and call again", rule="uneven-batches",
            )  # fmt: skip
    return {name: count / len(items) for name, count in recorder.elements.items()}


def harness_overhead_ms(folder: Path, settings: RunSettings) -> dict[str, float]:
    """Return p50 and p99 of a round trip through the null system, in ms."""
    path = Path(null.__file__)
    echo = System("null", "code", path, "echo", "")
    items = [{"x": np.zeros(16, np.float32)} for _ in range(60)]
    with SystemProcess(echo, ["x"], devices=settings.devices, log_path=folder / "null.log") as process:
        process.wait_ready(settings.timeout_s)
        recorder = Recorder()
        one_by_one(process, items, {"x": 16}, settings.timeout_s, monotonic_ns() + int(5e9), recorder)
        drain(process, recorder, settings.timeout_s)
    gaps = [write.at_ns - sent for write, sent in zip(recorder.written, recorder.sent_ns, strict=True)][10:]
    return {"p50": float(np.percentile(gaps, 50)) / 1e6, "p99": float(np.percentile(gaps, 99)) / 1e6}


def run_once(
    system: System,
    inputs: str,
    workspace: Path,
    log_path: Path,
    settings: RunSettings,
    per_batch: Mapping[str, float] | None,
    *,
    restart: int = 0,
    trace_s: np.ndarray | None = None,
    sampler: Sampler | None = None,
    hidden: Sequence[Path] = (),
) -> OneRun:
    """Start the system, warm it up, drive the scenario, and take the measures of this one process."""
    seeds: dict[str, int | None] = {"inputs": new_seed(), "arrivals": None}
    moments_s: np.ndarray | None = None
    if settings.scenario in PLANNED:
        if settings.scenario != "trace":
            seeds["arrivals"] = new_seed() if settings.seed is None else settings.seed + restart
        moments_s = plan_s(settings, trace_s, seeds["arrivals"] or 0)
    items = read_inputs(inputs, workspace, seeds["inputs"] or 0, settings.max_batches + settings.warmup)
    warmup = min(settings.warmup, max(len(items) - MIN_MEASURED_BATCHES, 0))
    recorder = Recorder(keep_values=False, sampler=sampler)
    remove_bytecode(system)
    watch = NeighbourWatch(settings.devices, settings.neighbours, settings.neighbour_share)
    with watch, SystemProcess(
        system, list(items[0]), devices=settings.devices, config=settings.config, log_path=log_path, hidden=hidden,
        private=private_files(workspace),
    ) as process:  # fmt: skip
        process.wait_ready(settings.timeout_s)
        one_by_one(process, items[:warmup], per_batch, settings.timeout_s, monotonic_ns() + int(3.6e12), recorder)
        start, period_ms, rest = len(recorder.sent_ns), None, items[warmup:]
        watch.begin(process.mark)
        until_ns = monotonic_ns() + int(settings.duration_s * 1e9)
        search: dict[str, Any] = {}
        if settings.scenario == "single_stream":
            one_by_one(process, rest, per_batch, settings.timeout_s, until_ns, recorder)
        elif settings.scenario == "realtime":
            period_ms = settings.period_ms or 1.1 * last_latency_ms(recorder)
            paced(process, rest, per_batch, period_ms, settings, recorder)
        elif moments_s is not None:
            planned(process, rest, per_batch, moments_s, settings, recorder)
        else:
            start, period_ms, search = search_rate(process, rest, per_batch, settings, recorder)
        drain(process, recorder, settings.timeout_s)
        watch.end()
        overruns = [event for event in process.events if event["kind"] == "overrun" and event["batch"] >= start]
        startup_ms = ((process.ready_ns or process.started_ns) - process.started_ns) / 1e6
        usages = [process.usage, *(event for event in process.events if event["kind"] == "usage")]
        peak = max(process.peak_host_bytes, sum(int(usage.get("peak_host_bytes", 0)) for usage in usages))
        activities = [event for event in process.events if event["kind"] in ACTIVITIES]
        said = [str(event["text"]) for event in process.events if event["kind"] == "note"]
        seen, guards = judge_guards(process.events), guard_records(process.events)
        device_bytes = sum(int(usage.get("peak_device_bytes") or 0) for usage in usages) or None
    attribution = attribute(recorder)
    lines = attribution.timelines if start < len(recorder.sent_ns) else ()
    level = level_change(lines, start)
    if settings.scenario == "single_stream":
        # Open loop, a change at the begin may be a stall of the system, and is never cut.
        start += level
    rates = settings.media_rate or {}
    outputs = {
        line.output: measure(line, start, period_ms, stated_d0_ms=settings.d0_ms, media_rate=rates.get(line.output))
        for line in lines
    }
    load = describe_load(recorder, start, None if moments_s is None else len(moments_s))
    gap_ms = 1e3 / load["offered_hz"] if load["offered_hz"] and moments_s is not None else None
    judged = judge(recorder, start, period_ms, outputs, search, lines, per_batch, gap_ms)
    problems = [*attribution.problems, *judged, *seen, *watch.problems, *map(str, process.left)]
    problems += judge_emulation(overruns, len(recorder.sent_ns) - start)
    if len(items) < warmup + MIN_MEASURED_BATCHES:
        problems.append(
            f"the inputs yield {len(items)} batches; {warmup + MIN_MEASURED_BATCHES} are needed: yield more"
        )
    metrics: dict[str, Any] = {"startup_ms": startup_ms, "peak_host_bytes": peak, "peak_device_bytes": device_bytes}
    metrics["client_lag_ms"] = lag_ms(recorder, start)
    if skew := skew_ms({line.output: line.since(start).all_visible_ns for line in lines}, rates):
        metrics["skew_ms"] = skew
    if lines:
        metrics["warmup"] = describe_warmup(lines, start, level, settings)
    metrics |= {f"search_{key}": value for key, value in search.items() if isinstance(value, int | float)}
    spans = [event for event in activities if event["kind"] == "span"]
    if spans and start < len(recorder.sent_ns):
        end_ns = max(write.at_ns for write in recorder.written)
        metrics["busy_share"] = busy_shares(spans, recorder.sent_ns[start], end_ns)
        metrics["devices"] = utilisation(activities, recorder.sent_ns[start], end_ns)
    sent: list[Mapping[str, Any]] = list(items[: len(recorder.sent_ns)])
    return OneRun(
        metrics,
        outputs,
        problems,
        recorder,
        sent,
        start,
        activities,
        attribution,
        guards,
        load,
        search,
        seeds,
        watch,
        said,
    )


def level_change(lines: Sequence[Timeline], start: int) -> int:
    """Return how many batches from `start` on are still on another level of latency than the rest."""
    if not lines:
        return 0
    return change_point(np.max([latencies_ms(line) for line in lines], axis=0)[start:])


def describe_warmup(lines: Sequence[Timeline], start: int, level: int, settings: RunSettings) -> dict[str, Any]:
    """Return where warm-up was cut, what was found after it, and whether latency drifts from there on."""
    latency = np.max([latencies_ms(line) for line in lines], axis=0)
    low, high = growth_interval(latency[start:], 1 - CONFIDENCE)
    known = math.isfinite(low)
    return {
        "batches": start,
        "cut_at_change": level if settings.scenario == "single_stream" else 0,
        "level_change_left_in": 0 if settings.scenario == "single_stream" else level,
        "drift_ms_per_batch": {"low": low, "high": high} if known else None,
        "drifts": int(known and not low <= 0 <= high),
    }


def judge_emulation(overruns: Sequence[Mapping[str, Any]], num_batches: int) -> list[str]:
    """Return why emulated figures do not stand: real work that took longer than the time it stands for."""
    by_name: dict[str, list[float]] = {}
    for event in overruns:
        by_name.setdefault(str(event["name"]), []).append(float(event["over_ns"]) / 1e6)
    return [
        f"operation '{name}' took up to {max(over_ms):.1f} ms longer than its emulated time in {len(over_ms)} of "
        f"{num_batches} batches: make its real work smaller, or give it a core of its own"
        for name, over_ms in sorted(by_name.items())
        if len(over_ms) > MAX_OVERRUN_SHARE * num_batches
    ]


def _write_artifacts(folder: Path, result: Mapping[str, Any], done: Sequence[OneRun]) -> dict[str, str]:
    samples = folder / "samples.npz"
    arrays = {}
    for index, run in enumerate(done):
        arrays[f"run{index}_intended_ns"] = np.asarray(run.recorder.intended_ns)
        arrays[f"run{index}_sent_ns"] = np.asarray(run.recorder.sent_ns)
        for line in run.attribution.timelines:
            arrays[f"run{index}_visible_ns_{line.output}"] = line.visible_ns
            arrays[f"run{index}_counts_{line.output}"] = line.counts
    np.savez_compressed(samples, **arrays)  # type: ignore[arg-type]
    trace, plot, page = folder / "trace.json", folder / "plot.png", folder / "plot.html"
    report.write_trace(trace, done[-1].recorder, done[-1].activities, done[-1].attribution)
    report.write_plots(plot, page, result, [(run.attribution, run.start) for run in done])
    record = folder / "result.json"
    record.write_text(json.dumps(result, indent=1, default=str))
    return {"result": str(record), "samples": str(samples), "trace": str(trace), "plot": str(plot), "page": str(page)}
