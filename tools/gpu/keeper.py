"""The keeper: a process of ours that holds the locks of one lease, for as long as the lease lasts and no longer.

It reads an order on standard input, queues, takes the devices, writes the record and answers on standard output.
When the acquirer confirms the answer, the keeper cuts all ties to it: the acquirer may be restarted, the lease stays.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import select
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrt.errors import FlashrtError, ResourceMissingError
from flashrt.gpu.devices import Device
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import ProcessIdentity, boottime_ns, pid_namespace
from flashrt.gpu.records import Lease, Ticket
from flashrt.gpu.selection import Request, choose, could_ever_have, seconds_until_free

HEARTBEAT_S = 1.0
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
    num_free: int
    retry_after_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the answer to the acquirer."""
        holders = [str(lease) for lease in self.leases] + [str(ticket) for ticket in self.ahead]
        holders += [f"{uuid} is locked by a process that left no readable record" for uuid in self.unexplained]
        return {"holders": holders, "num_free": self.num_free, "retry_after_s": self.retry_after_s}


@dataclass
class Holding:
    """A lease with the descriptors that are its locks."""

    lease: Lease
    record: int
    devices: tuple[int, ...]
    control: int


class _AcquirerGoneError(Exception):
    """Nobody waits for the answer any more."""


class Acquirer:
    """The process at the other end of standard input and output, until it has confirmed the lease."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._pidfd: int | None = None

    def read_line(self) -> bytes:
        """Return the next line.

        Raises
        ------
        _AcquirerGoneError
            It ended before the line was complete.
        """
        line = b""
        while not line.endswith(b"\n"):
            chunk = os.read(0, 65536)
            if not chunk:
                raise _AcquirerGoneError
            line += chunk
        return line

    def watch(self, identity: ProcessIdentity) -> None:
        """Also notice its death where a process it forked holds the pipe open."""
        try:
            self._pidfd = identity.open_pidfd()
        except ProcessLookupError:
            raise _AcquirerGoneError from None
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has written something, after `timeout_s` at most.

        Raises
        ------
        _AcquirerGoneError
            It died.
        """
        ready = {descriptor for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000)}
        # What it wrote before it died counts: a confirmed lease outlives its acquirer.
        if 0 in ready:
            return True
        if self._pidfd in ready:
            raise _AcquirerGoneError
        return False

    def answer(self, document: dict[str, Any]) -> None:
        """Write one line."""
        data = json.dumps(document).encode() + b"\n"
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            raise _AcquirerGoneError from None

    def confirm(self) -> None:
        """Return when the acquirer says that it has the answer."""
        while not self.wait(HEARTBEAT_S):
            pass
        if self.read_line() != b"ok\n":
            raise _AcquirerGoneError

    def cut_ties(self) -> None:
        """Let go of its pipes and of the folder it was in."""
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        if self._pidfd is not None:
            os.close(self._pidfd)


def attempt(directory: LeaseDirectory, order: Order, number: int | None) -> Holding | Busy:
    """Take the devices now, all or nothing, or say why not.

    Parameters
    ----------
    number
        Our place in the queue; without one, everybody who waits was there before us.
    """
    with directory.exclusive():
        leases = directory.live_leases(inside=True)
        leased = {uuid for lease in leases for uuid in lease.uuids}
        ahead = _blocking(directory, order, number, leased)
        if ahead:
            return _busy(order, leases, ahead, set())
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
                return _write_lease(directory, order, chosen, tuple(locks))
            for descriptor in locks:
                os.close(descriptor)
        return _busy(order, leases, (), unexplained)


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


def _busy(order: Order, leases: Sequence[Lease], ahead: tuple[Ticket, ...], unexplained: set[str]) -> Busy:
    wanted = {device.uuid for device in order.devices}
    relevant = tuple(lease for lease in leases if not wanted.isdisjoint(lease.uuids))
    leased = {uuid for lease in relevant for uuid in lease.uuids}
    left_s = seconds_until_free(order.devices, [(lease.remaining_s, lease.uuids) for lease in relevant], order.request)
    # Leases are mostly given back early, so asking again is worth it long before they run out.
    retry_after_s = min(RETRY_AFTER_MOST_S, max(1.0, RETRY_AFTER_MOST_S if left_s is None else left_s))
    return Busy(
        relevant, ahead, tuple(sorted(unexplained)), len(wanted - leased - unexplained), round(retry_after_s, 1)
    )


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
    record = directory.publish(directory.record_path(lease.lease), lease.as_record())
    path = directory.control_path(lease.lease)
    os.mkfifo(path, 0o600)
    # Read and write, so that the pipe never reports an end when the last sender closes it.
    control = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return Holding(lease, record, locks, control)


def queue_and_take(directory: LeaseDirectory, order: Order, acquirer: Acquirer) -> Holding | Busy:
    """Try at once, then wait in the queue for at most `order.wait_s`."""
    start = time.monotonic()
    result = attempt(directory, order, None)
    while isinstance(result, Busy) and result.unexplained and time.monotonic() < start + SETTLE_S:
        acquirer.wait(0.01)
        result = attempt(directory, order, None)
    if isinstance(result, Holding) or order.wait_s <= 0:
        return result
    with directory.exclusive():
        number = directory.next_number()
        ticket = Ticket(
            number, order.holder, order.purpose, order.request, tuple(device.uuid for device in order.devices)
        )
        place = directory.publish(directory.ticket_path(number), ticket.as_record())
    try:
        refreshed = time.monotonic()
        while isinstance(result := attempt(directory, order, number), Busy):
            left_s = start + order.wait_s - time.monotonic()
            if left_s <= 0:
                return result
            if acquirer.wait(min(left_s, 0.5, 0.02 * (1 + len(result.ahead)))):
                raise _AcquirerGoneError
            if order.request.min_free_bytes and time.monotonic() > refreshed + _REFRESH_S:
                order = _look_again(order)
                refreshed = time.monotonic()
        return result
    finally:
        directory.ticket_path(number).unlink(missing_ok=True)
        os.close(place)


