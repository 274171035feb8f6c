"""The MCP server: the table of tools over stdio or HTTP, with errors that an agent can act on."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolResult,
    Completion,
    CompletionArgument,
    CompletionContext,
    GetPromptResult,
    InputRequiredResult,
    PromptReference,
    Resource,
    ResourceTemplateReference,
    TextContent,
    ToolAnnotations,
)
from mcp_types import Tool as MCPTool
from pydantic import ValidationError

from flashrt import __version__
from flashrt.errors import Finding, FlashrtError, InputError, ResourceMissingError, listed, nearest
from flashrt.ir.documents import expectation
from flashrt.mcp_server.http import HttpOptions, serve_http
from flashrt.mcp_server.prompts import skill_prompts
from flashrt.mcp_server.resources import WorkspaceResources
from flashrt.mcp_server.results import output_schema
from flashrt.mcp_server.table import TABLE, Tool
from flashrt.mcp_server.tools import Tools, unknown_argument
from flashrt.mcp_server.workspace import Workspace

LOG = logging.getLogger("flashrt")
ANSWER_WITHIN_S = 2.0
POLL_S = 0.25
MAX_TEXT = 6000
REFUSALS_OF_THE_SYSTEM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE,
     errno.ENOMEM, errno.EIO, errno.ENAMETOOLONG}
)  # fmt: skip
"""What the operating system refuses through no fault of ours: no room, no right, no more descriptors."""

INSTRUCTIONS = """FlashRT deploys real-time multimodal applications on many devices, step by step, with proofs.
The loop: ir_build (write the application as a program document) -> ir_interpret with the reference as baseline
(prove it) -> ir_audit (check what it declares) -> profile_measure -> plan_deployment (the proved front of placements;
its documents run as they stand) -> analyze with seed_queue -> then for each variant: variant_next, implement it in its
folder, equivalence_check against the reference, bench_run, variant_update. Stop when variant_list says may_stop, and
report_write.
gpu_acquire before measuring, gpu_release at the end. Arguments take paths inside the workspace or ids that earlier
calls returned. Jobs answer with an id: call job_wait until the state is final. Every error says what to change and
what to call next."""


class JobEndedError(FlashrtError):
    """A job that failed or was lost while its starter still waited; carries the job's record."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(str(record.get("error") or f"job '{record['job']}' is {record['state']}"))
        self.record = record


