"""Running the first batches in other orders that the document allows: permuted, chunk by chunk in turns, at once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from flashrt.analysis.claims import CONFIRMED, REFUTED, UNCHECKED, parallel_claim, parallel_pairs
from flashrt.bench.audit.findings import Findings
from flashrt.bench.audit.forks import ForkFailedError, in_fork
from flashrt.bench.audit.places import own_modules
from flashrt.bench.audit.record import Arrived, Session, Tape, as_handed_over, run_pieces
from flashrt.bench.audit.replay import Loaded, outputs_differ
from flashrt.bench.audit.values import freeze, thaw
from flashrt.ir import OUTPUT, Dataflow, Operation
from flashrt.ir.execute import Distributor, Piece
from flashrt.ir.interpreter import gather

TURN_S = 2.0
"""How long one operation waits for the other's next line, which may be inside a library."""

Mismatches = dict[str, str]
Pieces = tuple[list[Piece], list[Piece]]
"""What others get, and what was handed over."""


def check_orders(loaded: Loaded, tape: Tape, findings: Findings, num_batches: int) -> None:
    """Check that what the document leaves open decides nothing.

    Parameters
    ----------
    num_batches
        How many batches each order runs.
    """
    pairs = parallel_pairs(findings.built)
    template = {operation.path: operation.template for operation in loaded.flat.operations}
    wrong: dict[str, Mismatches] = {}
    if any(flow.chunked for flow in loaded.flat.dataflow):
        wrong["taking turns, chunk by chunk"] = _try(loaded, tape, findings, num_batches, _interleaved)
    if pairs:
        wrong["in another order"] = _try(loaded, tape, findings, num_batches, _permuted)
        wrong["at once, line by line"] = _try(loaded, tape, findings, num_batches, _concurrent)
    failed = {how for how in wrong if f"order: {how}" in findings.unchecked}
    for how, found in wrong.items():
        for path, difference in found.items():
            others = [b if a == path else a for a, b in sorted(pairs) if path in (a, b)]
            around = {template[one] for one in (*others, *loaded.flat.predecessors[path])}
            if findings.has(template[path], _ELSEWHERE) or any(findings.has(one, _IN_PLACE) for one in around):
                continue
            beside = " and ".join(f"'{findings.node(one).name}'" for one in others[:2]) or "the rest"
            findings.add(
                "order-dependent", path, how,
                "keep what they share in a state that both nodes declare, or add an edge that orders "
                f"'{findings.node(path).name}' and {beside}",
                difference=difference, beside=others, batches=num_batches,
            )  # fmt: skip
    bad = {path for how, found in wrong.items() for path in found if how != "taking turns, chunk by chunk"}
    for a, b in sorted(pairs):
        claim = parallel_claim(template[a], template[b])
        if a in bad or b in bad:
            findings.claim(claim, REFUTED, "another order or running at once gives something else")
        elif failed:
            findings.claim(claim, UNCHECKED, "; ".join(sorted(failed)) + " could not be run")
        else:
            findings.claim(claim, CONFIRMED, f"in another order, and at once line by line, over {num_batches} batches")


_ELSEWHERE = (
    "hidden-global", "hidden-attribute", "hidden-buffer", "hidden-random", "hidden-file", "hidden-environment",
    "hidden-unknown", "iteration-leak", "nondeterministic", "changes-input", "shared-storage",
)  # fmt: skip
"""Findings that explain a difference better."""
_IN_PLACE = ("changes-input", "shared-storage", "changes-read-state")
"""Findings that explain a difference in another node."""


def _try(
    loaded: Loaded,
    tape: Tape,
    findings: Findings,
    num_batches: int,
    run: Callable[[Session, Arrived, Mapping[str, Any], Loaded, int], dict[str, list[Piece]]],
) -> Mismatches:
    def work() -> Mismatches:
        session = Session(loaded.flat, loaded.ops)
        found: Mismatches = {}
        for batch in range(num_batches):
            item = thaw(freeze(dict(tape.items[batch])))
            pieces = run(session, session.begin(item), item, loaded, batch)
            for path, made in pieces.items():
                different = outputs_differ(tape.calls[batch, path], session.runners[path], made)
                if different is not None and not different.bits_only:
                    found.setdefault(path, f"batch {batch}, {different}")
            if found:
                break
        # What comes after a wrong value is wrong too: only the first are told.
        return {path: text for path, text in found.items()
                if not any(other in loaded.flat.predecessors[path] for other in found)}  # fmt: skip

    try:
        mismatches: Mismatches = in_fork(work, loaded.timeout_s)
    except ForkFailedError as error:
        how = {"_interleaved": "taking turns, chunk by chunk", "_permuted": "in another order"}
        findings.skip(f"order: {how.get(run.__name__, 'at once, line by line')}", str(error))
        return {}
    return mismatches


def _permuted(
    session: Session, arrived: Arrived, item: Mapping[str, Any], loaded: Loaded, batch: int
) -> dict[str, list[Piece]]:
    """Run what could run first last, as far as the dataflow allows."""
    found: dict[str, list[Piece]] = {}
    left = [operation.path for operation in loaded.flat.operations]
    while left:
        path = next(p for p in reversed(left) if not loaded.flat.predecessors[p] & set(left))
        left.remove(path)
        live, found[path] = _run(session, path, arrived)
        session.deliver(path, live, arrived)
    return found


def _run(session: Session, path: str, arrived: Arrived) -> Pieces:
    """Return an operation's pieces, and copies of what is compared later."""
    runner = session.runners[path]
    values, first = gather(session.flat, runner, arrived)
    live, _ = run_pieces(runner, values, first)
    return live, [
        Piece(thaw(freeze({port: one.outputs[port] for port in runner.needed})), one.is_chunk) for one in live
    ]