def _look_again(order: Order) -> Order:
    """Read the devices' free memory anew; emulated devices have none that could change."""
    if order.request.kind == "emulated":
        return order
    return replace(order, devices=take_inventory(kinds=(order.request.kind,)).of_kind(order.request.kind))


def guard(directory: LeaseDirectory, holding: Holding) -> str:
    """Keep the lease until it ends, and return why it ended."""
    poll = select.poll()
    poll.register(holding.control, select.POLLIN)
    holder = holding.lease.holder_process
    pidfd: int | None = None
    if holder is not None:
        try:
            pidfd = holder.open_pidfd()
        except ProcessLookupError:
            return "its holder's process died"
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
    # Without a pidfd the holder is looked up, often enough that its death is noticed within a second.
    beat_s = HEARTBEAT_S if holder is None or pidfd is not None else HEARTBEAT_S / 4
    while True:
        left_s = (holding.lease.expires_ns - boottime_ns()) / 1e9
        if left_s <= 0:
            return f"its time ran out ({holding.lease.ttl_s:g} s)"
        if not _beat(directory, holding):
            return "its record was removed"
        ready = {descriptor for descriptor, _ in poll.poll(min(beat_s, left_s) * 1000 + 1)}
        if pidfd in ready or (holder is not None and pidfd is None and not holder.runs()):
            return "its holder's process died"
        if holding.control in ready and _obey(directory, holding):
            return "released"


def _beat(directory: LeaseDirectory, holding: Holding) -> bool:
    """Mark record and locks as in use; False when the record is not ours any more."""
    now = boottime_ns()
    # In time since boot, like all times that decide something; it also keeps cleaners of old files away (by ctime).
    for descriptor in (holding.record, *holding.devices):
        os.utime(descriptor, ns=(now, now))
    try:
        seen = os.stat(directory.record_path(holding.lease.lease))
    except OSError:
        return False
    own = os.fstat(holding.record)
    return (seen.st_dev, seen.st_ino) == (own.st_dev, own.st_ino)


def _obey(directory: LeaseDirectory, holding: Holding) -> bool:
    """Carry out the requests in the control pipe; True when asked to release."""
    for line in os.read(holding.control, 65536).splitlines():
        try:
            message = json.loads(line)
            if message["token"] != holding.lease.token:
                continue
            if message["do"] == "release":
                return True
            if message["do"] == "renew":
                _renew(directory, holding, float(message["ttl_s"]), str(message["request"]))
        except (ValueError, KeyError, TypeError):
            # Not from `leases`, which writes whole lines: the sender sees that nothing happened.
            continue
    return False


def _renew(directory: LeaseDirectory, holding: Holding, ttl_s: float, request: str) -> None:
    lease = replace(holding.lease, ttl_s=ttl_s, expires_ns=boottime_ns() + int(ttl_s * 1e9), last_request=request)
    try:
        with directory.exclusive(timeout_s=1.0):
            record = directory.publish(directory.record_path(lease.lease), lease.as_record())
    except FlashrtError:
        # The sender hears that the renewal did not happen; the lease stays as it was.
        return
    os.close(holding.record)
    holding.lease, holding.record = lease, record


def let_go(directory: LeaseDirectory, holding: Holding, reason: str) -> None:
    """End the lease: devices first, record last, so that a record never says less than the locks."""
    for descriptor in holding.devices:
        os.close(descriptor)
    # The folder may have been removed under us: then there is nothing to tidy, and the lease has ended all the same.
    with contextlib.suppress(OSError):
        directory.remember(holding.lease, reason)
        directory.control_path(holding.lease.lease).unlink(missing_ok=True)
        if _beat(directory, replace(holding, devices=())):
            directory.record_path(holding.lease.lease).unlink(missing_ok=True)
    os.close(holding.record)


def main() -> None:
    """Serve one lease from order to end."""
    acquirer = Acquirer()
    try:
        fields = json.loads(acquirer.read_line())
        directory = LeaseDirectory(Path(fields["directory"]))
        order = Order.from_dict(fields)
        acquirer.watch(order.acquirer)
        result = queue_and_take(directory, order, acquirer)
        if isinstance(result, Busy):
            acquirer.answer({"busy": result.as_dict()})
            return
    except _AcquirerGoneError:
        return
    except ResourceMissingError as error:
        with contextlib.suppress(_AcquirerGoneError):
            acquirer.answer({"missing": str(error), "retry_after_s": error.retry_after_s})
        return
    except Exception:  # noqa: BLE001 - handed to the acquirer, which raises it with its text
        with contextlib.suppress(_AcquirerGoneError):
            acquirer.answer({"fault": traceback.format_exc()})
        return
    try:
        acquirer.answer({"granted": result.lease.as_record()})
        acquirer.confirm()
        acquirer.cut_ties()
        reason = guard(directory, result)
    except _AcquirerGoneError:
        reason = "the acquirer died before it had the answer"
    let_go(directory, result, reason)


if __name__ == "__main__":
    main()
