"""Running recorded calls again, alone, from the declared states: what differs was kept somewhere else.

Each replay begins in a fork of the process in which the ops were loaded and never ran, so nothing that a call left
behind is there: no attribute, global, buffer, generator.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.bench.audit.chance import MAX_DRAWS, Draws
from flashrt.bench.audit.files import Unknown, replaced
from flashrt.bench.audit.findings import Findings, Kind
from flashrt.bench.audit.forks import ForkFailedError, in_fork, stream_from_fork
from flashrt.bench.audit.places import find_places, fingerprints
from flashrt.bench.audit.record import Arrived, CallRecord, ObservingView, Session, Tape, run_pieces, travel
from flashrt.bench.audit.values import Difference, compare, digest, freeze, perturb, thaw
from flashrt.ir import INPUT, FlatProgram, Operation, OperationRunner
from flashrt.ir.execute import Piece
from flashrt.ir.interpreter import gather
from flashrt.ir.ops import Call
from flashrt.ir.values import describe

MAX_PLACES_TRIED = 12
CHANCE_RUNS = 5
"""Runs of each of up to three calls that must agree before chance is ruled out."""
MAX_PLACE_BYTES = 64 << 20
HIDDEN: Mapping[str, Kind] = {
    "global": "hidden-global", "attribute": "hidden-attribute", "buffer": "hidden-buffer", "random": "hidden-random",
    "environment": "hidden-environment",
}  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A program whose ops are loaded in this process and have not run."""

    flat: FlatProgram
    ops: Mapping[str, Call]
    folder: Path
    timeout_s: float


def arrived_at(tape: Tape, batch: int, path: str) -> Arrived:
    """Return new copies of the values that arrived at an operation in a batch."""
    arrived: Arrived = {}
    made: dict[str, list[Piece]] = {}
    for flow in tape.flat.incoming.get(path, ()):
        if flow.source == INPUT:
            arrived[flow] = travel(flow, [Piece(thaw(freeze(dict(tape.items[batch]))), False)])
            continue
        if flow.source not in made:
            pieces = tape.calls[batch, flow.source].pieces
            made[flow.source] = [Piece(thaw(data), is_chunk) for data, is_chunk in pieces]
        arrived[flow] = travel(flow, made[flow.source])
    return arrived


def states_before(tape: Tape, batch: int, path: str) -> dict[str, Any]:
    """Return new copies of the states that an operation touches, as they were before a call, each one apart.

    Raises
    ------
    LookupError
        One of them cannot be copied; names it.
    """
    before = tape.before[batch, path]
    found = {}
    for instance in tape.touched(path) & before.keys():
        data = before[instance]
        if data is None:
            raise LookupError(instance)
        found[instance] = thaw(data)
    return found


def run_alone(
    loaded: Loaded, tape: Tape, batch: int, path: str, store: dict[str, Any] | None = None
) -> Difference | None:
    """Run one recorded call in this process; return where outputs or states differ from what was recorded."""
    record = tape.calls[batch, path]
    store = states_before(tape, batch, path) if store is None else store
    operation = loaded.flat.by_path[path]
    view = ObservingView(loaded.flat, operation, store)
    runner = OperationRunner(loaded.flat, operation, loaded.ops, store, view)
    values, first = gather(loaded.flat, runner, arrived_at(tape, batch, path))
    _, pieces = run_pieces(runner, values, first)
    return outputs_differ(record, runner, pieces) or states_differ(tape, record, store)


def outputs_differ(record: CallRecord, runner: OperationRunner, pieces: Sequence[Piece]) -> Difference | None:
    """Return where the pieces of a call are not those that were recorded."""
    if len(pieces) != len(record.pieces):
        return Difference("number of pieces", str(len(record.pieces)), str(len(pieces)))
    gravest = None
    for number, piece in enumerate(pieces):
        wanted = record.piece_digests[number]
        if all(digest(piece.outputs[port]) == wanted[port] for port in runner.needed):
            continue
        expected = thaw(record.pieces[number][0])
        for port in sorted(runner.needed):
            label = f"output '{port}'" + (f", chunk {number} " if len(pieces) > 1 else "")
            found = compare(expected[port], piece.outputs[port], label)
            if found is not None and (gravest is None or not found.bits_only):
                gravest = found
            if found is not None and not found.bits_only:
                return found
    return gravest


