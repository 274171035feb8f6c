"""Driving one system through its buffers: what is sent when, what came back when."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from flashrt.bench.equality import stream_length
from flashrt.bench.process import SystemProcess
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error

SPIN_NS = 300_000


@dataclass(frozen=True)
class Written:
    """One write of the system, stamped on arrival in the harness."""

    at_ns: int
    output: str
    num_elements: int
    value: Any = field(repr=False)
    batch: int | None = None

    def without_value(self) -> Written:
        """Return the same write with its value let go."""
        return replace(self, value=None)


class Keeper(Protocol):
    """Decides which values a recorder keeps."""

    def keeps(self, index: int, output: str, span: tuple[int, int], value: Any, written: list[Written]) -> bool:
        """Return whether to keep write number `index`, of the elements `span` of an output's stream."""


@dataclass
class Recorder:
    """What was sent and what came back, in order, while a system is driven."""

    intended_ns: list[int] = field(default_factory=list)
    sent_ns: list[int] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    batches_done: int = 0
    ends: list[int] = field(default_factory=list)
    """How many writes had come when each batch was said to be done."""
    elements: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_axes: dict[str, int] = field(default_factory=dict)
    """Output -> axes of what is written to it; 0 for what is no array."""
    taken_ns: list[int] = field(default_factory=list)
    """When each item had left the harness: later than sent where the system did not take it."""
    ended: bool = False
    keep_values: bool = True
    sampler: Keeper | None = None
    """Decides of each value whether it is kept; absent: `keep_values` does."""

    def take(self, at_ns: int, message: Mapping[str, Any]) -> None:
        """Record one message of the system."""
        if message["kind"] == "output":
            value = message["value"]
            count, name = stream_length(value), message["name"]
            first = self.elements[name]
            self.elements[name] += count
            self.num_axes[name] = len(getattr(value, "shape", ()))
            kept = self.keep_values
            if self.sampler is not None:
                kept = self.sampler.keeps(len(self.written), name, (first, first + count), value, self.written)
            self.written.append(Written(at_ns, name, count, value if kept else None, message.get("batch")))
        elif message["kind"] == "batch_done":
            self.batches_done = max(self.batches_done, int(message["batch"]) + 1)
            self.ends.append(len(self.written))
        elif message["kind"] == "done":
            self.ended = True

    def values(self) -> dict[str, list[Any]]:
        """Return what was written to each output, in order."""
        found: dict[str, list[Any]] = defaultdict(list)
        for write in self.written:
            found[write.output].append(write.value)
        return dict(found)


def new_seed() -> int:
    """Return a seed that no system can know."""
    return secrets.randbelow(2**31)


def drain(process: SystemProcess, recorder: Recorder, timeout_s: float) -> None:
    """Close the inputs and take everything until the system has returned."""
    process.close_inputs()
    while not recorder.ended:
        arrival = process.next_arrival(timeout_s, "the rest of the outputs, and a return once the inputs are closed")
        recorder.take(arrival.at_ns, arrival.message)


def send(process: SystemProcess, recorder: Recorder, item: Mapping[str, Any], intended_ns: int | None = None) -> None:
    """Put one item, keeping the moment it was meant for and the moment it went."""
    now = monotonic_ns()
    recorder.intended_ns.append(now if intended_ns is None else intended_ns)
    recorder.sent_ns.append(now)
    process.send(item)
    recorder.taken_ns.append(monotonic_ns())


def run_all(
    process: SystemProcess, items: Sequence[Mapping[str, Any]], timeout_s: float, recorder: Recorder | None = None
) -> Recorder:
    """Send every item at once and take every output: for comparing, not for timing."""
    recorder = Recorder() if recorder is None else recorder
    for item in items:
        send(process, recorder, item)
    drain(process, recorder, timeout_s)
    return recorder


def is_complete(recorder: Recorder, batch: int, per_batch: Mapping[str, float] | None) -> bool:
    """Return whether every output of `batch` has arrived.

    `per_batch` gives the elements that a batch yields on each output; None: the system says when a batch is done.
    """
    if per_batch is None:
        return recorder.batches_done > batch
    return all(recorder.elements[name] >= round((batch + 1) * count) for name, count in per_batch.items())


def completed_ns(recorder: Recorder, per_batch: Mapping[str, float] | None) -> np.ndarray:
    """Return when each batch so far was complete, in ns, up to the first that is not; shape [complete batches]."""
    stamps = np.asarray([write.at_ns for write in recorder.written], np.int64)
    num_sent = len(recorder.sent_ns)
    if per_batch is None:
        # Ends are counts of writes; a batch without any was complete with what came before it.
        ends = np.maximum(np.asarray(recorder.ends[:num_sent], np.int64) - 1, 0)
        return np.asarray(stamps[ends]) if len(stamps) else stamps
    found = []
    for name, count in per_batch.items():
        own = [index for index, write in enumerate(recorder.written) if write.output == name]
        totals = np.cumsum([recorder.written[index].num_elements for index in own])
        owed = np.round(np.arange(1, num_sent + 1) * count)
        there = np.searchsorted(totals, owed)
        found.append(stamps[own][there[there < len(own)]])
    num_complete = min((len(one) for one in found), default=0)
    return np.asarray(np.max([one[:num_complete] for one in found], axis=0)) if num_complete else stamps[:0]


