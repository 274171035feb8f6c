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
from flashrt.ir.flattening import Dataflow, FlatProgram
from flashrt.runtime.batch import END, OperationRun, Outlet, Stopwatch
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.checks import Arrivals
from flashrt.runtime.inbox import Inbox
from flashrt.runtime.layout import Emulation, Layout, Strategy, lay_out
from flashrt.runtime.timeline import MAX_LAG_NS, Timeline
from tests.ir.documents import edge, flat_graph
from tests.runtime.ends import channel, opened

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
    with opened(channel(0), channel(1)) as ends:
        inbox = Inbox(ends["b"], {0: [0], 1: [3]})
        ends["a"].send(0, "a", 0, last=False)
        ends["a"].send(0, "b", 0)
        ends["a"].send(0, "later", 1)
        assert [received.value for received in inbox.chunks(0, 0)] == ["a", "b"]
        assert [received.value for received in inbox.chunks(0, 1)] == ["later"]
        ends["a"].send_end(1, 0)
        assert list(inbox.chunks(3, 0)) == []
        assert len(inbox) == 0


def test_what_two_operations_need_of_one_channel_reaches_both() -> None:
    with opened(channel(0, flows=(4, 7))) as ends:
        inbox = Inbox(ends["b"], {0: [4, 7]})
        assert not inbox.has(7)
        ends["a"].send(0, "a", 0)
        assert inbox.has(7)
        assert inbox.take(4).value == "a"
        assert len(inbox) == 1
        assert inbox.take(7).value == "a"
        assert len(inbox) == 0


def test_what_nobody_asks_for_stays_in_its_channel() -> None:
    with opened(channel(0), channel(1, capacity=2)) as ends:
        inbox = Inbox(ends["b"], {0: [0], 1: [1]})
        for number in (0, 1, 1):
            ends["a"].send(number, "x", 0)
        assert inbox.take(0).value == "x"
        assert not ends["a"].board.has_room(1)
        assert inbox.take(1).value == "x"
        assert ends["a"].board.has_room(1)


def test_a_reader_waits_for_chunks_and_wakes_when_the_deployment_ends() -> None:
    with opened() as ends:
        chunks = Inbox(ends["b"], {0: [0]}).chunks(0, 0)
        sender = threading.Thread(target=ends["a"].send, args=(0, "a", 0), kwargs={"last": False})
        sender.start()
        assert next(chunks).value == "a"
        sender.join()
        threading.Thread(target=ends["b"].interrupt, args=("group 'b' is gone",)).start()
        with pytest.raises(ChannelClosedError, match="group 'b' is gone"):
            next(chunks)


def test_what_arrived_before_the_end_is_still_read() -> None:
    with opened() as ends:
        ends["a"].send(0, "a", 0)
        ends["b"].interrupt("gone")
        assert [received.value for received in Inbox(ends["b"], {0: [0]}).chunks(0, 0)] == ["a"]


