"""The ``flashrt`` command."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flashrt.errors import FlashrtError
from flashrt.mcp_server.calling import EXIT_INTERRUPTED
from flashrt.mcp_server.cli_parser import build_parser
from flashrt.mcp_server.commands import EXIT_TOOL_ERROR

EXIT_USAGE = 2
EXIT_PIPE = 141
"""What a shell reports of a process that wrote to a pipe that nobody reads."""
# Command -> the function that carries it out: f(options) -> exit status. Those that stand for a tool have one of their
# own, see `flashrt.mcp_server.commands`.
RUN = {
    "serve": "flashrt.mcp_server.cli:run_serve",
    "call": "flashrt.mcp_server.cli:run_call",
    "demo": "flashrt.mcp_server.demo:run_demo_command",
    "init": "flashrt.mcp_server.init:run_init_command",
    "deploy": "flashrt.mcp_server.deploy:run_deploy_command",
    "plan": "flashrt.mcp_server.plan_command:run_plan",
    "plan-serving": "flashrt.mcp_server.serving_command:run_plan_serving",
    "elastic": "flashrt.mcp_server.elastic_command:run_elastic",
    "gpu": "flashrt.mcp_server.gpu_command:run_gpu",
    "variants": "flashrt.mcp_server.listing:run_variants",
    "jobs": "flashrt.mcp_server.listing:run_jobs",
    "dashboard": "flashrt.mcp_server.dashboard:run_dashboard",
    "doctor": "flashrt.mcp_server.doctor:run_doctor",
    "repair": "flashrt.mcp_server.cli:run_repair",
    "completion": "flashrt.mcp_server.cli:run_completion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 for a no, 2 for wrong usage, 5 for a tool error, 130 interrupted."""
    line = list(sys.argv[1:] if argv is None else argv)
    named = next((word for word in line if not word.startswith("-")), "")
    parser = build_parser(lambda name: name == named)
    options = parser.parse_args(line)
    if options.command == "call" and options.tool is None and not options.list:
        parser.error("call: name a TOOL; flashrt call --list prints them")
    # A folder that happens to hold a `tools/` or `flashrt.py` must not be importable from by accident.
    sys.path[:] = [entry for entry in sys.path if entry not in {"", os.getcwd()} or entry in _site_paths()]
    try:
        place = "flashrt.mcp_server.commands:run_tool_command" if "tool_command" in options else RUN[options.command]
        module, _, function = place.partition(":")
        status: int = getattr(importlib.import_module(module), function)(options)
        return status
    except FlashrtError as error:
        print(f"flashrt {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes at its end once more; that must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _site_paths() -> set[str]:
    import site

    return {*site.getsitepackages(), site.getusersitepackages()}


def run_serve(options: argparse.Namespace) -> int:
    """Run the MCP server until its input closes or a signal comes."""
    from flashrt.mcp_server.http import http_options
    from flashrt.mcp_server.server import serve

    if options.http is None:
        return serve(options.workspace)
    http = http_options(
        options.http, allow_remote=options.allow_remote, token_file=options.token_file, names=tuple(options.host_name)
    )
    return serve(options.workspace, http)


def run_call(options: argparse.Namespace) -> int:
    """Call one tool and print its structured result, or print what tools there are."""
    from flashrt.mcp_server.calling import call_tool

    if options.list or options.describe:
        from flashrt.mcp_server.listing import describe_tool, list_tools

        print(list_tools(options.workspace) if options.list else describe_tool(options.tool, options.workspace))
        sys.stdout.flush()
        return 0
    try:
        arguments = json.loads(options.arguments)
    except ValueError as error:
        print(f"flashrt call: the arguments are no JSON: {error}; write them as '{{\"name\": value}}'", file=sys.stderr)
        return EXIT_USAGE
    if not isinstance(arguments, dict):
        print("flashrt call: the arguments are no JSON object; write '{\"name\": value}'", file=sys.stderr)
        return EXIT_USAGE
    answer = call_tool(options.tool, arguments, options.workspace, "flashrt call")
    print(json.dumps(dict(answer.record), indent=2))
    if not answer.ok:
        print(answer.text, file=sys.stderr)
    sys.stdout.flush()
    return 0 if answer.ok else EXIT_TOOL_ERROR


def run_repair(options: argparse.Namespace) -> int:
    """Keep a damaged database as a backup, make a new one of what can be read, and say what was found."""
    from flashrt.variants.repair import repair

    try:
        print(repair(options.workspace))
    except OSError as error:
        print(f"flashrt repair: {error}; make room or give access, and call again", file=sys.stderr)
        return EXIT_USAGE
    return 0


def run_completion(options: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    import shtab

    parser = build_parser()
    waiting = [parser]
    while waiting:
        for action in waiting.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
            elif action.dest in {"workspace", "plots", "folder"}:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.choices is None and (action.type is Path or not action.option_strings):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell))
    return 0
