"""One worker, ``python -m flashrt.runtime.worker --fd N``: runs the operations of its group, batch after batch."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from flashrt.clock import MonotonicClock, monotonic_ns
from flashrt.errors import FlashrtError, InputError, user_traceback
from flashrt.ir.building import build
from flashrt.ir.documents import read_document
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flattening import INPUT, Dataflow
from flashrt.ir.interpreter import check_input, in_batch
from flashrt.ir.ops import Context, load_ops
from flashrt.ir.values import join
from flashrt.runtime import messages
from flashrt.runtime.batch import END, OperationRun, Outlet, Stopwatch
from flashrt.runtime.channels.board import BUBBLE
from flashrt.runtime.channels.codec import Received
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.channels.hub import Remote, open_endpoint
from flashrt.runtime.checks import Arrivals, NanWatch
from flashrt.runtime.inbox import Inbox
from flashrt.runtime.layout import WorkerPlan
from flashrt.runtime.lifeline import current_place, die_with_parent, end_system, inherited_socket
from flashrt.runtime.loading import Loading
from flashrt.runtime.measuring import Loaded, Measuring
from flashrt.runtime.ranks import join_group
from flashrt.runtime.timeline import Timeline
from flashrt.runtime.wire import Connection

MAX_ROWS = 500
"""Spans that are kept before they are sent, where a batch has more."""


class Worker:
    """The operations of one group (or one rank of it), their state, and its end of the channels.

    Parameters
    ----------
    hello
        The supervisor's first message.
    control
        The connection to the supervisor.
    remote
        How it reaches workers on other hosts.
    orphaned
        Called when the supervisor is gone.
    """

    def __init__(
        self,
        hello: messages.Hello,
        control: Connection,
        remote: Remote | None = None,
        orphaned: Callable[[], None] = end_system,
    ) -> None:
        self.plan = plan = WorkerPlan.from_dict(hello.plan)
        self.control = control
        self.batch = 0
        self._hello = hello
        self._blocking = frozenset(plan.blocking)
        self._asynchronous = frozenset(plan.asynchronous)
        self._local = frozenset(plan.operations)
        self._orphaned = orphaned
        self.endpoint = open_endpoint(hello.wiring, torch=True, inherited=True, remote=remote)
        self._board = self.endpoint.board
        self._number = self._board.endpoints[plan.name]
        self._rows: list[tuple[str, str, int, int, int, int]] = []
        self._notes: set[str] = set()
        self._runs: dict[int, dict[str, OperationRun]] = {}
        """Batch -> its operations here, until the last of them is done."""
        self._depth = max(plan.stagger.values(), default=0)
        self._current: tuple[str, list[Outlet]] | None = None
        self._measuring: Measuring | None = None
        emulated = bool(plan.part_ns)
        self._device = Timeline(self._sleep_until_ns) if emulated else None
        self._stopwatch = Stopwatch(MonotonicClock(), self._ignore if emulated else self._span, self._doing)

    def load(self) -> None:
        """Load this worker's operations, and only those.

        Raises
        ------
        InputError
            The program's ops cannot be loaded, or its ranks do not meet.
        """
        hello, plan = self._hello, self.plan
        built = build(read_document(Path(hello.program)), Path(hello.folder))
        self.flat = flat = built.flat
        numbers = {flow: number for number, flow in enumerate(flat.dataflow)}
        self._wire(numbers)
        mine = [flat.by_path[path] for path in plan.operations]
        names = {operation.op for operation in mine} | {p.op for operation in mine for p in operation.prologues}
        device = torch_device(plan.devices)
        if device != "cpu":
            from flashrt.runtime.devices import DeviceChannels

            self._on_gpu = DeviceChannels(self.endpoint)
        group = join_group(plan, hello.store, device) if plan.degree > 1 else None
        context = Context(
            device=device, config=hello.config, operations=frozenset(names), rank=plan.rank, degree=plan.degree,
            group=group, tiles=dict(plan.tiles), loan=self._loan,
        )  # fmt: skip
        if plan.measured:
            self._measuring = Measuring(
                plan.measured, built.folder, device, plan.name, plan.rank, group, lambda row: self._rows.append(row)
            )
        ops = load_ops(flat, built.folder, context)
        store: dict[str, Any] = {}
        self.runners = [OperationRunner(flat, operation, ops, store) for operation in mine]
        if self._measuring is not None:
            self._measuring.loaded(
                Loaded(
                    flat, built.folder, tuple(mine), ops, store,
                    lambda names: load_ops(flat, built.folder, replace(context, operations=names)),
                )
            )  # fmt: skip
        # Operations that nothing reaches begin with their batch; all others wait for what they need.
        self._index = {path: index for index, path in enumerate(flat.by_path)}

    def _wire(self, numbers: Mapping[Dataflow, int]) -> None:
        """Find out which dataflow comes and goes on which channel."""
        plan, flows = self.plan, self.flat.dataflow
        coming: dict[int, list[int]] = {}
        self._outlets: dict[str, list[Outlet]] = {path: [] for path in plan.operations}
        self._flow_number = numbers
        for channel in self.endpoint.channels:
            if plan.name in channel.targets:
                coming[channel.number] = [number for number in channel.flows if flows[number].target in self._local]
            if plan.name == channel.source:
                number = channel.flows[0]
                flow = flows[number]
                outlet = Outlet(channel.number, flow, bool(self._blocking & set(flow.labels)))
                self._outlets[flow.source].append(outlet)
        self.inbox = Inbox(self.endpoint, coming)

    def _ignore(self, name: str, start_ns: int, end_ns: int) -> None:
        """Take no note of real work that stands for an emulated operation's."""

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        self._rows.append(("operation", name, self.batch, start_ns, end_ns, 0))

    def _doing(self, name: str | None, now_ns: int) -> None:
        number = -1 if name is None else self._index.get(name, -1)
        self._board.set_status(self._number, number, self.batch, now_ns)

    def _sleep_until_ns(self, deadline_ns: int) -> None:
        """Hold an emulated device; a cancelled deployment holds none."""
        while (left_ns := deadline_ns - monotonic_ns()) > 0:
            self.endpoint.sleep(left_ns / 1e9)

    def _loan(self, port: str, shape: Sequence[int], dtype: Any) -> Any | None:
        """Return a tensor in the memory of the channel that the running operation's port feeds, or None."""
        if self._measuring is not None:
            self._measuring.loaned(port)
        if self._current is None:
            return None
        path, outlets = self._current
        outlet = next((outlet for outlet in outlets if outlet.flow.source_port == port), None)
        if outlet is None:
            return None
        import torch

        count = 1
        for length in shape:
            count *= length
        memory = self.endpoint.loan(outlet.channel, count * dtype.itemsize, f"operation '{path}', port '{port}'")
        return None if memory is None else torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))

    def run(self) -> None:
        """Run batches as they are admitted, until told to stop.

        Raises
        ------
        ChannelClosedError
            The deployment was cancelled.
        InputError
            An operation failed.
        """
        board = self._board
        for cycle in count():
            while board.num_cycles() <= cycle:
                if board.stop_after() == cycle:
                    self._leave_asynchronous()
                    return
                self.endpoint.wait()
            try:
                self.run_cycle(cycle)
            except InputError as error:
                raise in_batch(error, self.batch) from error
            self.flush()

    def _leave_asynchronous(self) -> None:
        """Read no more from operations that run beside the batches: they may be behind, and would wait for room."""
        for channel in self.endpoint.channels:
            sources = {self.flat.dataflow[number].source for number in channel.flows}
            if self.plan.name in channel.targets and sources & self._asynchronous:
                self.endpoint.leave(channel.number)

    def run_cycle(self, cycle: int) -> None:
        """Run this worker's operations in their order, each on the batch whose turn it is in this cycle."""
        stagger, begun = self.plan.stagger, []
        for runner in self.runners:
            path = runner.operation.path
            batch = self._batch_of(cycle - stagger.get(path, 0))
            if batch == BUBBLE:
                continue
            self.batch = batch
            runs = self._runs.setdefault(batch, {})
            run = runs[path] = self._begin(runner, runs)
            begun.append((batch, run))
            if self._measuring is not None:
                self._await_streams(runner)
                self._measuring.run(run, batch)
            # One that takes turns makes its chunks as the next operation asks for them.
            elif path not in self.plan.takes_turns:
                run.drain()
        for batch, run in begun:
            self.batch = batch
            run.drain()
            self._report(run)
        if self._measuring is not None:
            self._measuring.finish(self.batch)
            for note in self._measuring.notes:
                messages.Note(note).send(self.control)
        self._runs.pop(self._batch_of(cycle - self._depth), None)

    def _await_streams(self, runner: OperationRunner) -> None:
        """Return when the first chunk of every stream from elsewhere is here: then ranks can begin together."""
        for flow in self.flat.incoming.get(runner.operation.path, ()):
            streamed = flow.target_port in runner.streamed_inputs and not flow.prologue
            if streamed and flow.source not in self._local:
                while not self.inbox.has(self._flow_number[flow]):
                    self.endpoint.wait()

    def _batch_of(self, cycle: int) -> int:
        return self._board.batch_of(cycle) if cycle >= 0 else BUBBLE

    def _report(self, run: OperationRun) -> None:
        """Keep what is worth saying of an operation's batch."""
        if run.overrun_ns:
            now_ns = monotonic_ns()
            self._rows.append(("overrun", run.path, self.batch, now_ns - run.overrun_ns, now_ns, 0))
        for note in set(run.notes) - self._notes:
            self._notes.add(note)
            messages.Note(note).send(self.control)

    def status(self) -> tuple[int, int, int]:
        """Return the number of the running operation (-1: none), the batch, and since when (ns)."""
        return self._board.status(self._number)

    def flush(self) -> None:
        """Tell the supervisor what happened since the last time."""
        if self._rows:
            rows, self._rows = self._rows, []
            messages.Spans(rows).send(self.control)

    def _begin(self, runner: OperationRunner, runs: Mapping[str, OperationRun]) -> OperationRun:
        path = runner.operation.path
        inputs: dict[str, Any] = {}
        first: dict[str, Any] = {}
        incoming = self.flat.incoming.get(path, ())
        arrivals = Arrivals(0 if incoming else monotonic_ns())
        for flow in incoming:
            streamed = flow.target_port in runner.streamed_inputs and not flow.prologue
            if flow.source in self._local:
                source = runs[flow.source]
                value = source.chunks(flow) if streamed else source.whole(flow)
            else:
                chunks = self._entering(flow, arrivals) if flow.source == INPUT else self._arriving(flow, arrivals)
                value = chunks if streamed else join(list(chunks), flow.axis, where=flow.label)
            (first if flow.prologue else inputs)[flow.target_port] = value
        outlets = self._outlets[path]
        local = [flow for flow in self.flat.outgoing.get(path, ()) if flow.target in self._local]
        run = OperationRun(
            runner, local, outlets, inputs, first, self._send, self._stopwatch, arrivals=arrivals,
            device=self._device, part_ns=self.plan.part_ns.get(path, ()), span=self._span,
            watch=NanWatch(runner.where) if self.plan.nan == "refuse" else None,
        )  # fmt: skip
        run.on_work = lambda: self._works(path, outlets)
        return run

    def _works(self, path: str, outlets: list[Outlet]) -> None:
        self._current = (path, outlets)

    def _arriving(self, flow: Dataflow, arrivals: Arrivals) -> Iterator[Any]:
        number = self._flow_number[flow]
        if flow.source in self._asynchronous:
            for part in self.inbox.latest(number, self.batch):
                arrivals.add(flow.target_port, 0, part.tensors)
                yield part.value
            return
        chunks = self.inbox.chunks(number, self.batch)
        lag_ns = self.plan.lag_ns.get(str(number), 0)
        while True:
            received: Received | None = None
            if not self.inbox.has(number):
                start_ns = monotonic_ns()
                self._stopwatch.enter(None)
                try:
                    received = next(chunks, None)
                finally:
                    self._stopwatch.leave()
                    self._rows.append(("wait", flow.label, self.batch, start_ns, monotonic_ns(), 0))
            else:
                received = next(chunks, None)
            if received is None:
                return
            now_ns = monotonic_ns()
            self._rows.append(("transfer", flow.label, self.batch, received.sent_ns, now_ns, received.num_bytes))
            # A channel may carry one value to several; each has a way of its own.
            ready_ns = received.ready_ns and received.ready_ns + lag_ns
            arrivals.add(flow.target_port, ready_ns, received.tensors)
            yield received.value

    def _entering(self, flow: Dataflow, arrivals: Arrivals) -> Iterator[Any]:
        """Yield the chunks of a value from outside, which comes whole: a batch's item."""
        for value in self._arriving(flow, arrivals):
            check_input(self.flat.program, flow.source_port, value, self.batch)
            distributor = Distributor(flow)
            yield from distributor.push(Piece({flow.source_port: value}, False))
            yield from distributor.finish()

    def _send(self, outlet: Outlet, value: Any, last: bool, ready_ns: int) -> None:
        if value is END:
            self.endpoint.send_end(outlet.channel, self.batch, ready_ns=ready_ns)
        else:
            where = f"operation '{outlet.flow.source}', port '{outlet.flow.source_port}'"
            self.endpoint.send(outlet.channel, value, self.batch, last=last, ready_ns=ready_ns, where=where)
        if len(self._rows) > MAX_ROWS:
            self.flush()

    def listen(self) -> None:
        """Start the thread that obeys the supervisor."""
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        try:
            while (message := messages.Message.receive(self.control)) is not None:
                if isinstance(message, messages.Where):
                    messages.At(f"batch {self.batch}, {current_place()}").send(self.control)
                elif isinstance(message, messages.Cancel):
                    self.endpoint.interrupt(message.reason)
                elif isinstance(message, messages.Admit):
                    if message.stop_after >= 0:
                        self._board.stop(message.stop_after)
                    else:
                        self._board.admit(message.cycle, message.batch)
                    self.endpoint.ring()
        except (OSError, ValueError, KeyError, MemoryError) as error:
            # Most likely user code closed or wrote to a descriptor that is not its own.
            print(f"flashrt: the connection to the supervisor broke: {type(error).__name__}: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(5)
        # Nobody is left to work for.
        self._orphaned()


def torch_device(devices: Sequence[str]) -> str:
    """Return the device as torch spells it: a worker's own device is the first that it sees."""
    kind = devices[0].split("-", 1)[0].split(":", 1)[0] if devices else "cpu"
    return "cuda:0" if kind in {"cuda", "rocm"} else "cpu"


def serve(
    hello: messages.Hello,
    control: Connection,
    *,
    remote: Remote | None = None,
    orphaned: Callable[[], None] = end_system,
    started: Callable[[Worker], None] = lambda worker: None,
) -> int:
    """Run a worker to its end and tell the supervisor how it went; return the exit status.

    Parameters
    ----------
    remote, orphaned
        See `Worker`.
    started
        Called with the worker before it loads its operations.
    """
    loading = Loading()
    try:
        worker = Worker(hello, control, remote, orphaned)
        worker.listen()
        started(worker)
        worker.load()
        loading.end()
        messages.Ready().send(control)
        worker.run()
    except ChannelClosedError:
        return 4
    except BaseException as error:  # noqa: BLE001 - reported to the supervisor whatever it is
        known = isinstance(error, FlashrtError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            messages.Failed(text, "" if known else user_traceback(error)).send(control)
        return 3
    from flashrt.runtime.usage import process_usage

    messages.Done(process_usage()).send(control)
    # Stay until the supervisor has read everything: what is still in a channel uses this process's memory.
    threading.Event().wait()
    return 0


def main() -> int:
    """Serve one group; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    control = Connection(inherited_socket(arguments.fd), torch=True)
    hello = messages.Message.receive(control)
    if not isinstance(hello, messages.Hello):
        return 1
    die_with_parent(hello.supervisor)
    # A write to a received value ends the process: the log says in which line.
    faulthandler.enable()
    return serve(hello, control)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
