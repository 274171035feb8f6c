"""Memory of channels: values written in place, blocks that are used again, readers that keep values or write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import InputError
from flashrt.runtime.channels.carrier import MAX_LOANS
from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.channels.hub import Transport
from flashrt.runtime.checks import Arrivals
from tests.runtime.ends import ARENAS, SIZE, TRANSPORTS, WHERE, arena_bytes, channel, loaned, opened, take
from tests.runtime.test_codec import assert_identical

ROOT = Path(__file__).resolve().parents[2]
over_arenas = pytest.mark.parametrize("transport", ARENAS)
over_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def next_addresses(end: Endpoint, num: int = 6) -> set[int]:
    """Return where the next values of `SIZE` elements could be written, if so many were written at once."""
    return {tensor.data_ptr() for tensor in [loaned(end) for _ in range(num)]}


@over_transports
def test_a_tensor_written_in_place_is_handed_over_without_a_copy(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        sent = loaned(ends["a"]).view(256, 256)
        sent.fill_(1)
        ends["a"].send(0, sent, 0)
        got = take(ends["b"])
        assert got.shape == (256, 256)
        # Nobody may do this; here it shows that both are one memory.
        sent[3, 5] = 7
        assert got[3, 5] == 7
        assert got.sum() == SIZE + 6


@over_transports
def test_a_tensor_of_other_memory_is_copied_once_and_then_its_senders_own(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        sent = torch.ones(SIZE)
        ends["a"].send(0, sent, 0)
        got = take(ends["b"])
        sent.fill_(7)
        assert torch.equal(got, torch.ones(SIZE))


@over_arenas
def test_several_written_in_place_lie_side_by_side_with_copies_in_one_message(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        one, two = loaned(ends["a"]), loaned(ends["a"], dtype=torch.int64)
        one.copy_(torch.arange(SIZE))
        two.copy_(torch.arange(SIZE))
        other = np.arange(5000)
        value = {
            "one": one, "part": one[100:9000], "matrix": one.view(256, 256)[7:], "columns": one.view(256, 256)[:, 7:],
            "few": two[5:8], "bits": two.view(torch.uint8)[8:], "list": [other, two, "text", torch.ones(3)],
        }  # fmt: skip
        ends["a"].send(0, value, 0)
        got = take(ends["b"])
        assert_identical(got, value)
        one.fill_(-1)
        two.fill_(-1)
        in_place = [got["one"], got["part"], got["matrix"], got["bits"].view(torch.int64), got["list"][1]]
        assert all(bool((tensor == -1).all()) for tensor in in_place)
        # What is not dense is copied, and so is what is small, so that keeping it keeps no block.
        assert torch.equal(got["columns"], torch.arange(SIZE, dtype=torch.float32).view(256, 256)[:, 7:])
        assert got["few"].tolist() == [5, 6, 7]


@over_arenas
def test_memory_that_was_asked_for_and_dropped_is_used_again(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        addresses = {loaned(ends["a"]).data_ptr() for _ in range(50)}
        assert len(addresses) == 1
        # Also after others were sent meanwhile, and in blocks of another size.
        kept = loaned(ends["a"])
        ends["a"].send(0, torch.ones(SIZE), 0)
        assert kept.data_ptr() in addresses
        assert torch.equal(take(ends["b"]), torch.ones(SIZE))
        del kept
        assert next_addresses(ends["a"]) & addresses


@over_arenas
def test_what_its_maker_keeps_stays_readable_until_it_lets_go(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        kept = loaned(ends["a"]).fill_(3)
        address = kept.data_ptr()
        ends["a"].send(0, kept[: SIZE // 2], 0)
        assert take(ends["b"]).sum() == 3 * (SIZE // 2)
        for _ in range(20):
            later = loaned(ends["a"]).fill_(9)
            assert later.data_ptr() != address
            ends["a"].send(0, later, 0)
            del later
            assert take(ends["b"])[0] == 9
        assert torch.equal(kept, torch.full((SIZE,), 3.0))
        del kept
        assert address in next_addresses(ends["a"], MAX_LOANS)


@over_transports
def test_a_value_in_place_can_be_sent_twice_and_on_two_channels(transport: Transport) -> None:
    with opened(channel(0), channel(1), transport=transport) as ends:
        value = loaned(ends["a"]).fill_(3)
        for number in (0, 1, 0):
            ends["a"].send(number, value, 0)
        assert [take(ends["b"], number).sum() for number in (0, 0, 1)] == [3 * SIZE] * 3


@over_arenas
def test_more_memory_than_one_message_can_have_is_refused_without_an_error(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        kept = [loaned(ends["a"], 2048) for _ in range(MAX_LOANS)]
        assert ends["a"].loan(0, 8192, WHERE) is None
        for index, tensor in enumerate(kept):
            tensor.fill_(index)
        ends["a"].send(0, [*kept, torch.full((2048,), 99.0)], 0)
        got = take(ends["b"])
        assert [int(tensor[0]) for tensor in got] == [*range(MAX_LOANS), 99]
        # Sent ones count no more, and neither do those that were dropped.
        more = [loaned(ends["a"], 2048) for _ in range(MAX_LOANS)]
        assert ends["a"].loan(0, 8192, WHERE) is None
        more.pop()
        assert ends["a"].loan(0, 8192, WHERE) is not None
        assert ends["a"].loan(0, 0, WHERE) is None


@over_arenas
def test_a_block_is_used_again_only_when_both_readers_have_let_go(transport: Transport) -> None:
    with opened(channel(targets=("b", "c")), transport=transport) as ends:
        value = loaned(ends["a"]).fill_(5)
        address = value.data_ptr()
        ends["a"].send(0, value, 0)
        del value
        assert address not in next_addresses(ends["a"])
        first = take(ends["b"])
        del first
        assert address not in next_addresses(ends["a"])
        second = take(ends["c"])
        assert address not in next_addresses(ends["a"])
        assert torch.equal(second, torch.full((SIZE,), 5.0))
        # A part of a value keeps it all.
        part = second[10:20]
        del second
        assert address not in next_addresses(ends["a"])
        del part
        assert address in next_addresses(ends["a"], MAX_LOANS)


@over_arenas
@pytest.mark.parametrize("kind", ["tensors", "arrays", "forms"])
def test_values_that_are_let_go_take_no_more_memory_and_those_that_are_kept_stay(
    transport: Transport, kind: str
) -> None:
    def value(index: int) -> Any:
        if kind == "tensors":
            return torch.full((SIZE,), float(index))
        if kind == "arrays":
            return [np.full(300, index) for _ in range(300)]
        return f"{index:04} " * 3000

    def same(got: Any, index: int) -> bool:
        assert_identical(got, value(index))
        return True

    with opened(transport=transport) as ends:
        for index in range(3):
            ends["a"].send(0, value(index), index)
            assert same(take(ends["b"]), index)
        before = arena_bytes()
        for index in range(40):
            ends["a"].send(0, value(index), index)
            assert same(take(ends["b"]), index)
        assert arena_bytes() == before
        kept = []
        for index in range(40):
            ends["a"].send(0, value(index), index)
            kept.append(take(ends["b"]))
        assert all(same(got, index) for index, got in enumerate(kept))
        most = arena_bytes()
        kept.clear()
        for index in range(40):
            ends["a"].send(0, value(index), index)
            kept.append(take(ends["b"]))
        assert all(same(got, index) for index, got in enumerate(kept))
        assert arena_bytes() == most


NAMES = ["in place", "copied", "take b", "take c", "drop b", "drop c", "drop a"]
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=60)


@over_transports
def test_whatever_anybody_keeps_stays_as_it_was(transport: Transport) -> None:
    """Random sending, taking, keeping and letting go: memory is used again, and never too early."""
    with opened(channel(targets=("b", "c"), capacity=8), transport=transport) as ends:

        @given(ACTIONS)
        @settings(deadline=None, max_examples=300)
        def act(actions: list[tuple[str, int]]) -> None:
            kept: dict[str, list[tuple[int, torch.Tensor]]] = {"a": [], "b": [], "c": []}
            waiting: dict[str, list[int]] = {"b": [], "c": []}

            def get(name: str) -> None:
                if waiting[name]:
                    kept[name].append((waiting[name].pop(0), take(ends[name])))

            for number, (what, index) in enumerate(actions, 1):
                who = what[-1]
                if what.startswith("take"):
                    get(who)
                elif what.startswith("drop") and kept[who]:
                    kept[who].pop(index % len(kept[who]))
                elif what in {"in place", "copied"} and max(map(len, waiting.values())) < 8:
                    in_place = what == "in place"
                    value = loaned(ends["a"], 2048).fill_(number) if in_place else torch.full((2048,), float(number))
                    ends["a"].send(0, value, number)
                    kept["a"].append((number, value))
                    for queue in waiting.values():
                        queue.append(number)
                for number_then, tensor in (pair for pairs in kept.values() for pair in pairs):
                    assert (tensor == number_then).all()
            for name in waiting:
                while waiting[name]:
                    get(name)

        act()
        assert arena_bytes() < 200 * 16384


@over_arenas
def test_values_of_all_sizes_find_room_and_small_differences_share_it(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        for size in (1, 513, 4095, 4096, 4097, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 1):
            ends["a"].send(0, np.full(size, size % 251, np.uint8), 0)
            got = take(ends["b"])
            assert got.shape == (size,)
            assert (got == size % 251).all()
            del got
        before = arena_bytes()
        for size in range(900_000, 1_000_000, 7919):
            ends["a"].send(0, np.zeros(size, np.uint8), 0)
            take(ends["b"])
        # Sizes between two steps share blocks: at most one more for each step of an eighth.
        assert arena_bytes() - before <= 2 << 20


WRITER = """
import sys, torch
from tests.runtime.ends import opened, take
with opened(transport=sys.argv[1]) as ends:
    ends["a"].send(0, torch.zeros(1 << 16), 0)
    got = take(ends["b"])
    assert got.sum() == 0
    print("received", flush=True)
    {write}
    print("written", flush=True)
