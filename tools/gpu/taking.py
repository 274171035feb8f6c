"""How a keeper comes to its devices: the queue, and the moment in which all locks are taken or none."""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashrt.gpu.checking import keep_apart, look_over, memory_in_use, needs_check
from flashrt.gpu.devices import Device
from flashrt.gpu.handshake import Acquirer, AcquirerGoneError
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import ProcessIdentity, boottime_ns, pid_namespace
from flashrt.gpu.quarantine import quarantined
from flashrt.gpu.records import Lease, Ticket
from flashrt.gpu.selection import Request, choose, could_ever_have, seconds_until_free

# A lock without a record is a keeper that is just dying: worth a second look before saying "busy".
SETTLE_S = 0.5
RETRY_AFTER_MOST_S = 30.0
_REFRESH_S = 1.0


@dataclass(frozen=True)
class Order:
    """What the acquirer asks this keeper to hold."""

    request: Request
    holder: str
    purpose: str
    ttl_s: float
    wait_s: float
    devices: tuple[Device, ...]
    acquirer: ProcessIdentity
    holder_process: ProcessIdentity | None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Order:
        """Rebuild the order that `leases.acquire` wrote."""
        holder = fields["holder_process"]
        return cls(
            Request.from_dict(fields["request"]),
            fields["holder"],
            fields["purpose"],
            fields["ttl_s"],
            fields["wait_s"],
            tuple(Device.from_dict(device) for device in fields["devices"]),
            ProcessIdentity(**fields["acquirer"]),
            None if holder is None else ProcessIdentity(**holder),
        )


