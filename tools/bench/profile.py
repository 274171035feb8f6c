"""Measuring a profile: the time of each operation when a program is interpreted, and what a hand-over costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench import null
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import Recorder, drain, new_seed, one_by_one
from flashrt.bench.environment import describe_environment
from flashrt.bench.process import SystemProcess
from flashrt.bench.record import read_inputs
from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.ir import BuiltProgram

NUM_WARMUP = 3
FOREVER_NS = int(3.6e12)


def measure_profile(
    system: System,
    built: BuiltProgram,
    inputs: str,
    workspace: Path,
    folder: Path,
    *,
    count: int = 16,
    devices: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    timeout_s: float = 120,
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Measure every operation of a program on one device.

    The program is interpreted over `count` batches after warm-up; each operation's time is the median of its
    samples. Hand-overs are measured between two processes, empty and at 4 MiB.

    Returns
    -------
    A ``flashrt/profile@1`` document with samples (ms), spread (interquartile range over median) and provenance.

    Raises
    ------
    InputError
        The program fails, or `count` is too small.
    """
    if count < 3:
        raise input_error("argument 'count'", "at least 3 batches", str(count), "raise it", rule="too-few-batches")
    used = list(devices[:1])
    items = read_inputs(inputs, workspace, new_seed(), count + NUM_WARMUP)
    recorder = Recorder(keep_values=False)
    progress(0.1, f"{count} batches after {NUM_WARMUP} of warm-up")
    log_path = folder / "program.log"
    with SystemProcess(system, list(items[0]), devices=used, config=config, log_path=log_path) as process:
        process.wait_ready(timeout_s)
        one_by_one(process, items, None, timeout_s, monotonic_ns() + FOREVER_NS, recorder)
        drain(process, recorder, timeout_s)
        spans = [event for event in process.events if event["kind"] == "span"]
    samples: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span["batch"] >= NUM_WARMUP:
            samples[span["name"]].append((span["end_ns"] - span["start_ns"]) / 1e6)
    progress(0.8, "what a hand-over costs")
    transfer = measure_transfer(folder, used, timeout_s)
    environment = describe_environment(used)
    frames = sum(recorder.elements.values()) / len(items) if len(recorder.elements) == 1 else None
    operations = {path: {"1": round(float(np.median(times)), 4)} for path, times in samples.items()}
    document: dict[str, Any] = {
        "schema": "flashrt/profile@1",
        "device": environment["devices"][0].rstrip("0123456789").rstrip("-:") if used else "cpu",
        "operations": operations,
        "transfer": transfer,
        "provenance": "measured",
        "samples": {path: {"1": [round(time, 4) for time in times]} for path, times in samples.items()},
        "key": {
            "program": built.id,
            "processor": environment["processor"],
            "devices": used,
            "config": dict(config or {}),
            "packages": environment["packages"],
        },
    }
    if frames is not None and frames == int(frames):
        document["frames_per_batch"] = int(frames)
    return document


def measure_transfer(folder: Path, devices: Sequence[str], timeout_s: float) -> dict[str, float]:
    """Return latency (ms) and bandwidth (GB/s) of a hand-over between two processes: half a round trip."""
    echo = System("null", "code", Path(null.__file__), "echo", "")
    small = _round_trip_ms(echo, np.zeros(16, np.float32), folder, devices, timeout_s)
    size = 1 << 20
    large = _round_trip_ms(echo, np.zeros(size, np.float32), folder, devices, timeout_s)
    extra_s = max(large - small, 1e-6) / 2 / 1e3
    return {"latency_ms": round(small / 2, 4), "gigabytes_per_s": round(4 * size / extra_s / 1e9, 3)}


def _round_trip_ms(echo: System, value: np.ndarray, folder: Path, devices: Sequence[str], timeout_s: float) -> float:
    recorder = Recorder(keep_values=False)
    items = [{"x": value} for _ in range(30)]
    with SystemProcess(echo, ["x"], devices=devices, log_path=folder / "null.log") as process:
        process.wait_ready(timeout_s)
        one_by_one(process, items, {"x": len(value)}, timeout_s, monotonic_ns() + FOREVER_NS, recorder)
        drain(process, recorder, timeout_s)
    trips = [write.at_ns - sent for write, sent in zip(recorder.written, recorder.sent_ns, strict=True)]
    return float(np.median(trips[5:])) / 1e6
