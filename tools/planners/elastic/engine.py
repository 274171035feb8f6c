"""An engine: the process of one device, its weights resident, that runs steps as a member of whatever group it is told.

``python -P -m flashrt.planners.elastic.engine --fd N --parent PID``: commands and answers over one socket. It ends
when its parent does, or when the other end of the socket is closed.

Commands: ``run`` (one step; `begin`: from noise; `source`: the latent comes from there first), ``decode``, ``drop``
(forget a request), ``prepare`` (make groups ahead), ``measure`` (what a change of group costs). The lowest device of
a group answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, Protocol

from flashrt.clock import monotonic_ns
from flashrt.runtime.lifeline import die_with_parent, inherited_socket
from flashrt.runtime.timeline import Timeline
from flashrt.runtime.wire import Connection


class Work(Protocol):
    """What an engine does; one for emulated devices, one for real ranks."""

    def run(self, command: Mapping[str, Any]) -> int:
        """Do one step; return when it was done, in ns of the machine's clock."""
        ...

    def decode(self, command: Mapping[str, Any]) -> tuple[int, Any]:
        """Run the VAE; return when it was done, and the frames."""
        ...

    def drop(self, request: int) -> None:
        """Forget a request."""
        ...

    def prepare(self, groups: list[Mapping[str, Any]]) -> None:
        """Make groups ahead."""
        ...

    def measure(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a change to a group costs, in ms."""
        ...


class EmulatedWork:
    """An emulated device: it is busy for as long as the profile says, on a clock of its own."""

    def __init__(self) -> None:
        self._timeline = Timeline(_sleep_until_ns)

    def run(self, command: Mapping[str, Any]) -> int:
        """Hold the device for a step, and before it for the change of group where there is one."""
        return self._timeline.hold(command["ready_ns"], command["took_ns"])[1]

    def decode(self, command: Mapping[str, Any]) -> tuple[int, Any]:
        """Hold the device for the VAE."""
        return self.run(command), None

    def drop(self, request: int) -> None:
        """Keep nothing: there is nothing to forget."""

    def prepare(self, groups: list[Mapping[str, Any]]) -> None:
        """Make no groups: none are needed."""

    def measure(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: the profile says what a change costs."""
        return {}


def _sleep_until_ns(deadline_ns: int) -> None:
    # Not to the last microsecond: what is late is made up on the device's own clock, and cores are few.
    left = deadline_ns - monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


def make_work(settings: Mapping[str, Any]) -> Work:
    """Return the work that settings ask for."""
    if settings["engine"] == "emulated":
        return EmulatedWork()
    from flashrt.planners.elastic.tiny_engine import TinyWork

    return TinyWork(settings)


def serve(connection: Connection, work: Work, device: int) -> None:
    """Carry out commands until the other end is closed."""
    broken: set[tuple[int, int]] = set()
    while (command := connection.receive()) is not None:
        what = command["do"]
        if what == "prepare":
            work.prepare(command["groups"])
            connection.send({"did": "prepared"})
            continue
        if what == "measure":
            connection.send({"did": "measured", **work.measure(command)})
            continue
        request, version = command["request"], command["version"]
        if what == "drop":
            work.drop(request)
            if command["answers"]:
                connection.send({"did": "left", "request": request, "version": version})
            continue
        is_first = command["devices"][0] == device
        if (request, version) in broken:
            continue
        answer = {"request": request, "version": version}
        try:
            if what == "run":
                end_ns = work.run(command)
                if is_first:
                    connection.send({"did": "step", "step": command["step"], "end_ns": end_ns, **answer})
            else:
                end_ns, frames = work.decode(command)
                if is_first:
                    connection.send({"did": "decoded", "end_ns": end_ns, **answer}, frames)
        except RuntimeError as error:
            # A collective whose other ranks are gone. The driver hears of their end by itself, and says what to drop.
            broken.add((request, version))
            work.drop(request)
            connection.send({"did": "broken", "text": " ".join(str(error).split())[:300], **answer})


def main() -> None:
    """Serve as the first message says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    connection = Connection(inherited_socket(options.fd), torch=False)
    settings = connection.receive()
    if settings is None:
        return
    try:
        work = make_work(settings)
        connection.send({"did": "ready"})
        serve(connection, work, settings["device"])
    except OSError:
        return


if __name__ == "__main__":
    main()
