"""What there is, as text: the tools and their arguments, the jobs, the variants."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashrt.errors import input_error
from flashrt.mcp_server.server import FlashrtServer
from flashrt.mcp_server.workspace import Workspace

_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "minItems": "items: at least"}


def list_tools(workspace: Path) -> str:
    """Return every tool with its arguments, the required ones marked, and one line of description."""
    blocks = ["TOOL ARGUMENT* (required) ARGUMENT (optional); flashrt call TOOL --describe says what they mean"]
    for tool in _tools(workspace):
        required = tool.input_schema.get("required", [])
        names = [name + "*" * (name in required) for name in tool.input_schema["properties"]]
        blocks.append(f"{' '.join([tool.name, *names])}\n    {str(tool.description).partition('. ')[0].rstrip('.')}.")
    return "\n".join(blocks)


def describe_tool(name: str, workspace: Path) -> str:
    """Return a tool's description, and its arguments with type, default and meaning.

    Raises
    ------
    InputError
        No such tool.
    """
    tools = {tool.name: tool for tool in _tools(workspace)}
    if name not in tools:
        raise input_error(
            f"tool '{name}'", "a tool of flashrt call --list", "no such tool", "name one of them", rule="unknown-tool",
            valid=tools, name=name,
        )  # fmt: skip
    tool = tools[name]
    lines = [f"{name}: {tool.description}"]
    required = tool.input_schema.get("required", [])
    for argument, schema in tool.input_schema["properties"].items():
        facts = [_type(schema), *_bounds(schema)]
        if argument in required:
            facts.insert(0, "required")
        elif schema.get("default") is not None:
            facts.append(f"default {json.dumps(schema['default'])}")
        lines.append(f"  {argument} ({', '.join(facts)}) {schema.get('description', '')}".rstrip())
    return "\n".join(lines) + ("" if len(lines) > 1 else "\n  (no arguments)")


def _tools(workspace: Path) -> Iterable[Any]:
    import anyio

    return anyio.run(FlashrtServer(Workspace(workspace)).list_tools)


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


def _type(schema: Mapping[str, Any]) -> str:
    return " or ".join(
        "one of " + ", ".join(map(repr, option["enum"])) if "enum" in option else str(option.get("type", "any value"))
        for option in _options(schema)
    )


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    return [f"{words} {option[key]}" for option in _options(schema) for key, words in _BOUNDS.items() if key in option]


def run_variants(options: argparse.Namespace) -> int:
    """Carry out ``flashrt variants`` without an action, which is its ``list``."""
    from flashrt.mcp_server.commands import VARIANTS, run_tool_command

    return run_tool_command(argparse.Namespace(**vars(options), tool_command=VARIANTS[0], get=None))


def run_jobs(options: argparse.Namespace) -> int:
    """Print the workspace's jobs, the newest first."""
    from rich.console import Console

    from flashrt.mcp_server.jobs import list_jobs
    from flashrt.mcp_server.rendering import MIN_WIDTH, table

    jobs = list_jobs(Workspace(options.workspace).root)
    if options.json:
        print(json.dumps({"jobs": [job.as_dict() for job in jobs]}, indent=2, default=str))
        return 0
    rows = [
        (job.job, job.tool, job.state, f"{job.progress:.0%}", (job.started_at or "")[:19], job.error or job.message)
        for job in jobs
    ]
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table("", ("job", "tool", "state", "#progress", "began", "says"), rows))
    return 0