def states_differ(tape: Tape, record: CallRecord, store: Mapping[str, Any]) -> Difference | None:
    """Return where the states after a call are not those that were recorded."""
    gravest = None
    for instance, wanted in record.after.items():
        if instance not in tape.touched(record.path) or digest(store.get(instance)) == wanted:
            continue
        data = record.states.get(instance, tape.before[record.batch, record.path].get(instance))
        label = f"state '{instance}' "
        if data is None:
            found: Difference | None = Difference(label, "the recorded value", describe(store.get(instance)))
        else:
            found = compare(thaw(data), store.get(instance), label)
        if found is not None and not found.bits_only:
            return found
        gravest = found or gravest
    return gravest


@dataclass
class _Suspect:
    """A node whose replays differ."""

    template: str
    calls: list[tuple[int, str]] = field(default_factory=list)
    differences: dict[tuple[int, str], str] = field(default_factory=dict)


def replay(loaded: Loaded, tape: Tape, findings: Findings) -> None:
    """Replay every recorded call, batch by batch in forks, and explain what differs."""
    suspects: dict[str, _Suspect] = {}
    bits: set[str] = set()
    order = [operation.path for operation in loaded.flat.operations]
    for batch in range(tape.num_batches):
        try:
            found = in_fork(functools.partial(_replay_batch, loaded, tape, batch), loaded.timeout_s)
        except ForkFailedError as error:
            findings.skip(f"replay of batch {batch}", str(error))
            continue
        for path in order:
            told = found.get(path)
            if isinstance(told, str):
                findings.skip(f"replay of '{path}'", told)
            elif told is not None and told.bits_only:
                bits.add(path)
            elif told is not None and not _explained(tape, batch, path):
                suspect = suspects.setdefault(findings.template(path), _Suspect(findings.template(path)))
                suspect.calls.append((batch, path))
                suspect.differences[batch, path] = str(told)
    if bits:
        findings.notes.append(
            f"replays of {', '.join(sorted(bits))} differ in their last bits (numeric tier): a library adds up in "
            "another order where values lie elsewhere in memory"
        )
    for suspect in suspects.values():
        _explain(loaded, tape, findings, suspect)


def _explained(tape: Tape, batch: int, path: str) -> bool:
    """Return whether an input was changed by others after it was handed over, so that it is not this node's doing."""
    record = tape.calls[batch, path]
    runner = Session(tape.flat, _Anything()).runners[path]
    values, first = gather(tape.flat, runner, arrived_at(tape, batch, path))
    given = {**values, **{f"initial {port}": value for port, value in first.items()}}
    return any(digest(value) != record.inputs.get(port) for port, value in given.items())


class _Anything(dict[str, Call]):
    def __missing__(self, key: str) -> Call:
        return lambda inputs, state: {}


def _replay_batch(loaded: Loaded, tape: Tape, batch: int) -> dict[str, Difference | str]:
    # The other way round: what one call leaves for a later one is not there, what a later one leaves is.
    found: dict[str, Difference | str] = {}
    for operation in reversed(loaded.flat.operations):
        try:
            different = run_alone(loaded, tape, batch, operation.path)
        except LookupError as error:
            found[operation.path] = f"its state '{error.args[0]}' cannot be copied"
            continue
        except Exception as error:  # noqa: BLE001 - user code; alone from its states it should not fail
            different = Difference("call", "outputs", f"{type(error).__name__}: {error}"[:300])
        if different is not None:
            found[operation.path] = different
    return found


def _alone(
    loaded: Loaded, tape: Tape, batch: int, path: str, prepare: Callable[[], None] | None = None
) -> Difference | None:
    """Run one call alone in a new fork; return its difference from the record."""
    try:
        found: Difference | None = in_fork(
            lambda: _run_prepared(loaded, tape, batch, path, prepare)[0], loaded.timeout_s
        )
    except ForkFailedError as error:
        return Difference("call", "outputs", str(error)[:300])
    return found


def _drawn(
    loaded: Loaded, tape: Tape, batch: int, path: str, prepare: Callable[[], None] | None = None
) -> bytes | None:
    """Run one call alone in a new fork; return what it gave, outputs and states; None where it failed.

    Values that cannot be frozen count by their digests.
    """

    def work() -> bytes:
        _, values = _run_prepared(loaded, tape, batch, path, prepare)
        try:
            return freeze(values)
        except TypeError:
            return freeze(digest(values))

    try:
        found: bytes = in_fork(work, loaded.timeout_s)
    except ForkFailedError:
        return None
    return found


def _same(one: bytes, other: bytes) -> bool:
    """Return whether two results are equal; last bits do not count."""
    if one == other:
        return True
    found = compare(thaw(one), thaw(other))
    return found is None or found.bits_only


