"""The ``flashrt`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt import __version__
from flashrt.errors import FlashrtError
from flashrt.mcp_server.audit_command import add_audit
from flashrt.mcp_server.elastic_command import add_elastic
from flashrt.mcp_server.plan_command import add_plan
from flashrt.mcp_server.serving_command import add_plan_serving
from flashrt.mcp_server.trace_command import add_trace

if TYPE_CHECKING:
    from flashrt.mcp_server.client import Answer

EXIT_TOOL_ERROR = 5
EXIT_USAGE = 2
EXIT_PIPE = 141
"""What a shell reports of a process that wrote to a pipe that nobody reads."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="flashrt",
        description="Deploy real-time multimodal applications on many devices, with an agent or by hand.",
    )
    parser.add_argument("--version", action="version", version=f"flashrt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the MCP server on stdio, or over HTTP")
    serve.add_argument("--http", metavar="HOST:PORT", help="streamable HTTP instead of stdio; the path is /mcp")
    serve.add_argument(
        "--allow-remote", action="store_true",
        help="with --http: listen on a host that other machines reach; needs a token, since the tools run code",
    )  # fmt: skip
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="with --http: requests need this bearer token; a file that is not there is made with a new one "
        "(default: the environment's FLASHRT_TOKEN, or none on this machine alone)",
    )  # fmt: skip
    serve.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME[:PORT]",
        help="with --http: another name under which clients reach the server; others are refused (repeatable)",
    )
    _add_workspace(serve)

    demo = commands.add_parser("demo", help="run the whole loop on an application, through a real client and server")
    demo.add_argument("app", nargs="?", default="worldplay", help="the application (default: worldplay)")
    demo.add_argument("--json", metavar="FILE", type=Path, help="write the table to FILE")
    demo.add_argument("--workspace", type=Path, default=Path("demo"), help="folder to work in (default: ./demo)")
    demo.add_argument(
        "--real", action="store_true",
        help="the part with trained weights, of the packages that the extra 'real' installs (conversation)",
    )  # fmt: skip
    demo.add_argument("--quick", action="store_true", help="no published deployments on emulated devices")
    demo.add_argument("--all", action="store_true", help="longer runs with restarts, and all published deployments")

    init = commands.add_parser("init", help="lay out a small application that works, to begin with")
    init.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")

    call = commands.add_parser("call", help="call one tool of a server started for it; waits for jobs")
    call.add_argument("tool", nargs="?", help="its name")
    call.add_argument("arguments", nargs="?", default="{}", help="JSON object (default: {})")
    call.add_argument("--list", action="store_true", help="print every tool with its arguments, and call none")
    call.add_argument("--describe", action="store_true", help="print the tool's arguments with what they mean")
    _add_workspace(call)

    deploy = commands.add_parser("deploy", help="run a deployment document as a service until it is stopped")
    deploy.add_argument("document", metavar="DOCUMENT", help="the deployment document")
    deploy.add_argument("--socket", type=Path, metavar="PATH", help="where clients connect (default: in .flashrt)")
    deploy.add_argument("--devices", metavar="LEASE|NAMES", help="a lease, or cpu-0,cpu-1 (default: lease some)")
    deploy.add_argument("--inputs", metavar="FILE.py:FUNCTION", help="send these items and stop, instead of waiting")
    deploy.add_argument("--count", type=int, default=20, help="with --inputs: how many items (default: 20)")
    deploy.add_argument("--seed", type=int, default=0, help="with --inputs: the function's seed (default: 0)")
    deploy.add_argument("--period-ms", type=float, help="with --inputs: one item a period (default: at once)")
    deploy.add_argument("--trace", type=Path, metavar="FILE", help="write a Perfetto trace of what was done")
    _add_workspace(deploy)

    _add_workspace(add_audit(commands))
    _add_workspace(add_trace(commands))
    _add_workspace(add_plan(commands))
    _add_workspace(add_plan_serving(commands))
    for action in add_elastic(commands):
        _add_workspace(action)
    _add_gpu(commands)
    commands.add_parser("doctor", help="say what works on this machine and what to install")
    return parser


def _add_gpu(commands: Any) -> None:
    parser = commands.add_parser(
        "gpu", help="who holds which device; restore DEVICE looks a quarantined one over and lets it be leased again"
    )
    parser.add_argument("action", nargs="?", choices=["restore"], help="without: the table, refreshed until Ctrl-C")
    parser.add_argument("device", nargs="?", help="restore: its UUID, or a name such as cuda:2")
    parser.add_argument("--once", action="store_true", help="print the table once")
    parser.add_argument("--json", action="store_true", help="print what gpu_status answers, once")
    parser.add_argument(
        "--accept-memory", action="store_true", help="restore: take the memory that is in use now for its baseline"
    )


