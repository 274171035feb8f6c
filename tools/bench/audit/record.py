"""Running a program once while everything that its operations touch is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashrt.bench.audit.files import FileUse, FileWatch
from flashrt.bench.audit.values import digest, freeze, is_opaque, storages, thaw
from flashrt.clock import monotonic_ns
from flashrt.ir import INPUT, OUTPUT, Dataflow, FlatProgram, Operation, OperationRunner
from flashrt.ir.execute import Distributor, Piece
from flashrt.ir.interpreter import gather
from flashrt.ir.ops import Call
from flashrt.ir.values import is_tensor

Arrived = dict[Dataflow, list[Any]]


class ObservingView(MutableMapping[str, Any]):
    """The states of one operation: writes down every access, and lets through what was not declared."""

    def __init__(self, flat: FlatProgram, operation: Operation, store: dict[str, Any]) -> None:
        self._flat = flat
        self._operation = operation
        self._store = store
        self.begin()

    def begin(self) -> None:
        """Forget the accesses of the call before."""
        self.reads: set[str] = set()
        self.sets: set[str] = set()
        self.old_reads: set[str] = set()
        """States declared as written only, read before this call wrote them."""
        self.undeclared_reads: dict[str, str] = {}
        self.undeclared_writes: dict[str, str] = {}

    def instance(self, key: str) -> str:
        """Return the instance that a name stands for here, declared or not."""
        operation = self._operation
        found = operation.reads.get(key, operation.writes.get(key))
        if found is not None:
            return found
        declared = self._flat.program.states.get(key)
        per_iteration = declared is not None and declared.per == "iteration"
        return key + "".join(f"[{index}]" for index in operation.iteration) if per_iteration else key

    def __getitem__(self, key: str) -> Any:
        if key in self._operation.reads:
            self.reads.add(key)
        elif key in self._operation.writes:
            if key not in self.sets:
                self.old_reads.add(key)
        else:
            self.undeclared_reads[key] = self.instance(key)
        return self._store.get(self.instance(key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the state, or `default` when it was never written."""
        value = self[key]
        return default if value is None else value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the state; write `default` first when it was never written."""
        value = self[key]
        if value is None and default is not None:
            self[key] = value = default
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._operation.writes:
            self.sets.add(key)
        else:
            self.undeclared_writes[key] = self.instance(key)
        self._store[self.instance(key)] = value

    def __delitem__(self, key: str) -> None:
        self[key] = None

    def __contains__(self, key: object) -> bool:
        known = key in self._operation.reads or key in self._operation.writes
        return known and self[str(key)] is not None

    def __iter__(self) -> Iterator[str]:
        return iter({**self._operation.reads, **self._operation.writes})

    def __len__(self) -> int:
        return len({**self._operation.reads, **self._operation.writes})


class Session:
    """Operations that are loaded, with a store of their own, ready to be run in any order that the dataflow allows."""

    def __init__(self, flat: FlatProgram, ops: Mapping[str, Call], store: dict[str, Any] | None = None) -> None:
        self.flat = flat
        self.store: dict[str, Any] = {} if store is None else store
        self.views = {one.path: ObservingView(flat, one, self.store) for one in flat.operations}
        self.runners = {
            one.path: OperationRunner(flat, one, ops, self.store, self.views[one.path]) for one in flat.operations
        }

    def begin(self, item: Mapping[str, Any]) -> Arrived:
        """Return what has arrived when a batch begins."""
        return {flow: travel(flow, [Piece(item, False)]) for flow in self.flat.outgoing.get(INPUT, ())}

    def deliver(self, path: str, pieces: Sequence[Piece], arrived: Arrived) -> None:
        """Let an operation's pieces arrive at the other ends."""
        for flow in self.flat.outgoing.get(path, ()):
            arrived[flow] = travel(flow, pieces)


