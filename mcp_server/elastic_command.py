"""``flashrt elastic``: policies compared in the simulator, and a workload served by engine processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_elastic(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the command with its two actions; return their parsers."""
    elastic: argparse.ArgumentParser = commands.add_parser(
        "elastic", help="how many GPUs each video request has, step by step (DDiT): simulate policies, or serve"
    )
    actions = elastic.add_subparsers(dest="action", required=True, metavar="ACTION")
    simulate = actions.add_parser("simulate", help="compare the policies on a workload, in the simulator")
    simulate.add_argument("--plots", type=Path, metavar="FOLDER", help="write timeline, latencies and cost")
    serve = actions.add_parser(
        "serve", help="serve a workload by engine processes; prints the simulator's figures beside"
    )
    serve.add_argument("--engine", choices=("emulated", "tiny"), default="emulated",
                       help="emulated devices, or a tiny DiT on CPU cores (gloo) (default: emulated)")  # fmt: skip
    serve.add_argument("--speedup", type=float, default=1.0, help="emulated: so many times faster than life")
    for parser in (simulate, serve):
        parser.add_argument("profile", metavar="PROFILE", help="an elastic profile, or shipped:public, shipped:video")
        parser.add_argument("workload", metavar="WORKLOAD", help="an elastic workload, or shipped:workload-…")
        parser.add_argument("--devices", default="8", metavar="N|LEASE|NAMES", help="default: 8")
        parser.add_argument(
            "--island-size", type=int, help="devices that fast links join (default: all, or the lease's)"
        )
        parser.add_argument("--policy", help="one policy (simulate: default all; serve: elastic)")
        parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), metavar="FILE",
                            help="write all figures to FILE, or print them alone where none is named")  # fmt: skip
    return [simulate, serve]


def run_elastic(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    from rich.console import Console

    from flashrt.mcp_server.elastic import read_elastic_question
    from flashrt.mcp_server.workspace import Workspace
    from flashrt.planners.elastic import compare

    workspace = Workspace(options.workspace)
    devices = options.devices
    named = not devices.isdecimal() and not devices.startswith("lease")
    policy = options.policy or ("elastic" if options.action == "serve" else None)
    question, policies, notes = read_elastic_question(workspace, {
        "profile": options.profile, "workload": options.workload, "island_size": options.island_size,
        "devices": devices.split(",") if named else devices, "policy": policy,
    })  # fmt: skip
    console = Console()
    console.width = max(console.width, 120)
    record, simulations = compare(question, policies)
    record["notes"] += notes
    if options.json != Path("-"):
        console.print(policy_table(record))
    lines = [f"{name}: B = {one['best_degree']}, the VAE's degree {one['vae_degree']}"
             for name, one in record["classes"].items()]  # fmt: skip
    lines += [f"times: {record['provenance']} ({question.profile.name}); figures: predicted; {record['rate_per_s']:g} "
              f"requests a second; {record['rate_unit']}"]  # fmt: skip
    if options.action == "serve":
        served = _serve(question, policies[0], options)
        record["served"] = served
        lines += [f"served by {served['engine']} engines{' (EMULATED devices)' if served['emulated'] else ''}: "
                  f"mean {served['all']['mean_ms']:g} ms, p99 {served['all']['p99_ms']:g} ms"]  # fmt: skip
        if served["against_simulator"]:
            lines += [f"against the simulator: mean {served['against_simulator']['mean_ms']:+.2f} %, p99 "
                      f"{served['against_simulator']['p99_ms']:+.2f} %"]  # fmt: skip
        lines += served["notes"]
    elif options.plots is not None:
        from flashrt.planners.elastic.plots import write_plots

        paths = write_plots(
            record, simulations, f"{question.profile.name}, {question.num_devices} devices", options.plots
        )
        lines += [f"wrote {path}" for path in paths.values()]
    lines += [f"note: {note}" for note in record["notes"]]
    if options.json == Path("-"):
        print(json.dumps(record, indent=1))
        return 0
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
    return 0


def _serve(question: Any, policy: Any, options: argparse.Namespace) -> dict[str, Any]:
    from flashrt.planners.elastic.serve import serve_question

    return serve_question(question, policy, engine=options.engine, speedup=options.speedup)


def policy_table(record: Mapping[str, Any]) -> Any:
    """Return every policy's figures, of all requests and by class, as a table."""
    from rich.table import Table
    from rich.text import Text

    best = record.get("against_best_static", {})
    table = Table()
    table.add_column("policy")
    for name in ("class", "mean s", "p50 s", "p99 s", "queue s", "GPU s", "promotions", "cost", "p99 Δ", "mean Δ"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, policy in record["policies"].items():
        rows = {"all": policy["all"], **policy["classes"]}
        for place, (label, one) in enumerate(rows.items()):
            change = [
                f"{best[key]['change_percent'][name]:+.1f} %" if not place and name in best.get(key, {}).get(
                    "change_percent", {}) else "" for key in ("p99_ms", "mean_ms")
            ]  # fmt: skip
            cost = policy["cost_ratio"]
            table.add_row(
                Text("" if place else name), Text(label), *(f"{one[key] / 1e3:.2f}" for key in
                ("mean_ms", "p50_ms", "p99_ms", "queue_mean_ms")), f"{one['gpu_s']:.0f}", str(one["promotions"]),
                "" if place or cost is None else f"{cost:.3f}", *change,
            )  # fmt: skip
    return table