def one_by_one(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    timeout_s: float,
    until_ns: int,
    recorder: Recorder,
) -> None:
    """Send an item once the one before is answered in full (scenario ``single_stream``), until the time is up."""
    for item in items:
        batch = len(recorder.sent_ns)
        if batch and monotonic_ns() >= until_ns:
            break
        send(process, recorder, item)
        while not is_complete(recorder, batch, per_batch):
            _take(process, recorder, timeout_s, f"all outputs of batch {batch}", per_batch)


def windowed(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    window: int,
    timeout_s: float,
    until_ns: int,
    recorder: Recorder,
) -> None:
    """Keep `window` batches in flight, so that the system is never short of input (the search for its rate)."""
    first = len(recorder.sent_ns)
    for item in items:
        batch = len(recorder.sent_ns)
        if batch - first >= window:
            while not is_complete(recorder, batch - window, per_batch):
                _take(process, recorder, timeout_s, f"all outputs of batch {batch - window}", per_batch)
            if monotonic_ns() >= until_ns:
                break
        send(process, recorder, item)
    settle(process, recorder, per_batch, timeout_s)


def open_loop(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    due_ns: Sequence[int],
    timeout_s: float,
    recorder: Recorder,
    is_enough: Callable[[int], bool] | None = None,
) -> None:
    """Send each item at its moment, whether or not the system keeps up (scenario ``realtime``).

    `is_enough` is asked before an item, with how many were sent, whether to stop.
    """
    for index, (item, when_ns) in enumerate(zip(items, due_ns, strict=True)):
        if is_enough is not None and is_enough(index):
            break
        while (left := when_ns - monotonic_ns()) > 1_000_000:
            arrival = process.poll((left - 500_000) / 1e9)
            if arrival is None:
                break
            recorder.take(arrival.at_ns, arrival.message)
        wait_until_ns(when_ns)
        send(process, recorder, item, when_ns)
    settle(process, recorder, per_batch, timeout_s)


def wait_until_ns(when_ns: int) -> None:
    """Wait for a moment without sleeping through it, and without keeping the receiving thread from stamping."""
    while (left_ns := when_ns - monotonic_ns()) > 0:
        if left_ns > SPIN_NS:
            time.sleep((left_ns - SPIN_NS) / 1e9)
        else:
            # Gives up both the interpreter and the core, as a sleep of nothing would, without that one's 50 µs.
            os.sched_yield()


def settle(process: SystemProcess, recorder: Recorder, per_batch: Mapping[str, float] | None, timeout_s: float) -> None:
    """Take outputs until every batch sent so far is answered."""
    last = len(recorder.sent_ns) - 1
    while last >= 0 and not is_complete(recorder, last, per_batch):
        _take(process, recorder, timeout_s, f"all outputs of batch {last}", per_batch)


def _take(
    process: SystemProcess,
    recorder: Recorder,
    timeout_s: float,
    waiting_for: str,
    per_batch: Mapping[str, float] | None,
) -> None:
    arrival = process.poll(timeout_s, waiting_for)
    so_far = ", ".join(f"{count} of '{name}'" for name, count in recorder.elements.items()) or "nothing"
    if arrival is None:
        owed = f" ({_owed(per_batch)} a batch)" if per_batch else ""
        got = f"{so_far} for {len(recorder.sent_ns)} batches"
        raise process.hang(f"{waiting_for}{owed} within {timeout_s:.0f} s", got)
    recorder.take(arrival.at_ns, arrival.message)
    where = f"system '{process.system.reference}'"
    name = arrival.message.get("name")
    if per_batch and arrival.message["kind"] == "output" and name not in per_batch:
        raise input_error(
            f"{where}, output '{name}'", f"only the outputs of elements_per_batch: {_owed(per_batch)}", f"'{name}'",
            "correct elements_per_batch, or leave it out to have it found", rule="unknown-output",
            valid=list(per_batch), name=str(name),
        )  # fmt: skip
    if recorder.ended:
        raise input_error(
            where, waiting_for, f"it returned after {so_far} for {len(recorder.sent_ns)} batches",
            "return only when the inputs are closed, and write every batch's outputs", rule="too-few-outputs",
        )  # fmt: skip


def _owed(per_batch: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} of '{name}'" for name, count in per_batch.items())
