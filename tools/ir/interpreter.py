"""The interpreter: sequential, in topological order. What a program means is what this does.

Source: ``papers/000`` (FlashRT), the IR interpreter that is compared with the reference on the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flattening import INPUT, OUTPUT, Dataflow, FlatProgram
from flashrt.ir.model import Program
from flashrt.ir.ops import Context, load_ops
from flashrt.ir.values import describe, fits, join


class Observer(Protocol):
    """Told when an operation starts and ends; for measuring and tracing."""

    def started(self, path: str, batch: int) -> None:
        """Operation `path` begins on `batch`."""

    def finished(self, path: str, batch: int) -> None:
        """Operation `path` has ended on `batch`."""


class Interpreter:
    """Runs a program batch by batch in one process and keeps its state between batches.

    Parameters
    ----------
    flat
        The flattened program, free of errors (see `check_program`).
    folder
        Where the document lies; its ops file is beside it.
    context
        Device and configuration that the ops are loaded for.
    """

    def __init__(
        self,
        flat: FlatProgram,
        folder: Path,
        context: Context | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.flat = flat
        self.observer = observer
        self.notes: dict[str, None] = {}
        self.batch = 0
        self.state: dict[str, Any] = {}
        ops = load_ops(flat, folder, context or Context())
        self._runners = [OperationRunner(flat, operation, ops, self.state) for operation in flat.operations]

    def run_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one batch.

        Parameters
        ----------
        inputs
            Entry input -> value.

        Returns
        -------
        Entry output -> whole value.

        Raises
        ------
        InputError
            An input is missing, unknown or of the wrong shape, or an operation fails; names the operation.
        """
        return {
            port: join(parts, flow.axis, where=f"output '{port}'")
            for port, (flow, parts) in self.run_batch_in_chunks(inputs).items()
        }

    def run_batch_in_chunks(self, inputs: Mapping[str, Any]) -> dict[str, tuple[Dataflow, list[Any]]]:
        """Run one batch; return each entry output with the chunks it leaves in."""
        self.check_inputs(inputs)
        arrived: dict[Dataflow, list[Any]] = {}
        for flow in self.flat.outgoing.get(INPUT, ()):
            arrived[flow] = self.travel(flow, [Piece(inputs, False)])
        for runner in self._runners:
            path = runner.operation.path
            values, first = gather(self.flat, runner, arrived)
            if self.observer:
                self.observer.started(path, self.batch)
            try:
                pieces = list(runner.run(values, first))
            except InputError as error:
                raise in_batch(error, self.batch) from error
            if self.observer:
                self.observer.finished(path, self.batch)
            for flow in self.flat.outgoing.get(path, ()):
                arrived[flow] = self.travel(flow, pieces)
        self.batch += 1
        return {flow.target_port: (flow, arrived[flow]) for flow in self.flat.incoming.get(OUTPUT, ())}

    def travel(self, flow: Dataflow, pieces: Iterable[Piece]) -> list[Any]:
        """Return the chunks that arrive at the other end of `flow`, noting a value that cannot be cut."""
        distributor = Distributor(flow)
        chunks = [chunk for piece in pieces for chunk in distributor.push(piece)]
        chunks += distributor.finish()
        if distributor.note:
            self.notes[distributor.note] = None
        return chunks

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a batch whose inputs are not the entry graph's, all findings at once."""
        program = self.flat.program
        declared = program.graphs[program.entry].inputs
        findings = []
        for name in declared.keys() - inputs.keys():
            findings.append(
                Finding(
                    f"batch {self.batch}, input '{name}'",
                    "a value",
                    "none",
                    f"yield {listed(declared)} a batch",
                )
            )
        for name in inputs.keys() - declared.keys():
            findings.append(
                Finding(f"batch {self.batch}", f"inputs {listed(declared)}", f"'{name}'", "remove or rename it")
            )
        for name in declared.keys() & inputs.keys():
            try:
                check_input(program, name, inputs[name], self.batch)
            except InputError as error:
                findings += error.findings
        if findings:
            raise InputError(findings)

    def run(self, items: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Run a batch for every item and yield its outputs."""
        for item in items:
            yield self.run_batch(item)


def gather(
    flat: FlatProgram, runner: OperationRunner, arrived: Mapping[Dataflow, list[Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an operation is called with: its inputs (chunks where they stream), and those of its prologue."""
    incoming = flat.incoming.get(runner.operation.path, ())
    values = {
        f.target_port: arrived[f] if f.target_port in runner.streamed_inputs else join(arrived[f], f.axis)
        for f in incoming
        if not f.prologue
    }
    return values, {f.target_port: join(arrived[f], f.axis) for f in incoming if f.prologue}


def check_input(program: Program, name: str, value: Any, batch: int) -> None:
    """Refuse a batch's value for one entry input that is not what the program declares."""
    port = program.graphs[program.entry].inputs[name]
    if not fits(value, port.dtype, port.shape):
        raise input_error(
            f"batch {batch}, input '{name}'", f"{port.dtype or 'any dtype'} {list(port.shape or ())}", describe(value),
            "correct the inputs function, or the port's declaration", rule="wrong-shape",
        )  # fmt: skip


def in_batch(error: InputError, batch: int) -> InputError:
    """Return the same error with the batch named in every place."""
    if not error.findings:
        return error
    prefix = f"batch {batch}, "
    return InputError([replace(f, where=prefix + f.where.removeprefix(prefix)) for f in error.findings])


def interpret(
    flat: FlatProgram, folder: Path, items: Iterable[Mapping[str, Any]], context: Context | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the program over `items` from fresh state; return the outputs of every batch, and notes."""
    if not flat.operations:
        raise input_error(f"program '{flat.program.name}'", "operations", "none", "add nodes; call ir_build again")
    interpreter = Interpreter(flat, folder, context)
    outputs = list(interpreter.run(items))
    return outputs, list(interpreter.notes)