class FlashrtServer(MCPServer[Any]):
    """An MCP server that refuses unknown arguments by name and returns every finding as text and as data.

    Parameters
    ----------
    abandons
        Whether a call that is cancelled leaves its thread to itself; only where the process ends with the call.
    """

    def __init__(self, workspace: Workspace, *, abandons: bool = False) -> None:
        super().__init__("flashrt", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
        self.flashrt_tools = Tools(workspace)
        self._abandons = abandons
        self.table = {tool.name: tool for tool in TABLE}
        self._resources = WorkspaceResources(workspace)
        self._resources.offer(self)
        for prompt in skill_prompts():
            self.add_prompt(prompt)
        self.completion()(self._complete)  # type: ignore[no-untyped-call]
        for tool in TABLE:
            self.add_tool(
                getattr(self.flashrt_tools, tool.name),
                name=tool.name,
                description=tool.description,
                structured_output=False,
                annotations=ToolAnnotations(
                    read_only_hint=tool.read_only,
                    destructive_hint=tool.destructive,
                    open_world_hint=False,
                ),
            )

    async def list_tools(self) -> list[MCPTool]:
        """List the tools, those of the table with the schema of what they return."""
        tools = await super().list_tools()
        return [
            tool.model_copy(
                update={
                    "input_schema": without_titles(tool.input_schema),
                    "output_schema": output_schema(self.table[tool.name]),
                }
            )
            if tool.name in self.table
            else tool
            for tool in tools
        ]

    async def list_resources(self) -> list[Resource]:
        """List what earlier calls made, the newest of each kind."""
        return [*await super().list_resources(), *await anyio.to_thread.run_sync(self._resources.listed)]

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None, context: Context[Any, Any] | None = None
    ) -> GetPromptResult | InputRequiredResult:
        """Return a prompt filled in; an unknown one is refused with the names that there are."""
        names = [prompt.name for prompt in await self.list_prompts()]
        if name not in names:
            raise MCPError(code=INVALID_PARAMS, message=f"prompt: expected one of {listed(names)}, got '{name}'")
        return await super().get_prompt(name, arguments, context)

    async def _complete(
        self,
        reference: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion:
        return await anyio.to_thread.run_sync(self._resources.complete, reference, argument)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult:
        """Call a tool; failures are results with text and findings, never protocol errors."""
        tool = self.table.get(name)
        if tool is None and self._tool_manager.get_tool(name) is not None:
            return await super().call_tool(name, arguments, context)  # type: ignore[return-value]
        if tool is None:
            finding = Finding(
                f"tool '{name}'", f"one of {listed(self.table, 30)}", "no such tool", "call one of them",
                rule="unknown-tool", nearest=nearest(name, self.table),
            )  # fmt: skip
            return failure(InputError(finding))
        try:
            result = await self._answer(tool, arguments, context)
        except FlashrtError as error:
            return failure(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in REFUSALS_OF_THE_SYSTEM:
                again = f"make room on the disk or give access, and call {name} again"
                return failure(ResourceMissingError(f"tool '{name}': the system refuses ({error}); {again}"))
            fault = uuid.uuid4().hex[:8]
            LOG.exception("fault %s in tool %s", fault, name)
            return failure(FlashrtError(f"tool '{name}' failed inside FlashRT; the server's log has it under {fault}"))
        return success(result)

    async def _answer(self, tool: Tool, arguments: dict[str, Any], context: Context[Any, Any] | None) -> dict[str, Any]:
        info = self._tool_manager.get_tool(tool.name)
        assert info is not None, "every row of the table is registered"
        valid = list(info.parameters.get("properties", {}))
        unknown = [unknown_argument(tool.name, name, valid) for name in arguments if name not in valid]
        try:
            checked = info.fn_metadata.validate_arguments(arguments)
        except ValidationError as error:
            raise InputError([*unknown, *_argument_findings(tool.name, error, info.parameters["properties"])]) from None
        if unknown:
            raise InputError(unknown)
        if tool.name == "job_wait":
            return await self._wait(str(checked["job"]), float(checked["wait_s"]), context)
        function = getattr(self.flashrt_tools, tool.name)
        found: dict[str, Any] = await anyio.to_thread.run_sync(
            lambda: function(**checked), abandon_on_cancel=self._abandons
        )
        # A job tool whose function has an answer already needs no job.
        if found or not tool.job:
            return found
        given = {name: value for name, value in checked.items() if value is not None}
        return await self._start_job(tool.name, given, context)

    async def _start_job(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None
    ) -> dict[str, Any]:
        from flashrt.mcp_server.jobs import start_job

        root = self.flashrt_tools.workspace.root
        job = await anyio.to_thread.run_sync(lambda: start_job(root, name, arguments))
        record = await self._wait(job, ANSWER_WITHIN_S, context)
        if record["state"] in {"failed", "lost"}:
            raise JobEndedError(record)
        return {**(record.get("result") or {}), **record}

    async def _wait(self, job: str, wait_s: float, context: Context[Any, Any] | None) -> dict[str, Any]:
        """Wait for a job in short steps, sending progress while the client waits."""
        from flashrt.mcp_server.jobs import wait_job

        root = self.flashrt_tools.workspace.root
        deadline = anyio.current_time() + wait_s
        said = -1.0
        while True:
            left = max(min(POLL_S, deadline - anyio.current_time()), 0.0)
            found = await anyio.to_thread.run_sync(lambda left=left: wait_job(root, job, left))  # type: ignore[misc]
            if context is not None and found.progress > said:
                said = found.progress
                await context.report_progress(found.progress, 1.0, found.message or found.state)
            if found.is_final or anyio.current_time() >= deadline:
                record: dict[str, Any] = found.as_dict()
                return record


def _argument_findings(tool: str, error: ValidationError, properties: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    findings = []
    for item in error.errors(include_url=False):
        name = ".".join(str(step) for step in item["loc"])
        got = "nothing" if item["type"] == "missing" else repr(item.get("input"))[:80]
        expected, near = expectation(item)
        if item["type"] == "missing":
            schema = properties.get(name, {})
            names = schema.get("enum")
            expected = f"one of {listed(names, 30)}" if names else str(schema.get("description", "a value"))
        findings.append(
            Finding(f"{tool}, argument '{name}'", expected, got, "correct it and call again", rule=item["type"],
                    nearest=near)
        )  # fmt: skip
    return findings


def without_titles(schema: Any) -> Any:
    """Return a schema without the titles that repeat each argument's name: they cost every agent's context."""
    if isinstance(schema, Mapping):
        return {key: without_titles(value) for key, value in schema.items()
                if key != "title" or not isinstance(value, str)}  # fmt: skip
    return [without_titles(one) for one in schema] if isinstance(schema, list) else schema


def success(result: Mapping[str, Any]) -> CallToolResult:
    """Return a result as data, and as compact text for clients that show only text."""
    record = json.loads(json.dumps({"ok": True, **result}, default=str))
    text = record["text"] if isinstance(record.get("text"), str) else json.dumps(record, separators=(",", ":"))
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "… (cut; the structured result is whole)"
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=record)


def failure(error: FlashrtError) -> CallToolResult:
    """Return an error as text the agent can act on, with its findings as data."""
    record: dict[str, Any] = {
        "ok": False,
        "error": str(error),
        "diagnostics": [finding.as_dict() for finding in error.findings],
    }
    if isinstance(error, ResourceMissingError):
        record |= {"holders": list(error.holders), "retry_after_s": error.retry_after_s}
    if isinstance(error, JobEndedError):
        record = {**(error.record.get("error_detail") or {}), **error.record, **record}
    return CallToolResult(content=[TextContent(type="text", text=str(error))], structured_content=record, is_error=True)


def serve(root: Path, http: HttpOptions | None = None) -> int:
    """Run the server until its input closes or a signal comes; return the exit status.

    Parameters
    ----------
    http
        Where to serve streamable HTTP; None: stdio.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    return run_server(FlashrtServer(Workspace(root)), http)


def run_server(server: MCPServer[Any], http: HttpOptions | None) -> int:
    """Run any server of this kind as `serve` does."""
    try:
        anyio.run(_serve_until_signal, server, http)
    except* BrokenPipeError:
        LOG.warning("the client went away without closing standard input")
    sys.stderr.flush()
    # A thread may still block on standard input; nothing of ours is left to clean up after this point.
    os._exit(0)


async def _serve_until_signal(server: MCPServer[Any], http: HttpOptions | None) -> None:
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    # Standard input cannot be interrupted, so waiting for its reader would outlast the two seconds
                    # that a client grants: jobs and keepers run in processes of their own and need no farewell.
                    os._exit(0)

        group.start_soon(watch)
        if http is None:
            await server.run_stdio_async()
        else:
            await serve_http(server, http)
        group.cancel_scope.cancel()
