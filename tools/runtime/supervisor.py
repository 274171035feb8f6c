"""Running a deployment: starts the workers, admits batches, gathers outputs, and ends everything together."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.ir.flattening import INPUT, OUTPUT
from flashrt.runtime import messages
from flashrt.runtime.channels.board import BUBBLE
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.launch import Handle, Launcher, LocalLauncher, Run, end_all
from flashrt.runtime.wire import Connection

Event = Callable[[Mapping[str, Any]], None]
LOAD_TIMEOUT_S = 300
CANCEL_TIMEOUT_S = 3
JOIN_TIMEOUT_S = 5
WHERE_TIMEOUT_S = 4
LOOK_S = 0.5
"""How often a quiet deployment is looked at: for operations that never return."""


@dataclass(frozen=True)
class Output:
    """A part of a batch's output; `value` is empty where a batch only turned out to be complete."""

    name: str
    value: tuple[Any, ...]
    batch: int
    completes_batch: bool


@dataclass(frozen=True)
class _Said:
    """A worker's message, or None when its connection closed."""

    worker: str
    message: messages.Message | None


class Supervisor:
    """The workers of one deployment; a context manager that leaves none behind.

    `submit` belongs to one thread, `next_output` to another or the same.

    Parameters
    ----------
    on_event
        Called with spans and notes as they come.
    launcher
        Starts the workers; by default as processes of this host.

    Attributes
    ----------
    usage
        Worker -> what its process has used, once it is done.
    """

    def __init__(self, run: Run, on_event: Event, launcher: Launcher | None = None) -> None:
        self.layout = run.layout
        self._run_spec = run
        self._flat = run.flat
        self._on_event = on_event
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._workers = {worker.name: worker for worker in run.layout.workers}
        self._paths = list(run.flat.by_path)
        self._missing: dict[int, set[str]] = {}
        self._cycle_of: dict[int, int] = {}
        """Batch in flight -> the cycle that began with it."""
        self._ready_outputs: deque[Output] = deque()
        self._passing: deque[tuple[str, Any, int]] = deque()
        self._threads: list[threading.Thread] = []
        self._looked_ns = self._begun_ns = monotonic_ns()
        self._cycling = threading.Lock()
        self._num_cycles = self._num_bubbles = 0
        self._is_closed = False
        self.usage: dict[str, Mapping[str, Any]] = {}
        self._started = started = (launcher or LocalLauncher()).start(run)
        self._inputs, self._outputs = started.inputs, started.outputs
        self._find_flows(started.channels)
        for name, control in started.controls.items():
            self._run(self._receive, name, control)
            self._run(self._watch, started.handles[name], control)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _find_flows(self, channels: Sequence[ChannelPlan]) -> None:
        """Find out which inputs go on which channel, and which outputs come on which."""
        flows = self._flat.dataflow
        self._feeds = [(c.number, flows[c.flows[0]].source_port) for c in channels if c.source == INPUT]
        self._gathers = {
            c.number: [flows[number].target_port for number in c.flows if flows[number].target == OUTPUT]
            for c in channels
            if OUTPUT in c.targets
        }
        self._passed = [flow for flow in self._flat.outgoing.get(INPUT, ()) if flow.target == OUTPUT]
        # Who waits for nothing that comes with the batch is woken for it.
        asynchronous = {path for worker in self._workers.values() for path in worker.asynchronous}
        reached = {target for c in channels for target in c.targets if flows[c.flows[0]].source not in asynchronous}
        self._sources = [name for name in self._workers if name not in reached]

    def _run(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, handle: Handle, control: Connection) -> None:
        """Make a worker's death known even where a process that it forked still holds its connection."""
        handle.wait()
        control.stop_reading()

    def _receive(self, name: str, control: Connection) -> None:
        device = "+".join(self._workers[name].devices) or "cpu"
        try:
            while (message := messages.Message.receive(control)) is not None:
                if isinstance(message, messages.Spans):
                    for row in message.rows:
                        self._on_event(messages.as_event(row, device, name))
                elif isinstance(message, messages.Note):
                    self._on_event({"kind": "note", "text": message.text})
                elif isinstance(message, messages.Beat):
                    board = self._inputs.board
                    now_ns = monotonic_ns()
                    board.set_status(board.endpoints[name], message.operation, message.batch, now_ns - message.for_ns)
                elif isinstance(message, messages.At):
                    self._on_event({"kind": "at", "text": f"{self._workers[name].title}: {message.text}"})
                else:
                    if isinstance(message, messages.Ready):
                        self._started.handles[name].loaded()
                    self._say(name, message)
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            text = f"its process sent bytes that are no message: {type(error).__name__}: {error}"
            self._say(name, messages.Failed(text, ""))
        self._say(name, None)

    def _say(self, name: str, message: messages.Message | None) -> None:
        self._said.put(_Said(name, message))
        self._outputs.ring()
        if message is None or isinstance(message, messages.Failed):
            # Whoever waits for room in a channel of the dead would wait for ever.
            self._inputs.interrupt(f"{self._workers[name].title} has ended")

    def wait_ready(self) -> None:
        """Return when every worker has loaded its operations.

        Raises
        ------
        InputError
            A worker failed or died, or did not finish in time; names its group.
        """
        self._wait_all(messages.Ready, "to load its operations", LOAD_TIMEOUT_S)

    def ask_where(self) -> None:
        """Ask every worker where it is; the answers come as ``at`` events."""
        for name in self._workers:
            self._tell(name, messages.Where())

    def submit(self, batch: int, inputs: Mapping[str, Any]) -> None:
        """Send a batch's inputs to the workers that use them, and admit the batch everywhere.

        Raises
        ------
        ChannelClosedError
            A worker has ended; `next_output` says why.
        """
        now_ns = monotonic_ns()
        self._missing[batch] = {flow.target_port for flow in self._flat.incoming.get(OUTPUT, ())}
        self._begin_cycle(batch)
        for channel, port in self._feeds:
            self._inputs.send(channel, inputs[port], batch, ready_ns=now_ns, where=f"input '{port}'")
        for name in self._sources:
            self._inputs.ring(name)
        if self._passed:
            self._passing.extend((flow.target_port, inputs[flow.source_port], batch) for flow in self._passed)
            self._outputs.ring()

    def _begin_cycle(self, batch: int) -> None:
        with self._cycling:
            cycle, self._num_cycles = self._num_cycles, self._num_cycles + 1
            self._inputs.board.admit(cycle, batch)
            if batch != BUBBLE:
                self._cycle_of[batch] = cycle
            for name in self._started.far:
                self._tell(name, messages.Admit(cycle, batch, -1))
            self._begun_ns = monotonic_ns()
            self._num_bubbles = self._num_bubbles + 1 if batch == BUBBLE else 0

    def _flush_staggered(self) -> None:
        """Let staggered operations come to their turn, where no new batch brings it about for too long."""
        oldest = min(list(self._cycle_of.values()), default=self._num_cycles)
        # A batch's last operations run in the cycle that is `depth` after its own; those that have begun will come.
        stuck = self._num_cycles <= oldest + self.layout.depth
        late = stuck and monotonic_ns() - self._begun_ns > self._run_spec.patience_s * 1e9
        if (self._is_closed or late) and self._missing and self._num_bubbles < self.layout.depth:
            self._begin_cycle(BUBBLE)
            for name in self._workers:
                self._inputs.ring(name)

    def _tell(self, name: str, message: messages.Message) -> None:
        # A dead worker shows as a closed connection in `next_output`, with its reason.
        with suppress(OSError):
            message.send(self._started.controls[name])

    def close_inputs(self) -> None:
        """Say that no more batches come, so that staggered operations need not wait for one."""
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """Make a waiting `next_output` return."""
        self._said.put(_Said("", None))
        self._outputs.ring()

    def next_output(self, timeout_s: float | None = None) -> Output | None:
        """Return what came next of the outputs, or None when nothing came in time.

        Raises
        ------
        InputError
            A worker failed or died, or an operation does not return; names the group, its operations and the last
            traceback.
        """
        deadline_ns = None if timeout_s is None else monotonic_ns() + int(timeout_s * 1e9)
        look_s = min(LOOK_S, self._run_spec.patience_s / 2) if self.layout.depth else LOOK_S
        while True:
            if self._ready_outputs:
                return self._ready_outputs.popleft()
            if self._gather():
                continue
            while (said := self._next_said()) is not None:
                if not said.worker:
                    return None
            if self.layout.depth:
                self._flush_staggered()
            left_s = look_s if deadline_ns is None else min(look_s, (deadline_ns - monotonic_ns()) / 1e9)
            if left_s <= 0:
                return None
            self._outputs.wait(left_s)
            self._look()

    def _gather(self) -> bool:
        """Take what has come on the output channels; return whether there was anything."""
        found = bool(self._passing)
        while self._passing:
            name, value, batch = self._passing.popleft()
            self._ready_outputs.append(self._output(name, (value,), batch, last=True))
        for channel, names in self._gathers.items():
            received = self._outputs.poll(channel)
            if received is None:
                continue
            found = True
            parts = () if received.is_end else (received.value,)
            for name in names:
                self._ready_outputs.append(self._output(name, parts, received.batch, last=received.last))
        return found

    def _output(self, name: str, value: tuple[Any, ...], batch: int, *, last: bool) -> Output:
        missing = self._missing[batch]
        if last:
            missing.discard(name)
        if not missing:
            del self._missing[batch]
            self._cycle_of.pop(batch, None)
        return Output(name, value, batch, not missing)

    def stop(self, num_batches: int) -> None:
        """Let every worker end after `num_batches` and wait until all have."""
        while self._num_bubbles < self.layout.depth:
            self._begin_cycle(BUBBLE)
        self._inputs.board.stop(self._num_cycles)
        for name in self._workers:
            self._inputs.ring(name)
        for name in self._started.far:
            self._tell(name, messages.Admit(0, BUBBLE, self._num_cycles))
        beside = {name for name, worker in self._workers.items() if set(worker.operations) <= set(worker.asynchronous)}
        self._wait_all(messages.Done, "to end after the last batch", LOAD_TIMEOUT_S, beside)
        for name in beside - self.usage.keys():
            # Nobody takes what it would still make.
            self.usage[name] = {}
            self._tell(name, messages.Cancel("the last batch is done"))

    def cancel(self, reason: str = "cancelled") -> None:
        """Let every worker give up its batch and end, and wait a moment for it; what does not end in time is killed."""
        for name in self._workers:
            self._tell(name, messages.Cancel(reason))
        deadline_ns = monotonic_ns() + int(CANCEL_TIMEOUT_S * 1e9)
        for handle in self._started.handles.values():
            handle.wait(max((deadline_ns - monotonic_ns()) / 1e9, 0.0))
        self.end()

    def _wait_all(
        self, kind: type[messages.Message], expected: str, timeout_s: float, but: Collection[str] = ()
    ) -> None:
        waiting = self._workers.keys() - set(but)
        deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        while waiting:
            said = self._next_said(block_s=max((deadline_ns - monotonic_ns()) / 1e9, 0))
            if said is None:
                raise input_error(
                    f"deployment, {', '.join(self._workers[name].title for name in sorted(waiting))}",
                    f"{expected} within {timeout_s:.0f} s", "no word from it", "correct the operation and call again",
                    rule="worker-silent",
                )  # fmt: skip
            if isinstance(said.message, kind):
                waiting.discard(said.worker)
                if isinstance(said.message, messages.Done):
                    self.usage[said.worker] = said.message.usage

    def _next_said(self, block_s: float | None = None) -> _Said | None:
        try:
            said = self._said.get(timeout=block_s) if block_s is not None else self._said.get_nowait()
        except queue.Empty:
            return None
        message = said.message
        if isinstance(message, messages.Failed):
            raise self._broken(said.worker, f"{message.text}\n{message.traceback}".strip())
        if message is None and said.worker and said.worker not in self.usage:
            words = self._started.handles[said.worker].ending()
            raise self._broken(said.worker, f"{words}{self._last_place(said.worker)}")
        return said

    def _last_place(self, name: str) -> str:
        """Return what a worker was doing last, as words that follow a reason."""
        board = self._inputs.board
        operation, batch, _ = board.status(board.endpoints[name])
        if operation < 0:
            return ""
        return (
            f" in operation '{self._paths[operation]}', batch {batch}; SIGSEGV there may come from writing in place to "
            "an input (clone it first), SIGKILL from too little memory"
        )

    def _look(self) -> None:
        """Raise when an operation has worked for longer than it may."""
        now_ns = monotonic_ns()
        if now_ns - self._looked_ns < LOOK_S * 1e9:
            return
        self._looked_ns = now_ns
        board, limit_s = self._inputs.board, self._run_spec.operation_timeout_s
        for name in self._workers:
            if self._missing and self._started.handles[name].is_stopped():
                raise self._broken(name, f"its process is stopped (SIGSTOP){self._last_place(name)}")
            operation, batch, since_ns = board.status(board.endpoints[name])
            if operation >= 0 and now_ns - since_ns > limit_s * 1e9:
                raise input_error(
                    f"operation '{self._paths[operation]}', batch {batch}",
                    f"to return within {limit_s:g} s (operation_timeout_s of the deployment)",
                    f"no return for {(now_ns - since_ns) / 1e9:.1f} s{self._where_is(name)}",
                    "correct the op, or allow it more time, and call again", rule="operation-silent",
                )  # fmt: skip

    def _where_is(self, name: str) -> str:
        """Return the line at which a worker's main thread is, as words that follow a reason, if it can say so."""
        found: list[str] = []
        inner = self._on_event

        def listen(event: Mapping[str, Any]) -> None:
            if event["kind"] == "at":
                found.append(str(event["text"]))
                self._outputs.ring()
            inner(event)

        self._on_event = listen
        self._tell(name, messages.Where())
        deadline_ns = monotonic_ns() + int(WHERE_TIMEOUT_S * 1e9)
        while not found and monotonic_ns() < deadline_ns:
            self._outputs.wait(0.2)
        self._on_event = inner
        return f"; it is at {found[0]}" if found else ""

    def _broken(self, name: str, got: str) -> Exception:
        return input_error(
            self._workers[name].title, "a worker that runs", got, "correct the operation and call again",
            rule="worker-failed",
        )  # fmt: skip

    def end(self) -> None:
        """End every worker and reap it, and free all shared memory."""
        started = self._started
        for handle in started.handles.values():
            handle.kill()
        for handle in started.handles.values():
            handle.wait()
        for control in started.controls.values():
            control.shutdown()
        for thread in self._threads:
            thread.join(timeout=JOIN_TIMEOUT_S)
        for control in started.controls.values():
            control.close()
        end_all({}, {}, started.close)
