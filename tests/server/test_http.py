"""The server over streamable HTTP: the same tools, closed to foreign hosts, and gone when told."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from mcp.client.client import Client

from tests.server.connection import Session, command, http_server, maps_of, raw_server
from tests.server.test_stdio import CHECK, END_S

pytestmark = pytest.mark.anyio


async def test_the_same_tools_answer_over_http(workspace: Path) -> None:
    with raw_server(workspace) as server:
        stdio = server.request("tools/list", {})["tools"]
    with http_server(workspace) as (port, process):
        seen: list[float] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            seen.append(progress)
            (workspace / "go").touch()

        async with Client(f"http://127.0.0.1:{port}/mcp", cache=None) as client:
            session = Session(client)
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == [tool["name"] for tool in stdio]
            assert [tool.input_schema for tool in tools] == [tool["inputSchema"] for tool in stdio]
            program = (await session.call("ir_build", document="program.yaml"))["program"]
            await session.call("analyze", program=program, profile="profile.yaml", deployment="split.yaml")
            text, _ = await session.refused("ir_build", documents="program.yaml")
            assert "did you mean 'document'" in text
            text, _ = await session.refused("ir_build", document="../program.yaml")
            assert "inside the workspace" in text
            result = await client.call_tool("equivalence_check", CHECK, progress_callback=note)
            record = dict(result.structured_content or {})
            while record["state"] in {"queued", "running"}:
                result = await client.call_tool(
                    "job_wait", {"job": record["job"], "wait_s": 25}, progress_callback=note
                )
                record = dict(result.structured_content or {})
            assert record["result"]["equivalent"] is True
            assert seen
        async with Client(f"http://127.0.0.1:{port}/mcp", cache=None) as client:
            assert (await Session(client).call("job_wait", job=record["job"]))["state"] == "done"
        assert "libtorch" not in maps_of(process.pid)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
async def test_the_server_ends_when_told_also_with_a_client_connected(workspace: Path, how: str) -> None:
    with http_server(workspace) as (port, process):
        async with Client(f"http://127.0.0.1:{port}/mcp", cache=None) as client:
            await client.list_tools()
            assert psutil.Process(process.pid).children(recursive=True) == []
            process.send_signal(getattr(signal, how))
            assert process.wait(END_S) == 0


def post(port: int, **headers: str) -> int:
    """Return the status of a request to list the tools."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
    accept = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    try:
        connection.request("POST", "/mcp", body, {**accept, **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def test_foreign_hosts_and_origins_are_refused(workspace: Path) -> None:
    with http_server(workspace) as (port, _):
        assert post(port, Host="evil.example") == 421
        assert post(port, Host=f"evil.example:{port}") == 421
        assert post(port, Origin="http://evil.example") == 403
        assert post(port, Origin=f"http://127.0.0.1:{port}") not in {403, 421}
        assert not (workspace / ".flashrt").exists()


def test_a_port_that_is_taken_is_refused_in_words(workspace: Path) -> None:
    with http_server(workspace) as (port, _):
        done = subprocess.run(
            command(workspace, "--http", f"127.0.0.1:{port}"), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert f"127.0.0.1:{port}" in done.stderr
        assert "choose another port" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_token_is_asked_for_where_there_is_one(workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with http_server(workspace, "--token-file", str(file), "--host-name", "flash.example") as (port, _):
        token = file.read_text().strip()
        assert len(token) >= 32
        assert file.stat().st_mode & 0o077 == 0
        assert post(port) == 401
        assert post(port, Authorization="Bearer guess") == 401
        assert post(port, Authorization=token) == 401
        right = {"Authorization": f"Bearer {token}"}
        assert post(port, **right) not in {401, 403, 421}
        assert post(port, Host="flash.example", **right) not in {401, 403, 421}
        assert post(port, Host="evil.example", **right) == 421
    with http_server(workspace, FLASHRT_TOKEN=token) as (port, _):
        assert post(port) == 401
        assert post(port, **right) not in {401, 403, 421}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--http", "0.0.0.0:8765"], ["--allow-remote", "--token-file", "FLASHRT_TOKEN"]),
        (["--http", "0.0.0.0:8765", "--allow-remote"], ["a token", "--token-file"]),
        (["--http", "127.0.0.1:8765", "--token-file", "/"], ["--token-file", "Is a directory"]),
        (["--http", "127.0.0.1:none"], ["HOST:PORT"]),
    ],
)
def test_an_open_door_is_refused_in_words(workspace: Path, more: list[str], words: list[str]) -> None:
    done = subprocess.run(command(workspace, *more), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_a_body_that_is_too_large_is_refused(workspace: Path) -> None:
    with http_server(workspace) as (port, process):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        head = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        connection.request("POST", "/mcp", b" " * (5 * 1024 * 1024), head)
        assert connection.getresponse().status == 413
        connection.close()
        assert post(port) not in {413, 500}
        assert process.poll() is None
