"""Devices that were not free when they should have been: kept apart, with the evidence, until somebody restores them.

A record stays through restarts of everything, the machine included; nothing here resets a device or ends a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrt.gpu.lease_directory import LEASE_DIRECTORY, default_path, file_name
from flashrt.gpu.processes import boot_id

SCHEMA = "flashrt/quarantine@1"
RESTORE = "flashrt gpu restore"


@dataclass(frozen=True)
class Quarantine:
    """One device that nobody gets, and why.

    Parameters
    ----------
    reason
        One sentence.
    evidence
        What was seen: memory in use against the baseline, processes, what the probe said or how it ended.
    since
        Wall clock, for people.
    boot
        The boot of the machine in which it happened, for people too: a record counts in all.
    """

    device: str
    kind: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    lease: str = ""
    holder: str = ""
    since: str = ""
    boot: str = ""

    def __str__(self) -> str:
        return f"{self.device} is quarantined: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping, with the command that brings the device back."""
        return {**dataclasses.asdict(self), "evidence": dict(self.evidence), "restore": f"{RESTORE} {self.device}"}


def quarantine_path() -> Path:
    """Return the folder of the records: that of the leases where it was chosen, else one that outlives boots."""
    if os.environ.get(LEASE_DIRECTORY):
        return default_path() / "quarantine"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if state.startswith("/") and state != "/.local/state":
        return Path(state) / "flashrt" / "quarantine"
    return default_path() / "quarantine"


def quarantined() -> dict[str, Quarantine]:
    """Return the quarantined devices by UUID; one whose record is damaged stays there too."""
    found = {}
    for path in sorted(quarantine_path().glob("*.json")):
        try:
            fields = json.loads(path.read_bytes())
            names = {entry.name for entry in dataclasses.fields(Quarantine)}
            record = Quarantine(**{name: value for name, value in fields.items() if name in names})
            found[str(record.device)] = record
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, AttributeError) as error:
            found[path.stem] = Quarantine(path.stem, "unknown", f"its record is not readable ({error})")
    return found


def put_away(record: Quarantine, *, anew: bool = False) -> Quarantine:
    """Quarantine a device from now on; an earlier record of it stays as it is, unless it is written anew."""
    folder = quarantine_path()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = dataclasses.replace(record, since=record.since or since, boot=boot_id())
    path = folder / f"{file_name(record.device)}.json"
    draft = folder / f".{os.getpid()}-{path.name}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"schema": SCHEMA, **record.as_dict()}, stream)
            stream.flush()
            os.fsync(descriptor)
        if anew:
            os.replace(draft, path)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return record


def lift(device: str) -> None:
    """Take a device's record away."""
    (quarantine_path() / f"{file_name(device)}.json").unlink(missing_ok=True)
