"""Real servers for the tests: over stdio through the SDK's client, over stdio by hand, and over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.conftest import wait_until

DEADLINE_S = 60.0
INITIALIZE: dict[str, Any] = {
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}},
}
FINAL_STATES = {"done", "failed", "cancelled", "lost"}


def command(workspace: Path, *more: str) -> list[str]:
    """Return the command line of a server on `workspace`."""
    return [sys.executable, "-P", "-m", "flashrt.mcp_server", "serve", "--workspace", str(workspace), *more]


class Session:
    """Calls tools of one server through the SDK's client; a failed assertion shows what the server said."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return the structured result of a call that must succeed."""
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        assert result.structured_content is not None
        assert result.structured_content["ok"] is True
        return dict(result.structured_content)

    async def refused(self, tool: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
        """Return text and structured result of a call that must be refused."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error, result.structured_content
        assert result.structured_content is not None
        assert result.structured_content["ok"] is False
        text = "\n".join(getattr(block, "text", "") for block in result.content)
        assert result.structured_content["error"] == text
        return text, dict(result.structured_content)

    async def outcome(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a job tool and return the job's record as it ended, whether or not that was in time for the call."""
        result = await self.client.call_tool(tool, arguments)
        record = dict(result.structured_content or {})
        while record["state"] not in FINAL_STATES:
            record = await self.call("job_wait", job=record["job"], wait_s=25)
        return record

    async def finish(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a job tool that must succeed, wait for its end, and return the job's result."""
        record = await self.outcome(tool, **arguments)
        assert record["state"] == "done", record
        return dict(record["result"])


@contextlib.asynccontextmanager
async def connected(workspace: Path, **environment: str) -> AsyncIterator[Session]:
    """Start a server over stdio for as long as the context lasts."""
    line = command(workspace)
    parameters = StdioServerParameters(command=line[0], args=line[1:], env={**os.environ, **environment})
    with tempfile.TemporaryFile("w+") as log:
        async with Client(stdio_client(parameters, errlog=log), cache=None) as client:
            yield Session(client)


class RawServer:
    """A server over stdio, spoken to line by line, so that every byte of its standard output is seen."""

    def __init__(self, workspace: Path, **environment: str) -> None:
        self.lines: list[str] = []
        self._numbers = iter(range(1, 1_000_000))
        self._kept: dict[int, dict[str, Any]] = {}
        self._arrived: queue.Queue[str | None] = queue.Queue()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command(workspace), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.request(**INITIALIZE)
        self.notify("notifications/initialized")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send a notification."""
        self._send({"method": method, "params": dict(params or {})})

    def send(self, method: str, params: Mapping[str, Any]) -> int:
        """Send a request and return its number without waiting for the answer."""
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": dict(params)})
        return number

    def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer's result."""
        return self.answer(self.send(method, params))

    def answer(self, number: int) -> dict[str, Any]:
        """Return the result of the request with this number."""
        message = self.message(number)
        assert "result" in message, message
        return dict(message["result"])

    def message(self, number: int) -> dict[str, Any]:
        """Return the answer to the request with this number, be it a result or an error; others are kept meanwhile."""
        while number not in self._kept:
            try:
                line = self._arrived.get(timeout=DEADLINE_S)
            except queue.Empty:
                raise AssertionError(f"no answer to request {number} in {DEADLINE_S:.0f} s: {self.log()}") from None
            assert line is not None, f"the server ended: {self.log()}"
            message = json.loads(line)
            if message.get("id") is not None and "method" not in message:
                self._kept[message["id"]] = message
        return self._kept.pop(number)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return the structured result of a tool call."""
        result = self.request("tools/call", {"name": tool, "arguments": arguments})
        return dict(result["structuredContent"])

    def log(self) -> str:
        """Return what the server wrote to standard error."""
        self.errors.seek(0)
        return self.errors.read()

    def wait(self, timeout_s: float) -> int:
        """Return the exit status; fail when the server does not end in time."""
        status = self.process.wait(timeout_s)
        self._reader.join(DEADLINE_S)
        return status

    def close(self) -> None:
        """End the server whatever its state."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()


@contextlib.contextmanager
def raw_server(workspace: Path, **environment: str) -> Iterator[RawServer]:
    """Start a server over stdio, spoken to by hand."""
    server = RawServer(workspace, **environment)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def http_server(
    workspace: Path, *more: str, start: Sequence[str] | None = None, **environment: str
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server over HTTP, or the one that the command line `start` begins; gives its port and process."""
    with socket.socket() as held, tempfile.TemporaryFile("w+") as log:
        # Bound and not listened on: nobody else is given this port, and the server may have it as well.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        process = subprocess.Popen(
            [*(start or command(workspace)), "--http", f"127.0.0.1:{port}", *more], stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, text=True, env={**os.environ, **environment},
        )  # fmt: skip

        def answers() -> bool:
            assert process.poll() is None, "the server ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(answers, "the HTTP server answers", DEADLINE_S)
            yield port, process
        finally:
            process.kill()
            process.wait()


def store_state(workspace: Path) -> dict[str, str]:
    """Return what the workspace's state folder holds: every file by content, the database by its rows."""
    folder = workspace / ".flashrt"
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("flashrt.db"):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    with contextlib.closing(sqlite3.connect(folder / "flashrt.db")) as connection:
        found["rows"] = "\n".join(connection.iterdump())
    return found


def processes_of_job(job: str) -> list[int]:
    """Return the running processes that a job started, itself among them, wherever they moved to."""
    needle = f"FLASHRT_JOB={job}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process.pid)
        except OSError:
            continue
    return found


def maps_of(pid: int) -> str:
    """Return what a process has mapped into its memory."""
    return Path(f"/proc/{pid}/maps").read_text()
