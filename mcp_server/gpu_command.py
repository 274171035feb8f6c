"""``flashrt gpu``: who holds which device, why and since when; and the way back from quarantine."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

EVERY_S = 1.0
COLUMNS = ("device", "state", "holder", "since", "load", "memory", "°C", "neighbours")
STYLES = {"free": "green", "leased": "yellow", "checking": "cyan", "quarantined": "red"}


def run_gpu(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status.

    Raises
    ------
    InputError
        The device to restore is not quarantined, or still not free.
    """
    from flashrt import gpu

    console = Console()
    if options.action == "restore":
        gpu.restore(options.device, accept_memory=options.accept_memory)
        console.print(f"{options.device} can be leased again: its memory is back and the probe passed", soft_wrap=True)
        return 0
    if options.json:
        print(json.dumps(gpu.status(), indent=2))
        return 0
    if options.once or not console.is_terminal:
        console.print(picture(gpu.status()))
        return 0
    # Not an exception: one that comes while a driver's library or a destructor runs would be lost.
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        with Live(picture(gpu.status()), console=console, auto_refresh=False, screen=False) as live:
            while not stopped.wait(EVERY_S):
                live.update(picture(gpu.status()), refresh=True)
    finally:
        signal.signal(signal.SIGINT, before)
    raise KeyboardInterrupt


def picture(status: Mapping[str, Any]) -> Group:
    """Return what `flashrt.gpu.status` says as a table, with the queue, the quarantined devices and the notes below."""
    leases = {lease["lease"]: lease for lease in status["leases"]}
    table = Table(title=f"devices, {time.strftime('%H:%M:%S')}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, no_wrap=column in {"device", "state", "load", "memory", "°C"})
    for device in status["devices"]:
        lease = leases.get(device["lease"], {})
        purpose = f" for {lease['purpose']}" if lease.get("purpose") else ""
        there = [found for found in status["foreign_processes"] if found["device"] == device["uuid"]]
        table.add_row(
            device["run_name"],
            f"[{STYLES[device['state']]}]{device['state']}[/]",
            escape(f"{lease.get('holder', '')}{purpose}"),
            f"{lease['since'][11:19]}, {lease['remaining_s']:.0f} s left" if lease else "",
            "" if device["utilization_percent"] is None else f"{device['utilization_percent']} %",
            _memory(device),
            "" if device["temperature_c"] is None else str(device["temperature_c"]),
            escape("\n".join(_process(found) for found in there)),
        )
    return Group(table, *(Text(line) for line in _lines(status)))


def _lines(status: Mapping[str, Any]) -> Sequence[str]:
    waiting = [
        f"{number}. in the queue: {ticket['holder']}, for {ticket['request']['count']} {ticket['request']['kind']}"
        for number, ticket in enumerate(status["waiting"], 1)
    ]
    apart = []
    for record in status["quarantined"]:
        apart.append(f"{record['device']} is quarantined since {record['since']}: {record['reason']}")
        there = [_process(found) for found in record["evidence"].get("processes", [])]
        seen = f"the driver names {', '.join(there)} there; " if there else ""
        apart.append(f"  last held by {record['holder'] or 'nobody'}; {seen}when it is free: {record['restore']}")
    return [*waiting, *apart, *(f"- {note}" for note in status["notes"])]


def _process(found: Mapping[str, Any]) -> str:
    return f"{found['pid']} {found['name'] or '(not visible from here)'}"


def _memory(device: Mapping[str, Any]) -> str:
    total, free = device["memory_total_bytes"], device["memory_free_bytes"]
    if total is None or free is None:
        return "not readable"
    return f"{(total - free) / 2**30:.1f}/{total / 2**30:.1f} GiB"
