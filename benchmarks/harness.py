"""What the benchmark harness itself costs: round trips through the null system beside the least that sockets can do.

The floor is a bare socket pair between two processes that send the same bytes to and fro, measured in turn with the
harness, so that drift of the machine hits both. Also: how far an open-loop sender's items leave from their moment.
With --compare (--quick: in four minutes) instead: how often the verdicts of `bench_compare` are wrong, and right.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compare as verdicts
import numpy as np

from flashrt.bench import null
from flashrt.bench.drive import Recorder, drain, one_by_one, open_loop
from flashrt.bench.process import SystemProcess
from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.runtime.wire import pack

ECHO = System("null", "code", Path(null.__file__), "echo", "")
SIZES = {"64 B": 16, "64 KB": 1 << 14, "1 MB": 1 << 18}
NUM_ROUNDS = 3
NUM_ITEMS = 400
NUM_WARMUP = 20
PERIOD_MS = 5.0
TARGET_ONE_WAY_US = 100.0


def harness_trips_us(folder: Path, length: int) -> np.ndarray:
    """Return the round trips of items of `length` floats through the null system, in µs."""
    items = [{"x": np.full(length, number, np.float32)} for number in range(NUM_ITEMS)]
    recorder = Recorder(keep_values=False)
    with SystemProcess(ECHO, ["x"], log_path=folder / "null.log") as process:
        process.wait_ready(30)
        one_by_one(process, items, {"x": length}, 30, monotonic_ns() + int(60e9), recorder)
        drain(process, recorder, 30)
    trips = [write.at_ns - sent for write, sent in zip(recorder.written, recorder.sent_ns, strict=True)]
    return np.asarray(trips[NUM_WARMUP:]) / 1e3


def echo_bytes(end: socket.socket, size: int) -> None:
    """Send back every `size` bytes that come."""
    data = bytearray(size)
    while end.recv_into(data, size, socket.MSG_WAITALL) == size:
        end.sendall(data)


def floor_trips_us(length: int) -> np.ndarray:
    """Return the round trips of the same bytes over a bare socket pair, in µs."""
    size = sum(len(buffer) for buffer in pack({"kind": "input"}, {"x": np.zeros(length, np.float32)}))
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    process = multiprocessing.get_context("fork").Process(target=_echo_and_close, args=(ours, theirs, size))
    process.start()
    theirs.close()
    data, trips = bytearray(size), []
    for _ in range(NUM_ITEMS):
        begin = time.perf_counter_ns()
        ours.sendall(data)
        ours.recv_into(data, size, socket.MSG_WAITALL)
        trips.append(time.perf_counter_ns() - begin)
    ours.close()
    process.join()
    return np.asarray(trips[NUM_WARMUP:]) / 1e3


def _echo_and_close(ours: socket.socket, theirs: socket.socket, size: int) -> None:
    ours.close()
    echo_bytes(theirs, size)


def sending_lags_us(folder: Path) -> np.ndarray:
    """Return by how much an open-loop sender's items leave after their moment, in µs, outputs coming in meanwhile."""
    items: Sequence[Mapping[str, Any]] = [{"x": np.zeros(1024, np.float32)} for _ in range(NUM_ITEMS)]
    recorder = Recorder(keep_values=False)
    with SystemProcess(ECHO, ["x"], log_path=folder / "null.log") as process:
        process.wait_ready(30)
        begin = monotonic_ns() + int(PERIOD_MS * 1e6)
        due = [begin + int(number * PERIOD_MS * 1e6) for number in range(len(items))]
        open_loop(process, items, {"x": 1024}, due, 30, recorder)
        drain(process, recorder, 30)
    return (np.asarray(recorder.sent_ns) - np.asarray(recorder.intended_ns))[NUM_WARMUP:] / 1e3


def main() -> int:
    """Print the figures; the exit status says whether the target holds."""
    options = verdicts.parse(sys.argv[1:])
    if options.compare:
        return int(not verdicts.compare(quick=options.quick))
    print(f"harness: {NUM_ROUNDS} x {NUM_ITEMS} items through the null system, in turn with the floor")
    print(f"{'':>8} {'floor p50':>10} {'p99':>8} {'harness p50':>12} {'p99':>8} {'ratio p50':>10}   (µs a round trip)")
    one_way_us = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, length in SIZES.items():
            floor, harness = [], []
            for _ in range(NUM_ROUNDS):
                floor.append(floor_trips_us(length))
                harness.append(harness_trips_us(folder, length))
            bare, ours = (
                np.percentile(np.concatenate(floor), [50, 99]),
                np.percentile(np.concatenate(harness), [50, 99]),
            )
            one_way_us = one_way_us or float(ours[0]) / 2
            print(f"{label:>8} {bare[0]:10.0f} {bare[1]:8.0f} {ours[0]:12.0f} {ours[1]:8.0f} {ours[0] / bare[0]:10.1f}")
        lags = sending_lags_us(folder)
    print(f"one way, small items: {one_way_us:.0f} µs p50 (target below {TARGET_ONE_WAY_US:.0f})")
    print(f"open loop at {PERIOD_MS:.0f} ms: items leave {np.percentile(lags, 50):.0f} µs (p50), "
          f"{np.percentile(lags, 99):.0f} µs (p99) after their moment")  # fmt: skip
    return int(one_way_us >= TARGET_ONE_WAY_US)


if __name__ == "__main__":
    sys.exit(main())
