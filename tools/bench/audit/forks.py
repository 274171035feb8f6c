"""Work in processes that begin where this one stands: right after the ops were loaded, before any of them ran."""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.runtime.lifeline import die_with_parent

HEAD = struct.Struct("<Q")
Send = Callable[[Any], None]


class ForkFailedError(Exception):
    """The process ended, failed or hung before it was done; says how."""


def in_fork(work: Callable[[], Any], timeout_s: float) -> Any:
    """Return what `work` returns in a fork of this process.

    Raises
    ------
    ForkFailedError
        It raised, ended, or took longer than `timeout_s`.
    """
    found = list(stream_from_fork(lambda send: send(work()), timeout_s))
    return found[0]


def stream_from_fork(work: Callable[[Send], None], timeout_s: float) -> Iterator[Any]:
    """Yield what `work` sends from a fork of this process, whose memory it begins with.

    Parameters
    ----------
    timeout_s
        How long it may be silent.

    Raises
    ------
    ForkFailedError
        It raised, ended, or was silent for too long.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python seeds this generator anew in every child.
    own_random = random.getstate()
    child = os.fork()
    if child == 0:
        os.close(reading)
        random.setstate(own_random)
        _work_in_child(work, writing)
    os.close(writing)
    done = False
    try:
        while True:
            message = _receive(reading, timeout_s)
            if message is None:
                break
            kind, value = message
            if kind == "done":
                done = True
                break
            if kind == "error":
                raise ForkFailedError(value)
            yield value
    finally:
        os.close(reading)
        if not done:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not done:
        raise ForkFailedError("the process ended before it was done")


def _work_in_child(work: Callable[[Send], None], writing: int) -> None:
    code = 1
    die_with_parent(os.getppid())
    try:
        torch = sys.modules.get("torch")
        if torch is not None:
            # Threads of the parent are not here: a library that waits for them would wait for ever.
            torch.set_num_threads(1)
        try:
            work(lambda value: _send(writing, ("value", value)))
            _send(writing, ("done", None))
            code = 0
        except BaseException as error:  # noqa: BLE001 - told to the parent whatever it is
            _send(writing, ("error", f"{type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _send(writing: int, message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    view = memoryview(HEAD.pack(len(data)) + data)
    while view:
        view = view[os.write(writing, view) :]


def _receive(reading: int, timeout_s: float) -> Any:
    head = _exactly(reading, HEAD.size, timeout_s)
    if head is None:
        return None
    data = _exactly(reading, HEAD.unpack(head)[0], timeout_s)
    return None if data is None else pickle.loads(data)


def _exactly(reading: int, size: int, timeout_s: float) -> bytes | None:
    data = bytearray()
    until_ns = monotonic_ns() + int(timeout_s * 1e9)
    while len(data) < size:
        left = (until_ns - monotonic_ns()) / 1e9
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            raise ForkFailedError(f"nothing within {timeout_s:.0f} s")
        part = os.read(reading, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
        until_ns = monotonic_ns() + int(timeout_s * 1e9)
    return bytes(data)
