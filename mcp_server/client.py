"""A real MCP client: calls tools of a server, over stdio or in this process, and waits for jobs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

FINAL_STATES = {"done", "failed", "cancelled", "lost"}
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Answer:
    """What a tool call returned.

    `record` is the structured result; a job's is merged into it once the job is done.
    """

    ok: bool
    text: str
    record: Mapping[str, Any]


class Caller:
    """Calls tools of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, arguments: Mapping[str, Any], progress: Progress | None = None) -> Answer:
        """Call a tool; where it starts a job, wait until that has ended.

        Returns
        -------
        The tool's answer, or the job's.
        """
        answer = await self._once(tool, arguments)
        job = answer.record.get("job")
        if not answer.ok or job is None or tool in {"job_wait", "job_cancel"}:
            return answer
        while answer.record.get("state") not in FINAL_STATES:
            if progress is not None:
                progress(float(answer.record.get("progress") or 0), str(answer.record.get("message") or ""))
            answer = await self._once("job_wait", {"job": job, "wait_s": 1.0 if progress else 20.0})
            if not answer.ok:
                return answer
        if answer.record["state"] != "done":
            text = str(answer.record.get("error") or f"job {job} is {answer.record['state']}")
            return Answer(False, text, {**answer.record, "ok": False, "error": text})
        return Answer(True, answer.text, {"job": job, **(answer.record.get("result") or {}), "ok": True})

    async def _once(self, tool: str, arguments: Mapping[str, Any]) -> Answer:
        result = await self._client.call_tool(tool, dict(arguments))
        text = "\n".join(getattr(block, "text", "") for block in result.content)
        return Answer(not result.is_error, text, result.structured_content or {})


@asynccontextmanager
async def started_server(workspace: Path) -> AsyncIterator[Caller]:
    """Start a server on `workspace` over stdio for as long as the context lasts."""
    import os

    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "flashrt.mcp_server", "serve", "--workspace", str(workspace)],
        env=dict(os.environ),
    )
    async with Client(stdio_client(parameters)) as client:
        yield Caller(client)


@asynccontextmanager
async def server_in_process(workspace: Path) -> AsyncIterator[Caller]:
    """Serve `workspace` in this process for as long as the context lasts: half the start of a process of its own."""
    from flashrt.mcp_server.server import FlashrtServer
    from flashrt.mcp_server.workspace import Workspace

    async with Client(FlashrtServer(Workspace(workspace), abandons=True)) as client:
        yield Caller(client)
