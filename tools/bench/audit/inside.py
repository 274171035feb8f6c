"""The audit within one process: what is found by running the ops, observed, alone, and in other orders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrt.analysis.claims import CONFIRMED, REFUTED, UNCHECKED, audit_key, state_claim
from flashrt.bench.audit.files import FileWatch
from flashrt.bench.audit.findings import Findings
from flashrt.bench.audit.forks import ForkFailedError, stream_from_fork
from flashrt.bench.audit.orders import check_orders
from flashrt.bench.audit.places import find_places, fingerprints, own_modules
from flashrt.bench.audit.record import CallRecord, Notes, Observation, Session, Tape
from flashrt.bench.audit.replay import Loaded, find_old_reads, outputs_differ, replay
from flashrt.bench.audit.streams import check_streams, find_streamable
from flashrt.bench.audit.values import storages, thaw
from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, InputError
from flashrt.ir import BuiltProgram, Context, load_ops
from flashrt.ir.execute import Piece
from flashrt.ir.interpreter import gather

MAX_KEPT_BYTES = 1 << 30
"""Of recorded values; batches beyond are observed but not replayed."""
MAX_WALKED_BYTES = 256 << 20
LOOKED_AT = 2
"""Batches on which orders and streams are tried; one runs from fresh states, one from states that were written."""
MEMORY = (
    "hidden-global", "hidden-attribute", "hidden-buffer", "hidden-random", "hidden-file", "hidden-environment",
    "hidden-unknown", "iteration-leak", "nondeterministic",
)  # fmt: skip
STATES = (
    "undeclared-read", "undeclared-write", "reads-old-value", "changes-read-state", "changes-input", "shared-storage",
    *MEMORY,
)  # fmt: skip
"""Findings that refute what a node says of its states."""


class AuditedOpsError(Exception):
    """The program fails when it is run as it stands: carries the findings."""

    def __init__(self, findings: Sequence[Finding], text: str) -> None:
        super().__init__(text)
        self.findings = tuple(findings)


@dataclass
class Inside:
    """What was found in one process."""

    findings: Findings
    tape: Tape
    files: tuple[str, ...]
    changes: Mapping[str, str]
    seconds: dict[str, float] = field(default_factory=dict)


def load(built: BuiltProgram, config: Mapping[str, Any], timeout_s: float) -> tuple[Loaded, FileWatch]:
    """Load the ops, with files watched from before on."""
    watch = FileWatch(built.folder)
    ops = load_ops(built.flat, built.folder, Context(device="cpu", config=dict(config)))
    return Loaded(built.flat, ops, built.folder, timeout_s), watch


def audit_inside(
    built: BuiltProgram,
    items: Sequence[Mapping[str, Any]],
    loaded: Loaded,
    watch: FileWatch,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Inside:
    """Audit everything but what needs other processes: degrees, and other ways to start one.

    Raises
    ------
    AuditedOpsError
        The program fails on these items.
    """
    findings = Findings(built)
    seconds: dict[str, float] = {}

    def timed(name: str, share: float, work: Callable[[], Any]) -> Any:
        progress(share, name)
        begun = monotonic_ns()
        found = work()
        seconds[name] = round((monotonic_ns() - begun) / 1e9, 4)
        return found

    tape = timed("observed run", 0.1, lambda: _observe(loaded, watch, items, findings))
    seconds["operations themselves"] = round(tape.notes.ns / 1e9, 4)
    _from_records(built, tape, findings)
    _from_notes(tape, findings)
    timed("replays", 0.3, lambda: replay(loaded, tape, findings))
    timed("old values", 0.5, lambda: find_old_reads(loaded, tape, findings))
    few = range(min(LOOKED_AT, tape.num_batches))
    timed("streams", 0.6, lambda: check_streams(loaded, tape, findings, few))
    timed("other orders", 0.7, lambda: check_orders(loaded, tape, findings, len(few)))
    timed("edges that could stream", 0.8, lambda: find_streamable(loaded, tape, findings, few))
    _claim_states(built, tape, findings)
    files = tuple(_files_of_ops(built.folder))
    return Inside(findings, tape, files, dict(tape.notes.changes), seconds)


def _observe(loaded: Loaded, watch: FileWatch, items: Sequence[Mapping[str, Any]], findings: Findings) -> Tape:
    tape = _observed(loaded, watch, items, thorough=False)
    if tape.notes.late:
        # Something changed without its version counter: once more, and look at everything after each call.
        tape = _observed(loaded, watch, items, thorough=True)
    for call in tape.calls.values():
        for text in call.not_copied:
            findings.skip(f"replays of calls that need what '{call.path}' writes", text)
        for instance in call.opaque:
            findings.skip(f"content of state '{instance}'", "part of it is an object that shows no content")
    if tape.num_batches < len(items):
        findings.skip(
            f"batches {tape.num_batches} to {len(items) - 1}",
            f"their values are more than {MAX_KEPT_BYTES >> 20} MiB together; ask for fewer, or smaller ones",
        )
    return tape


def _observed(loaded: Loaded, watch: FileWatch, items: Sequence[Mapping[str, Any]], *, thorough: bool) -> Tape:
    def work(send: Callable[[Any], None]) -> None:
        try:
            _run_observed(loaded, watch, items, thorough, send)
        except InputError as error:
            send(("refused", error.findings, str(error)))

    tape = Tape(loaded.flat, list(items))
    try:
        for message in stream_from_fork(work, loaded.timeout_s):
            if isinstance(message, CallRecord):
                tape.add(message)
            elif isinstance(message, Notes):
                tape.notes = message
            else:
                raise AuditedOpsError(message[1], message[2])
    except ForkFailedError as error:
        raise AuditedOpsError((), f"the program does not run to its end: {error}") from error
    return tape


def _run_observed(
    loaded: Loaded,
    watch: FileWatch,
    items: Sequence[Mapping[str, Any]],
    thorough: bool,
    send: Callable[[Any], None],
) -> None:
    places = find_places(loaded.ops, loaded.folder, everywhere=False)
    memory = [
        (first, last, place.name) for place in places if place.kind in {"attribute", "buffer", "global"}
        for first, last in storages(place.value, 3)
    ]  # fmt: skip
    walked = sum(last - first for first, last in {(first, last) for first, last, _ in memory}) <= MAX_WALKED_BYTES
    before = fingerprints(places) if walked else {}
    observation = Observation(loaded.flat, loaded.ops, watch, memory, thorough=thorough)
    sent = 0

    def count(record: CallRecord) -> None:
        nonlocal sent
        sent += sum(len(data) for data, _ in record.pieces) + sum(len(d) for d in record.states.values() if d)
        send(record)

    kept = list(items)
    for number in range(len(kept)):
        observation.run_one(number, kept[number], count)
        if sent > MAX_KEPT_BYTES:
            break
    notes = observation.finish()
    if walked:
        notes.changes = {
            place.name: place.kind for place in find_places(loaded.ops, loaded.folder, everywhere=False)
            if place.name in before and place.kind in {"attribute", "buffer", "global", "random"}
            and not place.name.startswith("keys of") and before[place.name] != fingerprints([place])[place.name]
        }  # fmt: skip
    send(notes)


def _files_of_ops(folder: Path) -> list[str]:
    """Return the files that the ops were made of: of the program's folder by their relative names."""
    root = os.path.realpath(folder) + os.sep
    found = set()
    for module in own_modules(folder):
        file = os.path.realpath(str(module.__file__))
        found.add(file[len(root) :] if file.startswith(root) else file)
    return sorted(found)


