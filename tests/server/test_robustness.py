"""What goes wrong around a server: hostile paths, a full disk, a damaged database, clients that vanish."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import wait_until
from tests.server.connection import (
    INITIALIZE,
    RawServer,
    command,
    http_server,
    processes_of_job,
    raw_server,
    store_state,
)

SECRET = "of-the-neighbour"
# A valid value of every argument that is text, so that the argument under test is the only one that is wrong.
VALID: dict[str, Any] = {
    "document": "program.yaml", "program": "program.yaml", "profile": "profile.yaml", "deployment": "split.yaml",
    "system": "reference.py:serve", "baseline": "reference.py:serve", "candidate": "variants.py:same",
    "inputs": "inputs.py:batches", "systems": ["reference.py:serve", "variants.py:same"], "trace": "moments.csv",
    "model": "model.yaml", "workload": "workload.yaml", "devices": 2, "runs": ["run-1", "run-2"], "count": 1,
    "holder": "me", "lease": "lease-1", "ttl_s": 5, "job": "job-1", "variant": "var-0001", "state": "removed",
    "hypothesis": "h", "transformation": "t", "bottleneck": "b", "legality": "l",
}  # fmt: skip
NEEDS = {"trace": {"scenario": "trace"}, "deployment": {"profile": "profile.yaml"}}


def _is_text(schema: dict[str, Any]) -> bool:
    return (
        schema.get("type") == "string"
        or any(_is_text(one) for one in schema.get("anyOf", []))
        or (schema.get("type") == "array" and _is_text(schema.get("items", {})))
    )


def text_arguments(tools: list[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (tool, argument, the other arguments) of everything in the schemas that takes free text."""
    for tool in tools:
        schema = tool["inputSchema"]
        for name, part in schema["properties"].items():
            if not _is_text(part) or "enum" in part:
                continue
            others = {one: VALID[one] for one in schema.get("required", []) if one != name}
            if tool["name"] == "bench_compare":
                others |= {} if name == "runs" else {"systems": VALID["systems"], "inputs": VALID["inputs"]}
            yield tool["name"], name, {**others, **NEEDS.get(name, {})}


def hostile_paths(workspace: Path, outside: Path) -> list[str]:
    """Return paths that lead out of a workspace, or to what is no file."""
    suffixes = (".yaml", ".py", ".csv", ".frec")
    paths = []
    for suffix in suffixes:
        secret = outside / f"secret{suffix}"
        secret.write_text(f"# {SECRET}\nraise SystemExit(open(__file__ + '.ran', 'w'))\n")
        for name, target in (("link", secret), ("chain", workspace / f"link{suffix}"), ("zero", Path("/dev/zero"))):
            (workspace / f"{name}{suffix}").symlink_to(target)
        os.mkfifo(workspace / f"pipe{suffix}")
        named = os.path.relpath(secret, workspace)
        paths += [f"link{suffix}", f"chain{suffix}", f"zero{suffix}", f"pipe{suffix}", named, str(secret),
                  f"away/secret{suffix}", f"./x/../{named}"]  # fmt: skip
    (workspace / "away").symlink_to(outside)
    return [*paths, "/dev/zero", "/proc/self/mem", f"/proc/self/cwd/{named}", "/etc/passwd", "/proc/self/environ"]


