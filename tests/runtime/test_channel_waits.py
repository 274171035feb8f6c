"""Waiting on channels: full ones, interrupted ones, and ends that are other processes, killed or not."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.ir import Program, flatten
from flashrt.ir.flattening import INPUT, OUTPUT, FlatProgram
from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.channels.hub import Hub, Transport, open_endpoint
from flashrt.runtime.channels.plan import MAX_WAITING, ChannelPlan, plan_channels
from tests.conftest import wait_until
from tests.ir.documents import edge, flat_graph
from tests.runtime.ends import ARENAS, TRANSPORTS, channel, opened
from tests.runtime.passing import check_numbered, numbered, started
from tests.runtime.test_codec import VIEWS, assert_identical, bits

over_arenas = pytest.mark.parametrize("transport", ARENAS)
over_transports = pytest.mark.parametrize("transport", TRANSPORTS)


class Caller:
    """Calls a function in a thread and keeps what it raises."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.error: BaseException | None = None
        self._call, self._arguments = call, arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def is_running(self) -> bool:
        """Return whether the call has not returned."""
        return self._thread.is_alive()

    def result(self) -> BaseException | None:
        """Wait for the end; return what was raised."""
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "it still waits"
        return self.error


def send_many(end: Endpoint, first: int, last: int) -> None:
    for index in range(first, last):
        end.send(0, np.full(3000, index), index)


@over_transports
@pytest.mark.parametrize("spin_us", [0.0, 200.0])
def test_a_sender_waits_while_its_channel_is_full_and_goes_on_when_a_reader_takes(
    transport: Transport, spin_us: float
) -> None:
    with opened(channel(capacity=3, targets=("b", "c")), transport=transport, spin_us=spin_us) as ends:
        sender = Caller(send_many, ends["a"], 0, 200)
        board = ends["a"].board
        wait_until(lambda: board.published(0) == 3, "three messages to be sent")
        readers = [Caller(take_many, ends[name], 200) for name in "bc"]
        for caller in (*readers, sender):
            error = caller.result()
            assert error is None, error
        assert board.published(0) == board.taken(0, 0) == board.taken(0, 1) == 200


def take_many(end: Endpoint, count: int) -> None:
    for index in range(count):
        received = end.receive(0)
        assert (received.value == index).all()
        assert end.board.published(0) - index <= 3 + 1


@over_transports
def test_the_slowest_reader_decides_how_far_a_sender_runs_ahead(transport: Transport) -> None:
    with opened(channel(capacity=2, targets=("b", "c")), transport=transport) as ends:
        send_many(ends["a"], 0, 2)
        sender = Caller(send_many, ends["a"], 2, 4)
        for _ in range(2):
            assert ends["b"].receive(0) is not None
        assert ends["b"].poll(0) is None
        assert ends["a"].board.published(0) == 2
        for index in range(4):
            assert ends["c"].receive(0).batch == index
            assert ends["a"].board.published(0) <= index + 3
            if index >= 1:
                ends["b"].poll(0)
        assert sender.result() is None


@over_transports
@pytest.mark.parametrize("spin_us", [0.0, 200.0])
@pytest.mark.parametrize("how", ["full", "receive", "wait", "sleep"])
def test_an_interrupt_ends_every_wait_now_and_later(transport: Transport, spin_us: float, how: str) -> None:
    with opened(channel(capacity=2), transport=transport, spin_us=spin_us) as ends:
        end = ends["a" if how == "full" else "b"]
        calls: dict[str, Callable[[], Any]] = {
            "full": lambda: send_many(end, 0, 9),
            "receive": lambda: end.receive(0),
            "wait": end.wait,
            "sleep": lambda: end.sleep(3600),
        }
        caller = Caller(calls[how])
        if how == "full":
            wait_until(lambda: end.board.published(0) == 2, "the channel to be full")
        end.interrupt("group 'z' has ended")
        error = caller.result()
        assert isinstance(error, ChannelClosedError)
        assert str(error) == "group 'z' has ended"
        # Whatever comes after it does not wait either.
        for _ in range(3):
            for later in (calls[how], end.wait, lambda: end.sleep(3600), end.check):
                assert isinstance(Caller(later).result(), ChannelClosedError)
        if how == "full":
            assert [int(ends["b"].receive(0).value[0]) for _ in range(2)] == [0, 1]