def _from_records(built: BuiltProgram, tape: Tape, findings: Findings) -> None:
    """Turn what the views saw into findings."""
    for record in tape.calls.values():
        node = findings.node(record.path)
        for verb, seen in (("read", record.undeclared_reads), ("write", record.undeclared_writes)):
            for key, instance in seen.items():
                known = key in built.program.states
                where = f"'{verb}s' of node '{node.name}'"
                fix = f"add '{key}' to {where}" if known else f"declare the state '{key}' and add it to {where}"
                edit: dict[str, Any] = {"add": {f"{verb}s": [key]}}
                findings.add(
                    "undeclared-read" if verb == "read" else "undeclared-write", record.path, key, fix,
                    edit if known else {"states": {key: {}}, **edit}, instance=instance, batch=record.batch,
                    how=f"state['{key}'] was {'read' if verb == 'read' else 'set'}",
                )  # fmt: skip
        for port, change in record.changed_inputs.items():
            findings.add(
                "changes-input", record.path, port, f"let the op copy input '{port}' before it changes it",
                batch=record.batch, fingerprints=change, how="the value was changed in place during the call",
            )  # fmt: skip
        for instance, change in record.changed_states.items():
            _changed_state(record, instance, change, findings)
    _unused(built, tape, findings)


def _changed_state(record: CallRecord, instance: str, change: str, findings: Findings) -> None:
    operation = findings.built.flat.by_path[record.path]
    node = findings.node(record.path)
    key = next((key for key, one in operation.reads.items() if one == instance), None)
    name = instance.split("[")[0]
    if key is not None:
        findings.add(
            "changes-read-state", record.path, key, f"add '{key}' to 'writes' of node '{node.name}'",
            {"add": {"writes": [key]}}, batch=record.batch, fingerprints=change,
            how="the state that it only reads was changed in place during the call",
        )  # fmt: skip
        return
    own = next((one for key, one in operation.accesses.items() if str(key).split("[")[0] == name and one), None)
    if own is not None and name in {*operation.reads, *operation.writes}:
        findings.add(
            "iteration-leak", record.path, name, f"let each iteration keep a copy of its own in state '{name}'",
            batch=record.batch, fingerprints=change, instance=instance,
            how=f"the call changed '{instance}', the instance of another iteration, through memory that they share",
        )  # fmt: skip
        return
    findings.add(
        "shared-storage", record.path, name,
        f"keep a copy of its own in state '{name}', or add '{name}' to 'writes' of node '{node.name}'",
        {"add": {"writes": [name]}}, batch=record.batch, fingerprints=change,
        how="the call changed a state that the node does not name, through memory that it shares with something else",
    )  # fmt: skip


