"""The parts of a worker without processes: stopwatch, inbox, one operation's batch, and the layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from flashrt.clock import VirtualClock
from flashrt.errors import InputError
from flashrt.ir import Program, flatten
from flashrt.ir.execute import Distributor, OperationRunner, Piece
from flashrt.ir.flatten import Dataflow, FlatProgram
from flashrt.runtime.batch import END, OperationRun, Stopwatch
from flashrt.runtime.inbox import Inbox, LinkBrokenError
from flashrt.runtime.layout import Layout, lay_out
from tests.ir.documents import edge, flat_graph

MS = 1_000_000


def test_time_is_charged_to_the_innermost_operation_and_waiting_to_none() -> None:
    clock = VirtualClock()
    spans: list[tuple[str, int, int]] = []
    watch = Stopwatch(clock, lambda *span: spans.append(span))
    watch.enter("outer")
    clock.advance_to_ns(10)
    watch.enter("inner")
    clock.advance_to_ns(15)
    watch.enter(None)
    clock.advance_to_ns(30)
    assert watch.leave() == 15
    clock.advance_to_ns(32)
    assert watch.own_ns() == 7
    assert watch.leave() == 7
    clock.advance_to_ns(40)
    assert watch.leave() == 18
    assert spans == [("outer", 0, 10), ("inner", 10, 15), ("inner", 30, 32), ("outer", 32, 40)]


def test_the_inbox_hands_over_in_order_and_keeps_nothing() -> None:
    inbox = Inbox()
    inbox.put(0, 1, "later", last=True)
    inbox.put(0, 0, "a", last=False)
    inbox.put(0, 0, "b", last=True)
    assert list(inbox.chunks(0, 0)) == ["a", "b"]
    assert list(inbox.chunks(0, 1)) == ["later"]
    inbox.end(3, 0)
    assert list(inbox.chunks(3, 0)) == []
    assert len(inbox) == 0


def test_a_reader_waits_for_chunks_and_wakes_when_the_link_breaks() -> None:
    inbox = Inbox()
    chunks = inbox.chunks(0, 0)
    threading.Thread(target=inbox.put, args=(0, 0, "a"), kwargs={"last": False}).start()
    assert next(chunks) == "a"
    threading.Thread(target=inbox.fail, args=("group 'b' is gone",)).start()
    with pytest.raises(LinkBrokenError, match="group 'b' is gone"):
        next(chunks)


def test_what_arrived_before_the_break_is_still_read() -> None:
    inbox = Inbox()
    inbox.put(0, 0, "a", last=True)
    inbox.fail("gone")
    assert list(inbox.chunks(0, 0)) == ["a"]


@pytest.mark.parametrize(
    ("flow", "pieces", "leaves_at_once", "leaves_at_the_end"),
    [
        ({"source_chunks": 3, "target_chunks": 3, "chunked": True}, [("ab", True), ("cd", True)], ["ab", "cd"], []),
        ({"source_chunks": 3, "target_chunks": 3, "chunked": True}, [("abcd", False)], [], ["ab", "c", "d"]),
        ({"source_chunks": 3, "target_chunks": 1}, [("ab", True), ("c", True), ("d", True)], [], ["abcd"]),
        ({"source_chunks": 3, "target_chunks": 2}, [("ab", True), ("c", True), ("d", True)], [], ["ab", "cd"]),
        ({"source_chunks": 1, "target_chunks": 2}, [("ab", False), ("c", False)], [], ["ab", "c"]),
        ({"source_chunks": 1, "target_chunks": 1}, [], [], []),
    ],
)
def test_the_distributor_cuts_and_joins(
    flow: dict[str, Any], pieces: list[tuple[str, bool]], leaves_at_once: list[str], leaves_at_the_end: list[str]
) -> None:
    distributor = Distributor(Dataflow("p", "y", "q", "x", **flow))
    assert [chunk for text, is_chunk in pieces for chunk in distributor.push(Piece({"y": text}, is_chunk))] == (
        leaves_at_once
    )
    assert distributor.finish() == leaves_at_the_end
    assert distributor.note is None


def pair(chunks: int = 3, *, to_output: str = "blocking") -> FlatProgram:
    """Return x -> p -> (streaming) -> q -> y."""
    out = {"mode": "streaming", "chunks": chunks} if to_output == "streaming" else {}
    return flatten(
        Program.model_validate(
            flat_graph(
                {"p": {"op": "p"}, "q": {"op": "q"}},
                [edge("x", "p.x"), edge("p.y", "q.x", "streaming", chunks=chunks), edge("q.y", "y", **out)],
            )
        )
    )


class Bench:
    """Runs operations of one worker on a virtual clock and keeps what they send and when."""

    def __init__(self, flat: FlatProgram, ops: Mapping[str, Callable[..., Any]], hold_ms: Mapping[str, int]) -> None:
        self.flat = flat
        self.ops = ops
        self.hold_ms = hold_ms
        self.clock = VirtualClock()
        self.sent: list[tuple[str, Any, bool, int]] = []
        self.busy: dict[str, int] = {}
        self.watch = Stopwatch(self.clock, self._span)

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        self.busy[name] = self.busy.get(name, 0) + (end_ns - start_ns) // MS

    def _send(self, flow: Dataflow, value: Any, last: bool) -> None:
        self.sent.append((flow.label, value, last, self.clock.now_ns() // MS))

    def begin(self, path: str, local: frozenset[str], inputs: Mapping[str, Any], *blocking: str) -> OperationRun:
        runner = OperationRunner(self.flat, self.flat.by_path[path], self.ops, {})
        return OperationRun(
            runner, self.flat.outgoing[path], local, inputs, {}, self._send, self.watch, self.clock,
            self.hold_ms.get(path, 0) * MS, frozenset(blocking),
        )  # fmt: skip


def letters(inputs: Mapping[str, Any], state: Any) -> Iterator[dict[str, str]]:
    for letter in inputs["x"]:
        yield {"y": letter}


def upper(inputs: Mapping[str, Any], state: Any) -> dict[str, str]:
    return {"y": inputs["x"].upper()}


OPS = {"p": letters, "q": upper}


def test_chunks_leave_as_they_are_made_and_each_holds_its_share() -> None:
    bench = Bench(pair(), OPS, {"p": 30})
    bench.begin("p", frozenset({"p"}), {"x": "abc"}).drain()
    assert bench.sent == [
        ("p.y -> q.x", "a", False, 10),
        ("p.y -> q.x", "b", False, 20),
        ("p.y -> q.x", "c", True, 30),
    ]


def test_a_blocking_edge_sends_its_chunks_together_at_the_end() -> None:
    bench = Bench(pair(), OPS, {"p": 30})
    bench.begin("p", frozenset({"p"}), {"x": "abc"}, "p.y -> q.x").drain()
    assert [(value, last, at) for _, value, last, at in bench.sent] == [
        ("a", False, 30),
        ("b", False, 30),
        ("c", True, 30),
    ]


@pytest.mark.parametrize("to_output", ["blocking", "streaming"])
def test_an_emulated_consumer_holds_its_whole_time_in_addition_to_its_producer(to_output: str) -> None:
    bench = Bench(pair(to_output=to_output), OPS, {"p": 30, "q": 60})
    local = frozenset({"p", "q"})
    producer = bench.begin("p", local, {"x": "abc"})
    flow = bench.flat.outgoing["p"][0]
    bench.begin("q", local, {"x": producer.chunks(flow)}).drain()
    assert bench.busy == {"p": 30, "q": 60}
    assert bench.clock.now_ns() == 90 * MS
    assert [at for *_, at in bench.sent] == ([90] if to_output == "blocking" else [30, 60, 90])


def test_waiting_for_another_worker_does_not_count_as_holding_a_device() -> None:
    bench = Bench(pair(), OPS, {"q": 30})

    def arriving() -> Iterator[str]:
        for letter in "abc":
            bench.watch.enter(None)
            bench.clock.advance_to_ns(bench.clock.now_ns() + 50 * MS)
            bench.watch.leave()
            yield letter

    bench.begin("q", frozenset({"q"}), {"x": arriving()}).drain()
    assert bench.busy == {"q": 30}
    assert bench.clock.now_ns() == 180 * MS


def test_a_whole_mapping_or_fewer_chunks_than_declared_hold_the_whole_time_too() -> None:
    bench = Bench(pair(), {**OPS, "p": lambda inputs, state: {"y": inputs["x"]}}, {"p": 30, "q": 30})
    bench.begin("p", frozenset({"p"}), {"x": "ab"}).drain()
    assert [(value, last, at) for _, value, last, at in bench.sent] == [("a", False, 30), ("b", True, 30)]
    bench.begin("q", frozenset({"q"}), {"x": iter(["a", "b"])}).drain()
    assert bench.busy == {"p": 30, "q": 30}


def test_a_stream_that_ends_early_says_so() -> None:
    bench = Bench(pair(to_output="streaming"), OPS, {})
    bench.begin("q", frozenset({"q"}), {"x": iter(["a", "b"])}).drain()
    assert [(value, last) for _, value, last, _ in bench.sent] == [("A", False), ("B", False), (END, True)]


def laid_out(
    flat: FlatProgram, place: dict[str, str], order: dict[str, list[str]] | None = None, **more: Any
) -> Layout:
    groups = {group: [f"cpu-{number}"] for number, group in enumerate(sorted(set(place.values())))}
    return lay_out(flat, place, groups, order or {}, {}, (), emulated=False, **more)


def takes_turns(layout: Layout) -> set[str]:
    return {path for worker in layout.workers for path in worker.takes_turns}


def test_neighbours_that_stream_take_turns_unless_told_not_to() -> None:
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "a"})) == {"p"}
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "b"})) == set()
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "a"}, interleave=False)) == set()
    groups = {"a": ["cpu-0"]}
    blocked = lay_out(pair(), {"p": "a", "q": "a"}, groups, {}, {}, ("p.y -> q.x",), emulated=False)
    assert takes_turns(blocked) == set()


def detour() -> FlatProgram:
    """Return p streaming to q, and p -> far -> q beside it."""
    nodes = {name: {"op": name} for name in ("p", "far", "q")}
    edges = [
        edge("x", "p.x"),
        edge("p.y", "q.x", "streaming", chunks=3),
        edge("p.y", "far.x"),
        edge("far.y", "q.z"),
        edge("q.y", "y"),
    ]
    return flatten(Program.model_validate(flat_graph(nodes, edges)))


def test_neighbours_with_a_detour_through_another_group_run_one_after_the_other() -> None:
    assert takes_turns(laid_out(detour(), {"p": "a", "far": "b", "q": "a"})) == set()


def test_neighbours_with_a_detour_through_another_groups_order_run_one_after_the_other() -> None:
    nodes = {name: {"op": name} for name in ("p", "other", "far", "q")}
    edges = [
        edge("x", "p.x"),
        edge("x", "far.x"),
        edge("p.y", "q.x", "streaming", chunks=3),
        edge("p.y", "other.x"),
        edge("far.y", "q.z"),
        edge("other.y", "z"),
        edge("q.y", "y"),
    ]
    flat = flatten(Program.model_validate(flat_graph(nodes, edges, outputs={"y": {}, "z": {}})))
    place = {"p": "a", "q": "a", "other": "b", "far": "b"}
    assert takes_turns(laid_out(flat, place, {"b": ["other", "far"], "a": ["p", "q"]})) == set()
    assert takes_turns(laid_out(flat, place, {"b": ["far", "other"], "a": ["p", "q"]})) == {"p"}


@pytest.mark.parametrize(
    ("place", "order"),
    [
        ({"p": "a", "far": "a", "q": "a"}, {"a": ["q", "p", "far"]}),
        ({"p": "a", "far": "b", "q": "a"}, {"a": ["q", "p"]}),
    ],
)
def test_an_order_that_contradicts_the_dataflow_is_refused(place: dict[str, str], order: dict[str, list[str]]) -> None:
    with pytest.raises(InputError, match=r"each waits for the next.*q") as caught:
        laid_out(detour(), place, order)
    assert caught.value.findings[0].rule == "order-deadlock"


def test_orders_that_contradict_each_other_across_groups_are_refused() -> None:
    nodes = {name: {"op": name} for name in ("p", "q", "r", "s")}
    edges = [
        edge("x", "p.x"), edge("x", "r.x"), edge("p.y", "q.x"), edge("r.y", "s.x"), edge("q.y", "y"), edge("s.y", "z"),
    ]  # fmt: skip
    flat = flatten(Program.model_validate(flat_graph(nodes, edges, outputs={"y": {}, "z": {}})))
    place = {"p": "a", "s": "a", "r": "b", "q": "b"}
    assert laid_out(flat, place, {"a": ["p", "s"], "b": ["r", "q"]})
    with pytest.raises(InputError, match=r"group 'a'.*group 'b'|group 'b'.*group 'a'"):
        laid_out(flat, place, {"a": ["s", "p"], "b": ["q", "r"]})


def test_a_state_used_in_two_groups_and_a_wide_group_are_refused_together() -> None:
    nodes = {"p": {"op": "p", "writes": ["s"]}, "q": {"op": "q", "reads": ["s"]}}
    flat = flatten(
        Program.model_validate(
            flat_graph(nodes, [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")], states={"s": {}})
        )
    )
    groups = {"a": ["cpu-0"], "b": ["cpu-1", "cpu-2"]}
    with pytest.raises(InputError) as caught:
        lay_out(flat, {"p": "a", "q": "b"}, groups, {}, {}, (), emulated=False)
    assert [finding.rule for finding in caught.value.findings] == ["state-across-groups", "wide-group"]
    assert "state 's'" in str(caught.value)
