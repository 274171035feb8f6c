"""Checking a timed run: what the system put out while it was measured, held against what the baseline makes of it.

A system that was right when it was checked may be wrong, lazy or constant once it is timed. So one restart, chosen
in secret, keeps what it receives, and the baseline works on the same items afterwards, in a process of its own.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench.drive import Recorder, Written, run_all
from flashrt.bench.equality import OutputEquality, Tolerance, compare_output, flatten_stream
from flashrt.bench.process import SystemProcess
from flashrt.bench.systems import System, remove_bytecode
from flashrt.runtime.wire import Tensor

BUDGET_BYTES = 1 << 30
"""What is kept of a run at most; of one with more, a random part."""

Span = tuple[int, int]
"""First element of an output's stream, and the one after the last."""


@dataclass
class Sampler:
    """Keeps everything within a budget, else a random part: whenever it is full, each write goes with probability ½.

    Nobody can tell beforehand which writes remain, so a system has to be right in all of them.
    """

    budget_bytes: int = BUDGET_BYTES
    one_in: int = 1
    """Each write that comes is kept with probability 1 / `one_in`."""
    spans: dict[int, tuple[str, Span, int]] = field(default_factory=dict)
    """Index of a write -> its output, elements and bytes."""
    num_bytes: int = 0

    def keeps(self, index: int, output: str, span: Span, value: Any, written: list[Written]) -> bool:
        """Return whether to keep a write; may let go of earlier ones in `written`."""
        if secrets.randbelow(self.one_in):
            return False
        size = size_of(value)
        self.spans[index] = (output, span, size)
        self.num_bytes += size
        while self.num_bytes > self.budget_bytes and self.spans:
            self.one_in *= 2
            for other in [other for other in self.spans if secrets.randbelow(2)]:
                self.num_bytes -= self.spans.pop(other)[2]
                if other < len(written):
                    written[other] = written[other].without_value()
        return index in self.spans


@dataclass
class Wanted:
    """Keeps the writes that have some element of those that another system's run has kept."""

    spans: Mapping[str, Sequence[Span]]
    """By output, in order."""

    def keeps(self, index: int, output: str, span: Span, value: Any, written: list[Written]) -> bool:
        """Return whether a write has an element that is wanted."""
        return any(first < span[1] and span[0] < last for first, last in self.spans.get(output, ()))


@dataclass(frozen=True)
class Against:
    """What a timed run is held against.

    `noise` is the baseline's noise floor by output, from the equivalence check.
    """

    baseline: System
    tolerance: Tolerance
    noise: Mapping[str, float] | None = None
    equivalence: str | None = None
    """The check in which the system was found equal."""


def recheck(
    against: Against,
    items: Sequence[Mapping[str, Any]],
    recorder: Recorder,
    log_path: Path,
    *,
    devices: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    timeout_s: float = 120,
) -> dict[str, Any]:
    """Run the baseline over the items of a timed run, and compare what that run has kept.

    Parameters
    ----------
    items
        What the system was sent, in order.
    recorder
        Of the timed run; its sampler is a `Sampler`.

    Returns
    -------
    The record ``rechecked``: `equal`, `reasons`, which share was compared, and each output's figures.

    Raises
    ------
    InputError
        The baseline fails or hangs.
    """
    sampler = recorder.sampler
    assert isinstance(sampler, Sampler), "a run that is checked keeps a sample"
    spans: dict[str, list[Span]] = defaultdict(list)
    got: dict[str, list[Any]] = defaultdict(list)
    for index, (output, span, _) in sorted(sampler.spans.items()):
        spans[output].append(span)
        got[output].append(recorder.written[index].value)
    other = Recorder(sampler=Wanted(spans))
    remove_bytecode(against.baseline)
    with SystemProcess(against.baseline, list(items[0]), devices=devices, config=config, log_path=log_path) as process:
        process.wait_ready(timeout_s)
        run_all(process, items, timeout_s, other)
    results = [
        _compare(name, other, spans.get(name, ()), got.get(name, []), against, len(items), whole=sampler.one_in == 1)
        for name in dict.fromkeys((*other.elements, *recorder.elements))
    ]
    reasons = [reason for result in results for reason in result.reasons]
    for name in dict.fromkeys((*other.elements, *recorder.elements)):
        want, have = other.elements.get(name, 0), recorder.elements.get(name, 0)
        if want != have:
            reasons.append(
                f"output '{name}': the baseline makes {want} elements of these items, the system made {have}"
            )
    kept = sum(last - first for of_output in spans.values() for first, last in of_output)
    return {
        "equal": not reasons and kept > 0,
        "reasons": reasons if kept else ["nothing was put out, so nothing is proved"],
        "baseline": against.baseline.reference,
        "equivalence": against.equivalence,
        "tier": against.tolerance.tier,
        "num_batches": len(items),
        "num_elements": kept,
        "share": round(kept / max(sum(recorder.elements.values()), 1), 4),
        "outputs": {result.name: {key: value for key, value in asdict(result).items() if key != "reasons"}
                    for result in results},
    }  # fmt: skip


def _compare(
    name: str, other: Recorder, spans: Sequence[Span], got: Sequence[Any], against: Against, num_batches: int,
    *, whole: bool,
) -> OutputEquality:  # fmt: skip
    """Compare one output: its whole stream, or the elements that were kept."""
    floor = (against.noise or {}).get(name)
    if whole:
        expected = [write.value for write in other.written if write.output == name and write.value is not None]
        return compare_output(name, expected, got, against.tolerance, num_batches, floor=floor)
    position, pieces = 0, []
    for write in other.written:
        if write.output == name:
            if write.value is not None:
                pieces.append(((position, position + write.num_elements), write.value))
            position += write.num_elements
    expected = [_cut(pieces, span) for span in spans]
    return compare_output(name, expected, got, against.tolerance, max(len(spans), 1), floor=floor)


def _cut(pieces: Sequence[tuple[Span, Any]], span: Span) -> Any:
    """Return the elements of a stream in `span`, from the writes that have them."""
    parts = [
        cut_value(value, max(span[0] - first, 0), min(span[1], last) - first)
        for (first, last), value in pieces
        if first < span[1] and span[0] < last
    ]
    return parts[0] if len(parts) == 1 else flatten_stream(parts)


def cut_value(value: Any, first: int, last: int) -> Any:
    """Return elements `first` to `last` of a written value along its first axis; a number has one element."""
    if isinstance(value, Tensor):
        return Tensor(value.dtype, value.data[first:last]) if value.data.ndim else value
    if isinstance(value, np.ndarray):
        return value[first:last] if value.ndim else value
    if isinstance(value, str | bytes | list | tuple):
        return value[first:last]
    if isinstance(value, dict):
        return {key: cut_value(item, first, last) for key, item in value.items()}
    return value


def size_of(value: Any) -> int:
    """Return about how many bytes a written value takes."""
    if isinstance(value, Tensor):
        return int(value.data.nbytes)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value)
    return 8
