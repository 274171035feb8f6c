"""The options of all commands of ``flashrt``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrt import __version__
from flashrt.mcp_server.commands import COMMANDS, GPU, JOBS, VARIANTS, Command, add_command
from flashrt.mcp_server.elastic_command import add_elastic
from flashrt.mcp_server.plan_command import add_plan
from flashrt.mcp_server.serving_command import add_plan_serving

STATUS = """exit status: 0 done; 1 the answer is no (not equal, a run that is not valid, an audit with findings); 2
wrong usage; 5 a tool's error; 130 interrupted; 141 nobody reads the output any more"""


def build_parser(filled: Callable[[str], bool] = lambda name: True) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Parameters
    ----------
    filled
        Whether a command that stands for a tool has its options; finding them takes a moment.
    """
    parser = argparse.ArgumentParser(
        prog="flashrt",
        description="Deploy real-time multimodal applications on many devices, with an agent or by hand.",
        epilog=STATUS,
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

    for command in COMMANDS:
        made = add_command(commands, command, filled=filled(command.name))
        _add_workspace(made)
    _add_workspace(add_plan(commands))
    _add_workspace(add_plan_serving(commands))
    for action in add_elastic(commands):
        _add_workspace(action)
    variants = commands.add_parser("variants", help="the queue of variants: list (default), add, next, update")
    _add_group(variants, VARIANTS, filled=filled("variants"))
    jobs = commands.add_parser("jobs", help="long work: list (default), wait, cancel")
    _add_group(jobs, JOBS, filled=filled("jobs"))
    _add_gpu(commands, filled=filled("gpu"))
    dashboard = commands.add_parser("dashboard", help="a live page of this workspace on this machine, until Ctrl-C")
    dashboard.add_argument("--port", type=int, default=0, metavar="N", help="of 127.0.0.1 (default: a free one)")
    dashboard.add_argument("--no-open", action="store_true", help="print the address, and open no browser")
    _add_workspace(dashboard)
    repairs = commands.add_parser("repair", help="make a sound database of a workspace's damaged one, which is kept")
    _add_workspace(repairs)
    doctor = commands.add_parser("doctor", help="say what works on this machine and what to install")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    completion = commands.add_parser("completion", help="print a script that completes commands and options")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _add_group(parser: argparse.ArgumentParser, group: tuple[Command, ...], *, filled: bool) -> Any:
    """Add the actions of a command; without one of them it shows a list."""
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    _add_workspace(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for command in group:
        made = add_command(actions, command, filled=filled)
        _add_workspace(made, default=argparse.SUPPRESS)
    return actions


def _add_gpu(commands: Any, *, filled: bool) -> None:
    parser = commands.add_parser("gpu", help="who holds which device; acquire, renew and release leases; restore")
    parser.add_argument("--once", action="store_true", help="print the table once, instead of refreshing it")
    actions = _add_group(parser, GPU, filled=filled)
    restore = actions.add_parser("restore", help="look a quarantined device over, and let it be leased again")
    restore.add_argument("device", metavar="DEVICE", help="its UUID, or a name such as cuda:2")
    restore.add_argument("--accept-memory", action="store_true",
                         help="take the memory that is in use now for its baseline")  # fmt: skip


def _add_workspace(parser: argparse.ArgumentParser, default: Any = None) -> None:
    parser.add_argument("--workspace", type=Path, default=default or Path(),
                        help="folder to work in (default: the current one)")  # fmt: skip
