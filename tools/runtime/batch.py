"""Running one batch's operations of one worker: what is local stays, what is not is sent as it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashrt.clock import Clock
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flatten import Dataflow
from flashrt.ir.values import join

END = object()
"""Sent instead of a chunk when a batch turns out to have fewer than its edge declares."""

Send = Callable[[Dataflow, Any, bool], None]
Span = Callable[[str, int, int], None]


@dataclass
class _Stretch:
    name: str | None
    since: int
    own_ns: int = 0


MAX_OVERRUN_NS = 1_000_000


class Stopwatch:
    """Splits a worker's time among operations that call each other through their streams.

    While an operation waits for another's chunk, or for a message, its own time stands still.
    """

    def __init__(self, clock: Clock, span: Span) -> None:
        self._clock = clock
        self._span = span
        self._running: list[_Stretch] = []

    def enter(self, name: str | None) -> None:
        """Begin timing `name`; None stands for waiting, which no operation is charged for."""
        now = self._clock.now_ns()
        if self._running:
            self._close(now)
        self._running.append(_Stretch(name, now))

    def leave(self) -> int:
        """End the current timing; return its own time in ns; the one around it goes on."""
        now = self._clock.now_ns()
        self._close(now)
        done = self._running.pop()
        if self._running:
            self._running[-1].since = now
        return done.own_ns

    def own_ns(self) -> int:
        """Return the own time of the current timing so far."""
        stretch = self._running[-1]
        return stretch.own_ns + self._clock.now_ns() - stretch.since

    def _close(self, now: int) -> None:
        stretch = self._running[-1]
        stretch.own_ns += now - stretch.since
        if stretch.name is not None and now > stretch.since:
            self._span(stretch.name, stretch.since, now)


class OperationRun:
    """One operation on one batch, pulled piece by piece; pieces leave on every edge as soon as they can.

    Parameters
    ----------
    local
        Operations of the same worker: their values stay here; all others go through `send`.
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
        self._edges = [_Outgoing(flow, flow.target in local, bool(blocking & set(flow.labels))) for flow in flows]
        self._local = {edge.flow: edge.waiting for edge in self._edges if edge.is_local}
        self._send = send
        self._stopwatch = stopwatch
        self._clock = clock
        self._takes_chunks = bool(runner.streamed_inputs)
        self._num_parts = runner.num_input_chunks if self._takes_chunks else runner.num_output_chunks
        self._hold_ns = hold_ns
        self._own_ns = 0
        self._num_pieces = 0
        self.ended = False
        self.overrun_ns = 0
        """Emulated devices: by how much the real work took longer than the time it stands for."""
        self.notes: list[str] = []

    def pull(self) -> None:
        """Make one more piece, or end the batch."""
        if self.ended:
            return
        self._stopwatch.enter(self.path)
        try:
            piece = next(self._pieces, None)
            self._num_pieces += piece is not None
            if self._hold_ns:
                self._hold(piece)
        finally:
            self._own_ns += self._stopwatch.leave()
        self.ended = piece is None
        for edge in self._edges:
            for value, last in edge.end() if piece is None else edge.take(piece):
                self._send(edge.flow, value, last)
            if piece is None and edge.distributor.note:
                self.notes.append(edge.distributor.note)

    def _hold(self, piece: Piece | None) -> None:
        """Keep the emulated device busy for as long as the work up to this piece takes there."""
        due_ns = self._hold_ns
        # A chunk takes its share; one mapping for the whole batch takes all of the time.
        if piece is not None and (piece.is_chunk or self._takes_chunks):
            due_ns = self._hold_ns * min(self._num_pieces, self._num_parts) // self._num_parts
        left_ns = due_ns - self._own_ns - self._stopwatch.own_ns()
        if left_ns < -MAX_OVERRUN_NS:
            self.overrun_ns = max(self.overrun_ns, -left_ns)
        if left_ns > 0:
            self._clock.sleep_until_ns(self._clock.now_ns() + left_ns)

    def drain(self) -> None:
        """Run to the end of the batch."""
        while not self.ended:
            self.pull()

    def chunks(self, flow: Dataflow) -> Iterator[Any]:
        """Yield the chunks of a local edge, making them when they are asked for."""
        buffer = self._local[flow]
        while True:
            if buffer:
                yield buffer.popleft()
            elif self.ended:
                return
            else:
                self.pull()

    def whole(self, flow: Dataflow) -> Any:
        """Return a local edge's value, all chunks joined."""
        self.drain()
        return join(list(self._local[flow]), flow.axis, where=flow.label)


class _Outgoing:
    """One edge out of an operation during one batch: what waits here, and what leaves when."""

    def __init__(self, flow: Dataflow, is_local: bool, together: bool) -> None:
        self.flow = flow
        self.is_local = is_local
        self.distributor = Distributor(flow)
        self.waiting: deque[Any] = deque()
        self._together = together
        self._num_left = 0

    def take(self, piece: Piece) -> Iterator[tuple[Any, bool]]:
        """Take a piece; yield (value, whether it is the last) for what leaves now."""
        self.waiting.extend(self.distributor.push(piece))
        while self.waiting and not self.is_local and not self._together:
            self._num_left += 1
            yield self.waiting.popleft(), self._num_left == self.flow.target_chunks

    def end(self) -> Iterator[tuple[Any, bool]]:
        """End the batch; yield what is still to leave, the last one marked."""
        self.waiting.extend(self.distributor.finish())
        if self.is_local:
            return
        if not self.waiting and self._num_left != self.flow.target_chunks:
            yield END, True
        while self.waiting:
            value = self.waiting.popleft()
            yield value, not self.waiting
