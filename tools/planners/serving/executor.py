"""An executor on emulated GPUs: a process that takes requests, batches them, and is busy as long as the profile says.

``python -m flashrt.planners.serving.executor --fd N``: settings as JSON on standard input, requests as records on the
socket. It ends when the other end of the socket is closed, however that comes about.
"""

from __future__ import annotations

import argparse
import heapq
import json
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REQUEST = struct.Struct("<qqd")
"""Visit, type, uniform number for its latency."""
DONE = struct.Struct("<q")


@dataclass
class Engine:
    """The batching of one executor, by the same rules as the simulator's; times in seconds of the clock.

    Attributes
    ----------
    latency_s
        Type -> batch size - 1 -> quantiles.
    keeps
        Type -> how long a request keeps its place, over its latency.
    """

    batch: int
    static: bool
    latency_s: Sequence[Sequence[Sequence[float]]]
    keeps: Sequence[float]
    cpu_s: Sequence[float]
    waiting: deque[tuple[int, int, float]] = field(default_factory=deque)
    flying: int = 0
    events: list[tuple[float, int, int]] = field(default_factory=list)
    """(when, 0 for a visit that is done and 1 for a place that is free, visit)."""

    def arrive(self, now_s: float, visit: int, kind: int, draw: float) -> None:
        """Take a request."""
        idle = not self.flying and not self.waiting
        self.waiting.append((visit, kind, draw))
        self._start(now_s, idle)

    def due(self, now_s: float) -> list[int]:
        """Return the visits that are done by now; places take who waits at the moment they became free."""
        done = []
        while self.events and self.events[0][0] <= now_s:
            when, is_free, visit = heapq.heappop(self.events)
            if not is_free:
                done.append(visit)
                continue
            self.flying = 0 if self.static else self.flying - 1
            self._start(when, False)
        return done

    def _start(self, when_s: float, idle: bool) -> None:
        while self.waiting and self.flying < (1 if self.static else self.batch):
            taken = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.batch) if self.static else 1)]
            size = len(taken) if self.static else self.flying + 1
            took = [self._latency_s(kind, size, draw) for _, kind, draw in taken]
            kept = sum(one * self.keeps[kind] for one, (_, kind, _) in zip(took, taken, strict=True)) / len(taken)
            ahead = max(self.cpu_s[kind] for _, kind, _ in taken) if idle else 0.0
            self.flying += 1
            for visit, _, _ in taken:
                heapq.heappush(self.events, (when_s + ahead + sum(took) / len(taken), 0, visit))
            heapq.heappush(self.events, (when_s + ahead + kept, 1, -1))

    def _latency_s(self, kind: int, size: int, draw: float) -> float:
        row = self.latency_s[kind][min(size, len(self.latency_s[kind])) - 1]
        return row[min(int(draw * len(row)), len(row) - 1)]


def make_engine(settings: Mapping[str, Any]) -> Engine:
    """Return the engine that settings describe."""
    return Engine(
        settings["batch"], settings["static"], settings["latency_s"], settings["keeps"], settings["cpu_s"]
    )  # fmt: skip


def serve(engine: Engine, end: socket.socket) -> None:
    """Serve requests until the other end is closed."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        wait_ms = None
        if engine.events:
            wait_ms = max(engine.events[0][0] - time.monotonic(), 0) * 1e3
        # Poll's clock has whole milliseconds: the last part is waited for apart.
        ready = poll.poll(None if wait_ms is None else int(wait_ms))
        now = time.monotonic()
        if not ready and engine.events and engine.events[0][0] > now:
            time.sleep(engine.events[0][0] - now)
            now = time.monotonic()
        for visit in engine.due(now):
            end.sendall(DONE.pack(visit))
        if ready:
            packet = end.recv(REQUEST.size, socket.MSG_WAITALL)
            if len(packet) < REQUEST.size:
                return
            engine.arrive(time.monotonic(), *REQUEST.unpack(packet))


def main() -> None:
    """Serve as the settings on standard input say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    end = socket.socket(fileno=parser.parse_args().fd)
    engine = make_engine(json.load(sys.stdin))
    end.sendall(DONE.pack(-1))
    try:
        serve(engine, end)
    except OSError:
        return


if __name__ == "__main__":
    main()
