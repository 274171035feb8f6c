"""Starting, driving and ending a system under test in a process group of its own."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.errors import InputError, input_error
from flashrt.runtime.wire import Connection

MARK = "FLASHRT_SYSTEM"
LOG_TAIL_BYTES = 1500


@dataclass(frozen=True)
class Arrival:
    """One message from the system, stamped when it was complete in the harness."""

    at_ns: int
    message: Mapping[str, Any]


class SystemProcess:
    """A running system: a context manager that leaves no process behind, whatever happens.

    Parameters
    ----------
    devices
        Names of the leased devices; CPU devices also bound the cores that the system may use.
    log_path
        Where its standard output and error go.
    """

    def __init__(
        self,
        system: System,
        inputs: Sequence[str],
        *,
        devices: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        log_path: Path,
    ) -> None:
        self.system = system
        self.arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self.events: list[Mapping[str, Any]] = []
        self.started_ns = monotonic_ns()
        self.ready_ns: int | None = None
        self.usage: Mapping[str, Any] = {}
        self.finished = False
        self.peak_host_bytes = 0
        self._log_path = log_path
        self._mark = uuid.uuid4().hex
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._connection = Connection(ours, torch=False)
        cores = [int(name.removeprefix("cpu-")) for name in devices if name.startswith("cpu-")]
        with log_path.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flashrt.bench.host", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=system.path.parent,
                env={**os.environ, **_threads(), **(environment or {}), MARK: self._mark, "PYTHONUNBUFFERED": "1"},
            )
        if cores:
            with suppress(OSError, psutil.Error):
                psutil.Process(self._process.pid).cpu_affinity(cores)
        hello = {**system.as_hello(), "inputs": list(inputs), "devices": list(devices), "config": dict(config or {})}
        self._connection.send({"kind": "hello"}, hello)
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample_memory, daemon=True)
        self._sampler.start()

    @property
    def pid(self) -> int:
        """Process id of the system's first process, which leads its group."""
        return self._process.pid

    def __enter__(self) -> SystemProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                now = monotonic_ns()
                if message["kind"] in {"span", "note"}:
                    self.events.append(message)
                else:
                    self.arrivals.put(Arrival(now, message))
        except (OSError, ValueError, KeyError) as error:
            self.arrivals.put(Arrival(monotonic_ns(), {"kind": "garbled", "text": f"{type(error).__name__}: {error}"}))
        self.arrivals.put(None)

    def _sample_memory(self) -> None:
        while not self._sampling.wait(0.2):
            total = 0
            for process in self.members():
                with suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_host_bytes = max(self.peak_host_bytes, total)

    def members(self) -> list[psutil.Process]:
        """Return the system's processes: its first one and all below it."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def send(self, item: Mapping[str, Any]) -> None:
        """Put one item a named input; a dead system shows in the next `next_arrival`."""
        with suppress(OSError):
            self._connection.send({"kind": "input"}, dict(item))

    def send_packed(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Put an item that was packed before, so that packing is not in a timed path."""
        with suppress(OSError):
            self._connection.send_packed(buffers)

    def close_inputs(self) -> None:
        """Say that no more items will come."""
        with suppress(OSError):
            self._connection.send({"kind": "close"})

    def next_arrival(self, timeout_s: float, waiting_for: str) -> Arrival:
        """Return the next output, ``ready``, ``batch_done`` or ``done`` message.

        Raises
        ------
        InputError
            The system failed, died, sent garbage, or was silent for `timeout_s` seconds.
        """
        arrival = self.poll(timeout_s, waiting_for)
        if arrival is None:
            raise self._error("hang", f"{waiting_for} within {timeout_s:.0f} s", "nothing")
        return arrival

    def poll(self, timeout_s: float, waiting_for: str = "an output") -> Arrival | None:
        """Return the next message as `next_arrival` does, or None when none came in time."""
        try:
            arrival = self.arrivals.get(timeout=max(timeout_s, 1e-6))
        except queue.Empty:
            return None
        if arrival is None:
            code = self._exit_code()
            said = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise self._error("crash", waiting_for, f"the process ended with {said}")
        kind = arrival.message["kind"]
        if kind == "failed":
            text = arrival.message["text"]
            trace = arrival.message.get("traceback") or ""
            raise self._error(f"{arrival.message['phase']}-failed", waiting_for, f"{text}\n{trace}".strip(), log=False)
        if kind == "garbled":
            raise self._error("garbled", waiting_for, f"bytes that are no message ({arrival.message['text']})")
        if kind == "ready":
            self.ready_ns = arrival.at_ns
        if kind == "done":
            self.finished = True
            self.usage = arrival.message.get("usage") or {}
        return arrival

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the system has called ``io.ready()``."""
        arrival = self.next_arrival(timeout_s, "io.ready()")
        if arrival.message["kind"] != "ready":
            got = "the system returned" if arrival.message["kind"] == "done" else f"{arrival.message['kind']} first"
            raise self._error("not-ready", "io.ready() before anything else", got)

    def _exit_code(self) -> int:
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return 0

    def _error(self, rule: str, expected: str, got: str, *, log: bool = True) -> InputError:
        tail = self.log_tail() if log else ""
        got = f"{got}; its last output:\n{tail}" if tail else got
        return input_error(
            f"system '{self.system.reference}'", expected, got, "correct the system and call again", rule=rule
        )

    def log_tail(self) -> str:
        """Return the last of what the system printed."""
        try:
            data = self._log_path.read_bytes()
        except OSError:
            return ""
        return data[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def end(self, grace_s: float = 2.0) -> None:
        """End the system: politely when it has finished, else its whole group at once; always reaped."""
        if self.finished:
            with suppress(OSError):
                self._connection.send({"kind": "bye"})
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        self._sampling.set()
        strays = self.members()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in [*strays, *marked_processes(self._mark)]:
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        self._connection.shutdown()
        self._receiver.join(timeout=5)
        self._sampler.join(timeout=5)
        self._connection.close()


def _threads() -> dict[str, str]:
    # One thread a worker: more change the bits of some models and run slower on a shared host (spec/apps.md).
    return {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return live processes that carry a system's mark in their environment, wherever they moved to."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if needle in file.read():
                    found.append(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue
    return found
