"""Starting the workers of a deployment: what a supervisor asks for, and how it is done on one host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flashrt.gpu.exports import is_instance, mask_devices
from flashrt.ir.flattening import INPUT, OUTPUT, FlatProgram
from flashrt.runtime import messages
from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.channels.hub import Hub, Transport, open_endpoint
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.layout import Layout, WorkerPlan
from flashrt.runtime.lifeline import KEEP_MEMORY, exit_words
from flashrt.runtime.wire import Connection


@dataclass(frozen=True)
class Run:
    """What a supervisor is to run."""

    program: Path
    folder: Path
    flat: FlatProgram
    layout: Layout
    config: Mapping[str, Any]
    transport: Transport = "shared_memory"
    spin_us: float = 0.0
    operation_timeout_s: float = 300.0
    patience_s: float = 0.02
    """How long a batch may be missing before staggered operations go on without it, in seconds."""


class Handle(Protocol):
    """A worker's process, wherever it runs."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended, waiting for at most `timeout_s`."""

    def loaded(self) -> None:
        """Note that it has loaded its operations."""

    def ending(self) -> str:
        """Return how it ended, as words: ``its process ended with signal SIGKILL``."""

    def is_stopped(self) -> bool:
        """Return whether somebody has stopped it (SIGSTOP), as far as that can be seen from here."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class Started:
    """The workers of a run, started, and the supervisor's ends of their channels."""

    inputs: Endpoint
    outputs: Endpoint
    controls: dict[str, Connection]
    handles: dict[str, Handle]
    channels: tuple[ChannelPlan, ...]
    """As they were laid: those of the layout, or more where they cross hosts."""
    far: frozenset[str] = frozenset()
    """Workers that do not see the supervisor's board, and say what they are doing in messages."""
    close: list[Callable[[], None]] = field(default_factory=list)
    """What to call, last first, when all workers have ended."""


class Launcher(Protocol):
    """Starts the workers of a run."""

    def start(self, run: Run) -> Started:
        """Start all workers; on an error, none is left.

        Raises
        ------
        InputError
            They cannot be started.
        """


class LocalProcess:
    """A worker that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Handle.wait`; the process is reaped."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def loaded(self) -> None:
        """See `Handle.loaded`; a process that ends is noticed at once, so there is nothing to wait for less."""

    def ending(self) -> str:
        """See `Handle.ending`."""
        return f"its process ended with {exit_words(self._process.wait())}"

    def is_stopped(self) -> bool:
        """See `Handle.is_stopped`."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        return False

    def kill(self) -> None:
        """See `Handle.kill`."""
        self._process.kill()


class LocalLauncher:
    """Starts workers as child processes on this host."""

    def start(self, run: Run) -> Started:
        """See `Launcher.start`."""
        names = [worker.name for worker in run.layout.workers]
        hub = Hub([INPUT, OUTPUT, *names], run.layout.channels, run.transport, run.spin_us)
        controls: dict[str, Connection] = {}
        handles: dict[str, Handle] = {}
        close: list[Callable[[], None]] = [hub.close]
        try:
            # torch=False: values pass through here as they are, so that the supervisor needs no torch.
            ends = []
            for name in (INPUT, OUTPUT):
                ends.append(open_endpoint(hub.wiring(name), torch=False, inherited=False))
                close.append(ends[-1].close)
            stores: dict[str, int] = {}
            try:
                for worker in run.layout.workers:
                    if worker.degree > 1 and worker.group not in stores:
                        stores[worker.group] = os.memfd_create("flashrt-ranks", os.MFD_CLOEXEC)
                    _start_worker(run, worker, hub, stores.get(worker.group), controls, handles)
            finally:
                for descriptor in stores.values():
                    os.close(descriptor)
        except BaseException:
            end_all(controls, handles, close)
            raise
        return Started(ends[0], ends[1], controls, handles, run.layout.channels, close=close)


def _start_worker(
    run: Run,
    worker: WorkerPlan,
    hub: Hub,
    store: int | None,
    controls: dict[str, Connection],
    handles: dict[str, Handle],
) -> None:
    ours, theirs = socket.socketpair()
    control = controls[worker.name] = Connection(ours, torch=False)
    with theirs:
        shared = [theirs.fileno(), *hub.descriptors(worker.name), *([store] if store is not None else [])]
        # In our own process group: whoever ends the system's group ends the workers too.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flashrt.runtime.worker", "--fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=shared,
            env={**KEEP_MEMORY, **os.environ, **mask_devices(_visible(run, worker))[0]},
        )
    handles[worker.name] = LocalProcess(process)
    _pin(process.pid, worker)
    # A process that has died already shows as a closed connection, with its reason.
    with suppress(OSError):
        make_hello(run, worker, hub.wiring(worker.name), store).send(control)


def make_hello(run: Run, worker: WorkerPlan, wiring: Mapping[str, Any], store: int | str | None) -> messages.Hello:
    """Return the first message to a worker."""
    return messages.Hello(
        str(run.program), str(run.folder), worker.as_dict(), dict(run.config), dict(wiring), store, os.getpid()
    )


def _visible(run: Run, worker: WorkerPlan) -> list[str]:
    """Return the devices that a worker sees: its own first; on GPUs the others too, to reach their memory."""
    own = list(worker.devices)
    if not any(":" in name for name in own) or any(is_instance(name) for name in own):
        return own
    return list(dict.fromkeys([*own, *(name for other in run.layout.workers for name in other.devices)]))


def _pin(pid: int, worker: WorkerPlan) -> None:
    cores = [int(name.removeprefix("cpu-")) for name in worker.devices if name.startswith("cpu-")]
    if cores:
        # A core that this machine does not have: the worker runs where it may.
        with suppress(OSError):
            os.sched_setaffinity(pid, cores)


def end_all(controls: Mapping[str, Connection], handles: Mapping[str, Handle], close: list[Callable[[], None]]) -> None:
    """End every worker and wait for it, then free what they shared."""
    for handle in handles.values():
        handle.kill()
    for handle in handles.values():
        handle.wait()
    for control in controls.values():
        control.shutdown()
    while close:
        close.pop()()
