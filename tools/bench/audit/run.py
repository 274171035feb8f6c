"""An audit from outside: inputs made, the ops' process started and ended, degrees run, the document written."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrt.analysis.claims import AUDIT_SCHEMA, CONFIRMED, all_claims
from flashrt.bench.audit.degrees import check_degrees
from flashrt.bench.audit.findings import LOADED, AuditFinding, Findings
from flashrt.bench.audit.inside import LOOKED_AT
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import new_seed
from flashrt.bench.process import library_settings
from flashrt.bench.profile_layout import choose_degrees
from flashrt.bench.record import read_inputs, read_recording, write_recording
from flashrt.bench.systems import System, remove_bytecode
from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, InputError, input_error
from flashrt.ir import BuiltProgram
from flashrt.runtime.lifeline import MARK, exit_words, kill_marked

DEFAULT_BATCHES = 6
MIN_BATCHES = 3
"""Below it nothing that is kept from batch to batch shows twice."""
LOG_BYTES = 1500
LOOK_S = 0.5


def audit_program(
    system: System,
    built: BuiltProgram,
    inputs: str,
    workspace: Path,
    folder: Path,
    *,
    count: int = DEFAULT_BATCHES,
    degrees: Sequence[int] | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    timeout_s: float = 120,
    other_process: bool = True,
    baseline: bool = False,
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Check what a program document claims by running its operations.

    Parameters
    ----------
    inputs
        Reference of an inputs function, or of a recording.
    folder
        Where logs and what passes between processes are kept.
    count
        Batches.
    degrees
        Degrees to run; None: all that are declared, up to 4; empty: none.
    other_process
        Whether the program is also run in a process with another hash seed.
    baseline
        Whether the interpreter's time for the same batches is measured too.

    Returns
    -------
    An ``flashrt/audit@1`` document: findings, claims, what was not checked, and what it holds for.

    Raises
    ------
    InputError
        The program fails on these inputs, its ops do not load in time, or an argument is wrong.
    """
    if count < MIN_BATCHES:
        raise input_error(
            "argument 'count'", f"at least {MIN_BATCHES} batches: what is kept from one to the next has to show",
            str(count), "raise it and call again", rule="too-few-batches",
        )  # fmt: skip
    if not built.flat.operations:
        raise input_error(f"program '{built.program.name}'", "operations", "none", "add nodes; call ir_build again")
    if degrees:
        choose_degrees(built, degrees, None)
    begun = monotonic_ns()
    folder.mkdir(parents=True, exist_ok=True)
    options = dict(config or {})
    remove_bytecode(system)
    used_seed = new_seed() if seed is None else seed
    items = read_inputs(inputs, workspace, used_seed, count)
    write_recording(folder / "items.frec", items)
    assert system.program is not None, "a program's document"
    spec = {
        "mode": "audit", "program": str(system.program), "folder": str(built.folder), "config": options,
        "items": str(folder / "items.frec"), "out": str(folder / "inside.json"), "timeout_s": timeout_s,
        "outputs": str(folder / "outputs.frec"), "other_process": other_process, "baseline": baseline,
        "parent": os.getpid(),
    }  # fmt: skip
    found = _run_host(spec, built, folder, progress)
    findings = _as_findings(built, found)
    few = items[: min(LOOKED_AT, found["num_batches"])]
    outputs: dict[str, list[Any]] = {}
    for item in read_recording(folder / "outputs.frec"):
        for name, value in item.items():
            outputs.setdefault(name, []).append(value)
    before_degrees = monotonic_ns()
    check_degrees(
        system, built, few, outputs, findings, folder, degrees=degrees, config=options, timeout_s=timeout_s,
        progress=progress,
    )  # fmt: skip
    now = monotonic_ns()
    seconds = {
        **found["seconds"], "degrees": round((now - before_degrees) / 1e9, 3), "all": round((now - begun) / 1e9, 3)
    }  # fmt: skip
    return _document(built, findings, {**found, "seconds": seconds}, inputs, len(items))


def _run_host(
    spec: Mapping[str, Any], built: BuiltProgram, folder: Path, progress: Callable[[float, str], None]
) -> dict[str, Any]:
    path, out, log = folder / "spec.json", Path(spec["out"]), folder / "audit.log"
    path.write_text(json.dumps(spec))
    out.unlink(missing_ok=True)
    mark = uuid.uuid4().hex
    settings = {**library_settings(), "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flashrt.bench.audit.host", str(path)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=file, start_new_session=True, cwd=built.folder,
            env={**os.environ, **settings, MARK: mark},
        )  # fmt: skip
        try:
            _follow(process, built, spec["timeout_s"], progress)
            code = process.wait()
        finally:
            kill_marked(mark)
            process.wait()
    if not out.is_file():
        tail = log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
        raise input_error(
            f"program '{built.program.name}'", "operations that run", f"the process ended with {exit_words(code)}; its "
            f"last output:\n{tail}", "correct the ops and call ir_audit again", rule="crash",
        )  # fmt: skip
    found: dict[str, Any] = json.loads(out.read_text())
    if "refused" in found:
        raise InputError([Finding(**one) for one in found["refused"]] or found["text"])
    return found