def travel(flow: Dataflow, pieces: Sequence[Piece]) -> list[Any]:
    """Return the chunks that arrive at the other end of `flow`."""
    distributor = Distributor(flow)
    return [chunk for piece in pieces for chunk in distributor.push(piece)] + distributor.finish()


def run_pieces(
    runner: OperationRunner, values: Mapping[str, Any], first: Mapping[str, Any]
) -> tuple[list[Piece], list[Piece]]:
    """Run a call; return its pieces as others get them, and as they were when each was handed over."""
    live, copies = [], []
    for piece in runner.run(values, first):
        live.append(piece)
        copies.append(as_handed_over(runner, piece))
    return live, copies


def as_handed_over(runner: OperationRunner, piece: Piece) -> Piece:
    """Return a piece for comparing: a copy where the op goes on and could change it, else the piece itself."""
    if runner.num_output_chunks == 1 and not runner.streamed_inputs:
        return piece
    return Piece(thaw(freeze({port: piece.outputs[port] for port in runner.needed})), piece.is_chunk)


@dataclass
class CallRecord:
    """One call of one operation: what it got, what it did, what it left."""

    path: str
    batch: int
    inputs: dict[str, str]
    """Port -> fingerprint of what it was called with."""
    pieces: list[tuple[bytes, bool]] = field(default_factory=list)
    """(outputs that others use, whether it is a chunk), copied when each was handed over."""
    piece_digests: list[dict[str, str]] = field(default_factory=list)
    states: dict[str, bytes | None] = field(default_factory=dict)
    """Instance -> its value afterwards, where that changed or was set; None: it cannot be copied."""
    after: dict[str, str] = field(default_factory=dict)
    """Instance -> fingerprint afterwards, of all that it touched."""
    reads: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    in_place: set[str] = field(default_factory=set)
    """Declared writes that changed without being set."""
    old_reads: set[str] = field(default_factory=set)
    undeclared_reads: dict[str, str] = field(default_factory=dict)
    undeclared_writes: dict[str, str] = field(default_factory=dict)
    changed_inputs: dict[str, str] = field(default_factory=dict)
    """Port -> fingerprints before and after."""
    changed_states: dict[str, str] = field(default_factory=dict)
    """Instance that it does not declare to write -> fingerprints before and after."""
    not_copied: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    ns: int = 0


@dataclass(frozen=True)
class HandedOver:
    """An output that is looked at again later."""

    path: str
    port: str
    number: int
    value: Any
    digest: str
    batch: int


@dataclass(frozen=True)
class Sharing:
    """Memory that a state and something else have in common, and that was changed while they did."""

    batch: int
    state: str
    other: str
    other_is_state: bool


@dataclass(frozen=True)
class ChangedOutput:
    """An output whose content changed after it was handed over."""

    path: str
    port: str
    batch: int
    when: str


@dataclass
class Notes:
    """What was seen beside the calls."""

    sharing: list[Sharing] = field(default_factory=list)
    outputs: list[ChangedOutput] = field(default_factory=list)
    late: list[tuple[int, str]] = field(default_factory=list)
    """(batch, instance) that changed without an operation that was seen to do it."""
    files: dict[str, FileUse] = field(default_factory=dict)
    files_before: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)
    """Place beside the states that changed -> its kind."""
    ns: int = 0


