"""Running one batch's operations of one worker: what is local stays, what is not is sent as it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flashrt.clock import Clock
from flashrt.ir.execute import Distributor, OperationRunner
from flashrt.ir.flatten import Dataflow
from flashrt.ir.values import join

Send = Callable[[Dataflow, Any, bool], None]
Span = Callable[[str, int, int], None]


class Stopwatch:
    """Splits a worker's time among operations that call each other through their streams.

    While an operation waits for another's chunk, or for a message, its own time stands still.
    """

    def __init__(self, clock: Clock, span: Span) -> None:
        self._clock = clock
        self._span = span
        self._running: list[tuple[str | None, int]] = []

    def enter(self, name: str | None) -> None:
        """Begin timing `name`; None stands for waiting, which no operation is charged for."""
        now = self._clock.now_ns()
        if self._running:
            self._close(now)
        self._running.append((name, now))

    def leave(self) -> int:
        """End the current timing; return its last stretch in ns; the one around it goes on."""
        now = self._clock.now_ns()
        _, since = self._running[-1]
        self._close(now)
        self._running.pop()
        if self._running:
            name, _ = self._running[-1]
            self._running[-1] = (name, now)
        return now - since

    def _close(self, now: int) -> None:
        name, since = self._running[-1]
        if name is not None and now > since:
            self._span(name, since, now)


class OperationRun:
    """One operation on one batch, pulled piece by piece; pieces leave on every edge as soon as they can.

    Parameters
    ----------
    hold_ns
        Emulated devices: the time that the operation's work takes there, in all; 0 where the work is real.
    blocking
        Edges whose chunks leave together, when the batch is done.
    """

    def __init__(
        self,
        runner: OperationRunner,
        flows: tuple[Dataflow, ...],
        local: frozenset[str],
        inputs: Mapping[str, Any],
        prologue_inputs: Mapping[str, Any],
        send: Send,
        stopwatch: Stopwatch,
        clock: Clock,
        hold_ns: int = 0,
        blocking: frozenset[str] = frozenset(),
    ) -> None:
        self.path = runner.operation.path
        self._pieces = runner.run(inputs, prologue_inputs)
        self._edges = [(flow, Distributor(flow), flow.target in local) for flow in flows]
        self._together: dict[Dataflow, list[Any]]
        self._buffers: dict[Dataflow, deque[Any]] = {flow: deque() for flow, _, is_local in self._edges if is_local}
        self._together = {flow: [] for flow in flows if blocking & set(flow.labels)}
        self._send = send
        self._stopwatch = stopwatch
        self._clock = clock
        self._parts = max(runner.num_input_chunks, runner.num_output_chunks)
        self._hold_ns = hold_ns
        self._num_pieces = 0
        self.ended = False
        self.notes: list[str] = []

    def pull(self) -> None:
        """Make one more piece, or end the batch."""
        if self.ended:
            return
        self._stopwatch.enter(self.path)
        begin = self._clock.now_ns()
        try:
            piece = next(self._pieces, None)
            if piece is not None and self._hold_ns:
                # One mapping for the whole batch takes the whole time; a chunk takes its share.
                share = self._hold_ns // self._parts if piece.is_chunk else self._hold_ns
                self._clock.sleep_until_ns(begin + share)
        finally:
            self._stopwatch.leave()
        if piece is None:
            self.ended = True
            for flow, distributor, is_local in self._edges:
                self._hand_over(flow, distributor.finish(), is_local, ended=True)
                if distributor.note:
                    self.notes.append(distributor.note)
            return
        self._num_pieces += 1
        for flow, distributor, is_local in self._edges:
            self._hand_over(flow, distributor.push(piece), is_local, ended=False)

    def _hand_over(self, flow: Dataflow, chunks: list[Any], is_local: bool, *, ended: bool) -> None:
        if is_local:
            self._buffers[flow].extend(chunks)
            return
        if flow in self._together:
            self._together[flow] += chunks
            chunks = self._together[flow] if ended else []
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1 if ended else self._num_pieces == flow.target_chunks
            self._send(flow, chunk, last)

    def drain(self) -> None:
        """Run to the end of the batch."""
        while not self.ended:
            self.pull()

    def chunks(self, flow: Dataflow) -> Iterator[Any]:
        """Yield the chunks of a local edge, making them when they are asked for."""
        buffer = self._buffers[flow]
        while True:
            if buffer:
                yield buffer.popleft()
            elif self.ended:
                return
            else:
                self.pull()

    def whole(self, flow: Dataflow) -> Any:
        """Return a local edge's value, all chunks joined; leaves it in place for no one else."""
        self.drain()
        return join(list(self._buffers[flow]), flow.axis, where=flow.label)