def _run_prepared(
    loaded: Loaded, tape: Tape, batch: int, path: str, prepare: Callable[[], None] | None
) -> tuple[Difference | None, list[Any]]:
    if prepare is not None:
        prepare()
    record = tape.calls[batch, path]
    store = states_before(tape, batch, path)
    operation = loaded.flat.by_path[path]
    runner = OperationRunner(loaded.flat, operation, loaded.ops, store, ObservingView(loaded.flat, operation, store))
    values, first = gather(loaded.flat, runner, arrived_at(tape, batch, path))
    _, pieces = run_pieces(runner, values, first)
    different = outputs_differ(record, runner, pieces) or states_differ(tape, record, store)
    return different, [[piece.outputs[port] for port in sorted(runner.needed)] for piece in pieces] + [store]


def _explain(loaded: Loaded, tape: Tape, findings: Findings, suspect: _Suspect) -> None:
    """Tell files from chance, and chance from memory; then find where the memory is."""
    last = suspect.calls[-1]
    files = _files_of(tape, last[1])
    if files and _add_file(loaded, tape, findings, last, files):
        return
    for call in suspect.calls[:3]:
        if _varies(loaded, tape, call):
            _add_chance(loaded, tape, findings, *call, suspect.differences[call])
            return
    for call in suspect.calls:
        if _differs(_alone(loaded, tape, *call)):
            _add_hidden(loaded, tape, findings, suspect, call)
            return
    # Alone it gives what was recorded: what other calls of the replay left made the difference, or chance did.
    if any(_differs_in_replay(loaded, tape, call) for call in suspect.calls):
        _add_hidden(loaded, tape, findings, suspect, last)
    else:
        _add_chance(loaded, tape, findings, *last, suspect.differences[last])


def _varies(loaded: Loaded, tape: Tape, call: tuple[int, str], num_runs: int = CHANCE_RUNS) -> bool:
    """Return whether runs of the same call, alone, differ from each other."""
    first = _drawn(loaded, tape, *call)
    for _ in range(num_runs - 1):
        again = _drawn(loaded, tape, *call)
        if (first is None) != (again is None):
            return True
        if first is not None and again is not None and not _same(first, again):
            return True
    return False


def _differs(difference: Difference | str | None) -> bool:
    return isinstance(difference, Difference) and not difference.bits_only


def _differs_in_replay(loaded: Loaded, tape: Tape, call: tuple[int, str]) -> bool:
    try:
        return _differs(in_fork(lambda: _replay_batch(loaded, tape, call[0]), loaded.timeout_s).get(call[1]))
    except ForkFailedError:
        return False


def _files_of(tape: Tape, path: str) -> dict[str, bytes | None]:
    use = tape.notes.files.get(path)
    names = use.read_back if use else set()
    before = {name: tape.notes.files_before.get(name) for name in sorted(names)}
    return {name: content for name, content in before.items() if content is not Unknown.NOT_KEPT}


def _add_file(
    loaded: Loaded,
    tape: Tape,
    findings: Findings,
    call: tuple[int, str],
    files: Mapping[str, bytes | None],
) -> bool:
    for name, before in files.items():
        with replaced(name, before):
            difference = _alone(loaded, tape, *call)
        if difference is None:
            continue
        label = os.path.basename(name)
        _add_kept(
            findings, "hidden-file", call[1], f"file '{label}'",
            {"file": name, "difference": str(difference), "batches": tape.num_batches,
             "how": "with the file as it was before the program ran, the same call gives something else"},
        )  # fmt: skip
        return True
    return False


def _add_chance(loaded: Loaded, tape: Tape, findings: Findings, batch: int, path: str, difference: str) -> None:
    draw = functools.partial(_drawn, loaded, tape, batch, path)
    draws = Draws(draw, _same)
    decide = (name for name, fix_source in SOURCES.items() if draws.decided_by(functools.partial(draw, fix_source)))
    source = next(decide, "unknown")
    findings.add(
        "nondeterministic", path, source,
        f"take what node '{findings.node(path).name}' draws from {source if source != 'unknown' else 'it'} as an "
        "input, or from a generator that is kept in a declared state",
        difference=difference, source=source, batch=batch,
        how="two runs of the same call from the same states and inputs, in equal processes, differ",
    )  # fmt: skip


def _stop_clock() -> None:
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, lambda: 1234.5)
        setattr(time, f"{name}_ns", lambda: 1_234_500_000_000)


