"""Traces and shares of device time, from events alone."""

from __future__ import annotations

from typing import Any

from flashrt.runtime.trace import trace_events, utilisation

MS = 1_000_000


def event(kind: str, name: str, device: str, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    times = {"start_ns": int(start_ms * MS), "end_ns": int(end_ms * MS)}
    return {"kind": kind, "name": name, "batch": 3, "device": device, **times, **more}


EVENTS = [
    event("span", "dit", "cpu-0", 10, 30),
    event("span", "vae", "emulated-1", 32, 52),
    event("wait", "dit.y -> vae.x", "emulated-1", 12, 32),
    event("transfer", "dit.y -> vae.x", "emulated-1", 30, 32, num_bytes=4_000_000),
]


def test_every_device_has_a_row_of_operations_and_one_of_waits_on_one_clock() -> None:
    events = trace_events(EVENTS, 10 * MS, 7)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        1: "cpu-0", 2: "cpu-0 waits", 3: "emulated-1 (emulated)", 4: "emulated-1 (emulated) waits",
    }  # fmt: skip
    slices = {(e["name"], e["ph"]): (e["tid"], e["ts"], e.get("dur")) for e in events if e["ph"] != "M"}
    assert slices == {
        ("dit", "X"): (1, 0.0, 20_000.0),
        ("vae", "X"): (3, 22_000.0, 20_000.0),
        ("dit.y -> vae.x", "X"): (4, 2_000.0, 20_000.0),
        ("dit.y -> vae.x", "b"): (3, 20_000.0, None),
        ("dit.y -> vae.x", "e"): (3, 22_000.0, None),
    }
    assert {e["pid"] for e in events} == {7}
    assert [e["args"] for e in events if e["ph"] == "b"] == [{"batch": 3, "bytes": 4_000_000}]


def test_shares_count_only_what_lies_within_the_time() -> None:
    shares = utilisation(EVENTS, 20 * MS, 40 * MS)
    assert shares["cpu-0"] == {"busy": 0.5, "waiting": 0.0, "transfers": 0, "received_mb_per_s": 0.0}
    assert shares["emulated-1"] == {"busy": 0.4, "waiting": 0.6, "transfers": 1, "received_mb_per_s": 200.0}
    assert utilisation(EVENTS, 60 * MS, 70 * MS) == {}
