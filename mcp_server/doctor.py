"""``flashrt doctor``: what works on this machine, and what to install."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

# package, module, what it is for, how to get it
PACKAGES: tuple[tuple[str, str, str, str], ...] = (
    ("mcp", "mcp", "the server", "pip install flashrt"),
    ("torch", "torch", "tensors in operations and systems", "pip install torch"),
    ("diffusers", "diffusers", "the shipped applications", "pip install 'flashrt[apps]'"),
    ("transformers", "transformers", "the shipped applications", "pip install 'flashrt[apps]'"),
    ("nvidia-ml-py", "pynvml", "inventory of NVIDIA GPUs", "pip install flashrt"),
    ("iceoryx2", "iceoryx2", "transport: iceoryx2", "pip install 'flashrt[iceoryx2]'"),
    ("ray", "ray", "cluster: ray", "pip install 'flashrt[ray]'"),
    ("amdsmi", "amdsmi", "inventory of AMD GPUs", "install ROCm's amdsmi, on AMD hosts only"),
)


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; return 0 when the shipped demonstration can run, else 1."""
    from flashrt import gpu

    able = all(importlib.util.find_spec(module) for _, module, _, _ in PACKAGES[:4])
    if options.json:
        rows = [dict(zip(("package", "version", "for", "install"), row, strict=True)) for row in _found()]
        print(json.dumps({"ok": able, "packages": rows, "host": dict(_facts()), **gpu.status()}, indent=2))
        return 0 if able else 1
    console = Console()
    console.print(_packages())
    inventory = gpu.inventory()
    devices = Table(title="devices", title_justify="left")
    for column in ("device", "kind", "name", "memory"):
        devices.add_column(column)
    for device in inventory.devices:
        memory = f"{device.memory_total_bytes / 2**30:.1f} GiB" if device.memory_total_bytes else ""
        devices.add_row(device.uuid, device.kind, device.name, memory)
    console.print(devices)
    for record in gpu.quarantined().values():
        console.print(f"- {record}; when it is free: flashrt gpu restore {record.device}")
    for note in inventory.notes:
        console.print(f"- {note}")
    console.print(_host())
    console.print("`flashrt demo worldplay` can run here." if able else "Install what is missing for `flashrt demo`.")
    return 0 if able else 1


def _found() -> list[tuple[str, str, str, str]]:
    """Return each package with its version (empty: absent), what it is for, and how to get it where it is absent."""
    rows = []
    for package, module, purpose, remedy in PACKAGES:
        try:
            found = version(package) if importlib.util.find_spec(module) else ""
        except PackageNotFoundError:
            found = "?"
        rows.append((package, found, purpose, "" if found else remedy))
    return rows


def _packages() -> Table:
    table = Table(title="packages", title_justify="left")
    for column in ("package", "version", "for", "to install"):
        table.add_column(column)
    for package, found, purpose, remedy in _found():
        table.add_row(package, found or "[yellow]absent[/]", purpose, remedy)
    return table


def _facts() -> list[tuple[str, str]]:
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    also = (
        "; iceoryx2 too" if importlib.util.find_spec("iceoryx2") else "; pip install 'flashrt[iceoryx2]' for iceoryx2"
    )
    return [
        ("cores that may be used", str(len(os.sched_getaffinity(0)))),
        ("shared memory", f"{shared.free / 2**30:.1f} GiB free" if shared else "no /dev/shm"),
        ("transport between stages", f"shared memory (memfd) and eventfd{also}"),
        ("git (isolated variants as worktrees)", shutil.which("git") or "absent: folders are copied"),
    ]


def _host() -> Table:
    table = Table(title="host", title_justify="left")
    table.add_column("what")
    table.add_column("here")
    for name, value in _facts():
        table.add_row(name, value)
    return table
