"""Starting, driving and ending a system under test in a process group of its own."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
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

from flashrt.bench.limits import Limits, LimitWatch
from flashrt.bench.neighbours import Leftovers
from flashrt.bench.systems import System
from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, InputError, input_error
from flashrt.gpu.exports import mask_devices
from flashrt.runtime.janitor import remove_files
from flashrt.runtime.lifeline import (
    KEEP_MEMORY,
    MARK,
    descendants,
    exit_words,
    kill_marked,
    resident_bytes,
    shared_name,
    wait_exit,
)
from flashrt.runtime.wire import Connection, pack

LOG_TAIL_BYTES = 1500
SOCKET_BYTES = 4 << 20
SAMPLE_S = 0.2
ANSWER_S = 4.0
"""How long a silent system may take to say where it is; its processes may get little time themselves."""
MAX_BATCH = 10_000_000
SEND_TIMEOUT_S = 60
"""How long a system may take nothing off its socket before it counts as hung; its reader is FlashRT's own thread."""
SPAN: dict[str, type] = {"name": str, "device": str, "batch": int, "start_ns": int, "end_ns": int}
ARRIVALS = {"ready", "output", "batch_done", "done", "failed"}


@dataclass(frozen=True)
class Arrival:
    """One message from the system, stamped when it was complete in the harness."""

    at_ns: int
    message: Mapping[str, Any]


def check_message(message: Mapping[str, Any]) -> None:
    """Refuse a message that no system of ours sends; what a system's own code sends is not to be trusted.

    Raises
    ------
    ValueError
        Names the field.
    """
    kinds: dict[str, dict[str, type]] = {
        "output": {"name": str},
        "batch_done": {"batch": int},
        "span": SPAN,
        "wait": SPAN,
        "transfer": {**SPAN, "num_bytes": int},
        "overrun": {"name": str, "batch": int, "over_ns": int},
        "memory": {"name": str, "worker": str, "total_bytes": int, "call_bytes": int, "weights_bytes": int},
        "held": {"name": str, "worker": str, "num_bytes": int},
        "file": {"name": str, "worker": str},
        "note": {"text": str},
        "guard": {"name": str, "active": bool, "how": str},
        "replaced": {"text": str},
        "at": {"text": str},
        "failed": {"text": str, "phase": str},
        "done": {"usage": dict},
        "ready": {},
        "usage": {},
    }
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a message of kind {kind!r}"[:200])
    for name, wanted in kinds[kind].items():
        if not isinstance(message.get(name), wanted):
            raise ValueError(f"a {kind} message whose '{name}' is {type(message.get(name)).__name__}")
    batch = message.get("batch")
    if batch is not None and not (isinstance(batch, int) and 0 <= batch < MAX_BATCH):
        raise ValueError(f"a {kind} message for batch {batch!r}"[:200])
    usage: Mapping[str, Any] = message["usage"] if kind == "done" else message if kind == "usage" else {}
    for name in ("peak_host_bytes", "peak_device_bytes"):
        if not isinstance(usage.get(name, 0), int | None):
            raise ValueError(f"a {kind} message whose '{name}' is {type(usage[name]).__name__}")


