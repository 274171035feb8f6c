"""The process that an audit runs the ops in: ``python -m flashrt.bench.audit.host SPEC.json``.

It loads the ops once and forks for everything that runs them. In the mode ``plain`` it only runs the program, for the
comparison with a process that was started otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashrt.bench.audit.findings import LOADED, Findings
from flashrt.bench.audit.forks import ForkFailedError, in_fork
from flashrt.bench.audit.inside import (
    LOOKED_AT,
    AuditedOpsError,
    Inside,
    PlainCall,
    audit_inside,
    first_differing,
    key_of,
    load,
    run_plain,
)
from flashrt.bench.audit.record import output_flows, travel
from flashrt.bench.audit.replay import Loaded
from flashrt.bench.audit.values import thaw
from flashrt.bench.record import read_recording, write_recording
from flashrt.clock import monotonic_ns
from flashrt.errors import InputError
from flashrt.ir.building import BuiltProgram, build
from flashrt.ir.documents import read_document
from flashrt.ir.execute import Piece
from flashrt.runtime.lifeline import die_with_parent

SEEDS = 12345
START_RUNS = 3
"""Processes that must agree before what they were started with alike is named as the source."""
PROGRESS: int | None = None
"""The descriptor on which whoever started this process hears of progress."""


def main(arguments: Sequence[str]) -> int:
    """Audit what the specification names and write the result beside it; return the exit status."""
    global PROGRESS
    path = Path(arguments[0])
    # What ops print goes to the log: only the audit itself speaks of progress.
    PROGRESS = os.dup(1)
    os.dup2(2, 1)
    spec = json.loads(path.read_text())
    die_with_parent(spec["parent"])
    try:
        if spec["mode"] == "plain":
            _plain(spec)
            return 0
        result = audit(spec)
    except (AuditedOpsError, InputError) as error:
        result = {"refused": [asdict(finding) for finding in error.findings], "text": str(error)}
    part = Path(spec["out"]).with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(spec["out"])
    return 0


def _plain(spec: Mapping[str, Any]) -> None:
    if spec["seeded"]:
        import random

        import numpy as np

        random.seed(SEEDS)
        np.random.seed(SEEDS)
        if spec["torch"]:
            import torch

            torch.manual_seed(SEEDS)
    built = build(read_document(Path(spec["program"])), Path(spec["folder"]))
    items = read_recording(Path(spec["items"]), torch=True)[: spec["count"]]
    loaded, _ = load(built, spec["config"], spec["timeout_s"])
    Path(spec["out"]).write_bytes(pickle.dumps(run_plain(loaded, items), protocol=5))


def audit(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of an audit in this process; see `flashrt.bench.audit.run`."""
    begun = monotonic_ns()
    built = build(read_document(Path(spec["program"])), Path(spec["folder"]))
    items = read_recording(Path(spec["items"]), torch=True)
    other = _start(spec, 0, hash_seed="1") if spec["other_process"] else None
    try:
        loaded, watch = load(built, spec["config"], spec["timeout_s"])
        _say(LOADED, "loaded")
        load_s = (monotonic_ns() - begun) / 1e9
        inside = audit_inside(built, items, loaded, watch, _say)
        if other is not None:
            _say(0.85, "a process that was started otherwise")
            _check_start(spec, loaded, inside, other)
    finally:
        if other is not None and other.poll() is None:
            other.kill()
        if other is not None:
            other.wait()
    if not spec["other_process"]:
        inside.findings.skip("a process that was started otherwise", "it was not asked for")
    inside.findings.skip("other numbers of threads", "libraries run with one, as the workers of a deployment do")
    inside.findings.skip("devices other than the CPU", "the operations ran on the CPU")
    baseline = _time_plain(loaded, items, inside.findings) if spec["baseline"] else None
    if spec.get("outputs"):
        write_recording(Path(spec["outputs"]), _outputs(built, inside))
    findings = inside.findings
    return {
        "findings": [one.as_dict() for one in findings.found.values()],
        "templates": [findings.template(one.operation) for one in findings.found.values()],
        "claims": {name: list(found) for name, found in findings.claims.items()},
        "unchecked": findings.unchecked,
        "notes": findings.notes,
        "observed": inside.changes,
        "key": key_of(built, inside, spec["config"]),
        "num_batches": inside.tape.num_batches,
        "seconds": {
            **inside.seconds, "load": round(load_s, 3), "whole": round((monotonic_ns() - begun) / 1e9, 3),
            **({"interpreter": baseline} if baseline is not None else {}),
        },
    }  # fmt: skip


def _say(share: float, text: str) -> None:
    if PROGRESS is None:
        return
    with suppress(OSError):
        os.write(PROGRESS, f"{share} {text}\n".encode())


