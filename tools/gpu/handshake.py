"""Both ends of the pipes between an acquirer and the keeper that it starts.

The acquirer writes one line, the order; the keeper answers with one line; the acquirer confirms a granted lease with
``ok``. Until then each notices the other's death, and a lease that nobody has heard of does not stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any, NoReturn

from flashrt.errors import InternalFaultError
from flashrt.gpu.lease_directory import KEEPER_MODULE
from flashrt.gpu.processes import ProcessIdentity

_LOOK_S = 1.0

# Keepers that this process started: each is waited for by a thread, so that none stays a zombie.
_reapers: dict[int, threading.Thread] = {}


def start_keeper(order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Start a keeper and return its answer; a keeper that has not granted anything is gone afterwards."""
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", KEEPER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        granted = False
        try:
            with process.stdin as orders, process.stdout as answers:
                try:
                    _write_all(orders, json.dumps(order).encode() + b"\n")
                    answer = _read_answer(answers, timeout_s)
                    if "granted" in answer:
                        _write_all(orders, b"ok\n")
                        granted = True
                except (BrokenPipeError, EOFError):
                    _fail(process, complaints)
        finally:
            # Also on KeyboardInterrupt and cancellation: nobody has the lease, so nobody may hold it.
            if not granted:
                process.kill()
                process.wait()
    if granted:
        reaper = threading.Thread(target=process.wait, name=f"keeper {process.pid}", daemon=True)
        for pid in [pid for pid, thread in _reapers.items() if not thread.is_alive()]:
            _reapers.pop(pid, None)
        _reapers[process.pid] = reaper
        reaper.start()
    return answer


def _write_all(stream: IO[bytes], data: bytes) -> None:
    while data:
        data = data[stream.write(data) :]


def _read_answer(answers: IO[bytes], timeout_s: float) -> dict[str, Any]:
    poll = select.poll()
    poll.register(answers.fileno(), select.POLLIN)
    deadline = time.monotonic() + timeout_s
    data = b""
    while not data.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise InternalFaultError(f"gpu_acquire: the lease's keeper gave no answer within {timeout_s:.0f} s")
        if not poll.poll(left_s * 1000):
            continue
        chunk = os.read(answers.fileno(), 65536)
        if not chunk:
            raise EOFError
        data += chunk
    answer: dict[str, Any] = json.loads(data)
    return answer


def _fail(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> NoReturn:
    with contextlib.suppress(subprocess.TimeoutExpired):
        # Its words are complete when it has ended; a keeper that hangs on the way out is killed by the caller.
        process.wait(_LOOK_S)
    complaints.seek(0)
    words = complaints.read().decode(errors="replace").strip() or f"exit status {process.returncode}, no message"
    raise InternalFaultError(f"gpu_acquire: the lease's keeper ended before it answered: {words}")


def await_reaped(pid: int, timeout_s: float) -> None:
    """Return when a keeper that this process started is no zombie any more; at once for keepers of others."""
    reaper = _reapers.pop(pid, None)
    if reaper is not None:
        reaper.join(timeout_s)


class AcquirerGoneError(Exception):
    """Nobody waits for the answer any more."""


class Acquirer:
    """The process at the other end of standard input and output, until it has confirmed the lease."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._pidfd: int | None = None

    def read_line(self) -> bytes:
        """Return the next line.

        Raises
        ------
        AcquirerGoneError
            It ended before the line was complete.
        """
        line = b""
        while not line.endswith(b"\n"):
            chunk = os.read(0, 65536)
            if not chunk:
                raise AcquirerGoneError
            line += chunk
        return line

    def watch(self, identity: ProcessIdentity) -> None:
        """Also notice its death where a process it forked holds the pipe open."""
        try:
            self._pidfd = identity.open_pidfd()
        except ProcessLookupError:
            raise AcquirerGoneError from None
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has written something, after `timeout_s` at most.

        Raises
        ------
        AcquirerGoneError
            It died.
        """
        ready = {descriptor for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000)}
        # What it wrote before it died counts: a confirmed lease outlives its acquirer.
        if 0 in ready:
            return True
        if self._pidfd in ready:
            raise AcquirerGoneError
        return False

    def answer(self, document: dict[str, Any]) -> None:
        """Write one line."""
        data = json.dumps(document).encode() + b"\n"
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            raise AcquirerGoneError from None

    def confirm(self) -> None:
        """Return when the acquirer says that it has the answer."""
        while not self.wait(_LOOK_S):
            pass
        if self.read_line() != b"ok\n":
            raise AcquirerGoneError

    def cut_ties(self) -> None:
        """Let go of its pipes and of the folder it was in."""
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        if self._pidfd is not None:
            os.close(self._pidfd)