def _fix_entropy() -> None:
    def constant(count: int) -> bytes:
        return bytes(range(256))[: count % 256] + bytes(count - count % 256)

    os.urandom = constant
    random._urandom = constant  # type: ignore[attr-defined]
    uuid.os.urandom = constant  # type: ignore[attr-defined]
    random.seed(1)
    seed = random.Random(5)
    random.SystemRandom.random = lambda self: seed.random()  # type: ignore[method-assign]
    np.random.seed(1)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.seed = lambda: torch.manual_seed(1) and 1


def _same_process() -> None:
    os.getpid = lambda: 4242


SOURCES: Mapping[str, Callable[[], None]] = {
    "the clock": _stop_clock,
    "the operating system's randomness": _fix_entropy,
    "the process id": _same_process,
}
"""Name -> makes the source constant in this process."""


@dataclass(frozen=True)
class _Changed:
    """A place that was not as it had been after loading, when a call began."""

    name: str
    kind: str
    shown: str
    data: bytes | None
    writers: tuple[str, ...]


def _changes_before(loaded: Loaded, tape: Tape, call: tuple[int, str]) -> list[_Changed]:
    """Run the program again up to a call; return the places that had changed by then, and who changed them."""

    def work(send: Callable[[Any], None]) -> None:
        session = Session(loaded.flat, loaded.ops)
        marks = fingerprints(find_places(loaded.ops, loaded.folder))
        start, writers = dict(marks), dict[str, list[str]]()
        for batch in range(call[0] + 1):
            arrived = session.begin(thaw(freeze(dict(tape.items[batch]))))
            for operation in loaded.flat.operations:
                if (batch, operation.path) == call:
                    break
                runner = session.runners[operation.path]
                values, first = gather(loaded.flat, runner, arrived)
                session.deliver(operation.path, list(runner.run(values, first)), arrived)
                if batch in {0, call[0] - 1, call[0]}:
                    now = fingerprints(find_places(loaded.ops, loaded.folder))
                    for name in now:
                        if now[name] != marks.get(name) and operation.path not in writers.setdefault(name, []):
                            writers[name].append(operation.path)
                    marks = now
        for place in find_places(loaded.ops, loaded.folder):
            if digest(place.value) != start.get(place.name):
                send(_Changed(place.name, place.kind, _shown(place.value), _frozen(place.value) if place.put else None,
                              tuple(writers.get(place.name, ()))))  # fmt: skip

    return list(stream_from_fork(work, loaded.timeout_s))