def test_the_latest_whole_value_is_taken_and_never_one_of_a_later_batch() -> None:
    with opened() as ends:
        inbox = Inbox(ends["b"], {0: [0]})

        def latest(batch: int) -> list[Any]:
            return [received.value for received in inbox.latest(0, batch)]

        def send(text: str, batch: int) -> None:
            ends["a"].send(0, text, batch)

        first = threading.Thread(target=send, args=("zero", 0))
        first.start()
        assert latest(0) == ["zero"]
        first.join()
        assert latest(3) == ["zero"]
        ends["a"].send(0, "one, in", 1, last=False)
        assert latest(3) == ["zero"]
        ends["a"].send(0, " parts", 1)
        send("two", 2)
        send("nine", 9)
        assert latest(1) == ["one, in", " parts"]
        assert latest(3) == ["two"]
        assert latest(8) == ["two"]
        assert latest(9) == ["nine"]


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
        self.watch = Stopwatch(self.clock, lambda name, start_ns, end_ns: None)
        self.device = Timeline(self.clock.sleep_until_ns, self.clock.now_ns)

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        self.busy[name] = self.busy.get(name, 0) + (end_ns - start_ns) // MS

    def _send(self, outlet: Outlet, value: Any, last: bool, ready_ns: int) -> None:
        # A value leaves once its operation has ended on its device.
        assert ready_ns <= self.clock.now_ns()
        self.sent.append((outlet.flow.label, value, last, ready_ns // MS))

    def begin(
        self,
        path: str,
        local: frozenset[str],
        inputs: Mapping[str, Any],
        *blocking: str,
        arrivals: Arrivals | None = None,
    ) -> OperationRun:
        runner = OperationRunner(self.flat, self.flat.by_path[path], self.ops, {})
        flows = self.flat.outgoing[path]
        outlets = [
            Outlet(number, flow, flow.label in blocking)
            for number, flow in enumerate(flows)
            if flow.target not in local
        ]
        chunks = max(runner.num_output_chunks, runner.num_input_chunks)
        return OperationRun(
            runner, [flow for flow in flows if flow.target in local], outlets, inputs, {}, self._send, self.watch,
            arrivals=arrivals, device=self.device, part_ns=[self.hold_ms.get(path, 0) * MS // chunks] * chunks,
            span=self._span,
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
    arrivals = Arrivals()

    def arriving() -> Iterator[str]:
        for letter in "abc":
            bench.watch.enter(None)
            bench.clock.advance_to_ns(bench.clock.now_ns() + 50 * MS)
            bench.watch.leave()
            arrivals.add("x", bench.clock.now_ns(), ())
            yield letter

    bench.begin("q", frozenset({"q"}), {"x": arriving()}, arrivals=arrivals).drain()
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


def test_real_work_longer_than_what_it_stands_for_is_an_overrun_of_that_operation_alone() -> None:
    def slow(inputs: Mapping[str, Any], state: Any) -> dict[str, str]:
        bench.clock.advance_to_ns(bench.clock.now_ns() + 15 * MS)
        return {"y": inputs["x"]}

    bench = Bench(pair(), {**OPS, "q": slow}, {"p": 90, "q": 30})
    local = frozenset({"p", "q"})
    producer = bench.begin("p", local, {"x": "abc"})
    consumer = bench.begin("q", local, {"x": producer.chunks(bench.flat.outgoing["p"][0])})
    consumer.drain()
    # What its producer holds the device for is no work of the consumer.
    assert (producer.overrun_ns, consumer.overrun_ns) == (0, 15 * MS)


@pytest.mark.parametrize(
    ("now_ms", "ready_ms", "expected"),
    [
        (0, 0, (0, 10)),
        (3, 7, (7, 17)),
        (25, 0, (0, 10)),
        (30, 0, (0, 10)),
        (31, 0, (21, 31)),
        (95, 40, (85, 95)),
    ],
)
def test_an_emulated_clock_follows_reality_only_when_it_is_far_behind(
    now_ms: int, ready_ms: int, expected: tuple[int, int]
) -> None:
    clock = VirtualClock(now_ms * MS)
    device = Timeline(clock.sleep_until_ns, clock.now_ns)
    start_ns, end_ns = device.hold(ready_ms * MS, 10 * MS)
    assert (start_ns / MS, end_ns / MS) == expected
    assert device.free_ns == end_ns
    assert clock.now_ns() == max(now_ms * MS, end_ns)
    assert clock.now_ns() - end_ns <= MAX_LAG_NS


def laid_out(
    flat: FlatProgram, place: dict[str, str], order: dict[str, list[str]] | None = None, **more: Any
) -> Layout:
    groups = {group: [f"cpu-{number}"] for number, group in enumerate(sorted(set(place.values())))}
    return lay_out(flat, place, groups, Strategy(order=order or {}, **more))


def takes_turns(layout: Layout) -> set[str]:
    return {path for worker in layout.workers for path in worker.takes_turns}


def test_neighbours_that_stream_take_turns_unless_told_not_to() -> None:
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "a"})) == {"p"}
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "b"})) == set()
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "a"}, interleave=False)) == set()
    assert takes_turns(laid_out(pair(), {"p": "a", "q": "a"}, blocking=("p.y -> q.x",))) == set()


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


