"""A benchmark run: a scenario driven through a system's own buffers, over several process restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from flashrt.bench import null, report
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import Recorder, drain, new_seed, one_by_one, open_loop, run_all, windowed
from flashrt.bench.environment import describe_environment
from flashrt.bench.metrics import Attribution, attribute, busy_shares, combine, measure
from flashrt.bench.process import SystemProcess
from flashrt.bench.record import read_inputs
from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error, listed

Scenario = Literal["single_stream", "realtime", "max_rate"]
SCENARIOS: tuple[str, ...] = get_args(Scenario)
MIN_MEASURED_BATCHES = 5
WINDOW = 8
MAX_LAG_SHARE = 0.05
MAX_DRIFT_SHARE = 0.02


@dataclass(frozen=True)
class RunSettings:
    """How a benchmark runs.

    Attributes
    ----------
    duration_s
        Time of the measured part of each run; a run also ends when `max_batches` have been sent.
    period_ms
        ``realtime`` only: the period; None: 1.1 times the latency seen in warm-up.
    elements_per_batch
        What each output owes for a batch; None: found by a calibration run where the system does not say.
    """

    scenario: Scenario = "single_stream"
    duration_s: float = 8.0
    runs: int = 3
    warmup: int = 3
    max_batches: int = 256
    period_ms: float | None = None
    elements_per_batch: Mapping[str, float] | None = None
    devices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    timeout_s: float = 120
    emulated: bool = False


@dataclass(frozen=True)
class OneRun:
    """What one process restart yielded."""

    metrics: dict[str, Any]
    outputs: dict[str, dict[str, Any]]
    problems: list[str]
    recorder: Recorder
    start: int
    spans: list[Mapping[str, Any]]
    attribution: Attribution


def check_settings(settings: RunSettings) -> None:
    """Refuse settings that cannot be run, by name."""
    if settings.scenario not in SCENARIOS:
        raise input_error(
            "argument 'scenario'", f"one of {listed(SCENARIOS)}", f"'{settings.scenario}'", "name one of them",
            rule="unknown-scenario", valid=SCENARIOS, name=settings.scenario,
        )  # fmt: skip
    for name, low, high in (
        ("duration_s", 0.1, 3600),
        ("runs", 1, 100),
        ("warmup", 0, 1000),
        ("max_batches", 1, 100000),
    ):
        value = getattr(settings, name)
        if not low <= value <= high:
            raise input_error(f"argument '{name}'", f"between {low} and {high}", str(value), "change it and call again")
    if settings.period_ms is not None and not 0 < settings.period_ms < 1e7:
        raise input_error("argument 'period_ms'", "a positive time", str(settings.period_ms), "change it")


def run_benchmark(
    system: System,
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: RunSettings,
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Benchmark a system and write result, samples, trace and plot to `folder`.

    Returns
    -------
    The record of ``bench_run``: `valid` with reasons, metrics with intervals, artefact paths.

    Raises
    ------
    InputError
        Wrong settings, or a system that fails, hangs or returns early.
    """
    check_settings(settings)
    per_batch = settings.elements_per_batch
    if per_batch is None and system.kind == "code":
        progress(0.0, "calibration: how much a batch yields")
        per_batch = calibrate(system, inputs, workspace, folder, settings)
    overhead_ms = harness_overhead_ms(folder, settings)
    done: list[OneRun] = []
    for run in range(settings.runs):
        progress((run + 0.2) / (settings.runs + 0.5), f"run {run + 1} of {settings.runs}, {settings.scenario}")
        done.append(run_once(system, inputs, workspace, folder / f"system-{run}.log", settings, per_batch))
    progress(settings.runs / (settings.runs + 0.5), "metrics, trace and plot")
    metrics, intervals = combine([run.metrics for run in done])
    problems = list(dict.fromkeys(problem for run in done for problem in run.problems))
    result = {
        "valid": not problems,
        "reasons": problems,
        "notes": _notes(settings, done),
        "system": {"reference": system.reference, "kind": system.kind, "digest": system.digest},
        "inputs": inputs,
        "scenario": settings.scenario,
        "runs": settings.runs,
        "emulated": settings.emulated,
        "batches_measured": [len(run.recorder.sent_ns) - run.start for run in done],
        **metrics,
        "confidence_95": intervals,
        "outputs": {name: combine([run.outputs[name] for run in done if name in run.outputs])[0]
                    for name in dict.fromkeys(name for run in done for name in run.outputs)},
        "harness_overhead_ms": overhead_ms,
        "measured": "buffer to buffer",
        "settings": {k: v for k, v in asdict(settings).items() if k != "config"},
        "environment": describe_environment(settings.devices),
    }  # fmt: skip
    result["artifacts"] = _write_artifacts(folder, result, done)
    return result


