"""Running one batch's operations of one worker: what is local stays, what is not is sent as it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.clock import Clock
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flattening import Dataflow
from flashrt.ir.values import join
from flashrt.runtime.checks import Arrivals, NanWatch
from flashrt.runtime.timeline import Timeline

END = object()
"""Sent instead of a chunk when a batch turns out to have fewer than its edge declares."""

Send = Callable[["Outlet", Any, bool, int], None]
"""Channel, value or `END`, whether it is the last of the batch, when it is there on the emulated clock (0: real)."""
Span = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outlet:
    """A channel out of an operation, and a dataflow on it that says how values are cut."""

    channel: int
    flow: Dataflow
    together: bool
    """Whether chunks leave together, when the batch is done."""


@dataclass
class _Stretch:
    name: str | None
    since: int
    own_ns: int = 0


MAX_OVERRUN_NS = 1_000_000
Doing = Callable[[str | None, int], None]


class Stopwatch:
    """Splits a worker's time among operations that call each other through their streams.

    While an operation waits for another's chunk, or for a message, its own time stands still.

    Parameters
    ----------
    span
        Called with each stretch of an operation's own work.
    doing
        Called with the operation that works from now on (None: none) and the time.
    """

    def __init__(self, clock: Clock, span: Span, doing: Doing | None = None) -> None:
        self._clock = clock
        self._span = span
        self._doing = doing or (lambda name, now_ns: None)
        self._running: list[_Stretch] = []

    def enter(self, name: str | None) -> None:
        """Begin timing `name`; None stands for waiting, which no operation is charged for."""
        now = self._clock.now_ns()
        if self._running:
            self._close(now)
        self._running.append(_Stretch(name, now))
        self._doing(name, now)

    def leave(self) -> int:
        """End the current timing; return its own time in ns; the one around it goes on."""
        now = self._clock.now_ns()
        self._close(now)
        done = self._running.pop()
        around = self._running[-1] if self._running else None
        if around is not None:
            around.since = now
        self._doing(around.name if around is not None else None, now)
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
        Dataflow to operations of the same worker: its values stay here.
    outlets
        Channels to others; each gets its values once.
    arrivals
        What comes from elsewhere for this batch, filled as `inputs` are read.
    device
        The emulated device that its work occupies; None where the work is real.
    part_ns
        Emulated devices: how long each chunk holds it.
    watch
        Looks for NaNs in the outputs; None: they travel on.
    """

    def __init__(
        self,
        runner: OperationRunner,
        local: Iterable[Dataflow],
        outlets: Iterable[Outlet],
        inputs: Mapping[str, Any],
        prologue_inputs: Mapping[str, Any],
        send: Send,
        stopwatch: Stopwatch,
        *,
        arrivals: Arrivals | None = None,
        device: Timeline | None = None,
        part_ns: Sequence[int] = (),
        span: Span | None = None,
        watch: NanWatch | None = None,
    ) -> None:
        self.path = runner.operation.path
        self._where = runner.where
        self._pieces = runner.run(inputs, prologue_inputs)
        self._local = {flow: _Outgoing(flow) for flow in local}
        self._remote = [(outlet, _Outgoing(outlet.flow)) for outlet in outlets]
        self._send = send
        self._stopwatch = stopwatch
        self._arrivals = arrivals or Arrivals()
        self._device = device
        self._part_ns = part_ns
        self._num_held = 0
        self._span = span or (lambda name, start_ns, end_ns: None)
        self._watch = watch
        self._takes_chunks = bool(runner.streamed_inputs)
        self._streams_out = runner.num_output_chunks > 1 and not self._takes_chunks
        self._own_ns = 0
        self.ended = False
        self.overrun_ns = 0
        """Emulated devices: by how much the real work took longer than the time it stands for."""
        self.notes: list[str] = []
        self.on_work: Callable[[], None] = lambda: None
        """Called before the operation goes on working."""
        self.settle: Callable[[], None] = lambda: None
        """Called when it has worked, within its time: waits for its device, where that is measured."""
        self.on_outputs: Callable[[Mapping[str, Any]], None] = lambda outputs: None
        """Called with the outputs of each piece."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the batch has ended, before the last of it leaves."""

    def pull(self) -> None:
        """Make one more piece, or end the batch."""
        if self.ended:
            return
        self._stopwatch.enter(self.path)
        self.on_work()
        try:
            piece = next(self._pieces, None)
            if piece is not None and self._watch is not None:
                self._watch.look(piece.outputs)
            self.settle()
        finally:
            self._own_ns += self._stopwatch.leave()
        self.ended = piece is None
        if piece is None:
            self.on_end()
        else:
            self.on_outputs(piece.outputs)
        # Neither holding a device nor handing over is work, of this operation or of one that waits for its chunk.
        self._stopwatch.enter(None)
        try:
            ready_ns = self._hold(piece) if self._device is not None else 0
            for outlet, edge in self._remote:
                for value, last in edge.end() if piece is None else edge.take(piece, together=outlet.together):
                    self._send(outlet, value, last, ready_ns)
        finally:
            self._stopwatch.leave()
        for edge in self._local.values():
            edge.keep(piece)
        if piece is None:
            self._finish()
        elif self._streams_out and not piece.is_chunk:
            self.notes.append(
                f"{self._where} makes all its chunks at once, so none leaves before its end: yield them one by one"
            )

    def _finish(self) -> None:
        for edge in (*self._local.values(), *(edge for _, edge in self._remote)):
            if edge.distributor.note:
                self.notes.append(edge.distributor.note)
        if self._watch is not None:
            self._watch.settle()
        self._arrivals.check_unwritten(self._where)

    def _hold(self, piece: Piece | None) -> int:
        """Keep the emulated device busy for as long as the work up to this piece takes there; return when it ends."""
        assert self._device is not None
        count = len(self._part_ns)
        # A chunk takes its share; one mapping for the whole batch takes all of the time.
        chunk = piece is not None and (piece.is_chunk or self._takes_chunks)
        upto = min(self._num_held + 1, count) if chunk else count
        due_ns = sum(self._part_ns[self._num_held : upto])
        if upto > self._num_held or piece is not None:
            start_ns, end_ns = self._device.hold(self._arrivals.ready_ns, due_ns)
            if end_ns > start_ns:
                self._span(self.path, start_ns, end_ns)
        self._num_held = upto
        over_ns = self._own_ns - sum(self._part_ns)
        if over_ns > MAX_OVERRUN_NS:
            self.overrun_ns = over_ns
        return self._device.free_ns

    def drain(self) -> None:
        """Run to the end of the batch."""
        while not self.ended:
            self.pull()

    def chunks(self, flow: Dataflow) -> Iterator[Any]:
        """Yield the chunks of a local edge, making them when they are asked for."""
        buffer = self._local[flow].waiting
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
        return join(list(self._local[flow].waiting), flow.axis, where=flow.label)


class _Outgoing:
    """One edge out of an operation during one batch: what waits here, and what leaves when."""

    def __init__(self, flow: Dataflow) -> None:
        self.distributor = Distributor(flow)
        self.waiting: deque[Any] = deque()
        self._target_chunks = flow.target_chunks
        self._num_left = 0

    def keep(self, piece: Piece | None) -> None:
        """Take a piece (None: the batch has ended) for somebody who asks for it here."""
        self.waiting.extend(self.distributor.finish() if piece is None else self.distributor.push(piece))

    def take(self, piece: Piece, *, together: bool) -> Iterator[tuple[Any, bool]]:
        """Take a piece; yield (value, whether it is the last) for what leaves now."""
        self.keep(piece)
        while self.waiting and not together:
            self._num_left += 1
            yield self.waiting.popleft(), self._num_left == self._target_chunks

    def end(self) -> Iterator[tuple[Any, bool]]:
        """End the batch; yield what is still to leave, the last one marked."""
        self.keep(None)
        if not self.waiting and self._num_left != self._target_chunks:
            yield END, True
        while self.waiting:
            value = self.waiting.popleft()
            yield value, not self.waiting
