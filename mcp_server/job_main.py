"""The process of one job: runs its function, tells of progress, and leaves a final state and no process behind."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from flashrt.errors import FlashrtError, InputError, ResourceMissingError
from flashrt.mcp_server.job_processes import descendants, kill_all, marked
from flashrt.mcp_server.jobs import _finish, job_folder
from flashrt.variants.owners import Owner
from flashrt.variants.store import Store, open_store

# Less than the canceller waits, so that the job itself has the last word.
UNWIND_S = 1.5
_THROTTLE_S = 0.2
_KILL_S = 1.0
_EXIT_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36


class JobCancelledError(BaseException):
    """Raised in the main thread on SIGTERM, so that leases, systems and shared memory are given back on the way out."""


class ProgressWriter:
    """Writes the newest progress at most five times a second, never in the caller's thread."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._job = job
        self._newest: tuple[float, str] | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def __call__(self, fraction: float, message: str = "") -> None:
        """Note a fraction of 0 to 1 and what is being done."""
        assert math.isfinite(fraction), f"progress of job: {fraction!r}"
        with self._lock:
            self._newest = (min(1.0, max(0.0, float(fraction))), str(message))
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait()
            self._wanted.clear()
            self._write()
            self._closed.wait(_THROTTLE_S)

    def _write(self) -> None:
        with self._lock:
            newest, self._newest = self._newest, None
        if newest is None:
            return
        try:
            with self._store.writing() as connection:
                connection.execute(
                    "UPDATE jobs SET progress = ?, message = ? WHERE id = ? AND state = 'running'", (*newest, self._job)
                )
        except FlashrtError as error:
            # The work is worth more than the word about it.
            print(f"progress not written: {error}", file=sys.stderr)

    def close(self) -> None:
        """Write what is not written yet, and stop."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()
        self._write()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_masks = threading.local()


def _hold() -> None:
    # A forked child shares the pipe of the job: a signal that ends the child must not end the job, not even one that
    # comes in the child's first moment.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _let_go()


class Cancellation:
    """SIGTERM and SIGINT: unwinds the main thread, and ends the process by force where that does not come to an end."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._job = job
        self._armed = False
        self.requested = False
        self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The byte comes also while the main thread is inside a library that does not return to the interpreter.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._unwind)
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)
        # A starter may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        threading.Thread(target=self._force, name="cancellation", daemon=True).start()

    def _unwind(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._armed:
            self._armed = False
            raise JobCancelledError

    def arm(self) -> None:
        """Let a signal unwind the main thread from now on; one that came already does so at once."""
        self._armed = True
        if self.requested:
            self._armed = False
            raise JobCancelledError

    def _force(self) -> None:
        while True:
            select.select([self._read_end], [], [])
            numbers = os.read(self._read_end, 64)
            if any(number in numbers for number in _SIGNALS):
                break
        time.sleep(UNWIND_S)
        try:
            end_children(self._job)
            _finish(self._store, self._job, "cancelled", message="cancelled")
        finally:
            os._exit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Let no signal interrupt the last writes; a late one is answered by the force above."""
        self._armed = False


def end_children(job: str) -> None:
    """Kill whatever this job started and left running, and take note of its end so that no zombie stays."""
    me = os.getpid()
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        # It removes what shared memory was left, and ends when nobody writes to it any more.
        tracker._resource_tracker._stop()
    kill_all(lambda: marked(job) | descendants(me), _KILL_S)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run_job(store: Store, job: str, function: str, arguments: dict[str, Any], tool: str) -> None:
    """Run the job's function to a final state."""
    folder = job_folder(store.workspace, job)
    cancellation = Cancellation(store, job)
    progress = ProgressWriter(store, job)
    state, error, detail, message = "done", None, None, None
    try:
        try:
            cancellation.arm()
            module, _, name = function.partition(":")
            work = getattr(importlib.import_module(module), name)
            result = work(store.workspace, arguments, progress, folder / "files")
            _write_result(folder, result)
        finally:
            cancellation.close()
    except JobCancelledError:
        state, message = "cancelled", "cancelled"
    except FlashrtError as known:
        state, error, detail = "failed", str(known), _detail(known)
    except BaseException:  # noqa: BLE001
        # Also SystemExit of the work: whatever it was, the job ends in a state that says so.
        log_id = f"log-{job.removeprefix('job-')}"
        print(f"[{log_id}] {tool} failed:", file=sys.stderr)
        traceback.print_exc()
        log = (folder / "log.txt").relative_to(store.workspace)
        state, detail = "failed", {"kind": "fault", "log": log_id}
        error = f"{tool}: a fault of FlashRT's own, {log_id} in {log}; report it with that text"
    if cancellation.requested and state == "failed":
        # What ended the job may look like a failure of what it was waiting for.
        state, message, error, detail = "cancelled", "cancelled", None, None
    if state == "done":
        # What it was at last doing is no longer so; of one that failed it says where.
        message = ""
    end_children(job)
    progress.close()
    _finish(store, job, state, message=message, error=error, detail=detail)


def _write_result(folder: Path, result: Mapping[str, Any]) -> None:
    part = folder / "result.json.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(dict(result), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / "result.json")


def _detail(error: FlashrtError) -> dict[str, Any]:
    if isinstance(error, ResourceMissingError):
        return {"kind": "resource", "holders": list(error.holders), "retry_after_s": error.retry_after_s}
    return {"kind": "input" if isinstance(error, InputError) else "fault"}


def main() -> None:
    """Run the job that the command line names, unless it was cancelled before it began."""
    workspace, job = Path(sys.argv[1]), sys.argv[2]
    # What loses its parent below us comes to us, not to init: it is found and reaped.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    store = open_store(workspace)
    with store.writing() as connection:
        row = connection.execute("SELECT * FROM jobs WHERE id = ? AND state = 'queued'", (job,)).fetchone()
        if row is None:
            return
        connection.execute(
            "UPDATE jobs SET state = 'running', process = ?, started_at = ? WHERE id = ?",
            (Owner.this_process().as_text(), time.time(), job),
        )
    run_job(store, job, row["function"], json.loads(row["arguments"]), row["tool"])
    # Threads that the work left behind must not keep a finished job alive.
    threading.Thread(target=_leave, name="leave", daemon=True).start()


def _leave() -> None:
    time.sleep(_EXIT_S)
    os._exit(0)


if __name__ == "__main__":
    main()
