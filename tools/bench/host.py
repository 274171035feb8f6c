"""The process that a system under test runs in: ``python -m flashrt.bench.host --fd N``.

Reads one ``hello``, loads the system, serves it, and answers on the same socket: ``ready``, ``output``, ``event``,
``done`` or ``failed``. When the harness disappears, this process ends its whole group.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.bench.guards import hide, replaced_timers
from flashrt.bench.intake import Intake
from flashrt.bench.io import CLOSED, InputClosed, Inputs, Outputs, SystemIO
from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, FlashrtError, InputError, listed, nearest, user_traceback
from flashrt.runtime.lifeline import current_place, end_system, inherited_socket
from flashrt.runtime.loading import Loading
from flashrt.runtime.usage import process_usage
from flashrt.runtime.wire import Connection

if TYPE_CHECKING:
    from flashrt.ir.building import BuiltProgram

Serve = Callable[[SystemIO], Any]


def main() -> int:
    """Serve one system over the inherited socket; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    loading = Loading()
    connection = Connection(inherited_socket(arguments.fd), torch=True)
    hello = connection.receive()
    if hello is None:
        return 1
    spec = hello["value"]
    # Before any thread, which a new user namespace does not take along, and before any code of the system.
    for record in hide(spec["hidden"], spec["private"], spec["harness"]):
        connection.send(record)
    # The values of a deployment only pass through its supervisor: as bytes, without torch.
    connection.torch = spec["kind"] != "deployment"
    inputs = Inputs(spec["inputs"])
    intake = Intake(connection, lambda message: _take(connection, message, inputs, io), _end_all)
    inputs.wait_with(intake.wait)
    io = SystemIO(
        inputs,
        Outputs(lambda name, value, batch: _write(connection, name, value, batch)),
        spec["devices"],
        spec["config"],
        lambda: _ready(connection, loading),
        connection.send,
    )
    intake.start()
    try:
        serve = load_system(spec)
    except BaseException as error:  # noqa: BLE001 - reported to the harness whatever it is
        return _fail(connection, error, "load")
    try:
        serve(io)
    except InputClosed:
        pass
    except BaseException as error:  # noqa: BLE001 - reported to the harness whatever it is
        return _fail(connection, error, "serve")
    for name in replaced_timers():
        connection.send({"kind": "replaced", "text": name})
    connection.send({"kind": "done", "usage": process_usage()})
    return 0


def _ready(connection: Connection, loading: Loading) -> None:
    loading.end()
    connection.send({"kind": "ready", "at_ns": monotonic_ns()})


def _write(connection: Connection, name: str, value: Any, batch: int | None) -> None:
    connection.send({"kind": "output", "name": name, "batch": batch}, value, f"output '{name}'")


def _end_all() -> None:
    """End all of this system: the harness is gone without saying goodbye, and nothing may outlive it."""
    sys.stderr.flush()
    end_system()


def _take(connection: Connection, message: Mapping[str, Any], inputs: Inputs, io: SystemIO) -> None:
    if message["kind"] == "input":
        for name, value in message["value"].items():
            inputs[name].put(value)
    elif message["kind"] == "close":
        for buffer in inputs.values():
            buffer.put(CLOSED)
    elif message["kind"] == "where" and not io.ask_where():
        connection.send({"kind": "at", "text": current_place()})


def _fail(connection: Connection, error: BaseException, phase: str) -> int:
    trace = "" if isinstance(error, FlashrtError) else user_traceback(error)
    text = str(error) if isinstance(error, FlashrtError) else f"{type(error).__name__}: {error}"
    findings = [asdict(finding) for finding in error.findings] if isinstance(error, FlashrtError) else []
    try:
        connection.send({"kind": "failed", "phase": phase, "text": text, "traceback": trace, "findings": findings})
    except OSError:
        print(f"{text}\n{trace}", file=sys.stderr)
    return 3


def load_system(spec: dict[str, Any]) -> Serve:
    """Return the serving function of a system: the user's own, the interpreter, or the runtime."""
    kind = spec["kind"]
    if kind == "code":
        from flashrt.ir.ops import load_function

        return load_function(Path(spec["path"]), spec["function"])
    from flashrt.ir.building import build
    from flashrt.ir.documents import read_document

    built = build(read_document(Path(spec["program"])), Path(spec["folder"]))
    _check_names(list(built.program.graphs[built.program.entry].inputs), spec["inputs"])
    if kind == "program":
        return lambda io: serve_program(built, io)
    from flashrt.runtime.serve import serve_deployment

    profile = Path(spec["profile"]) if spec["profile"] else None
    program, path = Path(spec["program"]), Path(spec["path"])
    return lambda io: serve_deployment(built, program, path, io, profile, spec["measured"])


def _check_names(wanted: Sequence[str], yielded: Sequence[str]) -> None:
    """Refuse inputs under other names than the program's: nothing would ever come on one of them."""
    missing = [name for name in wanted if name not in yielded]
    spare = [name for name in yielded if name not in wanted]
    findings = []
    for name in missing:
        near = nearest(name, spare)
        only = spare[0] if len(spare) == len(missing) == 1 else None
        repair = f"rename '{near or only}' to '{name}'" if near or only else f"yield '{name}' too"
        findings.append(
            Finding(f"the program's input '{name}'", f"an inputs function that yields {listed(wanted)}",
                    f"one that yields {listed(yielded)}", f"{repair} in the inputs function, and call again",
                    rule="unknown-input", nearest=near)
        )  # fmt: skip
    if findings:
        raise InputError(findings)


def serve_program(built: BuiltProgram, io: SystemIO) -> None:
    """Serve a program with the sequential interpreter: each batch whole, after the other."""
    from flashrt.ir.interpreter import Interpreter
    from flashrt.ir.ops import Context

    spans = _Spans(io)
    interpreter = Interpreter(built.flat, built.folder, Context(device="cpu", config=io.config), spans)
    names = list(built.program.graphs[built.program.entry].inputs)
    io.ready()
    batch = 0
    while True:
        try:
            item = {name: io.inputs[name].read() for name in names}
        except InputClosed:
            break
        for port, (_, chunks) in interpreter.run_batch_in_chunks(item).items():
            for chunk in chunks:
                io.outputs[port].write(chunk, batch)
        io.batch_done(batch)
        batch += 1
    for note in interpreter.notes:
        io.note({"kind": "note", "text": note})


class _Spans:
    """Sends the span of each operation as an event."""

    def __init__(self, io: SystemIO) -> None:
        self._io = io
        self._start_ns = 0

    def started(self, path: str, batch: int) -> None:
        self._start_ns = monotonic_ns()

    def finished(self, path: str, batch: int) -> None:
        self._io.note(
            {
                "kind": "span",
                "name": path,
                "batch": batch,
                "device": self._io.devices[0] if self._io.devices else "cpu",
                "start_ns": self._start_ns,
                "end_ns": monotonic_ns(),
            }
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the system that still run must not hold the process.
    os._exit(code)