def _unused(built: BuiltProgram, tape: Tape, findings: Findings) -> None:
    for template in {operation.template: None for operation in built.flat.operations}:
        calls = tape.of_template(template)
        if not calls:
            continue
        operations = [one for one in built.flat.operations if one.template == template]
        node = findings.node(operations[0].path)
        reads = {key: None for one in operations for key in one.reads}
        writes = {key: None for one in operations for key in one.writes}
        read = {key for call in calls for key in (*call.reads, *call.old_reads)}
        written = {key for call in calls for key in (*call.sets, *call.in_place)}
        for verb, declared, used in (("read", reads, read), ("write", writes, written)):
            for key in declared:
                if key in used:
                    continue
                first = next(
                    p for one in operations for p in [one] if key in (one.reads if verb == "read" else one.writes)
                )
                initial = next((p for p in first.prologues if key in (p.reads if verb == "read" else p.writes)), None)
                holder = f"'initial' of port '{initial.graph_port}'" if initial else f"node '{node.name}'"
                edit = None if initial else {"remove": {f"{verb}s": [key]}}
                done = "read" if verb == "read" else "written"
                findings.add(
                    "unused-read" if verb == "read" else "unused-write", first.path, key,
                    f"remove '{key}' from '{verb}s' of {holder}, if it is never {done}",
                    edit, batches=tape.num_batches, calls=len(calls),
                    how=f"declared, and not {done} in any call",
                )  # fmt: skip


