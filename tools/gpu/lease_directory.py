"""The folder that all agents of a machine share: locks, records, queue, and the counter of fencing tokens.

Layout: ``mutex`` (held for milliseconds while something changes), ``counter``, ``devices/UUID.lock`` (held by the
keeper of the lease), ``devices/UUID.used`` (a GPU that was leased and not yet seen to be free again),
``devices/UUID.window`` (held while a measurement runs there), ``leases/ID.json`` and ``queue/NUMBER.json`` (each locked
by the process it speaks for), ``control/ID`` (a pipe to the keeper), ``history.jsonl`` (how leases ended).

Whether a record is alive is never read from what it says: its author holds a lock on it, and the kernel lets go of
that lock when the author dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, ResourceMissingError, input_error
from flashrt.gpu.processes import boottime_ns, command_line, pid_namespace
from flashrt.gpu.records import Lease, Ticket

LEASE_DIRECTORY = "FLASHRT_LEASE_DIR"
KEEPER_MODULE = "flashrt.gpu.keeper"
# A keeper that has not ended this long after its lease ran out is stopped or stuck, and is killed by the next reader.
OVERDUE_S = 1.5
_HISTORY_BYTES = 256 * 1024


def default_path() -> Path:
    """Return the folder for this user on this machine.

    ``/run/user/UID`` counts even where ``XDG_RUNTIME_DIR`` is not exported (cron, a bare shell): two agents of one
    user that resolve to different folders would lease the same device twice.
    """
    if chosen := os.environ.get(LEASE_DIRECTORY):
        return Path(chosen).absolute()
    user = os.getuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"):
        if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == user and os.access(runtime, os.W_OK):
            return Path(runtime).absolute() / "flashrt" / "leases"
    return Path(f"/tmp/flashrt-{user}/leases")


@dataclass(frozen=True)
class _Probe:
    alive: bool
    fields: Any


class LeaseDirectory:
    """Opens, and creates where needed, the shared folder.

    Raises
    ------
    InputError
        The folder cannot be created, or belongs to somebody else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        where = f"lease directory {self.path}"
        fix = f"set {LEASE_DIRECTORY} to a folder on a local disk that you own"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in ("devices", "leases", "queue", "control", "new"):
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise input_error(where, "a folder that can be created and written", str(error), fix) from error
        if owner != os.getuid() and os.environ.get(LEASE_DIRECTORY) is None:
            raise input_error(where, f"a folder of user {os.getuid()}", f"one of user {owner}", fix)

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float = 10.0) -> Iterator[None]:
        """Hold the mutex; every change of the folder happens inside.

        Raises
        ------
        ResourceMissingError
            Somebody else has held it for `timeout_s`: a stopped process.
        """
        descriptor = os.open(self.path / "mutex", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ResourceMissingError(
                        Finding(
                            f"lease directory {self.path}",
                            "the mutex to be free within milliseconds",
                            f"held by another process for {timeout_s:.0f} s",
                            "look for a stopped FlashRT process (state T) and continue it, then call again",
                            rule="mutex-stuck",
                        ),
                        retry_after_s=timeout_s,
                    )
                time.sleep(0.002)
            yield
        finally:
            # Said aloud, not left to close(): a process forked meanwhile would keep the lock alive.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def next_number(self) -> int:
        """Return a number larger than all before, durable; call it inside `exclusive`."""
        path = self.path / "counter"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            last = self._largest_number_in_sight()
        draft = self.path / "new" / "counter"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, str(last + 1).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
        return last + 1

    def _largest_number_in_sight(self) -> int:
        """Recover from a damaged counter: no token ever given is larger than what history and records show."""
        tokens = [lease.token for lease in self._parse_leases(self._entries("leases"))[0]]
        tokens += [int(entry["token"]) for entry in self.history()]
        tokens += [int(path.stem) for path, _ in self._entries("queue") if path.stem.isdecimal()]
        return max(tokens, default=0) + 1000

    def publish(self, path: Path, document: Mapping[str, Any]) -> int:
        """Write a record that appears complete and already locked; return the descriptor that keeps it alive.

        Call it inside `exclusive`.
        """
        draft = self.path / "new" / f"{os.getpid()}-{path.name}"
        # Only the holder of the mutex has drafts, so whatever lies here was left by one that was killed.
        for left in (self.path / "new").iterdir():
            left.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            data = json.dumps(document).encode()
            while data:
                data = data[os.write(descriptor, data) :]
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(descriptor, ns=(boottime_ns(), boottime_ns()))
            os.replace(draft, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def lock_device(self, uuid: str) -> int | None:
        """Take the lock of one device at once, or return None; call it inside `exclusive`."""
        path = self.path / "devices" / f"{file_name(uuid)}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor, fcntl.LOCK_EX):
            with contextlib.suppress(FileNotFoundError):
                # A lock on a file that was removed and made anew meanwhile would protect nothing.
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        os.close(descriptor)
        return None

    def open_window(self, uuid: str) -> int | None:
        """Take the lock of those who measure on one device, or return None while another has it.

        It is no lease: within a lease, two measurements at once would disturb each other.
        """
        path = self.path / "devices" / f"{file_name(uuid)}.window"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor, fcntl.LOCK_EX):
            return descriptor
        os.close(descriptor)
        return None

    def mark_used(self, uuid: str, fields: Mapping[str, Any]) -> None:
        """Note that a device may have something left on it, until `clear_mark`: also should its keeper be killed."""
        draft = self.path / "new" / f"{os.getpid()}-used"
        draft.write_text(json.dumps(dict(fields)))
        os.replace(draft, self._mark_path(uuid))

    def used_mark(self, uuid: str) -> dict[str, Any] | None:
        """Return what `mark_used` noted, or None where the device was seen to be free."""
        try:
            fields = json.loads(self._mark_path(uuid).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def clear_mark(self, uuid: str) -> None:
        """Note that the device was seen to be free."""
        self._mark_path(uuid).unlink(missing_ok=True)

    def _mark_path(self, uuid: str) -> Path:
        return self.path / "devices" / f"{file_name(uuid)}.used"

    def record_path(self, lease: str) -> Path:
        """Where the record of a lease is."""
        return self.path / "leases" / f"{file_name(lease)}.json"

    def control_path(self, lease: str) -> Path:
        """Where the pipe to the keeper of a lease is."""
        return self.path / "control" / file_name(lease)

    def ticket_path(self, number: int) -> Path:
        """Where a ticket of the queue is."""
        return self.path / "queue" / f"{number:012d}.json"

    def live_leases(self, *, inside: bool = False) -> tuple[Lease, ...]:
        """Return the leases whose keeper lives, oldest first; remove what the dead left behind.

        Those that have `ended` are among them while their keeper looks the devices over.

        Parameters
        ----------
        inside
            The caller is inside `exclusive` already.
        """
        leases, dead = self._parse_leases(self._entries("leases"))
        overdue = [lease for lease in leases if lease.expires_ns + OVERDUE_S * 1e9 < boottime_ns()]
        for lease in overdue:
            kill_keeper(lease)
        if dead:
            with contextlib.nullcontext() if inside else self.exclusive():
                again = self._parse_leases(self._entries("leases"))
                for path in again[1]:
                    self._bury(path)
                leases = again[0]
        gone = {lease.lease for lease in overdue}
        return tuple(sorted((lease for lease in leases if lease.lease not in gone), key=lambda lease: lease.token))

    def live_tickets(self, *, inside: bool = False) -> tuple[Ticket, ...]:
        """Return the queue, first come first; remove the tickets of the dead."""
        probes = self._entries("queue")
        if any(not probe.alive for _, probe in probes):
            with contextlib.nullcontext() if inside else self.exclusive():
                probes = self._entries("queue")
                for path, probe in probes:
                    if not probe.alive:
                        path.unlink(missing_ok=True)
        tickets = []
        for _, probe in probes:
            if probe.alive:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    tickets.append(Ticket.from_record(probe.fields))
        return tuple(sorted(tickets, key=lambda ticket: ticket.number))

    def is_live(self, lease: str) -> bool:
        """Say whether the keeper of a lease holds its record."""
        probe = _probe(self.record_path(lease))
        return probe is not None and probe.alive

    def _entries(self, folder: str) -> list[tuple[Path, _Probe]]:
        found = []
        for path in sorted((self.path / folder).glob("*.json")):
            if (probe := _probe(path)) is not None:
                found.append((path, probe))
        return found

    def _parse_leases(self, entries: list[tuple[Path, _Probe]]) -> tuple[list[Lease], list[Path]]:
        """Return the live leases and the paths of dead ones.

        A live record that this version cannot read is left out: its devices' locks still protect them.
        """
        leases, dead = [], []
        for path, probe in entries:
            if not probe.alive:
                dead.append(path)
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                leases.append(Lease.from_record(probe.fields))
        return leases, dead

    def _bury(self, path: Path) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.remember(Lease.from_record(json.loads(path.read_bytes())), "its keeper died")
        (self.path / "control" / path.stem).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def remember(self, lease: Lease, reason: str) -> None:
        """Write down how a lease ended, so that a late caller hears why."""
        path = self.path / "history.jsonl"
        with contextlib.suppress(OSError):
            if path.stat().st_size > _HISTORY_BYTES:
                os.replace(path, path.with_suffix(".1"))
        entry = {
            "lease": lease.lease,
            "token": lease.token,
            "holder": lease.holder,
            "devices": list(lease.uuids),
            "reason": reason,
            "ended_ns": boottime_ns(),
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(descriptor)

    def history(self) -> list[dict[str, Any]]:
        """Return how the latest leases ended, oldest first."""
        try:
            lines = (self.path / "history.jsonl").read_text().splitlines()
        except OSError:
            return []
        entries = []
        for line in lines:
            # A line cut short by a full disk is left out: the others still tell how their leases ended.
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"lease", "token", "reason"} <= set(entry):
                    entries.append(entry)
        return entries


def kill_keeper(lease: Lease) -> None:
    """End a keeper that does not end by itself, after making sure that it is this very keeper of ours."""
    if lease.namespace == pid_namespace() and KEEPER_MODULE in command_line(lease.keeper.pid):
        lease.keeper.kill()


def send_to_keeper(directory: LeaseDirectory, lease: str, message: Mapping[str, Any]) -> bool:
    """Write one line to the keeper's pipe; False when nobody reads there."""
    try:
        descriptor = os.open(directory.control_path(lease), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
        os.write(descriptor, json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _try_lock(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _probe(path: Path) -> _Probe | None:
    """Read a record and find out whether its author lives; None when there is no such record."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read()
        # Shared, so that two readers do not take each other for the author.
        alive = not _try_lock(descriptor, fcntl.LOCK_SH)
        if not alive:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            return _Probe(alive, json.loads(data))
        except ValueError:
            return _Probe(alive, None)
    finally:
        os.close(descriptor)


def file_name(name: str) -> str:
    """Return a file name that tells names apart and holds no path separators."""
    return "".join(char if char.isalnum() or char in "-_" else f"%{ord(char):x}%" for char in name)
