"""A worker as a Ray actor: what runs on a node of the cluster."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import FlashrtError
from flashrt.runtime import messages
from flashrt.runtime.channels.hub import Hub, Remote
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.hosts import HubServer, fetch_wiring
from flashrt.runtime.wire import Connection
from flashrt.runtime.worker import Worker, serve


class WorkerActor:
    """One worker; `run` returns when it has nothing left to do."""

    def where(self, program: str) -> tuple[str, str, bool]:
        """Return this node's id and address, and whether the program's document is here."""
        import ray
        import ray.util

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.path.exists(program)

    def run(self, orders: Mapping[str, Any]) -> int:
        """Become the worker that the supervisor orders; return the exit status."""
        stream = socket.create_connection(orders["supervisor"], timeout=60)
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        control = Connection(stream, torch=True)
        messages.Join(orders["name"], orders["token"]).send(control)
        pulse = _Pulse(control, orders["beat_s"])
        try:
            hello = self._join(orders, control)
        except BaseException as error:
            # The pulse goes on as long as the process, and would hide what happened.
            words = str(error) if isinstance(error, FlashrtError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                messages.Failed(words, "").send(control)
            raise
        remote = Remote(**orders["remote"])
        status = serve(hello, control, remote=remote, orphaned=_leave, started=pulse.follow)
        # What the others still read lies in this process's memory until the supervisor ends it.
        threading.Event().wait(0 if status == 0 else 1)
        return status

    def _join(self, orders: Mapping[str, Any], control: Connection) -> messages.Hello:
        """Make the node's shared memory, where this worker is to, and return what it has to know."""
        if orders["is_first"] and (note := note_of_priority(os.getpriority(os.PRIO_PROCESS, 0))) is not None:
            messages.Note(note).send(control)
        if orders["hub"] is not None:
            told = orders["hub"]
            channels = [ChannelPlan.from_dict(record) for record in told["channels"]]
            self._hub = Hub(told["endpoints"], channels, told["transport"], told["spin_us"], told["here"])
            self._server = HubServer(self._hub, orders["socket"], orders["token"])
        wiring = fetch_wiring(orders["socket"], orders["token"], orders["name"])
        return messages.Hello(**{**orders["hello"], "wiring": wiring})


def note_of_priority(niceness: int) -> str | None:
    """Return what to say of a node whose workers yield to every other process, as Ray's do by default (niceness 15)."""
    if niceness <= 0:
        return None
    return (
        f"the workers on node {socket.gethostname()} run with niceness {niceness}: any other process there goes first, "
        "and latencies suffer; start Ray's nodes with RAY_worker_niceness=0 in their environment"
    )


class _Pulse:
    """Says each period what this process is doing, so that silence means that it is lost."""

    def __init__(self, control: Connection, period_s: float) -> None:
        self._control = control
        self._period_s = period_s
        self._worker: Worker | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def follow(self, worker: Worker) -> None:
        """Say from now on what a worker is doing; before, that nothing runs."""
        self._worker = worker

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            operation, batch, since_ns = (-1, -1, 0) if self._worker is None else self._worker.status()
            with suppress(OSError):
                messages.Beat(operation, batch, monotonic_ns() - since_ns).send(self._control)
            pause.wait(self._period_s)


def _leave() -> None:
    """End this process alone: its process group is Ray's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
