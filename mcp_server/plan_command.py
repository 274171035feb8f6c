"""``flashrt plan``: the deployment search at the command line, with a table, plots and documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrt.errors import input_error

LIMITS = ("max_period_ms", "min_fps", "max_latency_ms", "memory_bytes")


def add_plan(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan", help="search the best deployments of a program, with proofs, plots and documents that run"
    )
    plan.add_argument("program", metavar="PROGRAM", help="the program document, or its id")
    plan.add_argument("profile", metavar="PROFILE", help="the profile document, or its id")
    plan.add_argument("--devices", required=True, metavar="N|LEASE|NAMES", help="how many, a lease, or cpu-0,cpu-1")
    plan.add_argument("--objective", choices=("front", "rate", "latency", "devices"), default="front")
    plan.add_argument("--time-limit-s", type=float, default=10.0, help="then the proof says the gap (default: 10)")
    plan.add_argument("--max-period-ms", type=float, help="only deployments that sustain this period")
    plan.add_argument("--min-fps", type=float, help="the same as a rate")
    plan.add_argument("--max-latency-ms", type=float, help="from a batch being ready to its last output")
    plan.add_argument("--memory-bytes", type=int, help="of each device (default: the lease's, else unlimited)")
    plan.add_argument("--islands", metavar="0,1:2,3", help="devices that fast links join, for groups to stay within")
    plan.add_argument("--place", action="append", default=[], metavar="OP=0,1", help="an operation's devices")
    plan.add_argument("--degree", action="append", default=[], metavar="OP=2", help="an operation's degree")
    plan.add_argument("--together", action="append", default=[], metavar="OP,OP", help="operations that share a group")
    plan.add_argument(
        "--apart", action="append", default=[], metavar="OP,OP", help="operations without a common device"
    )
    plan.add_argument("--overlap", choices=("disjoint", "aligned"), default="disjoint")
    plan.add_argument("--max-stagger", type=int, default=0, help="by how many batches a device's operations may differ")
    plan.add_argument("--split-states", action="store_true", help="users of a written state in several groups too")
    plan.add_argument("--min-gain", type=float, help="points that gain less are listed, not shown (default: 0.005)")
    plan.add_argument("--json", action="store_true", help="print the front with its deployments as JSON")
    plan.add_argument("--plots", type=Path, metavar="FOLDER", help="write the front and every point's Gantt chart")
    plan.add_argument("--out", type=Path, metavar="FOLDER", help="write every deployment, to a folder of the workspace")
    return plan


def run_plan(options: argparse.Namespace) -> int:
    """Search, print what was found, and write what was asked for; return the exit status."""
    from rich.console import Console

    from flashrt.mcp_server.planning import ask, draw, rank, read_question
    from flashrt.mcp_server.workspace import Workspace

    workspace = Workspace(options.workspace)
    if options.out is not None and not options.out.resolve().is_relative_to(workspace.root):
        raise input_error(
            f"option --out '{options.out}'", "a folder of the workspace, where the deployments find their program",
            "one outside of it", "name one inside it, such as 'plans'", rule="outside-workspace",
        )  # fmt: skip
    question = read_question(workspace, _arguments(options))
    console, errors = Console(), Console(stderr=True)
    with errors.status("searching") as status:
        result = ask(question, lambda _, message: status.update(message))
    if not options.json:
        console.print(_table(result.points))
    lines = [f"times: {result.provenance} ({question.profile_name}); figures: predicted; whole front: {result.proof}"]
    for number, point in enumerate(result.points, 1):
        lines += [f"{number}. {point.period_because}", f"   {point.latency_because}", f"   {point.one_more_device}"]
        lines += [f"   {note}" for note in point.notes]
    lines += [f"left out: {one}" for one in result.left_out]
    ranked = rank(question, result.points)
    lines += [f"under noise: {ranked}"] if isinstance(ranked, str) else [
        f"under noise: point {one['index'] + 1} is on the front in {one['on_front']:.0%} of draws" for one in ranked
    ]  # fmt: skip
    lines += [f"note: {note}" for note in (*question.notes, *result.notes)]
    if options.out is not None:
        from flashrt.analysis.search.pages import as_yaml

        options.out.mkdir(parents=True, exist_ok=True)
        for number, point in enumerate(result.points, 1):
            path = options.out / f"point-{number}.yaml"
            path.write_text(as_yaml(point.deployment))
            lines.append(f"wrote {path}")
    if options.plots is not None:
        paths, missing = draw(question, result, options.plots)
        lines += [f"wrote {paths['front_html']}", f"wrote {len(paths['gantt'])} Gantt charts beside it", *missing]
    if options.json:
        record = {"front": [point.as_dict() for point in result.points], "proof": result.proof.as_dict(),
                  "left_out": [one.as_dict() for one in result.left_out], "ranked": ranked,
                  "notes": [*question.notes, *result.notes]}  # fmt: skip
        print(json.dumps(record, indent=2, default=str))
        return 0
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _table(points: Sequence[Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("point", "period ms", "fps", "latency ms", "devices"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("proof")
    table.add_column("runs")
    for number, point in enumerate(points, 1):
        table.add_row(
            str(number), f"{point.period_ms:g}", "" if point.fps is None else f"{point.fps:.2f}",
            f"{point.latency_ms:g}", str(point.num_devices), Text(str(point.proof)), "yes" if point.runnable else "no",
        )  # fmt: skip
    return table


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    devices = options.devices
    named = not devices.isdecimal() and not devices.startswith("lease")
    given = {
        name: getattr(options, name)
        for name in ("program", "profile", "objective", "time_limit_s", "overlap", "max_stagger", "split_states",
                     "min_gain", *LIMITS)
    }  # fmt: skip
    pins = {
        "place": {name: _numbers(text, "--place") for name, text in map(_pair, options.place)},
        "degree": {name: _number(text, "--degree") for name, text in map(_pair, options.degree)},
        "together": [text.split(",") for text in options.together],
        "apart": [text.split(",") for text in options.apart],
    }
    islands = None
    if options.islands is not None:
        islands = [_numbers(text, "--islands") for text in options.islands.split(":")]
    return {**given, "devices": devices.split(",") if named else devices, "islands": islands, "pins": pins}


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.rpartition("=")
    if not separator or not name:
        raise input_error("options --place and --degree", "OPERATION=NUMBERS, such as vae=0,1", f"'{text}'",
                          "correct it and call again", rule="bad-pin")  # fmt: skip
    return name, value


def _numbers(text: str, option: str) -> list[int]:
    return [_number(one, option) for one in text.split(",")]


def _number(text: str, option: str) -> int:
    if not text.strip().isdecimal():
        raise input_error(f"option {option}", "whole numbers, separated by commas", f"'{text}'",
                          "correct it and call again", rule="bad-number")  # fmt: skip
    return int(text)
