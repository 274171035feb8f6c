"""The engine processes of a runtime: started, watched, started again after one is lost, all reaped at the end."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.runtime.lifeline import MARK, exit_words, kill_marked
from flashrt.runtime.wire import Connection

START_S = 120.0
REAP_S = 10.0
EngineKind = Literal["emulated", "tiny"]


@dataclass
class Engine:
    """One process.

    Attributes
    ----------
    starts
        How often the device's process was started; names its groups.
    """

    device: int
    process: subprocess.Popen[bytes]
    connection: Connection
    starts: int
    is_ready: bool = False


class Engines:
    """One engine a device; a context that ends them all, whatever happens."""

    def __init__(self, kind: EngineKind, num_devices: int, classes: Mapping[str, Mapping[str, Any]]) -> None:
        self.kind = kind
        self._num_devices = num_devices
        self._classes = classes
        self._mark = uuid.uuid4().hex
        self._selector = selectors.DefaultSelector()
        self._store = os.memfd_create("flashrt-elastic", os.MFD_CLOEXEC)
        self.of: dict[int, Engine] = {}

    def __enter__(self) -> Engines:
        try:
            for device in range(self._num_devices):
                self.start(device, 1)
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and wait for it."""
        kill_marked(self._mark)
        for engine in self.of.values():
            engine.connection.close()
            with suppress(subprocess.TimeoutExpired):
                engine.process.wait(REAP_S)
        self.of.clear()
        self._selector.close()
        with suppress(OSError):
            os.close(self._store)

    def start(self, device: int, starts: int) -> None:
        """Start a device's process; it says ``ready`` when its weights are resident."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flashrt.planners.elastic.engine", "--fd", str(theirs.fileno()),
                 "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._store),
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        connection = Connection(ours, torch=False)
        self.of[device] = Engine(device, process, connection, starts)
        self._selector.register(connection, selectors.EVENT_READ, device)
        settings = {"engine": self.kind, "device": device, "classes": self._classes, "store": self._store}
        # One that ended already shows when it is read from.
        with suppress(OSError):
            connection.send(settings)

    def group_name(self, devices: Sequence[int]) -> str:
        """Return the name of a group: its members, and how often each was started."""
        return "-".join(f"{device}.{self.of[device].starts}" for device in devices)

    def send(self, devices: Sequence[int], command: Mapping[str, Any]) -> None:
        """Send a command to the members of a group; one that is gone shows when it is read from."""
        for device in devices:
            with suppress(OSError):
                self.of[device].connection.send(command)

    def receive(self, until_ns: int | None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield (device, message) of all that have said something by a moment; look once at least.

        None instead of a message: the process has ended; it is reaped.
        """
        left_s = None if until_ns is None else max(until_ns - monotonic_ns(), 0) / 1e9
        for key, _ in self._selector.select(left_s):
            device = key.data
            engine = self.of[device]
            while True:
                try:
                    message = engine.connection.receive()
                except (OSError, ValueError):
                    message = None
                if message is None:
                    self._selector.unregister(engine.connection)
                    engine.connection.close()
                    engine.process.kill()
                    engine.process.wait(REAP_S)
                    yield device, None
                    break
                yield device, message
                if not engine.connection.num_buffered:
                    break

    def ended_words(self, device: int) -> str:
        """Return how a device's process ended."""
        code = self.of[device].process.returncode
        return "still runs" if code is None else exit_words(code)

    def _await_ready(self) -> None:
        deadline = monotonic_ns() + int(START_S * 1e9)
        while not all(engine.is_ready for engine in self.of.values()):
            if monotonic_ns() > deadline:
                raise _not_started("they did not in that time")
            for device, message in self.receive(deadline):
                if message is None:
                    raise _not_started(f"the one of device {device} ended ({self.ended_words(device)})")
                self.of[device].is_ready = True

    def ask(self, devices: Sequence[int], command: Mapping[str, Any], did: str) -> dict[int, dict[str, Any]]:
        """Send a command to engines that are idle, and return each one's answer.

        Raises
        ------
        InputError
            One ended, or they did not answer in time.
        """
        self.send(devices, command)
        found: dict[int, dict[str, Any]] = {}
        deadline = monotonic_ns() + int(START_S * 1e9)
        while len(found) < len(devices):
            if monotonic_ns() > deadline:
                raise _not_started("they did not answer in that time")
            for device, message in self.receive(deadline):
                if message is None:
                    raise _not_started(f"the one of device {device} ended ({self.ended_words(device)})")
                if message["did"] == did:
                    found[device] = message
        return found


def _not_started(got: str) -> Exception:
    return input_error("elastic engines", f"engines that are ready within {START_S:.0f} s", got, "start it again",
                       rule="engine-ended")  # fmt: skip