def _frozen(value: Any) -> bytes | None:
    try:
        data = freeze(value)
    except TypeError:
        return None
    return data if len(data) <= MAX_PLACE_BYTES else None


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | bool | str | None) else describe(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _transplant(loaded: Loaded, changes: Sequence[_Changed]) -> Callable[[], None]:
    def put() -> None:
        places = {place.name: place for place in find_places(loaded.ops, loaded.folder)}
        for change in changes:
            place = places.get(change.name)
            if place is not None and place.put is not None and change.data is not None:
                place.put(thaw(change.data))

    return put


def _add_hidden(loaded: Loaded, tape: Tape, findings: Findings, suspect: _Suspect, call: tuple[int, str]) -> None:
    batch, path = call
    try:
        changes = _changes_before(loaded, tape, call)
    except ForkFailedError as error:
        findings.skip(f"where '{path}' keeps what it remembers", str(error))
        changes = []
    own = findings.node(path).template
    writes_here = {loaded.flat.by_path[one].template for _, one in suspect.calls}
    # What this node itself, or its op, was seen to change comes first; generators last, they change with much else.
    changes.sort(key=lambda change: (
        change.kind == "random", not any(loaded.flat.by_path[w].template in writes_here for w in change.writers)
    ))  # fmt: skip
    tried = [change for change in changes if change.data is not None][:MAX_PLACES_TRIED]
    causes = [change for change in tried if _alone(loaded, tape, batch, path, _transplant(loaded, [change])) is None]
    proven = "with what was there before the call put into a fresh process, the call gives the recorded result"
    if not causes and len(tried) > 1 and _alone(loaded, tape, batch, path, _transplant(loaded, tried)) is None:
        causes, proven = tried, f"{proven}; it takes several places together"
    if not causes:
        causes, proven = changes[:1], "it changed before the call; it could not be put elsewhere to prove it"
    leak = batch == 0 and bool(loaded.flat.by_path[path].iteration) and any(
        loaded.flat.by_path[writer].template == own for change in causes for writer in change.writers
    )  # fmt: skip
    evidence: dict[str, Any] = {
        "difference": suspect.differences[call], "batch": batch, "batches": tape.num_batches,
        "how": "alone from its declared states and inputs, in a process where nothing else ran, the call gives "
               "something else",
    }  # fmt: skip
    if not causes:
        shared = _shared_states(tape, path)
        if shared:
            findings.add(
                "shared-storage", path, shared[0],
                f"write a copy of its own to each of the states {' and '.join(shared)} in node "
                f"'{findings.node(path).name}'", **evidence,
            )  # fmt: skip
            return
        # Chance that seldom decides otherwise looks the same: the recorded call met it, the replays did not.
        if _varies(loaded, tape, call, MAX_DRAWS):
            _add_chance(loaded, tape, findings, batch, path, suspect.differences[call])
            return
        evidence["how"] += f", the same in each of {MAX_DRAWS} runs"
        _add_kept(findings, "hidden-unknown", path, "a place that was not found", evidence)
        return
    for change in causes[:3]:
        kind: Kind = "iteration-leak" if leak else HIDDEN[change.kind]
        place = {"place": change.name, "place_kind": change.kind, "held": change.shown, "proof": proven,
                 "changed_by": list(change.writers)}  # fmt: skip
        _add_kept(findings, kind, path, change.name, {**evidence, **place})


def _shared_states(tape: Tape, path: str) -> list[str]:
    names = tape.touched(path)
    return sorted({one for share in tape.notes.sharing if share.state in names for one in (share.state, share.other)})


def _add_kept(findings: Findings, kind: Kind, path: str, subject: str, evidence: Mapping[str, Any]) -> None:
    """Add a finding about something that is kept outside of the declared states."""
    node = findings.node(path)
    if kind == "hidden-random":
        state = f"{node.name}.rng"
    elif kind == "hidden-unknown":
        state = f"{node.name}.memory"
    else:
        words = [word for word in subject.replace("'", " ").replace(".", " ").split() if word.isidentifier()]
        state = f"{node.name}.{words[0] if words and words[0] not in {'op', 'keys', 'len'} else 'memory'}"
    per = {"per": "iteration"} if kind == "iteration-leak" else {}
    writer = [one for one in evidence.get("changed_by", ()) if findings.template(one) != node.template]
    text = f"declare the state '{state}'{' per iteration' if per else ''}, add it to 'reads' and 'writes' of node " \
           f"'{node.name}', and keep {subject} there"  # fmt: skip
    if writer:
        text = f"declare the state '{state}', add it to 'reads' of node '{node.name}' and to 'writes' of node " \
               f"'{findings.node(writer[0]).name}', and keep {subject} there"  # fmt: skip
    add = {"reads": [state]} if writer else {"reads": [state], "writes": [state]}
    findings.add(kind, path, subject, text, {"states": {state: per}, "add": add}, **evidence)


def find_old_reads(loaded: Loaded, tape: Tape, findings: Findings) -> None:
    """Find operations that need the old value of a state that they declare as written only."""
    seen: set[tuple[str, str]] = set()
    for (batch, path), record in tape.calls.items():
        for key in sorted(record.old_reads):
            operation = loaded.flat.by_path[path]
            instance = operation.writes[key]
            data = tape.before[batch, path].get(instance)
            if (operation.template, key) in seen or data is None:
                continue
            difference = _with_other_value(loaded, tape, operation, batch, instance)
            if difference is None:
                continue
            seen.add((operation.template, key))
            node = findings.node(path)
            findings.add(
                "reads-old-value", path, key, f"add '{key}' to 'reads' of node '{node.name}'",
                {"add": {"reads": [key]}},
                batch=batch, difference=difference,
                how="with another value in the state before the call, the call gives something else",
            )  # fmt: skip


def _with_other_value(loaded: Loaded, tape: Tape, operation: Operation, batch: int, instance: str) -> str | None:
    def work() -> str | None:
        store = states_before(tape, batch, operation.path)
        other = perturb(store[instance])
        if digest(other) == digest(store[instance]):
            return None
        store[instance] = other
        try:
            different = run_alone(loaded, tape, batch, operation.path, store)
        except Exception as error:  # noqa: BLE001 - what user code does with a strange value
            return f"{type(error).__name__}: {error}"[:200]
        return str(different) if different is not None and not different.bits_only else None

    try:
        found: str | None = in_fork(work, loaded.timeout_s)
    except ForkFailedError as error:
        return str(error)
    return found
