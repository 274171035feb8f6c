"""The server over stdio: nothing but the protocol on its output, and an end whenever the client wants one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from flashrt.mcp_server.jobs import start_job
from tests.conftest import wait_until
from tests.server.connection import (
    DEADLINE_S,
    INITIALIZE,
    RawServer,
    command,
    connected,
    maps_of,
    processes_of_job,
    raw_server,
)

pytestmark = pytest.mark.anyio

CHECK: dict[str, Any] = {
    "baseline": "reference.py:serve", "candidate": "gated.py:serve", "inputs": "inputs.py:batches", "count": 8,
}  # fmt: skip
# A client grants two seconds, in which a starved machine may not come to the few milliseconds of work that it takes.
# A server that waits for what is in flight does not pass: that is a job's 25 s, or forever.
END_S = 20.0

LOUD = """
import os
import sys

print("loud: by print")
sys.stdout.write("loud: by sys.stdout\\n")
sys.__stdout__.write("loud: by the other sys.stdout\\n")
sys.stdout.flush()
os.write(1, b"loud: by the descriptor\\n")
os.system("echo loud: by a child")
"""


def finish(server: RawServer, tool: str, **arguments: Any) -> dict[str, Any]:
    record = server.call(tool, **arguments)
    while record["state"] in {"queued", "running"}:
        record = server.call("job_wait", job=record["job"], wait_s=25)
    return record


def start(server: RawServer, workspace: Path) -> str:
    """Start a check of the gated system and return its job once the system runs."""
    record = server.call("equivalence_check", **CHECK)
    wait_until((workspace / "pid").exists, "the gated system has started")
    assert record["state"] in {"queued", "running"}
    return str(record["job"])


def test_standard_output_carries_the_protocol_only(workspace: Path) -> None:
    for name in ("toy_ops.py", "inputs.py", "reference.py"):
        path = workspace / name
        path.write_text(LOUD + path.read_text())
    with raw_server(workspace) as server:
        server.notify("notifications/unheard-of")
        program = server.call("ir_build", document="program.yaml")["program"]
        server.call("analyze", program=program, profile="profile.yaml", deployment="split.yaml", seed_queue=True)
        claimed = server.call("variant_next")
        assert claimed["ok"] is True
        proved = finish(
            server, "ir_interpret", program=program, inputs=CHECK["inputs"], baseline=CHECK["baseline"], count=2
        )
        assert proved["result"]["equivalent"] is True
        refused = server.call("equivalence_check", **{**CHECK, "candidate": "absent.py:serve"})
        assert refused["ok"] is False
        lease = server.call("gpu_acquire", count=1, holder="me", kind="cpu")["lease"]
        server.call("gpu_release", lease=lease)
        assert len(server.lines) >= 8
        for line in server.lines:
            message = json.loads(line)
            assert message["jsonrpc"] == "2.0"
        assert not [line for line in server.lines if line.lstrip().startswith("loud")]
        assert "libtorch" not in maps_of(server.process.pid)
        loud = (workspace / proved["log"]).parent
        assert any("loud: by" in path.read_text() for path in loud.rglob("*.log")), "what systems print is kept"


def test_a_broken_line_is_no_reason_to_stop(workspace: Path) -> None:
    with raw_server(workspace) as server:
        assert server.process.stdin is not None
        server.process.stdin.write("this is no JSON\n{}\n[]\n")
        server.process.stdin.flush()
        assert server.call("ir_build", document="program.yaml")["ok"] is True


@pytest.mark.parametrize(
    ("how", "busy"),
    [("SIGTERM", False), ("SIGINT", False), ("closed input", False), ("SIGTERM", True), ("closed input", True)],
)
def test_the_server_ends_when_told(workspace: Path, how: str, busy: bool) -> None:
    with raw_server(workspace) as server:
        job = None
        if busy:
            job = start(server, workspace)
            server.send("tools/call", {"name": "job_wait", "arguments": {"job": job, "wait_s": 25}})
        children = psutil.Process(server.process.pid).children(recursive=True)
        if how == "closed input":
            assert server.process.stdin is not None
            server.process.stdin.close()
        else:
            server.process.send_signal(getattr(signal, how))
        assert server.wait(END_S) == 0
        assert "Traceback" not in server.log()
        if job is None:
            assert children == []
            return
    # The job goes on without it, and another server has its result.
    assert processes_of_job(job)
    with raw_server(workspace) as server:
        assert server.call("job_wait", job=job, wait_s=0)["state"] == "running"
        assert server.call("job_cancel", job=job)["state"] == "cancelled"
    assert processes_of_job(job) == []


def test_the_server_ends_in_silence_when_its_client_was_killed(workspace: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command(workspace), stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(reading)
    os.close(writing)
    # The answer finds nobody who reads it, and then the input ends.
    _, errors = process.communicate(json.dumps({"jsonrpc": "2.0", "id": 1, **INITIALIZE}) + "\n", DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_job_outlives_kill_9_of_its_server_and_another_reads_the_result(workspace: Path) -> None:
    with raw_server(workspace) as server:
        job = start(server, workspace)
        server.process.kill()
        server.wait(DEADLINE_S)
    with raw_server(workspace) as server:
        assert server.call("job_wait", job=job, wait_s=0)["state"] == "running"
        (workspace / "go").touch()
        record = server.call("job_wait", job=job, wait_s=25)
        while record["state"] == "running":
            record = server.call("job_wait", job=job, wait_s=25)
        assert record["state"] == "done"
        assert record["result"]["equivalent"] is True
        kept = server.call("variant_add", hypothesis="h", transformation="t", bottleneck="b", legality="l")
        assert kept["ok"] is True


def test_a_job_killed_with_9_is_lost_and_leaves_nothing(workspace: Path) -> None:
    with raw_server(workspace) as server:
        job = start(server, workspace)
        (process,) = [pid for pid in processes_of_job(job) if "flashrt.mcp_server.job_main" in command_of(pid)]
        os.kill(process, signal.SIGKILL)
        record = server.call("job_wait", job=job, wait_s=25)
        assert record["state"] == "lost"
        assert "call equivalence_check again" in record["error"]
        wait_until(lambda: not processes_of_job(job), "what the job started to end")
        assert server.call("job_wait", job=job, wait_s=0)["state"] == "lost"


def command_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


async def test_progress_arrives_while_the_job_runs(workspace: Path) -> None:
    seen: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        # The job cannot end before this has been called, for the gate is opened here.
        seen.append((progress, total, message))
        (workspace / "go").touch()

    async with connected(workspace) as session:
        result = await session.client.call_tool("equivalence_check", CHECK, progress_callback=note)
        record = dict(result.structured_content or {})
        while record["state"] in {"queued", "running"}:
            result = await session.client.call_tool(
                "job_wait", {"job": record["job"], "wait_s": 25}, progress_callback=note
            )
            record = dict(result.structured_content or {})
    assert record["state"] == "done"
    assert seen
    for progress, total, message in seen:
        assert 0 <= progress <= 1
        assert total == 1
        assert message


async def test_a_cancelled_request_does_not_wedge_the_server(workspace: Path) -> None:
    async with connected(workspace) as session:
        started = await session.call("equivalence_check", **CHECK)
        job = started["job"]
        for _ in range(3):
            waiting = anyio.Event()
            async with anyio.create_task_group() as group:

                async def wait(waiting: anyio.Event = waiting) -> None:
                    async def note(progress: float, total: float | None, message: str | None) -> None:
                        waiting.set()

                    await session.client.call_tool("job_wait", {"job": job, "wait_s": 25}, progress_callback=note)

                group.start_soon(wait)
                # The server has begun to answer when its first word is here.
                await waiting.wait()
                group.cancel_scope.cancel()
            assert (await session.call("job_wait", job=job, wait_s=0))["state"] in {"queued", "running"}
        assert (await session.call("ir_build", document="program.yaml"))["ok"] is True
        assert (await session.call("job_cancel", job=job))["state"] == "cancelled"


async def test_two_servers_share_a_workspace(workspace: Path) -> None:
    async with connected(workspace) as one, connected(workspace) as two:
        program = (await one.call("ir_build", document="program.yaml"))["program"]
        assert program in (await two.call("ir_show", program=program))["text"]
        words = {"hypothesis": "h", "transformation": "t", "bottleneck": "b", "legality": "l"}
        added: list[str] = []

        async def add(session: Any) -> None:
            for _ in range(4):
                added.append((await session.call("variant_add", **words))["variant"])

        async with anyio.create_task_group() as group:
            group.start_soon(add, one)
            group.start_soon(add, two)
        assert len(set(added)) == 8
        claimed: list[str] = []

        async def claim(session: Any) -> None:
            for _ in range(4):
                claimed.append((await session.call("variant_next"))["variant"])

        async with anyio.create_task_group() as group:
            group.start_soon(claim, one)
            group.start_soon(claim, two)
        assert sorted(claimed) == sorted(added)
        job = (await one.call("equivalence_check", **CHECK))["job"]
        (workspace / "go").touch()
        record = await two.call("job_wait", job=job, wait_s=25)
        while record["state"] in {"queued", "running"}:
            record = await two.call("job_wait", job=job, wait_s=25)
        assert record["result"]["equivalent"] is True


async def test_a_fault_of_ours_is_told_by_its_log_id_only(workspace: Path) -> None:
    job = start_job(workspace, "bench_run", {}, function="flashrt.mcp_server.work:no_such_function")
    async with connected(workspace) as session:
        record = await session.call("job_wait", job=job, wait_s=25)
        while record["state"] in {"queued", "running"}:
            record = await session.call("job_wait", job=job, wait_s=25)
    assert record["state"] == "failed"
    assert record["error_detail"]["log"] in record["error"]
    assert "no_such_function" not in record["error"]