@over_transports
def test_a_wait_ends_with_its_time_and_a_ring_wakes_only_whom_it_is_for(transport: Transport) -> None:
    with opened(channel(targets=("b", "c")), transport=transport) as ends:
        ends["b"].wait(0.001)
        ends["b"].sleep(0.001)
        waiting = Caller(ends["b"].wait)
        ends["c"].ring()
        ends["c"].wait()
        assert waiting.is_running()
        ends["a"].ring("b")
        assert waiting.result() is None
        # Nobody of that name is near: nothing happens.
        ends["b"].ring("c")
        assert ends["c"].poll(0) is None


@over_transports
def test_a_full_channel_of_one_reader_does_not_keep_another_channels_messages(transport: Transport) -> None:
    with opened(channel(0, capacity=2), channel(1, "b", ("a",), capacity=2), transport=transport) as ends:
        # Both send to each other at once, more than fits, and take what comes only afterwards.
        def talk(name: str, sends: int, takes: int) -> None:
            for index in range(50):
                ends[name].send(sends, index, index)
                assert ends[name].receive(takes).value == index

        talkers = [Caller(talk, "a", 0, 1), Caller(talk, "b", 1, 0)]
        assert [talker.result() for talker in talkers] == [None, None]


def send_numbered(end: Endpoint, number: int, indices: range) -> None:
    for index in indices:
        end.send(number, numbered(index), index)


def is_at(end: Endpoint, number: int, count: int) -> bool:
    return end.board.published(number) == count


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@over_transports
def test_values_come_back_from_another_process_as_they_went(transport: Transport) -> None:
    dtypes = [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64, torch.int64, torch.float32]
    values: list[Any] = [bits([size], dtype, size) for dtype in dtypes for size in (0, 1, 5000, 100_000)]
    values += [VIEWS[view](bits([40, 60], torch.complex64, 3)) for view in ("transposed", "conjugate", "negated")]
    values += [{"a": [np.arange(9000), b"x" * 9999, (torch.ones(2000), None)]}, 2**90, "text" * 2000]
    before = descriptors()
    hub = Hub(["a", "b"], [channel(0), channel(1, "b", ("a",))], transport)
    with started(hub, "b", "returns"):
        end = open_endpoint(hub.wiring("a"), torch=True, inherited=False)
        for index, value in enumerate(values):
            end.send(0, value, index)
            received = end.receive(1)
            assert received.batch == index
            assert_identical(received.value, value)
            del received
        end.close()
    hub.close()
    del end
    assert descriptors() == before


@over_arenas
@pytest.mark.parametrize("num_taken", [0, 1, 30])
def test_a_sender_killed_while_it_sends_leaves_whole_messages_and_nothing_else(
    transport: Transport, num_taken: int
) -> None:
    before = descriptors()
    hub = Hub(["a", "b"], [channel(0, capacity=4), channel(1, "b", ("a",), capacity=4)], transport)
    end = open_endpoint(hub.wiring("b"), torch=False, inherited=False)
    with started(hub, "a", "sends") as process:
        kept = [end.receive(0).value for _ in range(num_taken)]
        process.kill()
        process.wait()
    while (received := end.poll(0)) is not None:
        kept.append(received.value)
    for index in range(len(kept)):
        check_numbered(kept[index], index)
    # The survivor's own channel to the dead fills up, and its wait can be ended.
    sender = Caller(send_numbered, end, 1, range(9))
    wait_until(functools.partial(is_at, end, 1, 4), "the channel to be full")
    end.interrupt("group 'a' has ended")
    assert isinstance(sender.result(), ChannelClosedError)
    end.close()
    hub.close()
    del sender, end, received
    kept.clear()
    assert (descriptors(), flashrt_mappings()) == (before, 0)


@over_arenas
def test_a_reader_killed_while_it_takes_stops_its_sender_and_leaves_nothing(transport: Transport) -> None:
    before = descriptors()
    hub = Hub(["a", "b", "c"], [channel(0, capacity=4, targets=("b", "c"))], transport)
    end, other = (open_endpoint(hub.wiring(name), torch=False, inherited=False) for name in "ac")
    with started(hub, "b", "takes") as process:
        for index in range(20):
            end.send(0, numbered(index), index)
            check_numbered(other.receive(0).value, index)
        process.kill()
        process.wait()
    taken = end.board.taken(0, 0)
    sender = Caller(send_numbered, end, 0, range(20, 99))
    wait_until(functools.partial(is_at, end, 0, taken + 4), "the channel to be full")
    # The other reader has all of it.
    for index in range(20, taken + 4):
        check_numbered(other.receive(0).value, index)
    end.interrupt("group 'b' has ended")
    assert isinstance(sender.result(), ChannelClosedError)
    end.close()
    other.close()
    hub.close()
    del sender, end, other
    assert (descriptors(), flashrt_mappings()) == (before, 0)