def stateful() -> FlatProgram:
    """Return x -> p -> q -> y; p writes the state that q reads."""
    nodes = {"p": {"op": "p", "writes": ["s"]}, "q": {"op": "q", "reads": ["s"]}}
    edges = [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")]
    return flatten(Program.model_validate(flat_graph(nodes, edges, states={"s": {}})))


def test_a_state_used_in_two_groups_and_an_order_that_cannot_be_are_refused_together() -> None:
    groups = {"a": ["cpu-0"], "b": ["cpu-1", "cpu-2"]}
    with pytest.raises(InputError) as caught:
        lay_out(stateful(), {"p": "a", "q": "b"}, groups)
    assert [finding.rule for finding in caught.value.findings] == ["state-across-groups"]
    assert "state 's'" in str(caught.value)
    # Ranks of one group keep a state each: they run the same operations.
    assert len(lay_out(stateful(), {"p": "b", "q": "b"}, groups).workers) == 2
    with pytest.raises(InputError) as caught:
        lay_out(stateful(), {"p": "b", "q": "b"}, groups, Strategy(order={"b": ["q", "p"]}))
    assert [finding.rule for finding in caught.value.findings] == ["order-deadlock"]


def test_a_wide_group_of_real_devices_is_a_worker_for_each() -> None:
    groups = {"a": ["cpu-0"], "b": ["cpu-1", "cpu-2"]}
    strategy = Strategy(tiles={"q": 2}, nan="pass", asynchronous=frozenset({"q"}), in_flight=7)
    layout = lay_out(pair(), {"p": "a", "q": "b"}, groups, strategy)
    described = [(w.name, w.group, w.rank, w.degree, w.devices, w.operations) for w in layout.workers]
    assert described == [
        ("a", "a", 0, 1, ("cpu-0",), ("p",)),
        ("b", "b", 0, 2, ("cpu-1",), ("q",)),
        ("b#1", "b", 1, 2, ("cpu-2",), ("q",)),
    ]
    assert [worker.title for worker in layout.workers] == [
        "group 'a' (p on cpu-0)", "group 'b', rank 0 (q on cpu-1)", "group 'b', rank 1 (q on cpu-2)",
    ]  # fmt: skip
    assert [worker.tiles for worker in layout.workers] == [{}, {"q": 2}, {"q": 2}]
    assert layout.window == 7
    for worker in layout.workers:
        assert worker.asynchronous == ("q",)
        assert type(worker).from_dict(worker.as_dict()) == worker


def test_ranks_that_would_each_take_a_last_value_are_refused() -> None:
    strategy = Strategy(asynchronous=frozenset({"p"}))
    with pytest.raises(InputError, match="ranks might take different ones") as caught:
        lay_out(pair(), {"p": "a", "q": "b"}, {"a": ["cpu-0"], "b": ["cpu-1", "cpu-2"]}, strategy)
    assert [finding.rule for finding in caught.value.findings] == ["asynchronous-ranks"]


def test_emulated_devices_of_one_group_are_one_worker() -> None:
    groups = {"a": ["emulated-0"], "b": ["emulated-1", "emulated-2"]}
    emulation = Emulation({"p": [1, 2, 3], "q": [4]}, {1: 5}, num_batches=9)
    layout = lay_out(pair(), {"p": "a", "q": "b"}, groups, emulation=emulation)
    assert [(w.name, w.rank, w.degree, w.devices) for w in layout.workers] == [
        ("a", 0, 1, ("emulated-0",)),
        ("b", 0, 1, ("emulated-1", "emulated-2")),
    ]
    assert [dict(worker.part_ns) for worker in layout.workers] == [{"p": (1, 2, 3)}, {"q": (4,)}]
    assert all(worker.lag_ns == {"1": 5} for worker in layout.workers)
    # As many batches as are under way at once, and some more.
    assert layout.window == 11
