"""``flashrt audit``: does each node of a program do what the document says? A table, or the document as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashrt.errors import input_error

EXIT_FINDINGS = 1
COLOURS = {"error": "red", "warning": "yellow", "hint": "cyan"}


def add_audit(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    audit: argparse.ArgumentParser = commands.add_parser(
        "audit", help="run a program and check what its document claims: states, streams, order, chance, degrees"
    )
    audit.add_argument("program", metavar="PROGRAM", help="the program document, or its id")
    audit.add_argument("inputs", metavar="INPUTS", help="FILE.py:FUNCTION, or a recording")
    audit.add_argument("--count", type=int, default=6, help="batches (default: 6)")
    audit.add_argument("--degrees", metavar="2,4|none", help="degrees to run (default: the declared ones up to 4)")
    audit.add_argument("--config", metavar="JSON", default="{}", help="the application's own options")
    audit.add_argument("--seed", type=int, help="of the inputs (default: a new one)")
    audit.add_argument("--timeout-s", type=float, default=120.0, help="silence after which a call counts as hanging")
    audit.add_argument("--json", action="store_true", help="print the audit document instead of tables")
    return audit


def run_audit(options: argparse.Namespace) -> int:
    """Audit, keep the document in the workspace, print it; return 0, or 1 where there are errors or warnings."""
    from rich.console import Console

    from flashrt.mcp_server.auditing import ir_audit
    from flashrt.mcp_server.workspace import Workspace

    workspace = Workspace(options.workspace)
    arguments = {
        "program": options.program, "inputs": options.inputs, "count": options.count, "seed": options.seed,
        "config": _config(options.config), "degrees": _degrees(options.degrees), "timeout_s": options.timeout_s,
    }  # fmt: skip
    console, errors = Console(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="flashrt-audit-") as folder, errors.status("auditing") as status:
        result = ir_audit(workspace.root, arguments, lambda _, text: status.update(text), Path(folder))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print(console, result)
    return 0 if result["clean"] else EXIT_FINDINGS


def _config(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise input_error("option --config", "a JSON object", str(error), "correct it and call again") from None
    if not isinstance(found, dict):
        raise input_error("option --config", "a JSON object", text, "write '{\"name\": value}'")
    return found


def _degrees(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if text == "none":
        return []
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise input_error(
            "option --degrees", "whole numbers, separated by commas, or none", text, "correct it"
        ) from None


def _print(console: Any, result: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    if result["findings"]:
        table = Table(title=f"{result['name']}: what is not as the document says")
        for name in ("", "node", "kind", "about", "evidence", "smallest change"):
            table.add_column(name, overflow="fold")
        for one in result["findings"]:
            evidence = one["evidence"]
            seen = "; ".join(
                str(evidence[key]) for key in ("difference", "how", "place", "source") if evidence.get(key)
            )
            level = one["severity"]
            table.add_row(
                Text(level, COLOURS[level]), one["where"], one["kind"], Text(one["subject"]), Text(seen),
                Text(one["fix"]),
            )  # fmt: skip
        console.print(table)
    claims = Table(title="claims of the document")
    for name in ("claim", "status", "how"):
        claims.add_column(name, overflow="fold")
    for name, one in result["claims"].items():
        claims.add_row(Text(name), one["status"], Text(one["how"]))
    console.print(claims)
    lines = [f"not checked: {one['what']}: {one['why']}" for one in result["unchecked"]]
    lines += [f"seen: {one['place']} ({one['kind']}): {one['says']}" for one in result["observed"]]
    lines += [f"note: {note}" for note in result["notes"]]
    counts = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in result["counts"].items())
    lines.append(
        f"{counts} over {result['num_batches']} batches in {result['seconds']['all']:.0f} s; {result['audit']}"
    )
    lines.append(f"wrote {result['path']}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
