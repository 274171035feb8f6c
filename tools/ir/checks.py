"""The rules a program must keep, in one table; every finding is reported, not the first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from flashrt.errors import Finding, listed, nearest
from flashrt.ir.flattening import FlatProgram, flatten
from flashrt.ir.hazards import find_races
from flashrt.ir.model import Program
from flashrt.ir.rules_edges import (
    check_cycles,
    check_edges,
    check_feeds,
    check_repeats,
    check_shapes,
    check_states,
    check_streams,
)
from flashrt.ir.rules_nodes import (
    AGAIN,
    check_entry,
    check_names,
    check_node_kinds,
    check_rates,
    check_reachable,
    check_recursion,
    check_size,
)
from flashrt.ir.rules_ports import check_ports

Rule = Callable[[Program], Iterator[Finding]]


STRUCTURE: tuple[Rule, ...] = (
    check_names,
    check_entry,
    check_rates,
    check_ports,
    check_node_kinds,
    check_recursion,
    check_size,
    check_edges,
    check_feeds,
    check_cycles,
    check_repeats,
    check_streams,
    check_states,
    check_shapes,
    check_reachable,
)


def check_races(flat: FlatProgram) -> Iterator[Finding]:
    """Two operations that touch one state, one of them writing, are ordered by dataflow."""
    words = {"r": "reads", "w": "writes", "rw": "reads and writes"}
    for race in find_races(flat):
        yield Finding(
            f"state '{race.state}'",
            f"a dataflow path between '{race.first}' and '{race.second}', so that their order is defined",
            f"'{race.first}' {words[race.kinds[0]]} and '{race.second}' {words[race.kinds[1]]} it, unordered",
            f"add an edge that orders them, or give each its own state (per: iteration or a second name); {AGAIN}",
            rule="race",
        )  # fmt: skip


def check_ops(program: Program, folder: Path) -> Iterator[Finding]:
    """The ops file exists beside the document, parses, and has the function."""
    if program.ops is None:
        yield Finding(
            "key 'ops'", "file.py:function beside the document", "nothing",
            "add it before ir_interpret or profile_measure; analyze works without", rule="no-ops", severity="warning",
        )  # fmt: skip
        return
    file, _, function = program.ops.partition(":")
    path = folder / file
    if not file.endswith(".py") or not function:
        yield Finding("key 'ops'", "file.py:function", f"'{program.ops}'", f"correct it; {AGAIN}", rule="ops-reference")
        return
    try:
        inside, exists = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    # Python before 3.13 calls a loop of links a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        yield Finding(
            "key 'ops'", "a file name", f"{file[:80]!r} ({' '.join(str(error).split())[:80]})", f"correct it; {AGAIN}",
            rule="ops-reference",
        )  # fmt: skip
        return
    if not inside:
        yield Finding(
            "key 'ops'", "a file in the document's own folder", f"'{file}'", f"move it there; {AGAIN}",
            rule="ops-outside",
        )  # fmt: skip
        return
    if not exists:
        siblings = sorted(p.name for p in folder.glob("*.py"))
        yield Finding(
            "key 'ops'", f"an existing file; there are {listed(siblings)}", f"'{file}'", f"correct it; {AGAIN}",
            rule="no-such-file", nearest=nearest(file, siblings),
        )  # fmt: skip
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=file)
    except (SyntaxError, ValueError, OSError, MemoryError, RecursionError) as error:
        got = str(error) or f"code that is too deeply nested ({type(error).__name__})"
        yield Finding("key 'ops'", f"Python that parses in '{file}'", got, f"correct it; {AGAIN}", rule="syntax")
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    bound = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    } | {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if function not in names and function not in bound:
        yield Finding(
            "key 'ops'", f"a function of '{file}': {listed(names)}", f"'{function}'", f"correct the name; {AGAIN}",
            rule="no-such-function", nearest=nearest(function, names),
        )  # fmt: skip


def check_program(program: Program, folder: Path | None = None) -> list[Finding]:
    """Return all findings: the structure's, and, when that is sound, the races of the flattened program.

    `folder` is where the document lies; without it the ops file is not looked at.
    """
    findings = [finding for rule in STRUCTURE for finding in rule(program)]
    if not any(finding.severity == "error" for finding in findings):
        findings += check_races(flatten(program))
    if folder is not None:
        findings += check_ops(program, folder)
    return list(dict.fromkeys(findings))
