"""From a document to a checked program with an id: what ``ir_build`` does."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.ir.checks import check_program
from flashrt.ir.documents import check_kind, dump, read_document, validate
from flashrt.ir.flattening import FlatProgram, flatten
from flashrt.ir.hashing import content_hash
from flashrt.ir.hazards import find_dependencies
from flashrt.ir.model import PROGRAM_SCHEMA, Program

RETRY = "correct the document and call ir_build again"


@dataclass(frozen=True)
class BuiltProgram:
    """A program without errors, ready to run and to analyse.

    `id` is the hash of the document and of the ops file: another program or other ops, another id.
    """

    id: str
    program: Program
    flat: FlatProgram
    folder: Path
    findings: tuple[Finding, ...]
    """Warnings."""

    def counts(self) -> dict[str, int]:
        """Return how many of each thing the program has."""
        dependencies = find_dependencies(self.flat)
        return {
            "graphs": len(self.program.graphs),
            "nodes": sum(len(graph.nodes) for graph in self.program.graphs.values()),
            "operations": len(self.flat.operations),
            "edges": sum(len(graph.edges) for graph in self.program.graphs.values()),
            "streaming_edges": sum(e.mode == "streaming" for g in self.program.graphs.values() for e in g.edges),
            "state_instances": len(self.flat.state_instances),
            "dependencies_within_batch": sum(d.lam == 0 for d in dependencies),
            "dependencies_across_batches": sum(d.lam == 1 for d in dependencies),
        }


def parse_program(
    document: Mapping[str, Any], folder: Path | None, noun: str = "program"
) -> tuple[Program, list[Finding]]:
    """Return the program and its findings.

    Raises
    ------
    InputError
        The document does not have the grammar's form; with every finding.
    """
    check_kind(PROGRAM_SCHEMA, document, noun=noun, retry=RETRY)
    schema = document.get("schema")
    if schema != PROGRAM_SCHEMA:
        raise input_error(
            f"{noun}, key 'schema'", f"'{PROGRAM_SCHEMA}'", repr(schema), f"write schema: {PROGRAM_SCHEMA}; {RETRY}",
            rule="wrong-schema", valid=[PROGRAM_SCHEMA], name=str(schema),
        )  # fmt: skip
    try:
        program = validate(Program, document, noun=noun, retry=RETRY)
    except InputError as error:
        raise InputError([*error.findings, *_findings_beyond(document, noun)]) from None
    return program, _named(check_program(program, folder), noun)


def _findings_beyond(document: Mapping[str, Any], noun: str) -> list[Finding]:
    """Return what the other rules find once missing modes are filled in, so that one call shows it all."""
    repaired = copy.deepcopy(dict(document))
    graphs = repaired.get("graphs")
    for graph in graphs.values() if isinstance(graphs, dict) else ():
        edges = graph.get("edges") if isinstance(graph, dict) else None
        for edge in edges if isinstance(edges, list) else ():
            if isinstance(edge, dict):
                edge.setdefault("mode", "streaming" if "chunks" in edge else "blocking")
    try:
        return _named(check_program(validate(Program, repaired, noun=noun, retry=RETRY)), noun)
    except InputError:
        return []


def _named(findings: Sequence[Finding], noun: str) -> list[Finding]:
    """Return the findings with the document in each place, where `noun` says which it is: ``program 'app.yaml'``."""
    return [replace(one, where=f"{noun}, {one.where}") for one in findings] if "'" in noun else list(findings)


def program_id(program: Program, folder: Path | None) -> str:
    """Return the content hash of the document and its ops file."""
    ops = b""
    if folder is not None and program.ops:
        path = folder / program.ops.partition(":")[0]
        ops = path.read_bytes() if path.is_file() else b""
    return "prog-" + content_hash([dump(program), hashlib.sha256(ops).hexdigest()])


def build(document: Mapping[str, Any], folder: Path, noun: str = "program") -> BuiltProgram:
    """Check a document and return the program.

    Raises
    ------
    InputError
        With every error found; warnings are kept in the result.
    """
    program, findings = parse_program(document, folder, noun)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise InputError(findings)
    return BuiltProgram(program_id(program, folder), program, flatten(program), folder, tuple(findings))


def build_file(path: Path) -> BuiltProgram:
    """Read, check and build the program document at `path`; see `build`."""
    return build(read_document(path, retry=RETRY), path.parent, f"program '{path.name}'")


def find_operations(flat: FlatProgram, pattern: str) -> list[str]:
    """Return the operation paths that a pattern names: a path, a glob, or a node that contains operations.

    ``dit/step[*]`` and ``dit/*`` and ``dit`` all name the four steps; brackets are literal, ``*`` and ``?`` are not.
    """
    exact = [operation.path for operation in flat.operations if operation.path == pattern]
    return exact or [operation.path for operation in flat.operations if matches(pattern, operation.path)]


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    parts = [".*" if sign == "*" else "." if sign == "?" else re.escape(sign) for sign in re.sub(r"\*+", "*", pattern)]
    return re.compile("".join(parts) + r"(\[\d+\])?(/.*)?")


def matches(pattern: str, path: str) -> bool:
    """Return whether `pattern` names `path` or a node that contains it; brackets are literal."""
    return pattern == path or _expression(pattern).fullmatch(path) is not None


def require_operations(flat: FlatProgram, pattern: str, where: str, retry: str) -> list[str]:
    """Return the operations that `pattern` names, or raise an `InputError` that lists the paths."""
    found = find_operations(flat, pattern)
    if not found:
        paths = [operation.path for operation in flat.operations]
        raise input_error(
            where, f"an operation path or glob; there are {listed(paths)}", f"'{pattern}'", retry,
            rule="unknown-operation", valid=paths, name=pattern,
        )  # fmt: skip
    return found
