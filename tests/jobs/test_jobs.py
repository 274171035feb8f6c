"""Jobs are processes: they end in one final state, whoever dies on the way, and leave nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flashrt.errors import InputError
from flashrt.gpu.processes import ProcessIdentity
from flashrt.mcp_server.jobs import Job, cancel_job, job_folder, list_jobs, read_job, start_job, wait_job
from flashrt.variants import open_store
from flashrt.variants.owners import Owner

Start = Callable[..., str]
Finish = Callable[[str], Job]
Until = Callable[..., None]
Pids = Callable[[], list[ProcessIdentity]]


def none_run(processes: list[ProcessIdentity]) -> bool:
    return not any(process.runs() for process in processes)


def test_a_job_runs_to_its_result(workspace: Path, start: Start, finish: Finish) -> None:
    job = start("echo", system="a.py:serve", runs=3)
    done = finish(job)
    assert done.state == "done"
    assert done.progress == 1
    assert done.result is not None
    assert done.result["arguments"] == {"system": "a.py:serve", "runs": 3}
    assert done.result["job"] == job
    assert done.result["cwd"] == str(workspace)
    assert done.artifacts == (f".flashrt/jobs/{job}/files/trace.json",)
    assert json.loads((job_folder(workspace, job) / "result.json").read_text()) == done.result
    assert "said by the work" in (job_folder(workspace, job) / "log.txt").read_text()
    json.dumps(done.as_dict())
    assert [one.job for one in list_jobs(workspace)] == [job]


def test_progress_is_seen_and_waiting_ends_without_a_result(
    workspace: Path, start: Start, finish: Finish, until: Until
) -> None:
    job = start("gated")
    assert wait_job(workspace, job, 0).state in {"queued", "running"}
    until(lambda: read_job(workspace, job).message == "waiting")
    found = wait_job(workspace, job, 0.05)
    assert (found.state, found.progress, found.result) == ("running", 0.3, None)
    (workspace / "go").touch()
    assert finish(job).result == {"went": True}


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), True, "5"])
def test_a_wait_that_is_no_time_is_refused(workspace: Path, wait_s: float) -> None:
    with pytest.raises(InputError, match="seconds"):
        wait_job(workspace, "job-1", wait_s)


def test_a_known_error_fails_with_its_text(start: Start, finish: Finish) -> None:
    failed = finish(start("refuse"))
    assert failed.state == "failed"
    assert failed.error == "system 'a.py:serve': expected outputs, got none; write to io.outputs[name]"
    assert failed.error_detail == {"kind": "input"}
    lacking = finish(start("lack"))
    assert lacking.error_detail == {"kind": "resource", "holders": ["alice"], "retry_after_s": 7.0}


@pytest.mark.parametrize("work", ["break_down", "leave", "unwritable", "not_there"])
def test_our_fault_fails_with_a_log_id_and_the_trace_in_the_log_only(
    workspace: Path, start: Start, finish: Finish, work: str
) -> None:
    failed = finish(start(work))
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error_detail is not None
    assert failed.error_detail["log"] in failed.error
    assert "secret detail" not in failed.error
    log = (job_folder(workspace, failed.job) / "log.txt").read_text()
    assert failed.error_detail["log"] in log
    assert "Traceback" in log
    assert "Traceback" in failed.log_tail


def test_kill_of_the_job_makes_it_lost_and_ends_what_it_started(
    workspace: Path, start: Start, pids: Pids, until: Until
) -> None:
    job = start("family")
    processes = pids()
    os.kill(processes[0].pid, signal.SIGKILL)
    until(lambda: not processes[0].runs())
    lost = read_job(workspace, job)
    assert lost.state == "lost"
    assert lost.error is not None
    assert "call bench_run again" in lost.error
    # The third hides from every search once its parent is dead: no mark, a session of its own.
    assert none_run([*processes[:3], processes[4]])
    processes[3].kill()
    with open_store(workspace).reading() as connection:
        assert connection.execute("SELECT state FROM jobs").fetchall()[0][0] == "lost"
    with pytest.raises(InputError, match="lost"):
        cancel_job(workspace, job)


def test_a_number_that_was_given_to_another_process_is_not_the_job(workspace: Path, start: Start, until: Until) -> None:
    job = start("gated")
    until(lambda: read_job(workspace, job).state == "running")
    with open_store(workspace).writing() as connection:
        real = connection.execute("SELECT process FROM jobs").fetchone()[0]
        fields = json.loads(real)
        fields["start_ticks"] -= 1
        connection.execute("UPDATE jobs SET process = ?", (json.dumps(fields),))
    assert read_job(workspace, job).state == "lost"
    until(lambda: Owner.parse(real).is_gone())


def test_a_job_of_an_earlier_boot_is_lost(workspace: Path, start: Start, until: Until) -> None:
    job = start("gated")
    until(lambda: read_job(workspace, job).state == "running")
    with open_store(workspace).writing() as connection:
        fields = json.loads(connection.execute("SELECT process FROM jobs").fetchone()[0])
        fields["boot"] = "another"
        connection.execute("UPDATE jobs SET process = ?", (json.dumps(fields),))
    assert read_job(workspace, job).state == "lost"


def test_a_result_that_was_written_counts_although_the_word_was_lost(
    workspace: Path, start: Start, finish: Finish
) -> None:
    job = start("echo")
    finish(job)
    with open_store(workspace).writing() as connection:
        process = json.loads(connection.execute("SELECT process FROM jobs").fetchone()[0])
        process["start_ticks"] -= 1
        connection.execute("UPDATE jobs SET state = 'running', process = ?", (json.dumps(process),))
    assert read_job(workspace, job).state == "done"


SERVER = """
import pathlib, sys
from flashrt.mcp_server.jobs import start_job
print(start_job(pathlib.Path(sys.argv[1]), "bench_run", {}, function="job_fixtures:gated"), flush=True)
sys.stdin.readline()
"""


def test_a_job_outlives_its_server(workspace: Path, finish: Finish) -> None:
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER, str(workspace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    job = server.stdout.readline().strip()
    os.kill(server.pid, signal.SIGKILL)
    server.communicate()
    assert read_job(workspace, job).state in {"queued", "running"}
    (workspace / "go").touch()
    assert finish(job).state == "done"


def test_a_server_that_died_before_it_started_the_process_left_a_lost_job(workspace: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(gone.pid)
    assert owner is not None
    gone.communicate()
    with open_store(workspace).writing() as connection:
        connection.execute(
            "INSERT INTO jobs (id, tool, function, arguments, state, starter, created_at) "
            "VALUES ('job-1', 'bench_run', 'x:y', '{}', 'queued', ?, 0)",
            (owner.as_text(),),
        )
    assert read_job(workspace, "job-1").state == "lost"


def test_two_servers_share_the_jobs_of_a_workspace(workspace: Path, until: Until) -> None:
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER, str(workspace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    theirs = server.stdout.readline().strip()
    ours = start_job(workspace, "bench_run", {}, function="job_fixtures:gated")
    until(lambda: all(one.state == "running" for one in list_jobs(workspace)))
    assert [one.job for one in list_jobs(workspace)] == [ours, theirs]
    assert cancel_job(workspace, theirs).state == "cancelled"
    assert read_job(workspace, ours).state == "running"
    assert cancel_job(workspace, ours).state == "cancelled"
    server.communicate("\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_cancel_ends_the_whole_tree(workspace: Path, start: Start, pids: Pids, deaf: bool) -> None:
    job = start("family", deaf=deaf)
    processes = pids()
    assert len(processes) == 5
    cancelled = cancel_job(workspace, job)
    assert cancelled.state == "cancelled"
    assert none_run(processes)
    # A work that listens gives back what it holds; a deaf one is not waited for.
    assert (workspace / "unwound").exists() != deaf
    assert not Path(f"/proc/{processes[0].pid}").exists()
    with pytest.raises(InputError, match="cancelled"):
        cancel_job(workspace, job)


def test_a_signal_to_the_job_alone_cancels_it_and_its_tree(
    start: Start, finish: Finish, pids: Pids, until: Until
) -> None:
    job = start("family")
    processes = pids()
    os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(job).state == "cancelled"
    until(lambda: none_run(processes))


def test_a_cancelled_job_stays_cancelled_whatever_its_work_makes_of_the_signal(
    workspace: Path, start: Start, until: Until
) -> None:
    job = start("translated")
    until(lambda: read_job(workspace, job).message == "up")
    cancelled = cancel_job(workspace, job)
    assert (cancelled.state, cancelled.error) == ("cancelled", None)


def test_a_job_that_was_not_running_yet_never_runs(workspace: Path, start: Start) -> None:
    job = start("echo")
    with suppress(InputError):
        cancel_job(workspace, job)
    state = read_job(workspace, job).state
    assert state in {"cancelled", "done"}
    assert (job_folder(workspace, job) / "result.json").exists() == (state == "done")


def test_a_finished_job_leaves_no_process_and_no_zombie(start: Start, finish: Finish, pids: Pids, until: Until) -> None:
    job = start("family", **{"return": True})
    finish(job)
    numbers = [int(pid) for pid in finish(job).result["pids"]]  # type: ignore[index]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in numbers))


def test_a_signal_to_a_forked_child_is_none_to_the_job(
    workspace: Path, start: Start, finish: Finish, until: Until
) -> None:
    job = start("forked")
    until(lambda: read_job(workspace, job).message == "waiting")
    (workspace / "go").touch()
    assert finish(job).result == {"code": -signal.SIGTERM}


def test_shared_memory_that_the_work_forgot_is_removed(start: Start, finish: Finish) -> None:
    result = finish(start("leak_memory")).result
    assert result is not None
    assert not Path(f"/dev/shm/{result['name'].lstrip('/')}").exists()


def test_finished_and_unknown_jobs_are_refused_by_name(workspace: Path, start: Start, finish: Finish) -> None:
    job = start("echo")
    finish(job)
    with pytest.raises(InputError, match="one that is done"):
        cancel_job(workspace, job)
    near = f"{job[:-1]}{'0' if job[-1] != '0' else '1'}"
    for call in (read_job, cancel_job):
        with pytest.raises(InputError, match=f"did you mean '{job}'"):
            call(workspace, near)


def test_a_job_that_cannot_open_the_store_is_lost_with_its_log(workspace: Path, start: Start, finish: Finish) -> None:
    job = start("echo")
    finish(job)
    folder = job_folder(workspace, job)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server.job_main", str(folder / "absent"), job], capture_output=True
    )
    assert done.returncode != 0
    again = subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server.job_main", str(workspace), job], capture_output=True
    )
    assert again.returncode == 0
    assert read_job(workspace, job).state == "done"


def test_a_hostile_current_folder_does_not_matter(workspace: Path, start: Start, finish: Finish) -> None:
    (workspace / "flashrt.py").write_text("raise SystemExit('hostile')")
    (workspace / "tools").mkdir()
    (workspace / "tools" / "__init__.py").write_text("raise SystemExit('hostile')")
    (workspace / "json.py").write_text("raise SystemExit('hostile')")
    assert finish(start("echo")).state == "done"