def _concurrent(
    session: Session, arrived: Arrived, item: Mapping[str, Any], loaded: Loaded, batch: int
) -> dict[str, list[Piece]]:
    """Run all that is ready at once, in threads that change places after every line of the program's own code."""
    found: dict[str, list[Piece]] = {}
    left = [operation.path for operation in loaded.flat.operations]
    files = {str(module.__file__) for module in own_modules(loaded.folder)}
    while left:
        ready = [path for path in left if not loaded.flat.predecessors[path] & set(left)]
        left = [path for path in left if path not in ready]
        calls = [functools.partial(_run, session, path, arrived) for path in ready]
        made = dict(zip(ready, _at_once(calls, files), strict=True))
        for path, (live, copies) in made.items():
            found[path] = copies
            session.deliver(path, live, arrived)
    return found


class _Baton:
    """Lets one thread at a time run a line."""

    def __init__(self, count: int, files: set[str]) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._alive = list(range(count))
        self._files = files

    def trace(self, number: int) -> Callable[[FrameType, str, Any], Any]:
        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self._pass_on(number)
            return local

        def start(frame: FrameType, event: str, argument: Any) -> Any:
            return local if frame.f_code.co_filename in self._files else None

        return start

    def wait(self, number: int) -> None:
        """Wait for the first turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == number or number not in self._alive, TURN_S)

    def _pass_on(self, number: int) -> None:
        with self._condition:
            if number not in self._alive or len(self._alive) < 2:
                return
            self._turn = self._alive[(self._alive.index(number) + 1) % len(self._alive)]
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._turn == number or self._alive == [number], TURN_S)

    def end(self, number: int) -> None:
        with self._condition:
            after = self._alive[(self._alive.index(number) + 1) % len(self._alive)]
            self._alive.remove(number)
            self._turn = after
            self._condition.notify_all()


def _at_once(calls: Sequence[Callable[[], Pieces]], files: set[str]) -> list[Pieces]:
    if len(calls) == 1:
        return [calls[0]()]
    baton = _Baton(len(calls), files)
    results: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def work(number: int) -> None:
        gate.wait()
        baton.wait(number)
        sys.settrace(baton.trace(number))
        try:
            results[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            results[number] = error
        finally:
            sys.settrace(None)
            baton.end(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _Lazy:
    """One operation that makes its next piece when somebody asks for it."""

    def __init__(self, path: str, turns: _Turns) -> None:
        self.path = path
        self.made: list[Piece] = []
        self._turns = turns
        self._running: Iterator[Piece] | None = None
        self._distributors = {flow: Distributor(flow) for flow in turns.session.flat.outgoing.get(path, ())}
        self.chunks: dict[Dataflow, list[Any]] = {flow: [] for flow in self._distributors}
        self.done = False

    def advance(self) -> None:
        """Make one more piece, or end."""
        if self._running is None:
            self._running = self._turns.start(self.path)
        piece = next(self._running, None)
        if piece is None:
            self.done = True
        else:
            self.made.append(as_handed_over(self._turns.session.runners[self.path], piece))
        for flow, distributor in self._distributors.items():
            self.chunks[flow] += distributor.finish() if piece is None else distributor.push(piece)

    def finish(self) -> None:
        """Make all that is left."""
        while not self.done:
            self.advance()


class _Turns:
    """All operations of a batch, the last ones pulling at those before."""

    def __init__(self, session: Session, arrived: Arrived) -> None:
        self.session = session
        self._arrived = arrived
        self.lazy = {operation.path: _Lazy(operation.path, self) for operation in session.flat.operations}

    def start(self, path: str) -> Iterator[Piece]:
        """Begin an operation, all that it has to wait for being done."""
        flat = self.session.flat
        for before in flat.operations:
            if before.path in flat.predecessors[path] and _take_turns(before, flat.by_path[path]):
                self.lazy[before.path].finish()
        runner = self.session.runners[path]
        values: dict[str, Any] = {}
        for flow in flat.incoming.get(path, ()):
            if flow.source not in self.lazy:
                continue
            if flow.target_port in runner.streamed_inputs and not flow.prologue:
                values[flow.target_port] = self._pull(self.lazy[flow.source], flow)
            else:
                self.lazy[flow.source].finish()
                self._arrived[flow] = self.lazy[flow.source].chunks[flow]
        known = {flow: chunks for flow, chunks in self._arrived.items() if flow.target == path}
        waiting = [flow for flow in flat.incoming.get(path, ()) if flow not in known]
        whole, first = gather(flat, runner, {**known, **{flow: [None] for flow in waiting}})
        return runner.run({**whole, **values}, first)

    def _pull(self, producer: _Lazy, flow: Dataflow) -> Iterator[Any]:
        number = 0
        while True:
            while number >= len(producer.chunks[flow]) and not producer.done:
                producer.advance()
            if number >= len(producer.chunks[flow]):
                return
            yield producer.chunks[flow][number]
            number += 1


def _take_turns(one: Operation, other: Operation) -> bool:
    shared = one.accesses.keys() & other.accesses.keys()
    return any("w" in one.accesses[name] or "w" in other.accesses[name] for name in shared)


def _interleaved(
    session: Session, arrived: Arrived, item: Mapping[str, Any], loaded: Loaded, batch: int
) -> dict[str, list[Piece]]:
    """Run chunk by chunk: a producer goes on only when a consumer needs its next chunk."""
    turns = _Turns(session, arrived)
    last = [flow.source for flow in loaded.flat.incoming.get(OUTPUT, ())]
    for path in [*dict.fromkeys(last), *reversed(turns.lazy)]:
        if path in turns.lazy:
            turns.lazy[path].finish()
    return {path: lazy.made for path, lazy in turns.lazy.items()}
