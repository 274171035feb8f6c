"""``flashrt trace``: a draft program from a reference, with a table of its stages and the questions it leaves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashrt.errors import input_error


def add_trace(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    trace: argparse.ArgumentParser = commands.add_parser(
        "trace", help="draft a program from a reference by running it: stages, states, loops, times, and questions"
    )
    trace.add_argument("system", metavar="SYSTEM", help="the reference, file.py:function")
    trace.add_argument("inputs", metavar="INPUTS", help="inputs.py:function, or a recording")
    trace.add_argument("--name", help="the program's name (default: that of the reference's folder)")
    trace.add_argument("--out", metavar="FOLDER", help="where the draft goes (default: a new folder in traced/)")
    trace.add_argument("--count", type=int, default=8, help="batches to run (default: 8)")
    trace.add_argument("--depth", type=int, default=2, help="levels of calls that may be opened (default: 2)")
    trace.add_argument("--devices", metavar="LEASE|NAMES", help="a lease, or cuda:0 (default: the CPU)")
    trace.add_argument("--config", metavar="JSON", default="{}", help="the application's options")
    trace.add_argument("--timeout-s", type=float, default=600.0, help="then the trace is ended (default: 600)")
    trace.add_argument("--json", action="store_true", help="print all that was found as JSON")
    return trace


def run_trace(options: argparse.Namespace) -> int:
    """Trace, and print what was drafted; return the exit status."""
    from rich.console import Console

    from flashrt.mcp_server.tools import Tools
    from flashrt.mcp_server.work import ir_trace
    from flashrt.mcp_server.workspace import Workspace
    from flashrt.variants.store import new_id

    try:
        config = json.loads(options.config)
    except ValueError as error:
        raise input_error(
            "option --config", "a JSON object", str(error), "write it as '{\"name\": value}'", rule="bad-json"
        ) from None
    workspace = Workspace(options.workspace)
    devices = options.devices
    if devices and not devices.startswith("lease"):
        devices = devices.split(",")
    arguments = {
        "system": options.system, "inputs": options.inputs, "name": options.name, "out": options.out,
        "count": options.count, "depth": options.depth, "devices": devices, "config": config,
        "timeout_s": options.timeout_s,
    }  # fmt: skip
    Tools(workspace).ir_trace(**arguments)
    folder = workspace.folder("traces", new_id("trace"))
    with Console(stderr=True).status("tracing") as status:
        record = ir_trace(workspace.root, arguments, lambda _, message: status.update(message), folder)
    if options.json:
        print(json.dumps(record, indent=1))
        return 0
    console = Console()
    console.width = max(console.width, 100)
    console.print(trace_table(record, workspace.root / record["files"]["profile"]))
    lines = [f"{record['name']}: {record['num_batches']} batches run; program {record['program']}"]
    lines += [f"wrote {path}" for path in record["files"].values()]
    lines += [f"note: {note}" for note in record["notes"]]
    for number, question in enumerate(record["questions"], 1):
        lines.append(f"question {number} ({question['where']}, {question['source']}): {question['question']}")
        lines += [f"   - {choice['answer']}: {choice['change']}" for choice in question["choices"]]
    lines.append(
        f"next: answer the questions in {record['path']}, then ir_interpret with program {record['path']} and baseline "
        f"{record['system']}"
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def trace_table(record: Mapping[str, Any], profile: Path) -> Any:
    """Return the operations of a draft with their times, memory, states and where they come from, as a table."""
    from rich.table import Table
    from rich.text import Text

    from flashrt.analysis.profile import read_profile

    times = read_profile(profile)
    paths = {path.replace("[*]", "").rpartition("/")[2]: path for path in times.operations}
    table = Table()
    table.add_column("operation")
    for name in ("ms", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("reads", "writes", "from"):
        table.add_column(name)
    for name, node in record["nodes"].items():
        path = paths.get(name, name)
        ms = times.operations.get(path, {}).get(1)
        size = times.memory.get(path)
        table.add_row(
            Text(path), "" if ms is None else f"{ms:.3g}", f"{size / 1e6:.3g}" if isinstance(size, int) else "",
            Text("\n".join(node["reads"])), Text("\n".join(node["writes"])), Text(node["places"][-1]),
        )  # fmt: skip
    return table