class Observation:
    """One observed run. Its messages are `CallRecord` for each call and `Notes` at the end.

    Parameters
    ----------
    thorough
        Whether all states are looked at after each call; else those that the operation declares, the others by their
        version counters, and all of them at the end of the batch.
    memory
        (first, after last, name) of memory that the ops had before they ran.
    """

    def __init__(
        self,
        flat: FlatProgram,
        ops: Mapping[str, Call],
        watch: FileWatch,
        memory: Sequence[tuple[int, int, str]],
        *,
        thorough: bool,
    ) -> None:
        self.session = Session(flat, ops)
        self.notes = Notes()
        self._watch = watch
        self._memory = memory
        self._thorough = thorough
        self._known: dict[str, str] = {}
        self._tokens: dict[str, Any] = {}
        self._handed: list[HandedOver] = []
        self._mutated: list[Any] = []
        self._before: dict[str, tuple[Any, str, frozenset[tuple[str, bool]]]] = {}
        watch.start()

    def run_one(self, batch: int, item: Mapping[str, Any], send: Callable[[CallRecord], None]) -> None:
        """Run the next batch."""
        arrived = self.session.begin(item)
        self._mutated = []
        for operation in self.session.flat.operations:
            send(self._call(operation, batch, arrived))
        self._end_batch(batch)

    def finish(self) -> Notes:
        """Return what was seen beside the calls."""
        self.notes.files = self._watch.uses
        self.notes.files_before = self._watch.before
        return self.notes

    def _call(self, operation: Operation, batch: int, arrived: Arrived) -> CallRecord:
        path, store = operation.path, self.session.store
        runner, view = self.session.runners[path], self.session.views[path]
        values, first = gather(self.session.flat, runner, arrived)
        given = {**values, **{f"initial {port}": value for port, value in first.items()}}
        record = CallRecord(path, batch, {port: digest(value) for port, value in given.items()})
        view.begin()
        pieces: list[Piece] = []
        handed: list[HandedOver] = []
        started = monotonic_ns()
        with self._watch.during(path):
            for piece in runner.run(values, first):
                pieces.append(piece)
                needed = {port: piece.outputs[port] for port in sorted(runner.needed)}
                record.pieces.append((freeze(needed), piece.is_chunk))
                record.piece_digests.append({port: digest(value) for port, value in needed.items()})
                handed += [HandedOver(path, port, len(pieces) - 1, value, record.piece_digests[-1][port], batch)
                           for port, value in needed.items()]  # fmt: skip
        record.ns = monotonic_ns() - started
        self.notes.ns += record.ns
        self._watch.settle(path)
        for port, value in given.items():
            now = digest(value)
            if now != record.inputs[port]:
                record.changed_inputs[port] = f"{record.inputs[port][:10]} -> {now[:10]}"
                self._mutated.append(value)
        record.reads, record.sets, record.old_reads = view.reads, view.sets, view.old_reads
        record.undeclared_reads, record.undeclared_writes = view.undeclared_reads, view.undeclared_writes
        self._look_at_states(operation, record, store)
        self._look_at_outputs(handed, "before its batch was done")
        self._handed += handed
        self.session.deliver(path, pieces, arrived)
        return record

    def _look_at_states(self, operation: Operation, record: CallRecord, store: Mapping[str, Any]) -> None:
        written = {*operation.writes.values(), *record.undeclared_writes.values()}
        touched = {*operation.reads.values(), *written, *record.undeclared_reads.values()}
        by_instance = {instance: key for key, instance in operation.writes.items()}
        for instance, value in store.items():
            known = self._known.get(instance)
            if instance not in touched and not self._thorough and _token(value) == self._tokens.get(instance):
                continue
            now = digest(value)
            self._tokens[instance] = _token(value)
            if instance in touched:
                record.after[instance] = now
            was_set = by_instance.get(instance) in record.sets or instance in record.undeclared_writes.values()
            if now == known and not was_set:
                continue
            if instance in by_instance and not was_set:
                record.in_place.add(by_instance[instance])
            if instance not in written:
                record.changed_states[instance] = f"{(known or 'none')[:10]} -> {now[:10]}"
            self._known[instance] = now
            try:
                record.states[instance] = freeze(value)
            except TypeError as error:
                record.states[instance] = None
                record.not_copied.append(f"state '{instance}': {error}")
            if is_opaque(value):
                record.opaque.append(instance)

    def _look_at_outputs(self, handed: Sequence[HandedOver], when: str) -> list[HandedOver]:
        """Note outputs that changed; return those that did not."""
        kept = []
        for one in handed:
            if digest(one.value) == one.digest:
                kept.append(one)
            elif not any(_overlapping(one.value, value) for value in self._mutated):
                self.notes.outputs.append(ChangedOutput(one.path, one.port, one.batch, when))
        return kept

    def _end_batch(self, batch: int) -> None:
        for instance, value in self.session.store.items():
            now = digest(value)
            if now != self._known.get(instance):
                self.notes.late.append((batch, instance))
                self._known[instance] = now
        # Those of the batch before as well: the next call of an op is what changes memory that it gave away.
        kept = self._look_at_outputs(self._handed, "in the batch after it was handed over")
        self._handed = [one for one in kept if one.batch == batch]
        self._look_at_memory(batch)

    def _look_at_memory(self, batch: int) -> None:
        spans = {instance: set(storages(value)) for instance, value in self.session.store.items()}
        now: dict[str, tuple[Any, str, frozenset[tuple[str, bool]]]] = {}
        for instance, own in spans.items():
            others = {(other, True) for other, theirs in spans.items() if other != instance and _meet(own, theirs)}
            others |= {(name, False) for first, last, name in self._memory if _meet(own, {(first, last)})}
            value = self.session.store[instance]
            content = self._known[instance]
            before = self._before.get(instance)
            # The value before is held until here, so the same memory is the same value, changed in place.
            if others and before is not None and set(storages(before[0])) & own and content != before[1]:
                self.notes.sharing += [
                    Sharing(batch, instance, other, is_state) for other, is_state in sorted(others & before[2])
                ]
            now[instance] = (value, content, frozenset(others))
        self._before = now


