"""A tool call from the command line: a server in this process answers it, progress stands on standard error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.errors import input_error

if TYPE_CHECKING:
    from flashrt.mcp_server.client import Answer

EXIT_INTERRUPTED = 130


def call_tool(tool: str, arguments: Mapping[str, Any], workspace: Path, command: str) -> Answer:
    """Return a tool's answer, a job's once it has ended; an interrupt ends this process, with status 130.

    Raises
    ------
    InputError
        The workspace is no folder.
    """
    import anyio

    if not workspace.is_dir():
        raise input_error("--workspace", "a folder that exists", f"'{workspace}'", "create it first")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        with _output_to_errors():
            return anyio.run(_call, tool, arguments, workspace)
    except KeyboardInterrupt:
        print(f"{command}: interrupted; a job that was started goes on: 'flashrt jobs' lists it, 'flashrt jobs cancel "
              "JOB' ends it", file=sys.stderr, flush=True)  # fmt: skip
        # The tool's thread may still wait, for a device for instance, and Python would wait for the thread.
        os._exit(EXIT_INTERRUPTED)


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Send what libraries write to standard output to standard error: the answer alone belongs there."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


async def _call(tool: str, arguments: Mapping[str, Any], workspace: Path) -> Answer:
    from flashrt.mcp_server.client import server_in_process

    async with server_in_process(workspace) as caller:
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