def _from_notes(tape: Tape, findings: Findings) -> None:
    notes = tape.notes
    for share in notes.sharing:
        users = [path for path in (one.path for one in tape.flat.operations) if share.state in tape.touched(path)]
        writers = [path for path in users if share.state in tape.flat.by_path[path].writes.values()] or users
        if not writers:
            continue
        name, other = share.state.split("[")[0], share.other
        both = share.other_is_state and other.split("[")[0] == name
        findings.add(
            "iteration-leak" if both else "shared-storage", writers[0], name,
            f"let node '{findings.node(writers[0]).name}' keep a copy of its own in state '{name}'",
            batch=share.batch, shared_with=(f"state '{other}'" if share.other_is_state else other),
            how="both are the same memory, and it was changed in place while they were",
        )  # fmt: skip
    for one in notes.outputs:
        findings.add(
            "shared-storage", one.path, f"output '{one.port}'",
            f"let the op return a copy in output '{one.port}', not memory that it changes later",
            batch=one.batch, when=one.when, how="the value was changed after it had been handed over",
        )  # fmt: skip
    for batch, instance in notes.late:
        findings.notes.append(f"batch {batch}: state '{instance}' changed without an operation that was seen to do it")
    for path, use in notes.files.items():
        for name in sorted(use.written):
            findings.add(
                "file-written", path, os.path.basename(name),
                "nothing, if it is only for people; what the program reads again belongs into a declared state",
                file=name, read_back=name in use.read_back,
                how="the file is not part of the program's states: each process that runs the node writes it",
            )  # fmt: skip


def _claim_states(built: BuiltProgram, tape: Tape, findings: Findings) -> None:
    skipped = {what.split("'")[1] for what in findings.unchecked if what.startswith("replay of '")}
    batches = {what for what in findings.unchecked if what.startswith("replay of batch")}
    for operation in built.flat.operations:
        bad = [kind for (template, kind, _) in findings.found if template == operation.template and kind in STATES]
        claim = state_claim(operation.template)
        if bad:
            findings.claim(claim, REFUTED, ", ".join(dict.fromkeys(bad)))
        elif operation.path in skipped or len(batches) == tape.num_batches:
            findings.claim(claim, UNCHECKED, "its calls could not be replayed alone")
        elif claim not in findings.claims:
            findings.claim(
                claim, CONFIRMED,
                f"every call over {tape.num_batches} batches gives the same alone, from its declared states, in a "
                "process where nothing ran before",
            )  # fmt: skip


def key_of(built: BuiltProgram, inside: Inside, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the audit holds for."""
    return audit_key(built, inside.files, config)


@dataclass(frozen=True)
class PlainCall:
    """What one call gave in a process that only ran the program."""

    batch: int
    path: str
    pieces: tuple[tuple[bytes, bool], ...]


def run_plain(loaded: Loaded, items: Sequence[Mapping[str, Any]]) -> list[PlainCall]:
    """Run the program once, as it is; return what each call gave."""
    from flashrt.bench.audit.values import freeze

    session = Session(loaded.flat, loaded.ops)
    found = []
    for batch, item in enumerate(items):
        arrived = session.begin(item)
        for operation in loaded.flat.operations:
            runner = session.runners[operation.path]
            values, first = gather(loaded.flat, runner, arrived)
            pieces = []
            frozen = []
            for piece in runner.run(values, first):
                pieces.append(piece)
                frozen.append((freeze({port: piece.outputs[port] for port in sorted(runner.needed)}), piece.is_chunk))
            session.deliver(operation.path, pieces, arrived)
            found.append(PlainCall(batch, operation.path, tuple(frozen)))
    return found


def first_differing(loaded: Loaded, tape: Tape, calls: Sequence[PlainCall]) -> tuple[str, int, str] | None:
    """Return (operation, batch, difference) of the first call that is not as it was recorded, or None."""
    runners = Session(loaded.flat, loaded.ops).runners
    for call in calls:
        record = tape.calls.get((call.batch, call.path))
        if record is None:
            continue
        pieces = [Piece(thaw(data), is_chunk) for data, is_chunk in call.pieces]
        found = outputs_differ(record, runners[call.path], pieces)
        if found is not None and not found.bits_only:
            return call.path, call.batch, str(found)
    return None
