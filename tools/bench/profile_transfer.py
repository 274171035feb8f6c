"""What handing a value to another device costs: each edge with the values that the program sends, and by size.

A program of two operations on two devices makes each value again and hands it over through the runtime's own channel.
A time runs from when the making operation has ended until the taking one has the value: the lag κ of
``spec/cost-model.md``. Nothing else runs, so the receiver always waits for what comes.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench import replay_ops
from flashrt.bench.drive import Recorder, drain, one_by_one
from flashrt.bench.process import SystemProcess
from flashrt.bench.profile_layout import GPU_KINDS, Pool
from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.errors import InputError
from flashrt.ir.values import describe
from flashrt.runtime.wire import Tensor, read_messages

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
NUM_REPEATS, MIN_REPEATS, NUM_WARMUP = 20, 8, 3
MAX_BYTES_A_VALUE = 256 << 20
"""Of one value no more than this is handed over in all, and it `MIN_REPEATS` times whatever its size."""
FOREVER_NS = int(3.6e12)
METHOD = (
    "median from the end of the operation that makes a value until the one on another device has it, through the "
    "runtime's channel; edges: the values of one batch, all ports between two operations together; other sizes: "
    "latency and bandwidth fitted by least squares of the relative errors at the medians of 'sizes'"
)
PROGRAM = {
    "schema": "flashrt/program@1",
    "name": "hand-over",
    "ops": "replay_ops.py:load",
    "entry": "app",
    "graphs": {
        "app": {
            "inputs": {"value": {}, "in_place": {}},
            "outputs": {"taken": {}},
            "nodes": {"make": {"op": "make"}, "take": {"op": "take"}},
            "edges": [
                {"from": "value", "to": "make.value", "mode": "blocking"},
                {"from": "in_place", "to": "make.in_place", "mode": "blocking"},
                {"from": "make.value", "to": "take.value", "mode": "blocking"},
                {"from": "take.taken", "to": "taken", "mode": "blocking"},
            ],
        }
    },
}
FLOW = "make.value -> take.value"


def read_values(folder: Path) -> dict[str, tuple[Any, bool]]:
    """Return edge (``dit -> vae``) -> (what went over it in one batch, whether it was made in place).

    Several ports between two operations are one edge of the cost model: their values are in one mapping.
    """
    ports: dict[str, dict[str, tuple[Any, bool]]] = defaultdict(dict)
    for path in sorted(folder.glob("*.values")):
        with path.open("rb") as file:
            for message in read_messages(file, torch=False):
                edge = f"{message['source']} -> {message['target']}"
                ports[edge][str(message["port"])] = (message["value"], bool(message["in_place"]))
    return {
        edge: next(iter(found.values())) if len(found) == 1 else ({port: value for port, (value, _) in found.items()},
                                                                  False)
        for edge, found in ports.items()
    }  # fmt: skip


def measure_transfers(
    values: Mapping[str, tuple[Any, bool]], pool: Pool, folder: Path, timeout_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the profile's ``transfer`` and notes.

    Raises
    ------
    InputError
        The two workers fail, or are silent for too long.
    """
    notes: list[str] = []
    try:
        times = _hand_over(values, pool, folder, timeout_s)
    except InputError as failed:
        words = " ".join(str(failed).split())[:600]
        notes.append(f"transfers: none of the edges was measured, because handing their values over failed: {words}")
        times = _hand_over({}, pool, folder, timeout_s)
    edges = {edge: times[edge] for edge in values if times.get(edge)}
    by_size = {size: times[size] for size in SIZES if times.get(size)}
    medians = {size: float(np.median(samples)) for size, samples in by_size.items()}
    latency_ms, gigabytes_per_s, error = fit(medians)
    transfer: dict[str, Any] = {
        "latency_ms": round(latency_ms, 5),
        "edges": {edge: round(float(np.median(samples)), 5) for edge, samples in edges.items()},
        "samples": {edge: [round(one, 5) for one in samples] for edge, samples in edges.items()},
        "bytes": {edge: num_bytes(values[edge][0]) for edge in edges},
        "sizes": {str(size): [round(one, 5) for one in samples] for size, samples in by_size.items()},
        "fit_error": round(error, 4),
    }
    if gigabytes_per_s is not None:
        transfer["gigabytes_per_s"] = round(gigabytes_per_s, 4)
    if len(set(pool.names)) == 1:
        notes.append(
            f"transfers: both ends were on '{pool.names[0]}', the only device given; between two they may take longer: "
            "measure with a lease of two"
        )
    return transfer, notes


