"""Taking, renewing and giving back devices: what an agent calls. The locks are in the keeper's hands, not in ours."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from flashrt.errors import Finding, InputError, InternalFaultError, ResourceMissingError, input_error, listed
from flashrt.gpu.checking import limit_s, needs_check
from flashrt.gpu.devices import KINDS, Device, Inventory, Kind
from flashrt.gpu.handshake import await_reaped, start_keeper
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.lease_directory import LeaseDirectory, kill_keeper, send_to_keeper
from flashrt.gpu.processes import ProcessIdentity, boottime_ns, pid_namespace
from flashrt.gpu.quarantine import RESTORE, quarantined
from flashrt.gpu.records import Lease
from flashrt.gpu.selection import Request, impossible

# Python's start on a loaded machine, and a driver that is slow to answer.
KEEPER_START_S = 30.0
RELEASE_S = 2.0
ANSWER_S = 10.0
"""How long a keeper may take to do what takes it a moment, on a machine with many processes for each core."""
_POLL_S = 0.005


def acquire(
    count: int,
    holder: str,
    *,
    kind: Kind | None = None,
    ttl_s: float = 600,
    min_free_bytes: int = 0,
    same_island: bool = False,
    purpose: str = "",
    holder_pid: int | None = None,
    wait_s: float = 0,
    inventory: Inventory | None = None,
) -> Lease:
    """Lease `count` devices, all or nothing, until released, until `ttl_s` is over, or until the holder dies.

    Parameters
    ----------
    holder
        Who asks, as others shall read it: ``agent-7``, ``alice``.
    kind
        ``cuda``, ``rocm``, ``cpu`` or ``emulated``; by default the best there is, never emulated.
    ttl_s
        Seconds after which the lease is lost unless renewed; sleep of the machine counts, clock changes do not.
    min_free_bytes
        Memory that must be free on every device; a device whose memory cannot be read has none.
    same_island
        Only devices that fast links join.
    holder_pid
        A process whose death ends the lease at once; without it the lease outlives its acquirer.
    wait_s
        Seconds to wait in the queue, first come first served; 0 refuses at once.
    inventory
        The devices to choose from; by default the machine is looked at.

    Raises
    ------
    InputError
        An argument is wrong, or this machine can never meet the request. Every finding is named.
    ResourceMissingError
        Others hold the devices: says who, and when to retry.
    """
    where = f"gpu_acquire(count={count!r}, holder={holder!r})"
    findings = _argument_findings(where, count, holder, kind, ttl_s, min_free_bytes, purpose, holder_pid, wait_s)
    holder_process = None
    if holder_pid is not None and not findings:
        holder_process = ProcessIdentity.of(holder_pid)
        if holder_process is None:
            findings.append(
                Finding(f"{where}, holder_pid", "a running process", f"{holder_pid}, which does not run",
                        "pass the number of the process that will use the devices", rule="holder-not-running")
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    if inventory is None:
        inventory = take_inventory(kinds=KINDS if kind is None else (kind,))
    request = Request(count, kind or inventory.best_kind, min_free_bytes, same_island)
    devices = inventory.of_kind(request.kind)
    if findings := impossible(devices, request, where):
        raise InputError(findings)
    apart = {uuid: record for uuid, record in quarantined().items() if uuid in {device.uuid for device in devices}}
    if apart and impossible([device for device in devices if device.uuid not in apart], request, where):
        raise _apart_error(where, request, list(apart), [str(record) for record in apart.values()])
    directory = LeaseDirectory()
    order = {
        "directory": str(directory.path),
        "request": request.as_dict(),
        "holder": holder,
        "purpose": purpose,
        "ttl_s": ttl_s,
        "wait_s": wait_s,
        "devices": [device.as_dict() for device in devices],
        "acquirer": _identity_of_this_process(),
        "holder_process": None if holder_process is None else dataclasses.asdict(holder_process),
    }
    # GPUs may have to be looked over first, where a keeper was killed, and their memory is read in the end.
    answer = start_keeper(order, wait_s + KEEPER_START_S + (3 * limit_s() if needs_check(devices) else 0))
    if "granted" in answer:
        return Lease.from_record(answer["granted"])
    if "busy" in answer:
        raise _busy_error(where, request, answer["busy"])
    if "missing" in answer:
        raise ResourceMissingError(answer["missing"], retry_after_s=answer["retry_after_s"])
    raise InternalFaultError(f"{where}: the lease's keeper failed:\n{answer['fault']}")


def release(lease: Lease | str, *, token: int | None = None) -> Lease:
    """Give the devices back; when this returns, the keeper is gone and the locks are free.

    GPUs are looked over first; `flashrt.gpu.quarantined` then has those that were not free again.

    Raises
    ------
    InputError
        The lease is unknown or has ended, or the token is not its own; the live leases are named.
    """
    directory = LeaseDirectory()
    held = _find(directory, "gpu_release", lease, token)
    message = {"do": "release", "token": held.token}
    start = time.monotonic()
    asked = send_to_keeper(directory, held.lease, message)
    killed = False
    most_s = RELEASE_S
    while directory.is_live(held.lease) or _keeper_runs(held):
        waited_s = time.monotonic() - start
        if not asked:
            asked = send_to_keeper(directory, held.lease, message)
        if most_s == RELEASE_S and needs_check(held.devices) and _is_looked_over(directory, held.lease):
            most_s = waited_s + limit_s() + 2 * RELEASE_S
        if not killed and waited_s > most_s - RELEASE_S / 2:
            kill_keeper(held)
            killed, most_s = True, waited_s + ANSWER_S
        if waited_s > most_s:
            raise InternalFaultError(
                f"gpu_release('{held.lease}'): the keeper (process {held.keeper.pid}) neither ends nor can be "
                f"killed from here; end it where it runs, the devices are free at that moment"
            )
        time.sleep(_POLL_S)
    await_reaped(held.keeper.pid, ANSWER_S)
    return held


def renew(lease: Lease | str, ttl_s: float, *, token: int | None = None) -> Lease:
    """Let the lease last `ttl_s` from now on, longer or shorter than before; return it as it is now.

    Raises
    ------
    InputError
        The lease is unknown or has ended, the token is not its own, or `ttl_s` is not a positive number.
    """
    if not _is_number(ttl_s) or ttl_s <= 0:
        raise input_error("renew, ttl_s", "a number of seconds above 0", repr(ttl_s), "pass ttl_s=600")
    directory = LeaseDirectory()
    held = _find(directory, "renew", lease, token)
    request = secrets.token_hex(8)
    message = {"do": "renew", "token": held.token, "ttl_s": ttl_s, "request": request}
    asked = send_to_keeper(directory, held.lease, message)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        now = _find(directory, "renew", held.lease, held.token)
        if now.last_request == request:
            return now
        asked = asked or send_to_keeper(directory, held.lease, message)
        time.sleep(_POLL_S)
    raise InternalFaultError(f"renew('{held.lease}'): the keeper (process {held.keeper.pid}) does not answer")


def check(lease: Lease | str, *, token: int | None = None) -> Lease:
    """Return the lease as it is now, or raise if it is not held any more: call it before trusting a device.

    Raises
    ------
    InputError
        The lease is unknown or has ended, or the token is not its own.
    """
    return _find(LeaseDirectory(), "lease check", lease, token)


def holders() -> tuple[Lease, ...]:
    """Return the live leases, oldest first."""
    return tuple(lease for lease in LeaseDirectory().live_leases() if not lease.ended)


def _is_looked_over(directory: LeaseDirectory, lease: str) -> bool:
    return any(one.lease == lease and one.ended for one in directory.live_leases())


def lease_devices(lease: str) -> tuple[Device, ...]:
    """Return the devices of a live lease.

    Raises
    ------
    InputError
        The lease is unknown or has ended.
    """
    return check(lease).devices


def _find(directory: LeaseDirectory, call: str, lease: Lease | str, token: int | None) -> Lease:
    name = lease.lease if isinstance(lease, Lease) else str(lease)
    if isinstance(lease, Lease) and token is None:
        token = lease.token
    live = [one for one in directory.live_leases() if not one.ended]
    # What has run out is lost at that very moment, also while its keeper is still on its way out.
    held = next((one for one in live if one.lease == name and one.expires_ns > boottime_ns()), None)
    names = [one.lease for one in live]
    if held is None:
        ended = next((entry for entry in reversed(directory.history()) if entry["lease"] == name), None)
        raise input_error(
            f"{call}, lease '{name}'",
            f"a live lease (live: {listed(names)})",
            "one that is not known here" if ended is None else f"one that has ended: {ended['reason']}",
            "call gpu_status to see the live leases, or gpu_acquire for a new one",
            rule="unknown-lease" if ended is None else "ended-lease",
            valid=names,
            name=name,
        )
    if token is not None and token != held.token:
        raise input_error(
            f"{call}, lease '{name}', token",
            f"{held.token}, the token of this lease",
            f"{token}, which is {'out of date' if token < held.token else 'not given out'}",
            "use the token that gpu_acquire returned with this lease",
            rule="stale-token",
        )
    return held


def _keeper_runs(lease: Lease) -> bool:
    return lease.namespace == pid_namespace() and lease.keeper.runs()


def _identity_of_this_process() -> dict[str, Any]:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None, "a running process sees itself in /proc"
    return dataclasses.asdict(identity)


def _busy_error(where: str, request: Request, busy: dict[str, Any]) -> ResourceMissingError:
    held: Sequence[str] = busy["holders"]
    retry_after_s: float = busy["retry_after_s"]
    if held:
        who = "; ".join(held)
    else:
        who = "no lease stands in the way: memory in use by others does, see foreign_processes in gpu_status"
    if busy["apart"]:
        who += f"; quarantined: {listed(busy['apart'])} (see gpu_status)"
    estimate_s: float | None = busy["estimate_s"]
    if estimate_s is None:
        estimate = "when is not known, because not only leases stand in the way"
    else:
        num_ahead = busy["num_ahead"]
        before = f", with {num_ahead} in the queue before you" if num_ahead else ""
        estimate = f"free in {estimate_s:.0f} s at the latest if nobody renews{before}"
    finding = Finding(
        where,
        f"{request} free at once",
        f"{busy['num_free']} not leased; {who}; {estimate}",
        f"call gpu_acquire again in {retry_after_s:g} s, or with wait_s to queue; or ask for fewer, or ask a holder to "
        "call gpu_release",
        rule="devices-busy",
    )
    return ResourceMissingError(finding, holders=held, retry_after_s=retry_after_s)


def _apart_error(where: str, request: Request, apart: list[str], reasons: list[str]) -> ResourceMissingError:
    finding = Finding(
        where, f"{request} that are not quarantined", "; ".join(reasons),
        f"ask for fewer, or see to the devices and run: {RESTORE} {apart[0]}", rule="devices-quarantined",
    )  # fmt: skip
    return ResourceMissingError(finding, holders=reasons)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _argument_findings(
    where: str,
    count: object,
    holder: object,
    kind: object,
    ttl_s: object,
    min_free_bytes: object,
    purpose: object,
    holder_pid: object,
    wait_s: object,
) -> list[Finding]:
    def is_whole(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    rules: list[tuple[str, object, bool, str, str]] = [
        ("count", count, is_whole(count, 1), "a whole number of at least 1", "pass count=1 or more"),
        ("holder", holder, isinstance(holder, str) and bool(holder.strip()), "a name that others can read",
         "pass holder='your name'"),
        ("kind", kind, kind is None or kind in KINDS, f"one of {listed(KINDS)}", "leave it out for the best kind"),
        ("ttl_s", ttl_s, _is_number(ttl_s) and ttl_s > 0, "seconds above 0", "pass ttl_s=600"),  # type: ignore[operator]
        ("min_free_bytes", min_free_bytes, is_whole(min_free_bytes, 0), "whole bytes of at least 0",
         "leave it out, or pass a number"),
        ("purpose", purpose, isinstance(purpose, str), "text", "pass purpose='what for'"),
        ("holder_pid", holder_pid, holder_pid is None or is_whole(holder_pid, 1), "a process number",
         "leave it out, or pass the number of the process that uses the devices"),
        ("wait_s", wait_s, _is_number(wait_s) and wait_s >= 0, "seconds of at least 0", "leave it out"),  # type: ignore[operator]
    ]  # fmt: skip
    return [
        Finding(f"{where}, {name}", expected, repr(value), f"{fix}, and call gpu_acquire again", rule="bad-argument")
        for name, value, good, expected, fix in rules
        if not good
    ]
