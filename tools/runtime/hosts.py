"""Sharing one host's memory and bells among processes that are not each other's children.

The process that made them hands their descriptors out over a Unix socket (SCM_RIGHTS) to those that know the token.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.runtime.channels.hub import Hub

MAX_BYTES = 1 << 20
MAX_DESCRIPTORS = 250
"""What one message can carry (SCM_MAX_FD is 253)."""
FETCH_TIMEOUT_S = 60


class HubServer:
    """Hands out a hub's descriptors; a socket without a name in the file system.

    Parameters
    ----------
    name
        Name of the socket; only processes of this host's network namespace can reach it.
    token
        What a process has to say to be served.
    """

    def __init__(self, hub: Hub, name: str, token: str) -> None:
        self._hub = hub
        self._token = token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{name}")
        self._socket.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, suppress(OSError, ValueError, KeyError):
                asked = json.loads(peer.recv(MAX_BYTES))
                if asked["token"] == self._token:
                    self._answer(peer, str(asked["endpoint"]))

    def _answer(self, peer: socket.socket, endpoint: str) -> None:
        wiring = self._hub.wiring(endpoint)
        numbers = list(dict.fromkeys(self._hub.descriptors(endpoint)))
        text = json.dumps({"wiring": wiring, "numbers": numbers}).encode()
        peer.send(len(text).to_bytes(8, "little"))
        for start in range(0, len(text), MAX_BYTES // 16):
            peer.send(text[start : start + MAX_BYTES // 16])
        for start in range(0, len(numbers), MAX_DESCRIPTORS):
            socket.send_fds(peer, [b"d"], numbers[start : start + MAX_DESCRIPTORS])

    def close(self) -> None:
        """Serve nobody any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def fetch_wiring(name: str, token: str, endpoint: str) -> dict[str, Any]:
    """Return an endpoint's wiring with descriptors of this process, from the host's `HubServer`.

    Raises
    ------
    InputError
        It does not answer in time.
    """
    deadline_ns = monotonic_ns() + FETCH_TIMEOUT_S * 10**9
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            try:
                peer.settimeout(FETCH_TIMEOUT_S)
                peer.connect(f"\0{name}")
                peer.send(json.dumps({"token": token, "endpoint": endpoint}).encode())
                return _receive(peer)
            except (OSError, ValueError) as error:
                if monotonic_ns() > deadline_ns:
                    raise input_error(
                        f"worker '{endpoint}'", "the shared memory of its host's other workers",
                        f"{type(error).__name__}: {error}", "see why the host's first worker does not start",
                        rule="no-shared-memory",
                    ) from error  # fmt: skip
        # The process that makes it may not have come so far.
        threading.Event().wait(0.05)


def _receive(peer: socket.socket) -> dict[str, Any]:
    length = int.from_bytes(peer.recv(8), "little")
    text = b""
    while len(text) < length:
        part = peer.recv(MAX_BYTES)
        if not part:
            raise ValueError("the other side closed")
        text += part
    record = json.loads(text)
    numbers = record["numbers"]
    own: list[int] = []
    while len(own) < len(numbers):
        data, descriptors, _, _ = socket.recv_fds(peer, 1, MAX_DESCRIPTORS)
        if not data:
            raise ValueError("the other side closed")
        own += descriptors
    return _renumber(record["wiring"], dict(zip(numbers, own, strict=True)))


def _renumber(wiring: Mapping[str, Any], own: Mapping[int, int]) -> dict[str, Any]:
    for number in own.values():
        os.set_inheritable(number, False)
    return {
        **wiring,
        "board": own[wiring["board"]],
        "bells": {name: own[number] for name, number in wiring["bells"].items()},
        "arenas": {name: own[number] for name, number in wiring["arenas"].items()},
    }