"""
WRITES = {"torch": "got.add_(5)", "view": "got[3:5].mul_(9)", "data": "got.data.add_(5)", "numpy": "got.numpy()[:] = 5"}


@over_transports
@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_what_was_received_ends_the_writer_and_reaches_nobody(transport: Transport, how: str) -> None:
    code = WRITER.replace("{write}", WRITES[how])
    done = subprocess.run(
        [sys.executable, "-c", code, transport], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()) == (-signal.SIGSEGV, ["received"])


@over_transports
def test_a_write_to_a_small_tensor_that_was_received_is_named(transport: Transport) -> None:
    with opened(channel(targets=("b", "c")), transport=transport) as ends:
        ends["a"].send(0, torch.ones(20), 0)
        received = ends["b"].poll(0)
        assert received is not None
        arrivals = Arrivals()
        arrivals.add("x", 0, received.tensors)
        arrivals.check_unwritten("operation 'q' (op 'q')")
        received.value[3:5].mul_(9)
        assert torch.equal(take(ends["c"]), torch.ones(20))
        with pytest.raises(InputError, match=r"operation 'q' \(op 'q'\), port 'x'.*written in place.*clone") as caught:
            arrivals.check_unwritten("operation 'q' (op 'q')")
        assert caught.value.findings[0].rule == "input-written"


@over_transports
def test_received_arrays_are_read_only(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        ends["a"].send(0, [np.ones(9000), {"small": np.ones(3)}, (np.ones((3, 0)), np.float32(1))], 0)
        large, nested, _ = take(ends["b"])
        for array in (large, nested["small"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7


@over_transports
def test_what_was_received_with_numpy_alone_is_read_only_too(transport: Transport) -> None:
    with opened(transport=transport, torch=False) as ends:
        ends["a"].send(0, [torch.ones(9000), torch.ones(3, dtype=torch.bfloat16)], 0)
        for tensor in take(ends["b"]):
            with pytest.raises(ValueError, match="read-only"):
                tensor.data[0] = 7


@over_transports
def test_small_parts_travel_beside_what_is_written_in_place(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        sent = {"t": loaned(ends["a"]).fill_(1), "m": b"abc", "s": torch.arange(3), "e": torch.empty(0)}
        ends["a"].send(0, sent, 0)
        got = take(ends["b"])
        assert got["m"] == b"abc"
        assert got["s"].tolist() == [0, 1, 2]
        assert got["e"].shape == (0,)
        assert torch.equal(got["t"], torch.ones(SIZE))


@over_transports
def test_memory_of_one_channel_may_be_sent_on_another(transport: Transport) -> None:
    with opened(channel(0), channel(1), transport=transport) as ends:
        value = loaned(ends["a"]).fill_(7)
        ends["a"].send(0, torch.zeros(3), 0)
        ends["a"].send(1, value, 0)
        assert take(ends["b"], 0).tolist() == [0, 0, 0]
        assert torch.equal(take(ends["b"], 1), torch.full((SIZE,), 7.0))


@over_arenas
def test_a_forked_child_gives_back_nothing_of_its_parents(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        ends["a"].send(0, torch.ones(SIZE), 0)
        kept = {"value": take(ends["b"])}
        child = os.fork()
        if child == 0:
            kept.clear()
            os._exit(0)
        os.waitpid(child, 0)
        for batch in range(1, 6):
            ends["a"].send(0, torch.full((SIZE,), float(batch)), batch)
            take(ends["b"])
        assert torch.equal(kept["value"], torch.ones(SIZE))


@over_transports
def test_more_arrays_than_a_short_number_counts_travel(transport: Transport) -> None:
    with opened(transport=transport) as ends:
        ends["a"].send(0, list(np.arange(70_000.0)), 0)
        assert take(ends["b"]) == list(np.arange(70_000.0))


@over_arenas
def test_what_cannot_be_written_down_is_refused_by_name(transport: Transport) -> None:
    inside: list[Any] = []
    inside.append(inside)
    with opened(transport=transport) as ends:
        for value in (inside, np.ma.masked_less(np.arange(6.0), 3), 10**5000):
            with pytest.raises(InputError, match="operation 'p', port 'y'"):
                ends["a"].send(0, value, 0, where=WHERE)