def _add_workspace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workspace", type=Path, default=Path(), help="folder to work in (default: the current one)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 2 for wrong usage, 5 for a tool error."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command == "call" and options.tool is None and not options.list:
        parser.error("call: name a TOOL; flashrt call --list prints them")
    if options.command == "gpu" and (options.action is None) != (options.device is None):
        parser.error("gpu restore: name a DEVICE; flashrt gpu --once shows which are quarantined")
    # A folder that happens to hold a `tools/` or `flashrt.py` must not be importable from by accident.
    sys.path[:] = [entry for entry in sys.path if entry not in {"", os.getcwd()} or entry in _site_paths()]
    try:
        if options.command == "serve":
            return _serve(options)
        if options.command == "call" and (options.list or options.describe):
            from flashrt.mcp_server.listing import describe_tool, list_tools

            print(list_tools(options.workspace) if options.list else describe_tool(options.tool, options.workspace))
            sys.stdout.flush()
            return 0
        if options.command == "call":
            return _call(options.tool, options.arguments, options.workspace)
        if options.command == "deploy":
            from flashrt.mcp_server.deploy import DeployOptions, run_deploy

            given = {key: value for key, value in vars(options).items() if key != "command"}
            return run_deploy(DeployOptions(**given))
        if options.command == "audit":
            from flashrt.mcp_server.audit_command import run_audit

            return run_audit(options)
        if options.command == "plan":
            from flashrt.mcp_server.plan_command import run_plan

            return run_plan(options)
        if options.command == "trace":
            from flashrt.mcp_server.trace_command import run_trace

            return run_trace(options)
        if options.command == "plan-serving":
            from flashrt.mcp_server.serving_command import run_plan_serving

            return run_plan_serving(options)
        if options.command == "elastic":
            from flashrt.mcp_server.elastic_command import run_elastic

            return run_elastic(options)
        if options.command == "gpu":
            from flashrt.mcp_server.gpu_command import run_gpu

            return run_gpu(options)
        if options.command == "init":
            from flashrt.mcp_server.init import run_init

            return run_init(options.folder)
        if options.command == "doctor":
            from flashrt.mcp_server.doctor import run_doctor

            return run_doctor()
        from flashrt.mcp_server.demo import run_demo

        return run_demo(
            options.app, options.workspace, options.json, quick=options.quick, real=options.real, whole=options.all
        )
    except FlashrtError as error:
        print(f"flashrt {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes at its end once more; that must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _site_paths() -> set[str]:
    import site

    return {*site.getsitepackages(), site.getusersitepackages()}


def _is_lost(error: BaseException) -> bool:
    """Return whether the connection to the server broke, and nothing else went wrong."""
    import anyio
    from mcp.shared.exceptions import MCPError

    if isinstance(error, BaseExceptionGroup):
        return all(_is_lost(inner) for inner in error.exceptions)
    lost = (MCPError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
    return isinstance(error, lost)


def _serve(options: argparse.Namespace) -> int:
    from flashrt.mcp_server.http import http_options
    from flashrt.mcp_server.server import serve

    if options.http is None:
        return serve(options.workspace)
    http = http_options(
        options.http, allow_remote=options.allow_remote, token_file=options.token_file, names=tuple(options.host_name)
    )
    return serve(options.workspace, http)


def _call(tool: str, text: str, workspace: Path) -> int:
    import anyio

    try:
        arguments = json.loads(text)
    except ValueError as error:
        print(f"flashrt call: the arguments are no JSON: {error}; write them as '{{\"name\": value}}'", file=sys.stderr)
        return EXIT_USAGE
    if not isinstance(arguments, dict):
        print("flashrt call: the arguments are no JSON object; write '{\"name\": value}'", file=sys.stderr)
        return EXIT_USAGE
    if not workspace.is_dir():
        print(f"flashrt call: --workspace: expected a folder that exists, got '{workspace}'; create it first",
              file=sys.stderr)  # fmt: skip
        return EXIT_USAGE

    async def run() -> Answer:
        from flashrt.mcp_server.client import started_server

        async with started_server(workspace) as caller:
            return await caller.call(tool, arguments)

    try:
        answer = anyio.run(run)
    except (Exception, ExceptionGroup) as error:
        if not _is_lost(error):
            raise
        print("flashrt call: the server ended before it answered; a job that it had started goes on: call job_wait "
              "with its id", file=sys.stderr)  # fmt: skip
        return EXIT_TOOL_ERROR
    print(json.dumps(dict(answer.record), indent=2))
    if not answer.ok:
        print(answer.text, file=sys.stderr)
    sys.stdout.flush()
    return 0 if answer.ok else EXIT_TOOL_ERROR