@dataclass(frozen=True)
class Busy:
    """Why the order cannot be met now."""

    leases: tuple[Lease, ...]
    ahead: tuple[Ticket, ...]
    unexplained: tuple[str, ...]
    apart: tuple[str, ...]
    num_free: int
    estimate_s: float | None
    """When the order is met at the latest if nobody renews and those ahead take their whole time; None: not known."""

    @property
    def retry_after_s(self) -> float:
        """Leases are mostly given back early, so asking again is worth it long before they run out."""
        left_s = RETRY_AFTER_MOST_S if self.estimate_s is None else self.estimate_s
        return round(min(RETRY_AFTER_MOST_S, max(1.0, left_s)), 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer to the acquirer."""
        holders = [str(lease) for lease in self.leases] + [str(ticket) for ticket in self.ahead]
        holders += [
            f"{uuid} is locked, but not leased: it is looked over, or its keeper just ends" for uuid in self.unexplained
        ]
        return {
            "holders": holders, "apart": list(self.apart), "num_free": self.num_free, "num_ahead": len(self.ahead),
            "estimate_s": self.estimate_s, "retry_after_s": self.retry_after_s,
        }  # fmt: skip


@dataclass
class Holding:
    """A lease with the descriptors that are its locks."""

    lease: Lease
    record: int
    devices: tuple[int, ...]
    control: int


@dataclass(frozen=True)
class Unchecked:
    """Devices that are locked, and whose last keeper was killed before it saw them free."""

    devices: tuple[Device, ...]
    marks: dict[str, dict[str, Any]]
    locks: tuple[int, ...]

    def settle(self, directory: LeaseDirectory) -> None:
        """Look the devices over, quarantine those that are not free, and let go of all."""
        try:
            baselines = {uuid: mark.get("baseline_bytes") for uuid, mark in self.marks.items()}
            for checkup in look_over(self.devices, baselines):
                mark = self.marks[checkup.device.uuid]
                keep_apart([checkup], lease=str(mark.get("lease", "")), holder=str(mark.get("holder", "")))
                directory.clear_mark(checkup.device.uuid)
        finally:
            for lock in self.locks:
                os.close(lock)


def attempt(directory: LeaseDirectory, order: Order, number: int | None) -> Holding | Busy | Unchecked:
    """Take the devices now, all or nothing, or say why not.

    Parameters
    ----------
    number
        Our place in the queue; without one, everybody who waits was there before us.
    """
    with directory.exclusive():
        leases = directory.live_leases(inside=True)
        leased = {uuid for lease in leases for uuid in lease.uuids}
        apart = {device.uuid for device in order.devices} & set(quarantined())
        order = replace(order, devices=tuple(device for device in order.devices if device.uuid not in apart))
        ahead = _blocking(directory, order, number, leased)
        if ahead:
            return _busy(order, leases, ahead, set(), apart)
        unexplained: set[str] = set()
        while (chosen := choose(order.devices, leased | unexplained, order.request)) is not None:
            locks: list[int] = []
            for device in chosen:
                descriptor = directory.lock_device(device.uuid)
                if descriptor is None:
                    unexplained.add(device.uuid)
                    break
                locks.append(descriptor)
            else:
                found = {device.uuid: directory.used_mark(device.uuid) for device in needs_check(chosen)}
                marks = {uuid: mark for uuid, mark in found.items() if mark is not None}
                if marks:
                    left = tuple(device for device in chosen if device.uuid in marks)
                    return Unchecked(left, marks, tuple(locks))
                return _write_lease(directory, order, chosen, tuple(locks))
            for descriptor in locks:
                os.close(descriptor)
        return _busy(order, leases, (), unexplained, apart)


def _blocking(directory: LeaseDirectory, order: Order, number: int | None, leased: set[str]) -> tuple[Ticket, ...]:
    """Return those who came before us, want what we want, and wait for a lease to end."""
    wanted = {device.uuid for device in order.devices}
    return tuple(
        ticket
        for ticket in directory.live_tickets(inside=True)
        if (number is None or ticket.number < number)
        and ticket.request.kind == order.request.kind
        and not wanted.isdisjoint(ticket.candidates)
        and could_ever_have(
            [device for device in order.devices if device.uuid in ticket.candidates], leased, ticket.request
        )
    )


def _busy(
    order: Order, leases: Sequence[Lease], ahead: tuple[Ticket, ...], unexplained: set[str], apart: set[str]
) -> Busy:
    wanted = {device.uuid for device in order.devices}
    relevant = tuple(lease for lease in leases if not wanted.isdisjoint(lease.uuids))
    leased = {uuid for lease in relevant for uuid in lease.uuids}
    estimate_s = seconds_until_free(
        order.devices,
        [(lease.remaining_s, lease.uuids) for lease in relevant],
        order.request,
        [(ticket.request, ticket.ttl_s, ticket.candidates) for ticket in ahead],
    )
    num_free = len(wanted - leased - unexplained)
    if unexplained:
        # Nobody knows how long the lock will be held.
        estimate_s = None
    return Busy(relevant, ahead, tuple(sorted(unexplained)), tuple(sorted(apart)), num_free, estimate_s)


def _write_lease(
    directory: LeaseDirectory, order: Order, chosen: tuple[Device, ...], locks: tuple[int, ...]
) -> Holding:
    token = directory.next_number()
    keeper = ProcessIdentity.of(os.getpid())
    assert keeper is not None, "a running process sees itself in /proc"
    lease = Lease(
        lease=f"lease-{token}-{secrets.token_hex(3)}",
        token=token,
        holder=order.holder,
        purpose=order.purpose,
        since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        ttl_s=order.ttl_s,
        expires_ns=boottime_ns() + int(order.ttl_s * 1e9),
        devices=chosen,
        keeper=keeper,
        namespace=pid_namespace(),
        holder_process=order.holder_process,
    )
    for device in needs_check(chosen):
        directory.mark_used(device.uuid, {"lease": lease.lease, "holder": lease.holder})
    record = directory.publish(directory.record_path(lease.lease), lease.as_record())
    path = directory.control_path(lease.lease)
    os.mkfifo(path, 0o600)
    # Read and write, so that the pipe never reports an end when the last sender closes it.
    control = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return Holding(lease, record, locks, control)


def queue_and_take(directory: LeaseDirectory, order: Order, acquirer: Acquirer) -> Holding | Busy:
    """Try at once, then wait in the queue for at most `order.wait_s`."""
    start = time.monotonic()
    result = _take(directory, order, None)
    while isinstance(result, Busy) and result.unexplained and time.monotonic() < start + SETTLE_S:
        acquirer.wait(0.01)
        result = _take(directory, order, None)
    if isinstance(result, Holding) or order.wait_s <= 0:
        return result
    with directory.exclusive():
        number = directory.next_number()
        ticket = Ticket(
            number, order.holder, order.purpose, order.request, tuple(device.uuid for device in order.devices),
            order.ttl_s,
        )  # fmt: skip
        place = directory.publish(directory.ticket_path(number), ticket.as_record())
    try:
        refreshed = time.monotonic()
        while isinstance(result := _take(directory, order, number), Busy):
            left_s = start + order.wait_s - time.monotonic()
            if left_s <= 0:
                return result
            if acquirer.wait(min(left_s, 0.5, 0.02 * (1 + len(result.ahead)))):
                raise AcquirerGoneError
            if order.request.min_free_bytes and time.monotonic() > refreshed + _REFRESH_S:
                order = _look_again(order)
                refreshed = time.monotonic()
        return result
    finally:
        directory.ticket_path(number).unlink(missing_ok=True)
        os.close(place)


def _take(directory: LeaseDirectory, order: Order, number: int | None) -> Holding | Busy:
    """Do as `attempt`, with the devices looked over whose last keeper could not."""
    while isinstance(result := attempt(directory, order, number), Unchecked):
        result.settle(directory)
    return result


def note_baselines(directory: LeaseDirectory, lease: Lease) -> dict[str, int | None]:
    """Return the memory in use on the lease's GPUs, and note it, so that it is known should this keeper be killed."""
    baselines = memory_in_use(lease.devices)
    for uuid, used in baselines.items():
        with directory.exclusive():
            directory.mark_used(uuid, {"lease": lease.lease, "holder": lease.holder, "baseline_bytes": used})
    return baselines


def _look_again(order: Order) -> Order:
    """Read the devices' free memory anew; emulated devices have none that could change."""
    if order.request.kind == "emulated":
        return order
    return replace(order, devices=take_inventory(kinds=(order.request.kind,)).of_kind(order.request.kind))
