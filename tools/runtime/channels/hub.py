"""The supervisor's part: makes what the endpoints of a deployment share, and tells each how to open its end."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from flashrt.ir.flattening import INPUT
from flashrt.runtime.channels.board import Board
from flashrt.runtime.channels.carrier import Carrier, SharedMemory
from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.janitor import Janitor
from flashrt.runtime.lifeline import inherited_descriptor, remove_orphans, shared_name

Transport = Literal["shared_memory", "iceoryx2"]


class Hub:
    """The shared memory and bells of one deployment; a context manager that leaves nothing behind.

    Parameters
    ----------
    endpoints
        Names of all endpoints.
    transport
        What carries values within a host.
    here
        The endpoints on this host; absent: all.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        channels: Sequence[ChannelPlan],
        transport: Transport,
        spin_us: float = 0.0,
        here: Collection[str] | None = None,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.channels = tuple(channels)
        self._here = [name for name in endpoints if here is None or name in here]
        self.token = f"{shared_name()}-{uuid.uuid4().hex[:8]}"
        self._transport = transport
        self._spin_us = spin_us
        self._open: list[int] = []
        self._janitor: Janitor | None = None
        if transport == "iceoryx2":
            remove_orphans()
            self._janitor = Janitor(self.token)
        try:
            self._board = self._keep(os.memfd_create("flashrt-board", os.MFD_CLOEXEC))
            Board(self._board, self.endpoints, self.channels).close()
            self._bells = {name: self._keep(os.eventfd(0, os.EFD_CLOEXEC)) for name in self._here}
            sources = dict.fromkeys(channel.source for channel in self.channels if channel.source in self._here)
            wanted = sources if transport == "shared_memory" else {}
            self._arenas = {name: self._keep(os.memfd_create("flashrt-arena", os.MFD_CLOEXEC)) for name in wanted}
        except BaseException:
            self.close()
            raise

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor

    def descriptors(self, endpoint: str) -> tuple[int, ...]:
        """Return the descriptors that an endpoint's process has to inherit, under the same numbers."""
        peers = self._peers(endpoint)
        arenas = [self._arenas[name] for name in self._heard(endpoint)]
        return (self._board, *(self._bells[name] for name in peers), *arenas)

    def _peers(self, endpoint: str) -> list[str]:
        if endpoint == INPUT:
            # Where batches come from, so where everybody is woken.
            return list(self._here)
        peers = {endpoint: None}
        for channel in self.channels:
            if channel.source == endpoint:
                peers.update(dict.fromkeys(channel.targets))
            elif endpoint in channel.targets:
                peers[channel.source] = None
        return [name for name in peers if name in self._here]

    def _heard(self, endpoint: str) -> list[str]:
        """Return whose arenas an endpoint uses: its own, and those of the endpoints that it hears."""
        heard = {channel.source for channel in self.channels if endpoint in channel.targets} | {endpoint}
        return [name for name in self._arenas if name in heard]

    def wiring(self, endpoint: str) -> dict[str, Any]:
        """Return, JSON-ready, what `open_endpoint` needs in the endpoint's process."""
        peers = self._peers(endpoint)
        return {
            "name": endpoint,
            "endpoints": list(self.endpoints),
            "channels": [channel.as_dict() for channel in self.channels],
            "transport": self._transport,
            "token": self.token,
            "board": self._board,
            "bells": {name: self._bells[name] for name in peers},
            "arenas": {name: self._arenas[name] for name in self._heard(endpoint)},
            "spin_us": self._spin_us,
        }

    def close(self) -> None:
        """Close the descriptors, and remove what a carrier has left under a name."""
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()
        if self._janitor is not None:
            self._janitor.close()
            self._janitor = None


class Remote(NamedTuple):
    """How an endpoint reaches those on other hosts; see `flashrt.runtime.channels.distributed.Distributed`."""

    channels: tuple[int, ...]
    """Numbers of the channels between hosts."""
    store: str
    ranks: dict[str, int]
    address: str


def open_endpoint(wiring: Mapping[str, Any], *, torch: bool, inherited: bool, remote: Remote | None = None) -> Endpoint:
    """Open one end of a deployment's channels.

    Parameters
    ----------
    inherited
        Whether the descriptors belong to this process; they then move to high numbers and are closed on exec.
    remote
        Where some channels go to other hosts.

    Raises
    ------
    InputError
        The transport is not installed, or the hosts do not reach each other.
    """
    channels = [ChannelPlan.from_dict(record) for record in wiring["channels"]]
    name = wiring["name"]
    move = inherited_descriptor if inherited else os.dup
    board_descriptor = move(wiring["board"])
    board = Board(board_descriptor, wiring["endpoints"], channels)
    os.close(board_descriptor)
    bells = {peer: move(number) for peer, number in wiring["bells"].items()}
    owned = list(bells.values())
    far = frozenset(remote.channels if remote is not None else ())
    near = [channel for channel in channels if channel.number not in far]
    carrier: Carrier
    if wiring["transport"] == "iceoryx2":
        from flashrt.runtime.channels.iceoryx import Iceoryx

        carrier = Iceoryx(board, name, near, wiring["token"])
    else:
        arenas = {peer: move(number) for peer, number in wiring["arenas"].items()}
        owned += arenas.values()
        carrier = SharedMemory(board, name, channels, arenas)
    mine = [channel for channel in channels if name == channel.source or name in channel.targets]
    carriers: dict[int, Carrier] = {channel.number: carrier for channel in mine if channel.number not in far}
    if remote is not None and name in remote.ranks:
        from flashrt.runtime.channels.distributed import Distributed

        across = [channel for channel in mine if channel.number in far]
        distributed: Carrier = Distributed(
            name, across, remote.store, remote.ranks, remote.address, lambda: os.eventfd_write(bells[name], 1)
        )  # fmt: skip
        carriers |= {channel.number: distributed for channel in across}
    return Endpoint(
        name, channels, carriers, board, bells, torch=torch, spin_us=wiring["spin_us"], owned=owned
    )  # fmt: skip


def split_by_host(channels: Sequence[ChannelPlan], host: Mapping[str, str]) -> tuple[ChannelPlan, ...]:
    """Return the channels with those that reach this host and others cut in two: within a host, and between hosts."""
    found: list[ChannelPlan] = []
    for channel in channels:
        near = tuple(target for target in channel.targets if host[target] == host[channel.source])
        far = tuple(target for target in channel.targets if target not in near)
        found += [replace(channel, number=0, targets=targets) for targets in (near, far) if targets]
    return tuple(replace(channel, number=number) for number, channel in enumerate(found))
