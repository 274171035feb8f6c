"""One worker, ``python -m flashrt.runtime.worker --fd N``: runs the operations of its group, batch after batch."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashrt.clock import MonotonicClock
from flashrt.errors import FlashrtError, InputError
from flashrt.ir.build import build
from flashrt.ir.documents import read_document
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flatten import INPUT, OUTPUT, Dataflow
from flashrt.ir.interpret import check_input, in_batch
from flashrt.ir.ops import Context, load_ops
from flashrt.ir.values import join
from flashrt.runtime.batch import END, OperationRun, Stopwatch
from flashrt.runtime.inbox import Inbox, LinkBrokenError
from flashrt.runtime.lifeline import current_place, die_with_parent, end_system, inherited_socket
from flashrt.runtime.wire import Connection


class Worker:
    """The operations of one group, their state, and the links to other groups.

    Parameters
    ----------
    hello
        The supervisor's first message: program path, plan, configuration, and the links' descriptors.
    control
        The connection to the supervisor.
    """

    def __init__(self, hello: Mapping[str, Any], control: Connection) -> None:
        plan = hello["plan"]
        self.control = control
        self.inbox = Inbox()
        self.clock = MonotonicClock()
        self.device = "+".join(plan["devices"]) or "cpu"
        self.batch = 0
        self.stop_after: int | None = None
        self.admitted = threading.Condition()
        self._num_admitted = 0
        self._plan = plan
        self._hello = hello
        self._blocking = frozenset(plan["blocking"])
        self.stopwatch = Stopwatch(self.clock, self._span)
        self.local = frozenset(plan["operations"])
        self.place = hello["place"]
        self.links = {
            group: Connection(inherited_socket(number), torch=True) for group, number in hello["links"].items()
        }
        self.notes: set[str] = set()

    def load(self) -> None:
        """Load this worker's operations, and only those.

        Raises
        ------
        InputError
            The program's ops cannot be loaded.
        """
        hello, plan = self._hello, self._plan
        built = build(read_document(Path(hello["program"])), Path(hello["folder"]))
        self.flat = flat = built.flat
        self.numbers = {flow: number for number, flow in enumerate(flat.dataflow)}
        mine = [flat.by_path[path] for path in plan["operations"]]
        names = {operation.op for operation in mine} | {p.op for operation in mine for p in operation.prologues}
        context = Context(
            device=torch_device(plan["devices"]), config=hello["config"], operations=frozenset(names), degree=1
        )
        ops = load_ops(flat, built.folder, context)
        store: dict[str, Any] = {}
        self.runners = [OperationRunner(flat, operation, ops, store) for operation in mine]

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        self.control.send(
            {
                "kind": "span",
                "name": name,
                "batch": self.batch,
                "device": self.device,
                "start_ns": start_ns,
                "end_ns": end_ns,
            }
        )

    def admit(self, count: int) -> None:
        """Allow batches up to `count`; the receiving thread calls this."""
        with self.admitted:
            self._num_admitted = count
            self.admitted.notify_all()

    def stop(self, count: int) -> None:
        """End after `count` batches."""
        with self.admitted:
            self.stop_after = count
            self.admitted.notify_all()

    def run(self) -> None:
        """Run batches as they are admitted, until told to stop."""
        while True:
            with self.admitted:
                while self._num_admitted <= self.batch and self.stop_after != self.batch:
                    self.admitted.wait()
                if self.stop_after == self.batch:
                    return
            try:
                self.run_batch()
            except InputError as error:
                raise in_batch(error, self.batch) from error
            self.batch += 1

    def run_batch(self) -> None:
        """Run this worker's operations on one batch, in their order."""
        runs: dict[str, OperationRun] = {}
        for runner in self.runners:
            path = runner.operation.path
            runs[path] = self._begin(runner, runs)
            # One that takes turns makes its chunks as the next operation asks for them.
            if path not in self._plan["takes_turns"]:
                runs[path].drain()
        for run in runs.values():
            run.drain()
            if run.overrun_ns:
                overrun = {"kind": "overrun", "name": run.path, "batch": self.batch, "over_ns": run.overrun_ns}
                self.control.send(overrun)
            for note in set(run.notes) - self.notes:
                self.notes.add(note)
                self.control.send({"kind": "note", "text": note})

    def _begin(self, runner: OperationRunner, runs: Mapping[str, OperationRun]) -> OperationRun:
        path = runner.operation.path
        inputs: dict[str, Any] = {}
        first: dict[str, Any] = {}
        for flow in self.flat.incoming.get(path, ()):
            streamed = flow.target_port in runner.streamed_inputs and not flow.prologue
            if flow.source in self.local:
                source = runs[flow.source]
                value = source.chunks(flow) if streamed else source.whole(flow)
            else:
                chunks = self._entering(flow) if flow.source == INPUT else self._arriving(flow)
                value = chunks if streamed else join(list(chunks), flow.axis, where=flow.label)
            (first if flow.prologue else inputs)[flow.target_port] = value
        hold_ns = int(self._plan["hold_ms"].get(path, 0.0) * 1e6)
        outgoing = self.flat.outgoing.get(path, ())
        return OperationRun(
            runner, outgoing, self.local, inputs, first, self._send, self.stopwatch, self.clock, hold_ns,
            self._blocking,
        )  # fmt: skip

    def _arriving(self, flow: Dataflow) -> Iterator[Any]:
        chunks = self.inbox.chunks(self.numbers[flow], self.batch)
        while True:
            self.stopwatch.enter(None)
            try:
                value = next(chunks, self)
            finally:
                self.stopwatch.leave()
            if value is self:
                return
            yield value

    def _entering(self, flow: Dataflow) -> Iterator[Any]:
        """Yield the chunks of a value from outside, which comes whole: a batch's item."""
        for value in self._arriving(flow):
            check_input(self.flat.program, flow.source_port, value, self.batch)
            distributor = Distributor(flow)
            yield from distributor.push(Piece({flow.source_port: value}, False))
            yield from distributor.finish()

    def _send(self, flow: Dataflow, value: Any, last: bool) -> None:
        target = self.control if flow.target == OUTPUT else self.links[self.place[flow.target]]
        head = {
            "kind": "output" if flow.target == OUTPUT else "chunk",
            "flow": self.numbers[flow],
            "batch": self.batch,
            "last": last,
        }
        if flow.target == OUTPUT:
            head["name"] = flow.target_port
        if value is END:
            target.send({**head, "kind": f"{head['kind']}_end"})
        else:
            target.send(head, value, flow.label)

    def listen(self) -> None:
        """Start the threads that fill the inbox and obey the supervisor."""
        for group, link in self.links.items():
            threading.Thread(target=self._receive, args=(link, f"group '{group}'"), daemon=True).start()
        threading.Thread(target=self._receive, args=(self.control, "the supervisor"), daemon=True).start()

    def _receive(self, connection: Connection, name: str) -> None:
        try:
            while (message := connection.receive()) is not None:
                self._take(message)
        except (OSError, ValueError, KeyError, MemoryError) as error:
            # Most likely user code closed or wrote to a descriptor that is not its own.
            print(f"flashrt: the connection to {name} broke: {type(error).__name__}: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(5)
        if connection is self.control:
            # Nobody is left to work for.
            end_system()
        self.inbox.fail(f"{name} is gone")

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "chunk":
            self.inbox.put(message["flow"], message["batch"], message["value"], last=message["last"])
        elif kind == "chunk_end":
            self.inbox.end(message["flow"], message["batch"])
        elif kind == "admit":
            self.admit(message["count"])
        elif kind == "stop":
            self.stop(message["count"])
        elif kind == "where":
            self.control.send({"kind": "at", "text": f"batch {self.batch}, {current_place()}"})


def torch_device(devices: list[str]) -> str:
    """Return the device as torch spells it: the worker sees only its own devices, so the first is number 0."""
    kind = devices[0].split("-", 1)[0].split(":", 1)[0] if devices else "cpu"
    return "cuda:0" if kind in {"cuda", "rocm"} else "cpu"


def main() -> int:
    """Serve one group; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    control = Connection(inherited_socket(arguments.fd), torch=True)
    greeting = control.receive()
    if greeting is None:
        return 1
    hello = greeting["value"]
    die_with_parent(hello["supervisor"])
    try:
        worker = Worker(hello, control)
        worker.listen()
        worker.load()
        control.send({"kind": "ready"})
        worker.run()
    except LinkBrokenError as error:
        # Another worker broke first; the supervisor knows which.
        with suppress(OSError):
            control.send({"kind": "orphaned", "text": str(error)})
        return 4
    except BaseException as error:  # noqa: BLE001 - reported to the supervisor whatever it is
        known = isinstance(error, FlashrtError)
        with suppress(OSError):
            control.send(
                {
                    "kind": "failed",
                    "text": str(error) if known else f"{type(error).__name__}: {error}",
                    "traceback": "" if known else traceback.format_exc(limit=-6),
                }
            )
        return 3
    from flashrt.runtime.usage import process_usage

    control.send({"kind": "done", "usage": process_usage()})
    # Stay until the supervisor has read everything: closing now could cut what other workers still send.
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