def _meet(own: set[tuple[int, int]], theirs: set[tuple[int, int]]) -> bool:
    return any(first < end and start < last for first, last in own for start, end in theirs)


def _overlapping(a: Any, b: Any) -> bool:
    return a is b or _meet(set(storages(a)), set(storages(b)))


def _token(value: Any) -> Any:
    """Return what changes when a value does, as far as can be told without reading its tensors."""
    if is_tensor(value):
        return id(value), value._version
    if isinstance(value, Mapping):
        return tuple((key, _token(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_token(item) for item in value)
    return digest(value)


@dataclass
class Tape:
    """An observed run as later checks use it: every call with its inputs and the states before it."""

    flat: FlatProgram
    items: Sequence[Mapping[str, Any]]
    calls: dict[tuple[int, str], CallRecord] = field(default_factory=dict)
    before: dict[tuple[int, str], dict[str, bytes | None]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    num_bytes: int = 0
    _states: dict[str, bytes | None] = field(default_factory=dict)

    def add(self, record: CallRecord) -> None:
        """Add the next call."""
        key = (record.batch, record.path)
        self.calls[key] = record
        self.before[key] = dict(self._states)
        self._states |= record.states
        self.num_bytes += sum(len(data) for data, _ in record.pieces)
        self.num_bytes += sum(len(data) for data in record.states.values() if data is not None)

    @property
    def num_batches(self) -> int:
        """Batches that were run."""
        return 1 + max((batch for batch, _ in self.calls), default=-1)

    def of_template(self, template: str) -> list[CallRecord]:
        """Return all calls of a node, batch after batch."""
        return [call for call in self.calls.values() if self.flat.by_path[call.path].template == template]

    def touched(self, path: str) -> set[str]:
        """Return the state instances that an operation declares, or was seen to use."""
        operation = self.flat.by_path[path]
        found = {*operation.reads.values(), *operation.writes.values()}
        for call in self.calls.values():
            if call.path == path:
                found |= {*call.undeclared_reads.values(), *call.undeclared_writes.values()}
        return found


def output_flows(flat: FlatProgram) -> tuple[Dataflow, ...]:
    """Return the dataflow that leaves the program."""
    return flat.incoming.get(OUTPUT, ())
