"""When an open-loop sender's items are due: random arrivals, bursts, recorded traces. Pure, but for reading a trace.

Source: Schroeder, Wierman, Harchol-Balter (NSDI 2006), "Open versus closed": arrivals that do not wait for completions.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from flashrt.bench.settings import PLANNED, RunSettings
from flashrt.bench.systems import find_file
from flashrt.errors import Finding, InputError, listed

WHERE = "argument 'trace'"
COLUMNS = ("timestamp", "time", "arrival", "arrival_time", "arrived_at", "arrival_timestamp", "seconds", "t")
MAX_FINDINGS = 8


def poisson_s(rate_hz: float, duration_s: float, seed: int) -> np.ndarray:
    """Return the moments of a Poisson process within a duration, in s from its begin."""
    generator = np.random.default_rng(seed)
    return _within(lambda count: generator.exponential(1 / rate_hz, count), rate_hz * duration_s, duration_s)


def bursts_s(rate_hz: float, burst_size: int, duration_s: float, seed: int) -> np.ndarray:
    """Return the moments of bursts of `burst_size` items at once, which begin as a Poisson process, in s.

    `rate_hz` is that of items, on average; the last burst is whole.
    """
    return poisson_s(rate_hz / burst_size, duration_s, seed).repeat(burst_size)


def _within(draw: Callable[[int], np.ndarray], expected: float, duration_s: float) -> np.ndarray:
    """Return the sums of drawn gaps that lie within the duration."""
    moments = np.empty(0)
    while not len(moments) or moments[-1] < duration_s:
        last = float(moments[-1]) if len(moments) else 0.0
        moments = np.concatenate([moments, last + np.cumsum(draw(int(expected) + 16))])
    return moments[moments < duration_s]


def read_trace(workspace: Path, reference: str) -> np.ndarray:
    """Return the moments of a recorded trace, in s from its first.

    A CSV file whose rows each have a moment: seconds, or an ISO 8601 date and time (UTC where it says no zone). A
    header is optional; with one the moments are in the first column whose name says time, else in the first.

    Raises
    ------
    InputError
        No such file, no rows, or rows without a moment or before the one above: all at once, by line.
    """
    path = find_file(workspace, reference, WHERE)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(line, row) for line, row in enumerate(csv.reader(file), 1) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            Finding(f"{WHERE}, '{reference}'", "a CSV file of moments", str(error), "name a CSV file in UTF-8",
                    rule="bad-trace")
        ) from None  # fmt: skip
    column = 0
    if rows and all(_moment(cell) is None for cell in rows[0][1]):
        names = [cell.strip().lower() for cell in rows[0][1]]
        column = next((names.index(name) for name in COLUMNS if name in names), 0)
        rows = rows[1:]
    return _checked(rows, column, reference)


def _checked(rows: Sequence[tuple[int, Sequence[str]]], column: int, reference: str) -> np.ndarray:
    moments: list[float] = []
    findings: list[Finding] = []
    for line, row in rows:
        cell = row[column].strip() if column < len(row) else ""
        moment = _moment(cell)
        where = f"{WHERE}, '{reference}', line {line}"
        if moment is None:
            findings.append(
                Finding(where, f"seconds or an ISO 8601 time in column {column + 1}", f"'{cell[:60]}'",
                        "correct the line, or call the column of moments 'timestamp' in a header", rule="bad-moment")
            )  # fmt: skip
        elif moments and moment < moments[-1]:
            findings.append(
                Finding(where, "a moment no earlier than the line above's", f"{moments[-1] - moment:g} s earlier",
                        "sort the trace by time and call again", rule="unsorted-trace")
            )  # fmt: skip
        else:
            moments.append(moment)
    if not moments and not findings:
        findings.append(
            Finding(f"{WHERE}, '{reference}'", "at least one row with a moment", "none", "name a trace that has rows",
                    rule="empty-trace")
        )  # fmt: skip
    if findings:
        more = len(findings) - MAX_FINDINGS
        shown = findings[:MAX_FINDINGS]
        if more > 0:
            shown.append(Finding(f"{WHERE}, '{reference}'", "moments in order", f"{more} more lines at fault",
                                 "correct them and call again", rule="bad-trace"))  # fmt: skip
        raise InputError(shown)
    return np.asarray(moments) - moments[0]


def _moment(cell: str) -> float | None:
    """Return a cell's moment in s, or None where it has none."""
    cell = cell.strip()
    try:
        value = float(cell)
    except ValueError:
        pass
    else:
        return value if math.isfinite(value) else None
    try:
        found = datetime.fromisoformat(cell)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def plan_s(settings: RunSettings, trace_s: np.ndarray | None, seed: int) -> np.ndarray:
    """Return when each item of a planned scenario is due, in s from the begin of the measured part."""
    assert settings.scenario in PLANNED, f"one of {listed(PLANNED)}"
    if settings.scenario == "trace":
        assert trace_s is not None, "read before"
        moments = trace_s / settings.speedup
        return np.asarray(moments[moments < settings.duration_s])
    assert settings.rate_hz is not None, "checked before"
    if settings.scenario == "poisson":
        return poisson_s(settings.rate_hz, settings.duration_s, seed)
    assert settings.burst_size is not None, "checked before"
    return bursts_s(settings.rate_hz, settings.burst_size, settings.duration_s, seed)
