"""Items reach whichever thread waits for them, in order, however threads take turns; a lost harness is noticed."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flashrt.bench.intake import Intake
from flashrt.runtime.wire import Connection, pack
from tests.conftest import wait_until

NUM_ITEMS = 400


class Ends:
    """Both ends of a connection, and what came out of it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.harness = Connection(ours, torch=False)
        self.system = Connection(theirs, torch=False)
        self.items: dict[str, queue.SimpleQueue[Any]] = {name: queue.SimpleQueue() for name in "ab"}
        self.lost = threading.Event()
        self.intake = Intake(self.system, self.take, self.lost.set)

    def take(self, message: dict[str, Any]) -> None:
        for name, value in message["value"].items():
            self.items[name].put(value)

    def send(self, **items: Any) -> None:
        self.harness.send_packed(pack({"kind": "input"}, items))


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.harness.shutdown()
    wait_until(found.lost.is_set, "the end of the connection to be noticed")
    found.harness.close()


@pytest.mark.parametrize("length", [1, 30_000], ids=["small", "large"])
@pytest.mark.parametrize("ahead", [1, 50], ids=["one by one", "in bursts"])
def test_two_threads_that_wait_get_their_own_in_order(ends: Ends, length: int, ahead: int) -> None:
    ends.intake.start()
    got: dict[str, list[int]] = {name: [] for name in ends.items}
    room = threading.Semaphore(ahead)

    def consume(name: str) -> None:
        for _ in range(NUM_ITEMS):
            got[name].append(int(ends.intake.wait(ends.items[name])[0]))
            if name == "b":
                room.release()

    threads = [threading.Thread(target=consume, args=(name,)) for name in ends.items]
    for thread in threads:
        thread.start()
    for number in range(NUM_ITEMS):
        room.acquire()
        ends.send(a=np.full(length, number))
        ends.send(b=np.full(length, number))
    for thread in threads:
        thread.join(60)
    assert got == {name: list(range(NUM_ITEMS)) for name in ends.items}


def test_what_comes_while_nobody_waits_is_received(ends: Ends) -> None:
    ends.intake.start()
    ends.send(a=1)
    assert ends.intake.wait(ends.items["a"]) == 1
    # More than a socket holds: it must be taken off although no thread asks for it.
    for number in range(20):
        ends.send(a=np.full(1 << 18, number, np.float64))
    assert [int(ends.intake.wait(ends.items["a"])[0]) for _ in range(20)] == list(range(20))


def test_a_signal_that_raises_while_waiting_loses_nothing(ends: Ends) -> None:
    ends.intake.start()

    class Late(Exception):
        pass

    def raise_late(*_: object) -> None:
        raise Late

    def wait_until_late() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        ends.intake.wait(ends.items["a"])

    before = signal.signal(signal.SIGALRM, raise_late)
    try:
        with pytest.raises(Late):
            wait_until_late()
    finally:
        signal.signal(signal.SIGALRM, before)
    ends.send(a=1, b=2)
    assert [ends.intake.wait(ends.items[name]) for name in "ab"] == [1, 2]


@pytest.mark.parametrize("waiting", [True, False])
def test_garbage_and_a_lost_harness_are_noticed_by_whoever_reads(ends: Ends, waiting: bool) -> None:
    ends.intake.start()
    if waiting:
        thread = threading.Thread(target=ends.intake.wait, args=(ends.items["a"],), daemon=True)
        thread.start()
    ends.harness._socket.sendall(b"no message at all, and long enough to be read as a head")
    wait_until(ends.lost.is_set, "garbage to be noticed")


def test_goodbye_is_no_loss(ends: Ends) -> None:
    ends.intake.start()
    ends.harness.send({"kind": "bye"})
    wait_until(lambda: ends.intake._ended, "goodbye")
    assert not ends.lost.is_set()
    ends.lost.set()