def _notes(settings: RunSettings, done: Sequence[OneRun]) -> list[str]:
    notes = []
    if settings.runs < 5:
        notes.append(f"{settings.runs} process restarts; an interval to be relied on wants at least 5")
    samples = min(len(run.recorder.sent_ns) - run.start for run in done)
    for share, need in (("p90", 44), ("p99", 459)):
        if samples * settings.runs < need:
            notes.append(f"{share} is indicative: {samples * settings.runs} batches, {need} needed at 99 % confidence")
    return notes


def calibrate(system: System, inputs: str, workspace: Path, folder: Path, settings: RunSettings) -> dict[str, float]:
    """Return how many elements a batch yields on each output, from a short run of its own."""
    items = read_inputs(inputs, workspace, new_seed(), 3)
    log_path = folder / "calibration.log"
    with SystemProcess(
        system, list(items[0]), devices=settings.devices, config=settings.config, log_path=log_path
    ) as process:
        process.wait_ready(settings.timeout_s)
        recorder = run_all(process, items, settings.timeout_s)
    if not recorder.elements:
        raise input_error(
            f"system '{system.reference}'", "outputs", "none for 3 batches", "write to io.outputs[name]",
            rule="too-few-outputs",
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
) -> OneRun:
    """Start the system, warm it up, drive the scenario, and take the measures of this one process."""
    items = read_inputs(inputs, workspace, new_seed(), settings.max_batches + settings.warmup)
    warmup = min(settings.warmup, max(len(items) - MIN_MEASURED_BATCHES, 0))
    recorder = Recorder(keep_values=False)
    with SystemProcess(
        system, list(items[0]), devices=settings.devices, config=settings.config, log_path=log_path
    ) as process:
        process.wait_ready(settings.timeout_s)
        one_by_one(process, items[:warmup], per_batch, settings.timeout_s, monotonic_ns() + int(3.6e12), recorder)
        start, period_ms, rest = len(recorder.sent_ns), None, items[warmup:]
        until_ns = monotonic_ns() + int(settings.duration_s * 1e9)
        search: dict[str, Any] = {}
        if settings.scenario == "single_stream":
            one_by_one(process, rest, per_batch, settings.timeout_s, until_ns, recorder)
        elif settings.scenario == "realtime":
            period_ms = settings.period_ms or 1.1 * _last_latency_ms(recorder)
            _paced(process, rest, per_batch, period_ms, settings, recorder)
        else:
            start, period_ms, search = _search_rate(process, rest, per_batch, settings, recorder)
        drain(process, recorder, settings.timeout_s)
        startup_ms = ((process.ready_ns or process.started_ns) - process.started_ns) / 1e6
        peak = max(process.peak_host_bytes, int(process.usage.get("peak_host_bytes", 0)))
        spans = [event for event in process.events if event["kind"] == "span"]
        device_bytes = process.usage.get("peak_device_bytes")
    attribution = attribute(recorder)
    lines = attribution.timelines if start < len(recorder.sent_ns) else ()
    outputs = {line.output: measure(line, start, period_ms) for line in lines}
    problems = [*attribution.problems, *judge(recorder, start, period_ms, outputs, search)]
    metrics = dict(_slowest(outputs)) if outputs else {}
    metrics |= {"startup_ms": startup_ms, "peak_host_bytes": peak, "peak_device_bytes": device_bytes}
    metrics["client_lag_ms"] = _lag_ms(recorder, start)
    metrics |= {f"search_{key}": value for key, value in search.items() if isinstance(value, int | float)}
    if spans and start < len(recorder.sent_ns):
        end_ns = max(write.at_ns for write in recorder.written)
        metrics["busy_share"] = busy_shares(spans, recorder.sent_ns[start], end_ns)
    return OneRun(metrics, outputs, problems, recorder, start, spans, attribution)