def _follow(
    process: subprocess.Popen[bytes], built: BuiltProgram, timeout_s: float, progress: Callable[[float, str], None]
) -> None:
    """Pass progress on until the process has ended.

    Raises
    ------
    InputError
        The ops were not loaded within `timeout_s`.
    """
    assert process.stdout is not None, "a pipe was asked for"
    begun, loaded, rest = monotonic_ns(), False, b""
    while True:
        if select.select([process.stdout], [], [], LOOK_S)[0]:
            read = os.read(process.stdout.fileno(), 4096)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                share, _, text = line.decode(errors="replace").partition(" ")
                loaded = loaded or float(share) >= LOADED
                progress(float(share), text)
        elif process.poll() is not None:
            # A process that the ops started may hold the pipe for ever.
            return
        if not loaded and monotonic_ns() - begun > timeout_s * 1e9:
            raise input_error(
                f"program '{built.program.name}'", f"ops that are loaded within {timeout_s:g} s", "they were not",
                "look at what load(context) waits for, or raise timeout_s", rule="hang",
            )  # fmt: skip


def _as_findings(built: BuiltProgram, found: Mapping[str, Any]) -> Findings:
    findings = Findings(built)
    for one, template in zip(found["findings"], found["templates"], strict=True):
        key = (template, one["kind"], one["subject"])
        findings.found[key] = AuditFinding(
            one["kind"], one["where"], one["subject"], one["evidence"], one["fix"], one.get("edit")
        )
    findings.claims = {name: (status, how) for name, (status, how) in found["claims"].items()}
    findings.unchecked = dict(found["unchecked"])
    findings.notes = list(found["notes"])
    return findings


def _document(
    built: BuiltProgram, findings: Findings, found: Mapping[str, Any], inputs: str, num_items: int
) -> dict[str, Any]:
    for claim in all_claims(built):
        if claim not in findings.claims:
            findings.claim(claim, "unchecked", findings.unchecked.get(claim, "no operation was seen to rest on it"))
    for operation in built.flat.operations:
        if operation.event_driven:
            findings.skip(f"event:{operation.template}", "what consumers see depends on when it is done")
    order = {"error": 0, "warning": 1, "hint": 2}
    listed = sorted(findings.found.items(), key=lambda one: order[one[1].severity])
    nodes = {
        template: _node(template, findings) for template in dict.fromkeys(o.template for o in built.flat.operations)
    }
    return {
        "schema": AUDIT_SCHEMA,
        "program": built.id,
        "name": built.program.name,
        "inputs": inputs,
        "num_batches": found["num_batches"],
        "clean": not any(one.severity != "hint" for one in findings.found.values()),
        "counts": {level: sum(one.severity == level for one in findings.found.values()) for level in order},
        "nodes": nodes,
        "findings": [{"node": template, **one.as_dict()} for (template, _, _), one in listed],
        "claims": {name: {"status": status, "how": how} for name, (status, how) in sorted(findings.claims.items())},
        "audited": sorted(name for name, (status, _) in findings.claims.items() if status == CONFIRMED),
        "unchecked": [{"what": what, "why": why} for what, why in findings.unchecked.items()],
        "observed": [
            {"place": name, "kind": kind, "says": "it changed, and over these batches nothing depended on it"}
            for name, kind in list(found["observed"].items())[:50]
            if not any(one.evidence.get("place") == name for one in findings.found.values())
        ],
        "notes": findings.notes,
        "key": found["key"],
        "seconds": found["seconds"],
    }


def _node(template: str, findings: Findings) -> dict[str, Any]:
    own = [one for (node, _, _), one in findings.found.items() if node == template]

    def subjects(*kinds: str) -> list[str]:
        return sorted({one.subject for one in own if one.kind in kinds})

    return {
        "undeclared_reads": subjects("undeclared-read", "reads-old-value"),
        "undeclared_writes": subjects("undeclared-write", "changes-read-state"),
        "unused_reads": subjects("unused-read"),
        "unused_writes": subjects("unused-write"),
        "failing_streams": subjects("streaming-lookahead", "streaming-differs"),
        "findings": [one.kind for one in own],
    }