def _hand_over(
    values: Mapping[str, tuple[Any, bool]], pool: Pool, folder: Path, timeout_s: float
) -> dict[Any, list[float]]:
    """Return edge, and size of `SIZES`, -> the times of its hand-overs in ms."""
    has_tensors = pool.kind in GPU_KINDS or any(_has_tensor(value) for value, _ in values.values())
    sweep: dict[Any, tuple[Any, bool]] = {size: (_plain(size, tensor=has_tensors), False) for size in SIZES}
    jobs = {**values, **sweep}
    items: list[dict[str, Any]] = []
    labels: list[Any] = []
    for label, (value, in_place) in jobs.items():
        size = max(num_bytes(value), 1)
        repeats = NUM_WARMUP + min(max(MAX_BYTES_A_VALUE // size, MIN_REPEATS), NUM_REPEATS)
        items += [{"value": value, "in_place": in_place and isinstance(value, Tensor)}] * repeats
        labels += [label] * repeats
    return _lags(_run(items, pool, folder, timeout_s), labels, on_gpu=pool.kind in GPU_KINDS)


def _run(items: Sequence[Mapping[str, Any]], pool: Pool, folder: Path, timeout_s: float) -> list[Mapping[str, Any]]:
    # A copy in a folder of its own: that folder is on the workers' path for imports, and nothing else is to be there.
    place = folder / "transfer"
    place.mkdir(exist_ok=True)
    shutil.copyfile(replay_ops.__file__, place / "replay_ops.py")
    program, path = place / "program.json", place / "deployment.json"
    program.write_text(json.dumps(PROGRAM))
    deployment = {
        "schema": "flashrt/deployment@1", "devices": pool.kind, "groups": {"make": [0], "take": [1]},
        "place": {"make": "make", "take": "take"}, "in_flight": 1, "nan": "pass",
    }  # fmt: skip
    path.write_text(json.dumps(deployment))
    # On GPUs both ends then wait for their device, and the value is there when its taker's wait is over.
    told = {"weigh": -1, "write": -1, "values": ""} if pool.kind in GPU_KINDS else {}
    system = System("transfer", "deployment", path, "", "", program, place, measured=told)
    recorder = Recorder(keep_values=False)
    with SystemProcess(
        system, list(items[0]), devices=pool.take(2), log_path=folder / "transfer.log"
    ) as process:  # fmt: skip
        process.wait_ready(timeout_s)
        one_by_one(process, items, None, timeout_s, monotonic_ns() + FOREVER_NS, recorder)
        drain(process, recorder, timeout_s)
        return list(process.events)


def _lags(events: Iterable[Mapping[str, Any]], labels: Sequence[Any], *, on_gpu: bool) -> dict[Any, list[float]]:
    """Return what was handed over -> its times in ms; the first of each were warm-up."""
    made_ns: dict[int, int] = {}
    came_ns: dict[int, int] = {}
    for event in events:
        if event["kind"] == "span" and event["name"] == "make":
            made_ns[event["batch"]] = max(made_ns.get(event["batch"], 0), int(event["end_ns"]))
        elif event["kind"] == "transfer" and event["name"] == FLOW and not on_gpu:
            came_ns[event["batch"]] = int(event["end_ns"])
        elif event["kind"] == "span" and event["name"] == "take" and on_gpu:
            came_ns.setdefault(event["batch"], int(event["start_ns"]))
    times: dict[Any, list[float]] = defaultdict(list)
    for batch, label in enumerate(labels):
        if batch in came_ns and batch in made_ns:
            times[label].append((came_ns[batch] - made_ns[batch]) / 1e6)
    return {label: samples[NUM_WARMUP:] for label, samples in times.items()}


def fit(medians: Mapping[int, float]) -> tuple[float, float | None, float]:
    """Return (latency in ms, bandwidth in GB/s or None, largest relative error) of ``latency + bytes / bandwidth``.

    Least squares of the relative errors. Where no slope can be told from the measurements, the latency alone: the
    largest median.
    """
    sizes, times = np.asarray(list(medians), float), np.asarray(list(medians.values()), float)
    weights = 1 / np.maximum(times, 1e-6)
    matrix = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    (latency, slope), *_ = np.linalg.lstsq(matrix, times * weights, rcond=None)
    if latency < 0:
        latency, slope = 0.0, float(np.sum(sizes * times * weights**2) / np.sum(sizes**2 * weights**2))
    if slope <= 0:
        latency, slope = float(times.max()), 0.0
    error = float(np.max(np.abs(latency + slope * sizes - times) * weights))
    return float(latency), float(1 / (slope * 1e6)) if slope > 0 else None, error


def num_bytes(value: Any) -> int:
    """Return the bytes of the arrays in a value."""
    if isinstance(value, Tensor):
        return int(value.data.nbytes)
    if isinstance(value, np.ndarray | np.generic):
        return int(value.nbytes)
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else 0


def signature(value: Any) -> str:
    """Return dtype and shape of a value as a key has them: ``float32 [12, 8]``."""
    return f"{value.dtype} {list(value.data.shape)}" if isinstance(value, Tensor) else describe(value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def _plain(size: int, *, tensor: bool) -> Any:
    array = np.arange(size // 4, dtype=np.float32)
    return Tensor("float32", array) if tensor else array