def _time_plain(loaded: Loaded, items: Sequence[Mapping[str, Any]], findings: Findings) -> float | None:
    """Return how long the interpreter takes for the same batches, in seconds."""

    def work() -> float:
        from flashrt.bench.audit.record import Session
        from flashrt.ir.interpreter import gather

        session = Session(loaded.flat, loaded.ops)
        begun = monotonic_ns()
        for item in items:
            arrived = session.begin(item)
            for operation in loaded.flat.operations:
                values, first = gather(loaded.flat, session.runners[operation.path], arrived)
                session.deliver(operation.path, list(session.runners[operation.path].run(values, first)), arrived)
        return (monotonic_ns() - begun) / 1e9

    try:
        return round(float(in_fork(work, loaded.timeout_s)), 4)
    except ForkFailedError as error:
        findings.skip("time of the interpreter", str(error))
        return None


def _outputs(built: BuiltProgram, inside: Inside) -> list[dict[str, Any]]:
    """Return what the program wrote, chunk by chunk, for the batches that other processes repeat."""
    written: dict[str, list[Any]] = {}
    for batch in range(min(LOOKED_AT, inside.tape.num_batches)):
        for flow in output_flows(built.flat):
            record = inside.tape.calls.get((batch, flow.source))
            if record is not None:
                pieces = [Piece(thaw(data), is_chunk) for data, is_chunk in record.pieces]
                written.setdefault(flow.target_port, []).extend(travel(flow, pieces))
    return [
        {name: values[index] for name, values in written.items() if index < len(values)}
        for index in range(max((len(values) for values in written.values()), default=0))
    ]


def _start(spec: Mapping[str, Any], number: int, *, hash_seed: str, seeded: bool = False) -> subprocess.Popen[bytes]:
    out = Path(spec["out"]).with_name(f"plain-{number}.pickle")
    mine = {
        **spec, "mode": "plain", "out": str(out), "seeded": seeded, "torch": "torch" in sys.modules, "count": LOOKED_AT,
        "parent": os.getpid(),
    }  # fmt: skip
    path = out.with_suffix(".json")
    path.write_text(json.dumps(mine))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "flashrt.bench.audit.host", str(path)],
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip


def _finish(spec: Mapping[str, Any], process: subprocess.Popen[bytes], number: int) -> list[PlainCall] | str:
    try:
        code = process.wait(timeout=spec["timeout_s"])
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it was not done within {spec['timeout_s']:.0f} s"
    out = Path(spec["out"]).with_name(f"plain-{number}.pickle")
    if code or not out.is_file():
        return f"it ended with status {code}"
    found: list[PlainCall] = pickle.loads(out.read_bytes())
    return found


def _check_start(spec: Mapping[str, Any], loaded: Loaded, inside: Inside, other: subprocess.Popen[bytes]) -> None:
    """Compare with a process of another hash seed; where it differs, find what of the start decides."""
    findings = inside.findings
    calls = _finish(spec, other, 0)
    if isinstance(calls, str):
        findings.skip("a process that was started otherwise", calls)
        return
    told = first_differing(loaded, inside.tape, calls)
    if told is None:
        return
    path, batch, difference = told
    explained = ("nondeterministic", "hidden-random", "hidden-file", "hidden-global", "hidden-environment")
    if findings.has(findings.template(path), explained):
        return
    source = "unknown"
    numbers = itertools.count(1)

    def again(*, seeded: bool = False) -> list[PlainCall] | str:
        number = next(numbers)
        return _finish(spec, _start(spec, number, hash_seed="0", seeded=seeded), number)

    runs = (again() for _ in range(START_RUNS))
    if all(not isinstance(run, str) and first_differing(loaded, inside.tape, run) is None for run in runs):
        source = "the hash seed: the order of a set, or hash() of text"
    else:
        first = again(seeded=True)
        others = (again(seeded=True) for _ in range(START_RUNS - 1))
        if not isinstance(first, str) and all(not isinstance(run, str) and _equal(first, run) for run in others):
            source = "a global random generator that nothing seeds, used while loading"
    findings.add(
        "nondeterministic", path, source,
        f"seed what node '{findings.node(path).name}' is loaded with from context.config or context.seed",
        difference=difference, source=source, batch=batch,
        how="another process, with the same inputs from the same start, gives something else",
    )  # fmt: skip
    from flashrt.analysis.claims import REFUTED, state_claim

    findings.claim(state_claim(findings.template(path)), REFUTED, "nondeterministic")


def _equal(one: Sequence[PlainCall], two: Sequence[PlainCall]) -> bool:
    from flashrt.bench.audit.values import compare

    for a, b in zip(one, two, strict=False):
        for (x, _), (y, _) in zip(a.pieces, b.pieces, strict=False):
            found = compare(thaw(x), thaw(y))
            if found is not None and not found.bits_only:
                return False
    return len(one) == len(two)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:  # noqa: BLE001 - printed for the log of the one who waits
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of user code that still run must not hold the process.
    os._exit(code)
