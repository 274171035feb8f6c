"""What a running system did, as a trace for Perfetto and as shares of each device's time.

All times are the host's monotonic clock, so operations, waits and transfers of all processes stand on one line. On an
emulated device (named ``emulated-…``), an operation's time is the profile's, not that of its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
ACTIVITIES = ("span", "wait", "transfer")
"""Kinds of events that last: an operation's work, a wait for a value, a value's way from sender to receiver."""


def is_emulated(device: str) -> bool:
    """Return whether a device only takes the time of another."""
    return device.startswith("emulated")


def trace_events(activities: Iterable[Event], origin_ns: int, process: int) -> list[dict[str, Any]]:
    """Return activities in the Trace Event format; times in µs from `origin_ns`.

    Each device has a row of operations and one of waits; transfers stand above the device that received them.

    Parameters
    ----------
    process
        Number under which the rows stand.
    """
    activities = list(activities)
    devices = sorted({str(event["device"]) for event in activities})
    events: list[dict[str, Any]] = []
    for index, device in enumerate(devices):
        for offset, words in enumerate(("", " waits")):
            row = 2 * index + offset + 1
            name = f"{device} (emulated){words}" if is_emulated(device) else f"{device}{words}"
            head = {"ph": "M", "pid": process, "tid": row}
            events.append({**head, "name": "thread_name", "args": {"name": name}})
            events.append({**head, "name": "thread_sort_index", "args": {"sort_index": row}})
    for number, event in enumerate(activities):
        row = 2 * devices.index(str(event["device"])) + 1
        start = (int(event["start_ns"]) - origin_ns) / 1e3
        length = max(int(event["end_ns"]) - int(event["start_ns"]), 0) / 1e3
        base = {"pid": process, "name": event["name"], "cat": event["kind"], "args": {"batch": event["batch"]}}
        if event["kind"] == "transfer":
            # Transfers overlap, so they are no slices of a row.
            base["args"] = {**base["args"], "bytes": event["num_bytes"]}
            events.append({**base, "ph": "b", "tid": row, "id": number, "ts": start})
            events.append({**base, "ph": "e", "tid": row, "id": number, "ts": start + length})
        else:
            events.append({**base, "ph": "X", "tid": row + (event["kind"] == "wait"), "ts": start, "dur": length})
    return events


def utilisation(activities: Sequence[Event], begin_ns: int, end_ns: int) -> dict[str, dict[str, float]]:
    """Return, for each device, how its time between two moments was used.

    Returns
    -------
    Device -> ``busy`` and ``waiting`` (shares of the time), ``transfers`` and ``received_mb_per_s`` (what it took from
    other devices).
    """
    length_ns = max(end_ns - begin_ns, 1)
    found: dict[str, dict[str, float]] = {}
    for event in activities:
        inside = min(int(event["end_ns"]), end_ns) - max(int(event["start_ns"]), begin_ns)
        if inside < 0:
            continue
        shares = found.setdefault(
            str(event["device"]), {"busy": 0.0, "waiting": 0.0, "transfers": 0, "received_mb_per_s": 0.0}
        )
        if event["kind"] == "transfer":
            shares["transfers"] += 1
            shares["received_mb_per_s"] += int(event["num_bytes"]) / 1e6 / (length_ns / 1e9)
        else:
            shares["busy" if event["kind"] == "span" else "waiting"] += inside / length_ns
    return {device: found[device] for device in sorted(found)}