def _slowest(outputs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of the output that is complete last: the run's own."""
    return max(outputs.values(), key=lambda found: found["latency_ms"]["mean"])


def _last_latency_ms(recorder: Recorder) -> float:
    if not recorder.sent_ns:
        raise input_error("argument 'period_ms'", "a period, or warm-up batches to choose one by", "neither", "say one")
    return (recorder.written[-1].at_ns - recorder.sent_ns[-1]) / 1e6


def _paced(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    period_ms: float,
    settings: RunSettings,
    recorder: Recorder,
    duration_s: float | None = None,
) -> None:
    count = max(int((duration_s or settings.duration_s) * 1e3 / period_ms), MIN_MEASURED_BATCHES + 1)
    chosen = items[:count]
    begin = monotonic_ns() + int(period_ms * 1e6)
    due = [begin + int(index * period_ms * 1e6) for index in range(len(chosen))]
    open_loop(process, chosen, per_batch, due, settings.timeout_s, recorder)


def _search_rate(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    settings: RunSettings,
    recorder: Recorder,
) -> tuple[int, float, dict[str, Any]]:
    """Find the smallest period with a finite offset.

    First the system is kept saturated, which bounds its rate from above; then items come open loop at a period a
    little longer, and longer still, until the offset no longer grows.

    Returns
    -------
    (first batch of the accepted open-loop part, its period in ms, figures of the search)
    """
    first = len(recorder.sent_ns)
    share = settings.duration_s / 3
    # A fast system must not use up its items here: the open-loop part needs most of them.
    supply = items[: max(len(items) // 4, WINDOW + 3)]
    windowed(process, supply, per_batch, WINDOW, settings.timeout_s, monotonic_ns() + int(share * 1e9), recorder)
    used = len(recorder.sent_ns) - first
    completions = _completions(recorder, first)
    if len(completions) < 3:
        raise input_error(
            f"system '{process.system.reference}', scenario 'max_rate'", "at least 3 batches in the saturated phase",
            f"{len(completions)}", "raise duration_s", rule="too-short",
        )  # fmt: skip
    # The first completions still fill the pipeline; the rest come at the system's own pace.
    tail = completions[min(2, len(completions) - 2) :]
    saturated_ms = float(tail[-1] - tail[0]) / (len(tail) - 1) / 1e6
    period_ms, tries = saturated_ms * 1.02, 0
    while True:
        tries += 1
        start = len(recorder.sent_ns)
        left = items[used:]
        _paced(process, left[: max(len(left) // 2, 8)], per_batch, period_ms, settings, recorder, 2 * share)
        used += len(recorder.sent_ns) - start
        drift = _drift_ms(_completions(recorder, start), period_ms)
        enough = len(items) - used > MIN_MEASURED_BATCHES
        if drift <= MAX_DRIFT_SHARE * period_ms or tries == 4 or not enough:
            finite = drift <= MAX_DRIFT_SHARE * period_ms
            figures = {"saturated_period_ms": saturated_ms, "tries": tries, "drift_ms": drift, "finite": finite}
            return start, period_ms, figures
        period_ms *= 1.04


def _completions(recorder: Recorder, first: int) -> np.ndarray:
    """Return when each batch from `first` on was complete, in ns, by the output that owes the most writes."""
    found = attribute(recorder)
    if not found.timelines:
        return np.zeros(0)
    return np.asarray(np.max([line.visible_ns.max(axis=1) for line in found.timelines], axis=0)[first:])


def _drift_ms(completions: np.ndarray, period_ms: float) -> float:
    """Return by how much the offset grows a batch, in ms (Theil-Sen slope: a single hiccup does not tilt it)."""
    if len(completions) < 3:
        return math.inf
    from scipy.stats import theilslopes

    late = completions / 1e6 - np.arange(len(completions)) * period_ms
    return float(theilslopes(late)[0])


def _lag_ms(recorder: Recorder, start: int) -> float:
    lags = np.asarray(recorder.sent_ns[start:]) - np.asarray(recorder.intended_ns[start:])
    return float(np.percentile(lags, 99)) / 1e6 if len(lags) else 0.0


def judge(
    recorder: Recorder,
    start: int,
    period_ms: float | None,
    outputs: Mapping[str, Mapping[str, Any]],
    search: Mapping[str, Any],
) -> list[str]:
    """Return why a run is not valid; empty when it is."""
    problems = []
    measured = len(recorder.sent_ns) - start
    if measured < MIN_MEASURED_BATCHES:
        problems.append(f"{measured} measured batches; at least {MIN_MEASURED_BATCHES} are needed: raise duration_s")
    if period_ms is not None:
        lag = _lag_ms(recorder, start)
        if lag > max(2.0, MAX_LAG_SHARE * period_ms):
            problems.append(f"items were sent {lag:.1f} ms after their moment (p99): the harness was disturbed")
        drift = max((found.get("drift_ms_per_batch", 0.0) for found in outputs.values()), default=0.0)
        sustained = search["finite"] if search else drift <= MAX_DRIFT_SHARE * period_ms
        if not sustained:
            problems.append(
                f"the offset grows by {search.get('drift_ms', drift):.1f} ms a batch at a period of {period_ms:.1f} ms:"
                " the system does not sustain it"
            )
    return problems


def _write_artifacts(folder: Path, result: Mapping[str, Any], done: Sequence[OneRun]) -> dict[str, str]:
    samples = folder / "samples.npz"
    arrays = {}
    for index, run in enumerate(done):
        arrays[f"run{index}_intended_ns"] = np.asarray(run.recorder.intended_ns)
        arrays[f"run{index}_sent_ns"] = np.asarray(run.recorder.sent_ns)
        for line in run.attribution.timelines:
            arrays[f"run{index}_visible_ns_{line.output}"] = line.visible_ns
    np.savez_compressed(samples, **arrays)  # type: ignore[arg-type]
    trace, plot = folder / "trace.json", folder / "plot.png"
    report.write_trace(trace, done[-1].recorder, done[-1].spans, done[-1].attribution)
    report.write_plot(plot, result, [(run.attribution, run.start) for run in done])
    record = folder / "result.json"
    record.write_text(json.dumps(result, indent=1, default=str))
    return {"result": str(record), "samples": str(samples), "trace": str(trace), "plot": str(plot)}