def test_no_argument_leads_out_of_the_workspace(workspace: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (workspace / "moments.csv").write_text("0.0\n0.1\n")
    hostile = hostile_paths(workspace, outside)
    problems = []
    with raw_server(workspace) as server:
        server.call("ir_build", document="program.yaml")
        tools = server.request("tools/list", {})["tools"]
        before = {path: path.read_bytes() for path in outside.iterdir()}
        sent: list[tuple[int, str, str, Any]] = []
        seen = set()
        for tool, name, others in text_arguments(tools):
            wanted = VALID.get(name)
            # What takes the name of a file that is not there is words, and reads none.
            absent: Any = ["no-such.py:serve"] * 2 if isinstance(wanted, list) else "no-such.py:serve"
            if name != "out" and server.call(tool, **{**others, name: absent})["ok"]:
                continue
            seen.add((tool, name))
            for path in hostile:
                value: Any = f"{path}:serve" if path.endswith(".py") and name != "out" else path
                if isinstance(wanted, list):
                    value = [value, value]
                arguments = {"name": tool, "arguments": {**others, name: value}}
                sent.append((server.send("tools/call", arguments), tool, name, value))
                if len(sent) >= 8:
                    problems += _look(server, *sent.pop(0))
        for one in sent:
            problems += _look(server, *one)
        for lease in server.call("gpu_status")["leases"]:
            server.call("gpu_release", lease=lease["lease"])
        assert not problems, "\n".join(problems[:10])
        assert {("ir_build", "document"), ("bench_run", "trace"), ("analyze", "profile")} <= seen
        assert {path: path.read_bytes() for path in outside.iterdir()} == before, "nothing outside was run or written"
        assert not list((workspace / ".flashrt" / "jobs").glob("*"))
        assert psutil.Process(server.process.pid).memory_info().rss < 500 * 2**20, "no device was read"


def finished(server: RawServer, job: str) -> dict[str, Any]:
    """Return a job's record when it has come to its end, however many calls that takes."""
    record = server.call("job_wait", job=job, wait_s=25)
    while record["state"] in {"queued", "running"}:
        record = server.call("job_wait", job=job, wait_s=25)
    return record


def _look(server: RawServer, number: int, tool: str, name: str, value: Any) -> list[str]:
    message = server.message(number)
    text = json.dumps(message)
    call = f"{tool}, {name}={value}"
    if "error" in message or SECRET in text or "failed inside FlashRT" in text or "root:" in text:
        return [f"{call}: {text[:1000]}"]
    if message["result"]["structuredContent"]["ok"]:
        return [f"{call}: was not refused"]
    return []


@pytest.mark.parametrize("name", ["loop", "zero\x00", "away/secret"])
def test_documents_that_name_no_file_of_the_workspace_are_refused(workspace: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.py").write_text("raise SystemExit\n")
    (tmp_path / "secret.yaml").write_bytes((workspace / "program.yaml").read_bytes())
    (workspace / "away").symlink_to(tmp_path)
    for suffix in (".py", ".yaml"):
        (workspace / f"loop{suffix}").symlink_to(f"loop{suffix}")
    program, deployment = (
        json.loads(json.dumps(yaml.safe_load((workspace / one).read_text()))) for one in ("program.yaml", "split.yaml")
    )
    (workspace / "bad-program.json").write_text(json.dumps({**program, "ops": f"{name}.py:load"}))
    (workspace / "bad-deployment.json").write_text(json.dumps({**deployment, "program": f"{name}.yaml"}))
    with raw_server(workspace) as server:
        inputs = {"inputs": "inputs.py:batches", "baseline": "reference.py:serve"}
        for tool, arguments in (
            ("ir_build", {"document": "bad-program.json"}),
            ("equivalence_check", {"candidate": "bad-deployment.json", **inputs}),
            ("ir_show", {"program": "loop.yaml"}),
            ("plan_deployment", {"program": "bad-program.json", "profile": "loop.yaml", "devices": 2}),
        ):
            record = server.call(tool, **arguments)
            if "job" in record:
                record = finished(server, record["job"])
            assert record.get("state", "failed") == "failed", (tool, record)
            assert "failed inside" not in record["error"], (tool, record)
            assert (record.get("error_detail") or {}).get("kind") != "fault", (tool, record)


# A disk without room: the kernel refuses writes beyond a limit of the process.


def limit_files(server: RawServer, limit_bytes: int) -> None:
    """Let the server's files grow no further than this from now on."""
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


WRITING: list[tuple[str, dict[str, Any]]] = [
    ("ir_build", {"document": "program.yaml"}),
    ("ir_show", {"program": "program.yaml", "view": "svg"}),
    ("analyze", {"program": "program.yaml", "seed_queue": True}),
    ("variant_add", {"hypothesis": "h", "transformation": "t", "bottleneck": "b", "legality": "l"}),
    ("ir_interpret", {"program": "program.yaml", "inputs": "inputs.py:batches", "count": 1}),
]


def test_a_disk_without_room_is_told_and_nothing_is_half_written(workspace: Path) -> None:
    with raw_server(workspace) as server:
        server.call("ir_build", document="program.yaml")
        server.call("variant_list")
        before = store_state(workspace)
        limit_files(server, 0)
        for tool, arguments in WRITING:
            record = server.call(tool, **arguments)
            assert record["ok"] is False, (tool, record)
            assert "failed inside FlashRT" not in record["error"], (tool, record)
            assert "room" in record["error"] or "space" in record["error"], (tool, record)
            assert store_state(workspace) == before, tool
        # What needs no database still does; SQLite itself needs a little room to read one.
        assert "failed inside" not in str(server.call("variant_list").get("error"))
        assert server.call("ir_show", program="program.yaml")["ok"] is True
        limit_files(server, resource.RLIM_INFINITY)
        for tool, arguments in WRITING[:-1]:
            assert server.call(tool, **arguments)["ok"] is True, tool
        record = server.call(*WRITING[-1][:1], **WRITING[-1][1])
        assert finished(server, record["job"])["state"] == "done"


def test_a_damaged_database_is_repaired_when_asked_and_the_same_server_goes_on(workspace: Path) -> None:
    database = workspace / ".flashrt" / "flashrt.db"
    with raw_server(workspace) as server:
        program = server.call("ir_build", document="program.yaml")["program"]
        damaged = b"damaged" + database.read_bytes()[7:]
        for suffix in ("-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        database.write_bytes(damaged)
        refused = server.call("variant_list")
        assert refused["ok"] is False
        assert "flashrt repair --workspace" in refused["error"]
        assert database.read_bytes() == damaged
        line = [sys.executable, "-P", "-m", "flashrt.mcp_server", "repair", "--workspace", str(workspace)]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        assert "flashrt-damaged-1.db" in said
        assert database.with_name("flashrt-damaged-1.db").read_bytes() == damaged
        assert server.call("variant_list")["ok"] is True
        assert server.call("ir_build", document="program.yaml")["program"] == program
        # Somebody may also just move it away.
        database.rename(workspace / "moved.db")
        assert server.call("variant_list")["ok"] is True


CLIENT = """
import json, subprocess, sys
server = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def send(**message):
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
    server.stdin.flush()
send(id=1, **json.loads(sys.argv[1]))
server.stdout.readline()
send(method="notifications/initialized")
send(id=2, method="tools/call", params={"name": "ir_interpret", "arguments": {
    "program": "program.yaml", "inputs": "inputs.py:batches", "baseline": "gated.py:serve", "count": 1}})
send(id=3, method="tools/call", params={"name": "gpu_status", "arguments": {}})
print(server.pid, flush=True)
sys.stdin.readline()
"""


def test_a_client_that_is_killed_in_mid_call_takes_its_server_along_and_not_its_job(workspace: Path) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, json.dumps(INITIALIZE), *command(workspace)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    server = int(client.stdout.readline())
    wait_until((workspace / "pid").exists, "the system that waits runs")
    client.send_signal(signal.SIGKILL)
    client.communicate()
    wait_until(lambda: not psutil.pid_exists(server), "the server has ended")
    (workspace / "go").write_text("")
    with raw_server(workspace) as other:
        jobs = [
            one["name"] for one in other.request("resources/list", {})["resources"] if one["uri"].startswith("job:")
        ]
        assert len(jobs) == 1
        record = finished(other, jobs[0])
        assert record["state"] == "done", record
        wait_until(lambda: not processes_of_job(jobs[0]), "the job's processes have ended")


def test_dropped_connections_leave_nothing_in_an_http_server(workspace: Path) -> None:
    body = {"jsonrpc": "2.0", "id": 1, **INITIALIZE}
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    call = {"program": "program.yaml", "inputs": "inputs.py:batches", "baseline": "gated.py:serve", "count": 1}
    with http_server(workspace) as (port, process):

        def ask(message: dict[str, Any], session: str | None, *, wait: bool) -> str | None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            more = {} if session is None else {"Mcp-Session-Id": session}
            connection.request("POST", "/mcp", json.dumps(message), {**headers, **more})
            found = None
            if wait:
                answer = connection.getresponse()
                found = answer.headers.get("Mcp-Session-Id")
                answer.read()
            elif connection.sock is not None:
                # Sent whole, and then reset instead of closed: as when a client's machine is gone.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()
            return found

        session = ask(body, None, wait=True)
        ask({"jsonrpc": "2.0", "method": "notifications/initialized"}, session, wait=True)
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
        ask(listing, session, wait=True)
        server = psutil.Process(process.pid)
        sockets = len(server.net_connections())
        start = {
            "jsonrpc": "2.0",
            "id": 3,
            "method": "tools/call",
            "params": {"name": "ir_interpret", "arguments": call},
        }
        ask(start, session, wait=False)
        wait_until((workspace / "pid").exists, "the call that nobody waits for has begun")
        for number in range(4, 24):
            waiting = {"name": "job_wait", "arguments": {"job": "job-1", "wait_s": 25}}
            ask({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": waiting}, session, wait=False)
        wait_until(lambda: len(server.net_connections()) <= sockets, "the server has closed its ends")
        ask(listing, session, wait=True)
        (workspace / "go").write_text("")
        with raw_server(workspace) as other:
            found = other.request("resources/list", {})["resources"]
            job = next(one["name"] for one in found if one["uri"].startswith("job:"))
            assert finished(other, job)["state"] == "done"
        assert process.poll() is None
