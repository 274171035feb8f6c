"""Which devices a request gets: pure functions over values, no locks and no files."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.errors import Finding
from flashrt.gpu.devices import Device, Kind, islands_of


@dataclass(frozen=True)
class Request:
    """What somebody asks for, all or nothing."""

    count: int
    kind: Kind
    min_free_bytes: int = 0
    same_island: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Request:
        """Rebuild a request from `as_dict`."""
        return cls(fields["count"], fields["kind"], fields["min_free_bytes"], fields["same_island"])

    def __str__(self) -> str:
        extra = f" with {self.min_free_bytes} free bytes each" if self.min_free_bytes else ""
        return f"{self.count} {self.kind} device(s){extra}{' on one island' if self.same_island else ''}"


def choose(devices: Sequence[Device], taken: Collection[str], request: Request) -> tuple[Device, ...] | None:
    """Return the devices to give, in the fixed device order, or None when it cannot be met now.

    Whole devices and MIG instances are never mixed, and whole ones come first. One island is preferred even when not
    asked for: the one with the most bandwidth, then the one that is filled most tightly, so that large islands stay
    whole.
    """
    pools = (_choose(pool, taken, request) for pool in _pools(devices, request.kind))
    return next((chosen for chosen in pools if chosen is not None), None)


def _pools(devices: Sequence[Device], kind: Kind) -> tuple[list[Device], list[Device]]:
    """Return the whole devices of a kind and the instances: one program does not run on both."""
    own = [device for device in devices if device.kind == kind]
    return [device for device in own if device.parent is None], [device for device in own if device.parent is not None]


def _choose(pool: Sequence[Device], taken: Collection[str], request: Request) -> tuple[Device, ...] | None:
    free = [
        device
        for device in pool
        if device.uuid not in taken and _has_memory(device.memory_free_bytes, request.min_free_bytes)
    ]
    by_uuid = {device.uuid: device for device in free}
    islands = [island for island in islands_of(free) if len(island.devices) >= request.count]
    if islands:
        best = min(islands, key=lambda island: (-(island.bandwidth_bytes_s or 0), len(island.devices), island.name))
        return tuple(by_uuid[uuid] for uuid in best.devices[: request.count])
    if request.same_island or len(free) < request.count:
        return None
    return tuple(free[: request.count])


def could_ever_have(devices: Sequence[Device], leased: Collection[str], request: Request) -> bool:
    """Say whether the request could be met if every leased device came back with all its memory free.

    A request in the queue for which this is false waits for something other than leases (a foreign process that
    holds memory), and must not hold up those behind it.
    """
    returned = [
        dataclasses.replace(device, memory_free_bytes=device.memory_total_bytes) if device.uuid in leased else device
        for device in devices
    ]
    return choose(returned, (), request) is not None


def impossible(devices: Sequence[Device], request: Request, where: str) -> list[Finding]:
    """Return why this machine can never meet the request, all reasons at once; empty when it can."""
    pools = _pools(devices, request.kind)
    found = [_impossible(pool, request, where) for pool in pools]
    return found[len(pools[1]) > len(pools[0])] if all(found) else []


def _impossible(own: Sequence[Device], request: Request, where: str) -> list[Finding]:
    if not own and request.kind in {"cuda", "rocm"}:
        return [
            Finding(
                f"{where}, kind", "a kind of device that this machine has", f"'{request.kind}', and there is none here",
                "leave kind out to lease CPU cores, on which everything works; gpu_status says what was looked for",
                rule="no-such-device",
            )
        ]  # fmt: skip
    if request.count > len(own):
        hint = "set FLASHRT_EMULATED_DEVICES=8 to have emulated devices" if request.kind == "emulated" else ""
        fix = hint if not own and hint else "ask for fewer, or another kind; call gpu_status to see what is here"
        return [
            Finding(
                f"{where}, count", f"at most {len(own)}, the {request.kind} devices of this machine",
                str(request.count), fix, rule="too-many-devices",
            )
        ]  # fmt: skip
    findings = []
    big = [device for device in own if _has_memory(device.memory_total_bytes, request.min_free_bytes)]
    if len(big) < request.count:
        unread = sum(device.memory_total_bytes is None for device in own)
        largest = max((device.memory_total_bytes or 0 for device in own), default=0)
        note = f" (the memory of {unread} is not readable)" if unread else ""
        findings.append(
            Finding(
                f"{where}, min_free_bytes", f"at most {largest} for {request.count} device(s){note}",
                str(request.min_free_bytes), "ask for less memory, or for fewer devices", rule="too-much-memory",
            )
        )  # fmt: skip
    sizes = [len(island.devices) for island in islands_of(own)]
    if request.same_island and max(sizes, default=0) < request.count:
        findings.append(
            Finding(
                f"{where}, same_island", f"a count of at most {max(sizes, default=0)}, the largest island",
                str(request.count), f"ask for fewer, or without same_island; island sizes are {sizes}",
                rule="island-too-small",
            )
        )  # fmt: skip
    return findings


def _has_memory(available_bytes: int | None, min_bytes: int) -> bool:
    return min_bytes <= 0 or (available_bytes is not None and available_bytes >= min_bytes)


def seconds_until_free(
    devices: Sequence[Device],
    expiries_s: Iterable[tuple[float, Collection[str]]],
    request: Request,
    ahead: Iterable[tuple[Request, float, Collection[str]]] = (),
) -> float | None:
    """Return when the request is met at the latest if nobody renews: leases end in order of expiry.

    Parameters
    ----------
    expiries_s
        For each live lease, the seconds it has left and the devices it holds.
    ahead
        Who is served before, in order: request, the seconds it may hold what it gets, and the devices it chooses from.
    """
    ends = [(left_s, tuple(uuids), True) for left_s, uuids in expiries_s]
    heapq.heapify(ends)
    taken = {uuid for _, uuids, _ in ends for uuid in uuids}
    now_s = 0.0
    own = {device.uuid for device in devices}
    for waiting, hold_s, candidates in (*ahead, (request, math.inf, own)):
        state = now_s, list(ends), list(devices), set(taken)
        while (
            chosen := choose([device for device in devices if device.uuid in candidates], taken, waiting)
        ) is None and ends:
            left_s, uuids, is_lease = heapq.heappop(ends)
            now_s = max(now_s, left_s)
            taken -= set(uuids)
            # What leases hold comes back with all its memory; what is free keeps what others have of it.
            devices = [
                dataclasses.replace(device, memory_free_bytes=device.memory_total_bytes)
                if is_lease and device.uuid in uuids else device
                for device in devices
            ]  # fmt: skip
        if hold_s == math.inf:
            return None if chosen is None else now_s
        if chosen is None:
            # It waits for something other than leases, and holds nobody up.
            now_s, ends, devices, taken = state
            continue
        uuids = tuple(device.uuid for device in chosen)
        taken |= set(uuids)
        heapq.heappush(ends, (now_s + hold_s, uuids, False))
    return None
