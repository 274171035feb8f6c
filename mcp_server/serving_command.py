"""``flashrt plan-serving``: the serving planner at the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flashrt.errors import input_error


def add_plan_serving(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan-serving", help="plan executors and routes for many users of a multimodal model, with the highest goodput"
    )
    plan.add_argument("model", nargs="?", metavar="MODEL", help="the model document")
    plan.add_argument("workload", nargs="?", metavar="WORKLOAD", help="the workload document")
    plan.add_argument("profile", nargs="?", metavar="PROFILE", help="the serving profile")
    plan.add_argument("--devices", metavar="N|LEASE", help="how many GPUs, or a lease")
    plan.add_argument("--policy", choices=("total", "weighted", "fair", "least_gpus"), default="total")
    plan.add_argument("--goodput-per-s", type=float, help="with --policy least_gpus: the goodput that is wanted")
    plan.add_argument("--restriction", help="a baseline: monolithic, disaggregated, encoder_split, epd, or a+b,c")
    plan.add_argument("--routing", choices=("lp", "grid"), default="lp", help="grid: steps of 0.1, as in the paper")
    plan.add_argument("--alpha", type=float, default=0.95, help="share of the largest rate that is offered")
    plan.add_argument("--time-limit-s", type=float, default=7.0)
    plan.add_argument("--emulate-requests", type=int, default=0, help="run the plan on emulated executors with so many")
    plan.add_argument("--speedup", type=float, default=1.0, help="with --emulate-requests: faster than life")
    plan.add_argument("--cluster", choices=("ray",), help="with --emulate-requests: on the nodes at RAY_ADDRESS")
    plan.add_argument(
        "--measured", type=Path, metavar="FILE", help="make a serving profile of measured profiles, and end"
    )
    plan.add_argument("--out", type=Path, metavar="FOLDER", help="write deployment, pictures and JSON")
    plan.add_argument("--json", action="store_true", help="print the answer as JSON")
    plan.add_argument("--examples", type=Path, metavar="FOLDER", help="copy the documents that FlashRT ships, and end")
    return plan


def run_plan_serving(options: argparse.Namespace) -> int:
    """Plan, print the answer, and write what was asked for; return the exit status."""
    from rich.console import Console
    from rich.table import Table

    from flashrt.mcp_server import serving
    from flashrt.mcp_server.workspace import Workspace

    console, errors = Console(), Console(stderr=True)
    if options.examples is not None:
        for name in serving.copy_examples(options.examples):
            console.print(f"wrote {options.examples / name}", highlight=False, soft_wrap=True)
        return 0
    if options.measured is not None:
        path = serving.write_measured(options.measured, options.out or Path())
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        return 0
    missing = [name for name in ("model", "workload", "profile", "devices") if getattr(options, name) is None]
    if missing:
        raise input_error(
            "command plan-serving", "MODEL WORKLOAD PROFILE --devices N", f"no {', no '.join(missing)}",
            "name them; --examples FOLDER copies documents to begin with", rule="missing-argument",
        )  # fmt: skip
    arguments = {
        name: getattr(options, name)
        for name in ("model", "workload", "profile", "devices", "policy", "goodput_per_s", "routing", "alpha",
                     "time_limit_s", "emulate_requests", "speedup", "cluster")
    }  # fmt: skip
    restriction = options.restriction
    if restriction and ("," in restriction or "+" in restriction):
        restriction = [group.split("+") for group in restriction.split(",")]
    question = serving.read_question(Workspace(options.workspace), {**arguments, "restriction": restriction})
    with errors.status("planning") as status:
        answer = serving.ask(question, lambda _, text: status.update(text))
    folder = options.out
    if folder is not None:
        record, paths = serving.write_answer(answer, folder)
        paths["json"] = folder / "plan.json"
        paths["json"].write_text(serving.as_text(record))
    else:
        from flashrt.planners.serving.record import answer_record

        record, paths = answer_record(answer), {}
    table = Table("node", "executors", "load")
    for row in serving.table_rows(record):
        table.add_row(*row)
    if not options.json:
        console.print(table)
    plan = record["plan"]
    lines = [
        f"goodput {plan['goodput_per_s']:.4g} ± {plan['goodput_error_95']:.2g} requests/s "
        f"of {plan['offered_per_s']:.4g} offered, on {plan['gpus']} GPUs (predicted; profile {record['provenance']})",
        f"bottleneck: {record['why']['bottleneck']}; one more GPU: {record['why']['next_gpu']['text']}",
        *(one["text"] for one in record["why"]["merges"]),
        *(f"note: {note}" for note in record["notes"]),
    ]
    if question.emulate_requests:
        with errors.status("running on emulated executors"):
            shown = serving.run_plan(question, answer)
        record["emulation"] = shown
        lines.append(
            f"EMULATED: {shown['goodput_per_s']:.4g} requests/s good, {shown['predicted_goodput_per_s']:.4g} predicted "
            f"for the same {shown['requests']} requests, {shown['executors']} executors"
        )
    if options.json:
        print(serving.as_text(record))
        return 0
    for line in [*lines, *(f"wrote {path}" for path in paths.values())]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
