"""A tool call from the command line: a server is started for it, progress stands on standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.errors import input_error

if TYPE_CHECKING:
    from flashrt.mcp_server.client import Answer


def call_tool(tool: str, arguments: Mapping[str, Any], workspace: Path, command: str) -> Answer | None:
    """Return a tool's answer, a job's once it has ended; None, and a sentence on standard error, where the server died.

    Raises
    ------
    InputError
        The workspace is no folder.
    """
    import anyio

    if not workspace.is_dir():
        raise input_error("--workspace", "a folder that exists", f"'{workspace}'", "create it first")
    try:
        return anyio.run(_call, tool, arguments, workspace)
    except KeyboardInterrupt:
        print(f"{command}: interrupted; a job that was started goes on: 'flashrt jobs' lists it, 'flashrt jobs cancel "
              "JOB' ends it", file=sys.stderr)  # fmt: skip
        raise
    except (Exception, ExceptionGroup) as error:
        if not is_lost(error):
            raise
        print(f"{command}: the server ended before it answered; a job that it had started goes on: call job_wait with "
              "its id", file=sys.stderr)  # fmt: skip
        return None


async def _call(tool: str, arguments: Mapping[str, Any], workspace: Path) -> Answer:
    from flashrt.mcp_server.client import started_server

    async with started_server(workspace) as caller:
        if not sys.stderr.isatty():
            return await caller.call(tool, arguments)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(tool, total=1.0)

            def report(share: float, message: str) -> None:
                bar.update(task, completed=share, description=message[:60] or tool)

            return await caller.call(tool, arguments, report)


def is_lost(error: BaseException) -> bool:
    """Return whether the connection to the server broke, and nothing else went wrong."""
    import anyio
    from mcp.shared.exceptions import MCPError

    if isinstance(error, BaseExceptionGroup):
        return all(is_lost(inner) for inner in error.exceptions)
    lost = (MCPError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
    return isinstance(error, lost)