def flashrt_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:flashrt")


def fan(**changes: str) -> FlatProgram:
    """Return x -> p; p to q and r; q and r to outputs; edges of p as told."""
    edges = [
        edge("x", "p.x"),
        edge("x", "r.z"),
        edge("p.y", "q.x", "streaming", chunks=3),
        edge("p.y", "r.x", changes.get("mode", "streaming"), **({"chunks": 3} if "mode" not in changes else {})),
        edge("p.z", "q.z"),
        edge("q.y", "y"),
        edge("r.y", "z"),
    ]
    document = flat_graph({name: {"op": name} for name in "pqr"}, edges, outputs={"y": {}, "z": {}})
    return flatten(Program.model_validate(document))


def planned(flat: FlatProgram, place: dict[str, str], *blocking: str, window: int = 5) -> tuple[ChannelPlan, ...]:
    ranks = {group: [group] for group in set(place.values())} | {"w": ["w", "w#1", "w#2"]}
    return plan_channels(flat, place, ranks, frozenset(blocking), window)


def described(plans: tuple[ChannelPlan, ...]) -> set[tuple[str, tuple[str, ...], int]]:
    return {(plan.source, plan.targets, len(plan.flows)) for plan in plans}


def test_one_port_cut_in_the_same_way_has_one_channel() -> None:
    plans = planned(fan(), {"p": "a", "q": "b", "r": "c"})
    assert described(plans) == {
        (INPUT, ("a", "c"), 2), ("a", ("b", "c"), 2), ("a", ("b",), 1), ("b", (OUTPUT,), 1), ("c", (OUTPUT,), 1),
    }  # fmt: skip
    assert [plan.number for plan in plans] == list(range(5))
    assert all(ChannelPlan.from_dict(plan.as_dict()) == plan for plan in plans)
    # Two operations of one worker hear it once.
    assert ("a", ("b",), 2) in described(planned(fan(), {"p": "a", "q": "b", "r": "b"}))


def test_one_port_cut_in_two_ways_has_two_channels() -> None:
    place = {"p": "a", "q": "b", "r": "c"}
    whole = planned(fan(mode="blocking"), place)
    assert {("a", ("b",), 1), ("a", ("c",), 1)} <= described(whole)
    # Also where chunks of one of them leave together.
    assert ("a", ("b", "c"), 2) not in described(planned(fan(), place, "p.y -> q.x"))
    assert ("a", ("b", "c"), 2) in described(planned(fan(), place, "p.y -> q.x", "p.y -> r.x"))


def test_what_stays_in_a_worker_has_no_channel() -> None:
    plans = planned(fan(), {"p": "a", "q": "a", "r": "a"})
    assert described(plans) == {(INPUT, ("a",), 2), ("a", (OUTPUT,), 1)} or len(plans) == 3
    assert {plan.source for plan in plans} == {INPUT, "a"}
    assert sum(plan.source == "a" for plan in plans) == 2


def test_every_rank_takes_the_inputs_and_the_first_alone_sends() -> None:
    plans = planned(fan(), {"p": "w", "q": "b", "r": "w"})
    assert (INPUT, ("w", "w#1", "w#2"), 2) in described(plans)
    assert {plan.source for plan in plans} == {INPUT, "w", "b"}
    into = planned(fan(), {"p": "a", "q": "w", "r": "w"})
    assert ("a", ("w", "w#1", "w#2"), 2) in described(into)


def test_an_input_that_goes_straight_out_has_no_channel() -> None:
    edges = [edge("x", "p.x"), edge("x", "z"), edge("p.y", "y")]
    flat = flatten(Program.model_validate(flat_graph({"p": {"op": "p"}}, edges, outputs={"y": {}, "z": {}})))
    assert described(planned(flat, {"p": "a"})) == {(INPUT, ("a",), 1), ("a", (OUTPUT,), 1)}


@pytest.mark.parametrize(("window", "capacity"), [(1, (4, 8)), (2, (4, 8)), (9, (18, 36)), (10**6, (MAX_WAITING,) * 2)])
def test_a_channel_holds_all_messages_of_the_batches_in_flight(window: int, capacity: tuple[int, int]) -> None:
    plans = planned(fan(), {"p": "a", "q": "b", "r": "c"}, window=window)
    by_size = {len(plan.targets): plan.capacity for plan in plans if plan.source == "a"}
    assert (by_size[1], by_size[2]) == capacity