class SystemProcess:
    """A running system: a context manager that leaves no process, thread or descriptor behind, whatever happens.

    Parameters
    ----------
    devices
        Names of the leased devices; CPU devices also bound the cores that the system may use.
    hidden, private
        The reference's files, and files and folders with verdicts and recordings, that it is kept from reading as far
        as the host allows.
    limits
        What it may take of the host before it is ended.
    log_path
        Where its standard output and error go.

    Attributes
    ----------
    events
        What came beside the outputs: spans, notes, what each worker used.
    mark
        What all its processes carry in their environment.
    left
        Once it has ended: devices that were not free again, and are quarantined.
    """

    def __init__(
        self,
        system: System,
        inputs: Sequence[str],
        *,
        devices: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[Path] = (),
        private: Sequence[Path] = (),
        limits: Limits | None = None,
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
        self.mark = uuid.uuid4().hex
        self.left: list[Finding] = []
        self._log_path = log_path
        self._leftovers = Leftovers(devices)
        self._limits = LimitWatch(limits or Limits(), self.mark, system.path.parent)
        self._excess: tuple[str, str] | None = None
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._exited = threading.Event()
        self._threads: list[threading.Thread] = []
        # A deployment's workers are masked one by one; any other system sees its own devices and no others.
        mask, names = ({}, list(devices)) if system.kind == "deployment" else mask_devices(devices)
        hello = {
            **system.as_hello(), "inputs": list(inputs), "devices": names, "config": dict(config or {}),
            "hidden": [str(path) for path in hidden], "private": [str(path) for path in private],
            "harness": os.getpid(),
        }  # fmt: skip
        greeting = pack({"kind": "hello"}, hello, "config")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = self._start(theirs, {**library_settings(), **mask, **(environment or {})})
            except OSError as error:
                ours.close()
                raise self._error("not-started", "a process that starts", str(error), log=False) from error
        self._pidfd = os.pidfd_open(self._process.pid)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._connection = Connection(ours, torch=False)
        _pin(self._process.pid, devices)
        # A process that has died already shows in the first `next_arrival`, with what it printed.
        self.send_packed(greeting)
        for target in (self._receive, self._watch):
            self._threads.append(threading.Thread(target=target, daemon=True))
            self._threads[-1].start()

    def _start(self, theirs: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "flashrt.bench.host", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=self.system.runs_in or self.system.path.parent,
                env={**os.environ, **environment, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            )

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
        if self.left and isinstance(error, InputError):
            raise InputError([*error.findings, *self.left]) from error

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                check_message(message)
                if message["kind"] in ARRIVALS:
                    self.arrivals.put(Arrival(self._connection.received_ns, message))
                    continue
                self.events.append(message)
                if message["kind"] == "at":
                    self._answered.set()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, RecursionError) as error:
            self.arrivals.put(Arrival(monotonic_ns(), {"kind": "garbled", "text": f"{type(error).__name__}: {error}"}))
        self.arrivals.put(None)

    def _watch(self) -> None:
        """Sample the memory in use until the first process ends; then nothing more is to be read."""
        while not self._stop.is_set():
            if wait_exit(self._pidfd, SAMPLE_S):
                self._exited.set()
                self._connection.stop_reading()
                return
            members = descendants(self._process.pid)
            in_use = sum(resident_bytes(number) for number in members)
            self.peak_host_bytes = max(self.peak_host_bytes, in_use)
            if self._excess is None:
                self._excess = self._limits.find_excess(members)
                if self._excess is not None:
                    self._kill()

    def _kill(self) -> None:
        """End all processes of the system at once; its first one stays unreaped."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(self.mark)

    def members(self) -> list[int]:
        """Return the ids of the system's processes: its first one and all below it."""
        return [] if self._exited.is_set() else descendants(self._process.pid)

    def send(self, item: Mapping[str, Any]) -> None:
        """Put one item a named input; a dead system shows in the next `next_arrival`.

        Raises
        ------
        InputError
            The system is alive and takes nothing.
        """
        self.send_packed(pack({"kind": "input"}, dict(item)))

    def send_packed(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Put an item that was packed before, so that packing is not in a timed path."""
        try:
            self._connection.send_packed(buffers)
        except BlockingIOError:
            place = self._place()
            raise self._error("hang", f"to take its input within {SEND_TIMEOUT_S} s", f"nothing taken{place}") from None
        except OSError:
            return

    def close_inputs(self) -> None:
        """Say that no more items will come."""
        self.send_packed(pack({"kind": "close"}))

    def next_arrival(self, timeout_s: float, waiting_for: str) -> Arrival:
        """Return the next output, ``ready``, ``batch_done`` or ``done`` message.

        Raises
        ------
        InputError
            The system failed, died, sent garbage, or was silent for `timeout_s` seconds.
        """
        arrival = self.poll(timeout_s, waiting_for)
        if arrival is None:
            raise self.hang(f"{waiting_for} within {timeout_s:.0f} s", "nothing")
        return arrival

    def hang(self, expected: str, got: str) -> InputError:
        """Return the error for a system that is silent: what was waited for, what came, and where it is."""
        return self._error("hang", expected, f"{got}{self._place()}")

    def _place(self) -> str:
        """Return where the system says that it is, for an error."""
        self._answered.clear()
        with suppress(OSError):
            self._connection.send({"kind": "where"})
        if not self._answered.wait(ANSWER_S):
            return ""
        # One answer a worker, each on its own connection: they come together, or not at all.
        self._exited.wait(ANSWER_S / 4)
        places = [str(event["text"]) for event in list(self.events) if event["kind"] == "at"]
        return f"; it is at {'; '.join(places)}"

    def poll(self, timeout_s: float, waiting_for: str = "an output") -> Arrival | None:
        """Return the next message as `next_arrival` does, or None when none came in time."""
        try:
            arrival = self.arrivals.get(timeout=max(timeout_s, 1e-6))
        except queue.Empty:
            return None
        if arrival is None:
            if self._excess is not None:
                raise self._error("limit", self._excess[0], f"{self._excess[1]}, so all of it was ended", log=False)
            raise self._error("crash", waiting_for, self._ending())
        kind = arrival.message["kind"]
        if kind == "failed":
            findings = arrival.message.get("findings")
            if isinstance(findings, list) and findings and all(isinstance(item, dict) for item in findings):
                raise InputError([self._within(finding) for finding in findings])
            text = arrival.message.get("text")
            trace = arrival.message.get("traceback") or ""
            raise self._error(
                f"{arrival.message.get('phase')}-failed", waiting_for, f"{text}\n{trace}".strip(), log=False
            )
        if kind == "garbled":
            raise self._error("garbled", waiting_for, f"bytes that are no message ({arrival.message['text']})")
        if kind == "ready":
            self.ready_ns = arrival.at_ns
        if kind == "done":
            self.finished = True
            self.usage = arrival.message.get("usage") or {}
        return arrival

    def _within(self, finding: Mapping[str, Any]) -> Finding:
        """Return a finding of the system's own process as one about the system."""
        # The system may have written anything there, so nothing but text is taken over.
        said = {name: str(finding.get(name) or "?") for name in ("where", "expected", "got", "fix", "rule")}
        nearest = finding.get("nearest")
        return Finding(
            f"system '{self.system.reference}', {said['where']}", said["expected"], said["got"], said["fix"],
            said["rule"], nearest if isinstance(nearest, str) else None,
        )  # fmt: skip

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the system has called ``io.ready()``."""
        arrival = self.next_arrival(timeout_s, "io.ready()")
        if arrival.message["kind"] != "ready":
            got = "the system returned" if arrival.message["kind"] == "done" else f"{arrival.message['kind']} first"
            raise self._error("not-ready", "io.ready() before anything else", got)

    def _ending(self) -> str:
        """Return how the first process ended; it stays unreaped, so that its number is nobody else's yet."""
        if not self._exited.wait(5):
            return "the process closed its connection and still runs"
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return "the process ended"
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return f"the process ended with {exit_words(code)}"

    def _error(self, rule: str, expected: str, got: str, *, log: bool = True) -> InputError:
        tail = self.log_tail() if log else ""
        got = f"{got}; its last output:\n{tail}" if tail else got
        return input_error(
            f"system '{self.system.reference}'", expected, got, "correct the system and call again", rule=rule
        )

    def log_tail(self) -> str:
        """Return the last of what the system printed."""
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def end(self, grace_s: float = 2.0) -> None:
        """End the system: politely when it has finished, else its whole group at once; always reaped."""
        if self.finished:
            with suppress(OSError):
                self._connection.send({"kind": "bye"})
            self._exited.wait(grace_s)
        self._stop.set()
        # Not reaped yet, so that the group's number cannot belong to others.
        self._kill()
        remove_files(shared_name(self.mark))
        self._process.wait()
        self._connection.shutdown()
        for thread in self._threads:
            thread.join(timeout=5)
        os.close(self._pidfd)
        self._connection.close()
        self.left = self._leftovers.settle(self.system.reference, probe=not self.finished)


def _pin(number: int, devices: Sequence[str]) -> None:
    cores = {int(name.removeprefix("cpu-")) for name in devices if name.startswith("cpu-")}
    if cores:
        # A core that this machine does not have: the system runs where it may.
        with suppress(OSError):
            os.sched_setaffinity(number, cores)


def library_settings() -> dict[str, str]:
    """Return the environment that systems run their libraries with: one thread, sums in a fixed order."""
    # One thread a worker: more change the bits of some models and run slower on a shared host (spec/apps.md).
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Without it MKL adds up in another order where a value lies at another address, and bits differ by chance.
    threads["MKL_CBWR"] = "AVX2,STRICT"
    return {name: os.environ.get(name, value) for name, value in {**KEEP_MEMORY, **threads}.items()}
