"""Running one operation: its state, its chunks, its outputs. The interpreter and the runtime both call this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from flashrt.errors import InputError, input_error, listed
from flashrt.ir.flattening import Dataflow, FlatProgram, Operation
from flashrt.ir.ops import Call, Context, load_function, load_module, load_ops, user_error
from flashrt.ir.values import describe, fits, is_array, is_tensor, join, length, split

__all__ = [
    "Context",
    "Distributor",
    "OperationRunner",
    "Piece",
    "StateView",
    "load_function",
    "load_module",
    "load_ops",
    "user_error",
]

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """What an operation hands over at once: port -> value.

    `is_chunk` says that it is one of the declared chunks of the operation's streaming outputs, in order.
    """

    outputs: Outputs
    is_chunk: bool


class StateView(MutableMapping[str, Any]):
    """The declared states of one operation under their document names; others are refused by name.

    A state that was never written reads as None and is not ``in`` the view.
    """

    def __init__(self, where: str, store: dict[str, Any], reads: Mapping[str, str], writes: Mapping[str, str]) -> None:
        self._where = where
        self._store = store
        self._reads = reads
        self._writes = writes

    def _refuse(self, key: object, verb: str, declared: Mapping[str, str]) -> InputError:
        return input_error(
            self._where, f"to {verb} only declared states: {listed(declared)}", f"'{key}'",
            f"declare it under '{verb}s' of the node and call ir_build again", rule=f"undeclared-{verb}",
            valid=list(declared), name=str(key),
        )  # fmt: skip

    def __getitem__(self, key: str) -> Any:
        # A state that is only written is readable too: updating a buffer in place needs it. The audit finds
        # reads of the old value that were not declared.
        instance = self._reads.get(key, self._writes.get(key))
        if instance is None:
            raise self._refuse(key, "read", self._reads)
        return self._store.get(instance)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the state, or `default` when it was never written; an undeclared name is refused."""
        value = self[key]
        return default if value is None else value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the state; write `default` first when it was never written."""
        value = self[key]
        if value is None and default is not None:
            self[key] = value = default
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._writes:
            raise self._refuse(key, "write", self._writes)
        self._store[self._writes[key]] = value

    def __delitem__(self, key: str) -> None:
        self[key] = None

    def __contains__(self, key: object) -> bool:
        instance = self._reads.get(str(key), self._writes.get(str(key)))
        return instance is not None and self._store.get(instance) is not None

    def __iter__(self) -> Iterator[str]:
        return iter({**self._reads, **self._writes})

    def __len__(self) -> int:
        return len({**self._reads, **self._writes})


class OperationRunner:
    """One operation with its callables, its state and its stream structure, ready to run batch after batch.

    Parameters
    ----------
    store
        State instance -> value; shared by the operations of one process.
    view
        What the op gets as its state; default: a `StateView` of what the operation declares.
    """

    def __init__(
        self,
        flat: FlatProgram,
        operation: Operation,
        ops: Mapping[str, Call],
        store: dict[str, Any],
        view: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.operation = operation
        self.where = f"operation '{operation.path}' (op '{operation.op}')"
        self._call = ops[operation.op]
        self._prologues = [(prologue, ops[prologue.op]) for prologue in operation.prologues]
        self._state = StateView(self.where, store, operation.reads, operation.writes) if view is None else view
        incoming = [flow for flow in flat.incoming.get(operation.path, ()) if not flow.prologue]
        outgoing = flat.outgoing.get(operation.path, ())
        self.streamed_inputs = {flow.target_port: flow for flow in incoming if flow.target_chunks > 1}
        self.num_input_chunks = max((flow.target_chunks for flow in incoming), default=1)
        self.num_output_chunks = max((flow.source_chunks for flow in outgoing), default=1)
        self.needed = {flow.source_port for flow in outgoing if not flow.prologue}
        self.axis = next((flow.axis for flow in outgoing if flow.source_chunks > 1), 0)
        self._whole_lengths = {
            port: declared.shape[self.axis]
            for port, declared in operation.outputs.items()
            if self.num_output_chunks > 1 and declared.shape is not None and len(declared.shape) > self.axis
            and isinstance(declared.shape[self.axis], int)
        }  # fmt: skip

    def run(self, inputs: Mapping[str, Any], prologue_inputs: Mapping[str, Any] | None = None) -> Iterator[Piece]:
        """Run one batch; yield its outputs piece by piece, as soon as each is made.

        Parameters
        ----------
        inputs
            Port -> whole value; for a streamed port an iterable of its chunks, which may block.

        Raises
        ------
        InputError
            The op raises, or its outputs are not what the document says; names the operation.
        """
        lengths = dict.fromkeys(self._whole_lengths, 0)
        for piece in self._run(inputs, prologue_inputs):
            for port in lengths:
                value = piece.outputs.get(port)
                lengths[port] += (length(value, self.axis) or 0) if is_tensor(value) or is_array(value) else 0
            yield piece
        for port, got in lengths.items():
            wanted = self._whole_lengths[port]
            if got not in {0, wanted}:
                raise input_error(
                    f"{self.where}, port '{port}'", f"{wanted} along axis {self.axis}, all chunks joined", str(got),
                    "correct the op, or the port's declaration, and call ir_build again", rule="wrong-shape",
                )  # fmt: skip

    def _run(self, inputs: Mapping[str, Any], prologue_inputs: Mapping[str, Any] | None) -> Iterator[Piece]:
        values = self._with_initial(inputs, prologue_inputs)
        if not self.streamed_inputs:
            yield from self._pieces(values)
            return
        in_step = self.num_input_chunks == self.num_output_chunks
        for chunked in self._chunks(values):
            made_of_chunk = [piece.outputs for piece in self._pieces(chunked)]
            yield Piece(self._joined(made_of_chunk), in_step)

    def _with_initial(self, inputs: Mapping[str, Any], prologue_inputs: Mapping[str, Any] | None) -> dict[str, Any]:
        values = dict(inputs)
        for prologue, call in self._prologues:
            made = self._invoke(call, dict(prologue_inputs or {}))
            keys = (prologue.graph_port, prologue.port)
            values[prologue.port] = next((made[k] for k in keys if isinstance(made, Mapping) and k in made), made)
        return values

    def run_cut(
        self,
        inputs: Mapping[str, Any],
        cut: Mapping[str, list[Any]],
        prologue_inputs: Mapping[str, Any] | None = None,
        axis: int | None = None,
    ) -> list[Outputs]:
        """Run one batch with the inputs cut as `cut` says, whatever the document says; return the outputs call by call.

        Parameters
        ----------
        inputs
            Port -> whole value.
        cut
            Port -> its chunks, equally many of each; empty: one call on the whole.
        axis
            Along which what one call yields in several pieces is joined; default: the document's.
        """
        values = self._with_initial(inputs, prologue_inputs)
        found: list[Outputs] = []
        for number in range(max((len(chunks) for chunks in cut.values()), default=1)):
            result = self._invoke(self._call, {**values, **{port: chunks[number] for port, chunks in cut.items()}})
            parts = [result] if isinstance(result, Mapping) else list(result)
            along = self.axis if axis is None else axis
            found.append({port: join([part[port] for part in parts], along) for port in self.needed})
        return found

    def _joined(self, parts: list[Outputs]) -> Outputs:
        if len(parts) == 1:
            return parts[0]
        return {port: join([part[port] for part in parts], self.axis) for port in self.needed}

    def _chunks(self, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        streams = {port: iter(values[port]) for port in self.streamed_inputs}
        waiting: dict[str, list[Any]] = {port: [] for port in streams}
        ended: set[str] = set()
        whole = {port: value for port, value in values.items() if port not in streams}
        while True:
            for port, stream in streams.items():
                window = self.streamed_inputs[port].lookahead + 1
                while len(waiting[port]) < window and port not in ended:
                    try:
                        waiting[port].append(next(stream))
                    except StopIteration:
                        ended.add(port)
            present = {port for port, items in waiting.items() if items}
            if not present:
                return
            if present != set(streams):
                raise input_error(
                    self.where, "as many chunks on every streaming input",
                    f"no more on {listed(sorted(set(streams) - present))}", "make the chunk counts equal",
                    rule="chunk-counts",
                )  # fmt: skip
            chunk = {port: join(items, self.streamed_inputs[port].axis) for port, items in waiting.items()}
            yield {**whole, **chunk}
            for items in waiting.values():
                items.pop(0)

    def _invoke(self, call: Call, values: Mapping[str, Any]) -> Any:
        try:
            return call(values, self._state)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise user_error(self.where, "to return outputs", error, "correct the op and call again") from error

    def _pieces(self, values: Mapping[str, Any]) -> Iterator[Piece]:
        result = self._invoke(self._call, values)
        if isinstance(result, Mapping):
            yield Piece(self._checked(result), False)
            return
        if not isinstance(result, Iterator):
            raise input_error(
                self.where, "a mapping port -> value, or an iterator of mappings", describe(result),
                "return {port: value}", rule="op-result",
            )  # fmt: skip
        count = 0
        wanted = self.num_output_chunks if not self.streamed_inputs else 1
        while True:
            try:
                piece = next(result)
            except StopIteration:
                break
            except InputError:
                raise
            except Exception as error:
                raise user_error(self.where, f"chunk {count}", error, "correct the op and call again") from error
            count += 1
            if count > wanted > 1:
                raise self._wrong_count(wanted, f"more than {wanted}")
            yield Piece(self._checked(piece), self.num_output_chunks > 1)
        if count != wanted and (wanted > 1 or count == 0):
            raise self._wrong_count(wanted, str(count))

    def _wrong_count(self, wanted: int, got: str) -> InputError:
        return input_error(
            self.where, f"{wanted} chunks, as the streaming edge says", got,
            "correct the op, or 'chunks' of the edge, and call ir_build again", rule="chunk-counts",
        )  # fmt: skip

    def _checked(self, piece: Any) -> Outputs:
        if not isinstance(piece, Mapping):
            raise input_error(
                self.where, "chunks that are mappings port -> value", describe(piece), "yield {port: value}",
                rule="op-result",
            )  # fmt: skip
        missing = sorted(self.needed - set(piece))
        if missing:
            raise input_error(
                self.where, f"outputs {listed(sorted(self.needed))}", f"only {listed(piece)}",
                f"return {listed(missing)}, or correct the edge and call ir_build again", rule="missing-output",
            )  # fmt: skip
        for port, declared in self.operation.outputs.items():
            axis = self.axis if self.num_output_chunks > 1 else None
            if port in piece and not fits(piece[port], declared.dtype, declared.shape, axis):
                raise input_error(
                    f"{self.where}, port '{port}'",
                    f"{declared.dtype or 'any dtype'} {list(declared.shape) if declared.shape else ''}".strip(),
                    describe(piece[port]), "correct the op, or the port's declaration, and call ir_build again",
                    rule="wrong-shape",
                )  # fmt: skip
        return piece


class Distributor:
    """Turns an operation's pieces into what travels on one edge: chunks as they are made, or the whole at the end."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.note: str | None = None
        self._held: list[Any] = []

    def push(self, piece: Piece) -> list[Any]:
        """Take a piece; return the chunks that can leave now."""
        value = piece.outputs[self.flow.source_port]
        if self.flow.chunked and piece.is_chunk:
            return [value]
        self._held.append(value)
        return []

    def finish(self) -> list[Any]:
        """Return what is left to leave now that the operation has ended its batch."""
        held, self._held = self._held, []
        if not held:
            return []
        chunks, axis = self.flow.target_chunks, self.flow.axis
        if chunks == 1:
            return [join(held, axis, where=self.flow.label)]
        if len(held) == chunks:
            return held
        whole = join(held, axis, where=self.flow.label)
        size = length(whole, axis)
        if size is None or size < chunks:
            travels = "whole" if not size else f"in {size}"
            self.note = f"{self.flow.label}: {describe(whole)} cannot be cut into {chunks}; it travels {travels}"
        return split(whole, chunks, axis)
