"""Long work in processes of its own: on disk, watched by number and start time, outliving the server."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrt.errors import InternalFaultError, input_error, listed
from flashrt.mcp_server.job_processes import MARK, descendants, kill_all, marked, signal_group, wait_gone
from flashrt.variants.owners import Owner
from flashrt.variants.store import Store, new_id, open_store
from flashrt.variants.variant import as_time

# Tool to the function that does its work: f(workspace, arguments, progress, folder) -> JSON mapping.
JOB_FUNCTIONS: dict[str, str] = {
    "ir_interpret": "flashrt.mcp_server.work:ir_interpret",
    "ir_audit": "flashrt.mcp_server.auditing:ir_audit",
    "ir_trace": "flashrt.mcp_server.work:ir_trace",
    "profile_measure": "flashrt.mcp_server.work:profile_measure",
    "plan_deployment": "flashrt.mcp_server.work:plan_deployment",
    "plan_serving": "flashrt.mcp_server.work:plan_serving",
    "plan_elastic": "flashrt.mcp_server.work:plan_elastic",
    "equivalence_check": "flashrt.mcp_server.work:equivalence_check",
    "bench_run": "flashrt.mcp_server.work:bench_run",
    "bench_compare": "flashrt.mcp_server.work:bench_compare",
}
FINAL_STATES = frozenset({"done", "failed", "cancelled", "lost"})
POLITE_S = 3.0
LOG_TAIL_BYTES = 4000
_KILL_S = 10.0
_LOOK_S = 0.05

# Jobs that this process started: each is waited for by a thread, so that none stays a zombie.
_reapers: dict[int, threading.Thread] = {}
_reapers_lock = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A job as the store knows it now.

    Parameters
    ----------
    state
        ``queued``, ``running``, or finally ``done``, ``failed``, ``cancelled``, or ``lost``: its process is gone.
    progress
        0 to 1.
    error
        For the agent, where it failed or was lost.
    error_detail
        `kind` (input, resource, fault), and for a missing resource `holders` and `retry_after_s`.
    artifacts
        Paths relative to the workspace.
    log_tail
        The end of what it printed, where it failed or was lost.
    """

    job: str
    tool: str
    state: str
    progress: float
    message: str
    result: dict[str, Any] | None
    error: str | None
    error_detail: dict[str, Any] | None
    artifacts: tuple[str, ...]
    log: str
    log_tail: str
    created_at: str | None
    started_at: str | None
    finished_at: str | None

    @property
    def is_final(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in FINAL_STATES

    def as_dict(self) -> dict[str, Any]:
        """Return the answer of ``job_wait``: what there is of it."""
        record = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        return {**record, "artifacts": list(self.artifacts)}


def job_folder(workspace: Path, job: str) -> Path:
    """Return where a job keeps its log and result, and in ``files/`` what its work writes."""
    return workspace.resolve() / ".flashrt" / "jobs" / job


def start_job(workspace: Path, tool: str, arguments: Mapping[str, Any], *, function: str | None = None) -> str:
    """Start a job in a session of its own and return its id at once.

    Parameters
    ----------
    arguments
        JSON values.
    function
        ``module:function`` to run; by default the one that `JOB_FUNCTIONS` has for the tool.
    """
    store = open_store(workspace)
    job = new_id("job")
    folder = job_folder(store.workspace, job)
    text = json.dumps(dict(arguments))
    try:
        (folder / "files").mkdir(parents=True)
        with store.writing() as connection:
            connection.execute(
                "INSERT INTO jobs (id, tool, function, arguments, state, starter, created_at) "
                "VALUES (?, ?, ?, ?, 'queued', ?, ?)",
                (job, tool, function or JOB_FUNCTIONS[tool], text, Owner.this_process().as_text(), time.time()),
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flashrt.mcp_server.job_main", str(store.workspace), job],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=store.workspace,
                start_new_session=True,
                env={**os.environ, MARK: job, "PYTHONUNBUFFERED": "1"},
            )
    except OSError as error:
        _finish(store, job, "failed", error=f"job '{job}': its process could not be started ({error}); call again",
                detail={"kind": "fault"})  # fmt: skip
        return job
    _reap_later(process)
    owner = Owner.of(process.pid)
    if owner is not None:
        with store.writing() as connection:
            connection.execute("UPDATE jobs SET process = ? WHERE id = ? AND process IS NULL", (owner.as_text(), job))
    return job


def read_job(workspace: Path, job: str) -> Job:
    """Return a job as it is; one whose process is gone before it finished is written back as lost.

    Raises
    ------
    InputError
        The id is unknown; the nearest one is named.
    """
    store = open_store(workspace)
    return _as_job(store, _settle(store, _row(store, job, "job_wait")))


def list_jobs(workspace: Path) -> list[Job]:
    """Return all jobs of the workspace, newest first."""
    store = open_store(workspace)
    with store.reading() as connection:
        rows = connection.execute("SELECT * FROM jobs ORDER BY number DESC").fetchall()
    return [_as_job(store, _settle(store, row)) for row in rows]


def wait_job(workspace: Path, job: str, wait_s: float) -> Job:
    """Return the job when it has finished, or as it is after `wait_s` seconds.

    Raises
    ------
    InputError
        The id is unknown, or `wait_s` is no number of seconds of at least 0.
    """
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not math.isfinite(wait_s) or wait_s < 0:
        raise input_error(
            "job_wait, wait_s", "seconds of at least 0", repr(wait_s), "pass wait_s=10", rule="bad-argument"
        )
    store = open_store(workspace)
    deadline = time.monotonic() + wait_s
    while True:
        row = _settle(store, _row(store, job, "job_wait"))
        left_s = deadline - time.monotonic()
        if row["state"] in FINAL_STATES or left_s <= 0:
            return _as_job(store, row)
        if row["process"] is None:
            time.sleep(min(left_s, _LOOK_S))
        else:
            wait_gone(Owner.parse(row["process"]), min(left_s, _LOOK_S))


def cancel_job(workspace: Path, job: str) -> Job:
    """End a job and every process that it started, politely for three seconds and then not; return it as it ended.

    A job that finishes just then keeps its result.

    Raises
    ------
    InputError
        The id is unknown, or the job has finished.
    """
    store = open_store(workspace)
    row = _settle(store, _row(store, job, "job_cancel"))
    if row["state"] in FINAL_STATES:
        raise input_error(
            f"job_cancel, job '{job}'", "a job that is queued or running", f"one that is {row['state']}",
            "there is nothing to cancel; job_wait returns what it left", rule="job-finished",
        )  # fmt: skip
    with store.writing() as connection:
        # One that has not begun will see this and not begin.
        connection.execute(
            "UPDATE jobs SET state = 'cancelled', message = 'cancelled before it began', finished_at = ? "
            "WHERE id = ? AND state = 'queued'",
            (time.time(), job),
        )
    row = _row(store, job, "job_cancel")
    process = None if row["process"] is None else Owner.parse(row["process"])
    if process is not None and not process.is_visible():
        raise input_error(
            f"job_cancel, job '{job}'", "a job that runs where this server can signal it",
            "one of another container", "cancel it through a server that runs there", rule="job-elsewhere",
        )  # fmt: skip
    below = set() if process is None or process.is_gone() else descendants(process.pid)
    if process is not None:
        signal_group(process, signal.SIGTERM)
        wait_gone(process, POLITE_S)
        signal_group(process, signal.SIGKILL)
    ended = kill_all(lambda: {*marked(job), *(one for one in below if one.runs())}, _KILL_S)
    if process is not None:
        _join_reaper(process.pid)
    _finish(store, job, "cancelled", message="cancelled")
    if not ended:
        raise InternalFaultError(f"job_cancel, job '{job}': processes of it cannot be killed: "
                                 f"{listed(one.pid for one in marked(job))}")  # fmt: skip
    return read_job(workspace, job)


def _row(store: Store, job: str, call: str) -> sqlite3.Row:
    with store.reading() as connection:
        row: sqlite3.Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
        if row is not None:
            return row
        ids = [one[0] for one in connection.execute("SELECT id FROM jobs ORDER BY number DESC")]
    raise input_error(
        f"{call}, job '{job}'", f"a job of this workspace (known: {listed(ids)})", "one that is not known here",
        "use an id that a job tool returned in this workspace", rule="unknown-job", valid=ids, name=job,
    )  # fmt: skip


def _settle(store: Store, row: sqlite3.Row) -> sqlite3.Row:
    """Write back what became of an unfinished job whose process is gone, and end what it left running."""
    job = row["id"]
    if row["state"] in FINAL_STATES or not _is_gone(row):
        return row
    # It may have finished between our two looks.
    row = _row(store, job, "job_wait")
    if row["state"] in FINAL_STATES:
        return row
    kill_all(lambda: marked(job), _KILL_S)
    if _read_result(store, job) is not None:
        # The result is written last and whole: all that was lost is the word that it is there.
        _finish(store, job, "done")
    else:
        _finish(store, job, "lost", error=f"job '{job}' ({row['tool']}): its process ended without a word (killed, out "
                f"of memory, or the machine restarted); see {_log(store, job)}, then call {row['tool']} again",
                detail={"kind": "fault"})  # fmt: skip
    return _row(store, job, "job_wait")


def _is_gone(row: sqlite3.Row) -> bool:
    if row["process"] is not None:
        return Owner.parse(row["process"]).is_gone()
    # Whoever started it may have died before the number was written; the job itself writes it first of all.
    return Owner.parse(row["starter"]).is_gone() and not marked(row["id"])


def _finish(
    store: Store,
    job: str,
    state: str,
    *,
    message: str | None = None,
    error: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> bool:
    """Give an unfinished job its final state; the first word counts. Return whether this was it."""
    with store.writing() as connection:
        changed = connection.execute(
            "UPDATE jobs SET state = ?, message = coalesce(?, message), error = ?, error_detail = ?, finished_at = ?, "
            "progress = CASE ? WHEN 'done' THEN 1 ELSE progress END "
            "WHERE id = ? AND state IN ('queued', 'running')",
            (state, message, error, None if detail is None else json.dumps(dict(detail)), time.time(), state, job),
        ).rowcount
    return bool(changed)


def _read_result(store: Store, job: str) -> dict[str, Any] | None:
    try:
        result = json.loads((job_folder(store.workspace, job) / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def _log(store: Store, job: str) -> str:
    return str((job_folder(store.workspace, job) / "log.txt").relative_to(store.workspace))


def _as_job(store: Store, row: sqlite3.Row) -> Job:
    job = row["id"]
    result = _read_result(store, job) if row["state"] == "done" else None
    error = row["error"]
    state = row["state"]
    if state == "done" and result is None:
        state, error = "lost", f"job '{job}': its result was removed; call {row['tool']} again"
    tail = ""
    if state in {"failed", "lost"}:
        tail = _tail(job_folder(store.workspace, job) / "log.txt")
    return Job(
        job=job,
        tool=row["tool"],
        state=state,
        progress=row["progress"],
        message=row["message"],
        result=result,
        error=error,
        error_detail=None if row["error_detail"] is None else json.loads(row["error_detail"]),
        artifacts=_artifacts(store, job, result),
        log=_log(store, job),
        log_tail=tail,
        created_at=as_time(row["created_at"]),
        started_at=as_time(row["started_at"]),
        finished_at=as_time(row["finished_at"]),
    )


def _artifacts(store: Store, job: str, result: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what the result names under ``artifacts``, else the files that the work wrote to its folder."""
    named = (result or {}).get("artifacts")
    if isinstance(named, Mapping | list):
        return tuple(_leaves(named))
    files = [path for path in (job_folder(store.workspace, job) / "files").rglob("*") if path.is_file()]
    return tuple(sorted(str(path.relative_to(store.workspace)) for path in files))


def _leaves(named: Any) -> Iterator[str]:
    """Yield the paths in a result's artifacts, whatever they are arranged by."""
    if isinstance(named, Mapping | list):
        for one in named.values() if isinstance(named, Mapping) else named:
            yield from _leaves(one)
    else:
        yield str(named)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _reap_later(process: subprocess.Popen[bytes]) -> None:
    thread = threading.Thread(target=process.wait, name=f"job {process.pid}", daemon=True)
    with _reapers_lock:
        for pid in [pid for pid, one in _reapers.items() if not one.is_alive()]:
            del _reapers[pid]
        _reapers[process.pid] = thread
        thread.start()


def _join_reaper(pid: int) -> None:
    with _reapers_lock:
        thread = _reapers.pop(pid, None)
    if thread is not None:
        thread.join(_KILL_S)
