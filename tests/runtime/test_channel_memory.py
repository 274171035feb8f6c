"""What channels hold on to: memory that is not there is refused by name, and nothing is left or remembered."""

from __future__ import annotations

import gc
import mmap
import os
import tracemalloc

import numpy as np
import pytest
import torch

from flashrt.errors import InputError
from flashrt.runtime.channels import arena
from flashrt.runtime.channels.hub import Transport
from tests.runtime.ends import ARENAS, SIZE, WHERE, arena_bytes, channel, loaned, memory_files, opened, take

MAP_NORESERVE = 0x4000

pytestmark = pytest.mark.parametrize("transport", ARENAS)


def test_as_many_kept_values_as_there_are_blocks_are_refused_by_name(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "MAX_BLOCKS", 40)
    with opened(channel(capacity=64), transport=transport) as ends:
        kept: list[torch.Tensor] = []

        def keep_more() -> None:
            ends["a"].send(0, torch.full((2000,), float(len(kept))), 0, where=WHERE)
            kept.append(take(ends["b"]))

        for _ in range(40):
            keep_more()
        with pytest.raises(InputError, match=r"operation 'p', port 'y'.*at most 40 values kept.*clone") as caught:
            keep_more()
        assert caught.value.findings[0].rule == "values-kept"
        assert [int(tensor[0]) for tensor in kept] == list(range(40))
        del kept[7]
        ends["a"].send(0, torch.full((2000,), 7.0), 0)
        assert take(ends["b"])[0] == 7


def test_many_kept_values_take_no_descriptors(transport: Transport) -> None:
    with opened(channel(), transport=transport) as ends:
        before, kept = len(os.listdir("/proc/self/fd")), []
        for index in range(600):
            ends["a"].send(0, np.full(2000, index), index, where=WHERE)
            kept.append(take(ends["b"]))
        assert all(array[7] == index for index, array in enumerate(kept))
        # Usually a process may have 1024.
        assert len(os.listdir("/proc/self/fd")) - before < 100


def test_values_that_are_new_each_time_are_not_remembered(transport: Transport) -> None:
    with opened(transport=transport) as ends:

        def pass_on(first: int, last: int) -> None:
            for index in range(first, last):
                value = [index, *range(3000)]
                ends["a"].send(0, value, 0)
                assert take(ends["b"]) == value

        pass_on(0, 5)
        gc.collect()
        tracemalloc.start()
        try:
            pass_on(5, 25)
            gc.collect()
            left, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Two such values take more than this.
        assert left < 200_000


def test_too_little_memory_is_refused_by_name_before_anything_is_sent(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(transport=transport) as ends:
        kept = loaned(ends["a"]).fill_(2)
        before = arena_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(arena, "available_bytes", lambda: 1_000_000)
            for act in (
                lambda: ends["a"].send(0, torch.ones(1 << 21), 0, where=WHERE),
                lambda: ends["a"].send(0, [1, b"x" * (8 << 20)], 0, where=WHERE),
                lambda: ends["a"].loan(0, 8 << 20, WHERE),
            ):
                with pytest.raises(InputError, match=r"operation 'p', port 'y'.* 8 MB of shared.* 1 MB") as caught:
                    act()
                assert caught.value.findings[0].rule == "no-shared-memory"
            # What it has already can be used.
            ends["a"].send(0, kept, 0, where=WHERE)
        assert arena_bytes() == before
        assert take(ends["b"]).sum() == 2 * SIZE
        assert ends["b"].poll(0) is None
        ends["a"].send(0, torch.ones(1 << 21), 0)
        assert take(ends["b"]).sum() == 1 << 21


def test_a_tensor_larger_than_the_machine_is_refused_before_it_breaks_anything(transport: Transport) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    size = 1 << 41
    huge = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    with opened(transport=transport) as ends:
        with pytest.raises(InputError, match=r"operation 'p', port 'y'.*2199023 MB of shared memory.*MB.* available"):
            ends["a"].send(0, huge, 0, where=WHERE)
        with pytest.raises(InputError, match=r"operation 'p', port 'y'.*MB.* available"):
            ends["a"].loan(0, size, WHERE)
        assert ends["b"].poll(0) is None


@pytest.mark.parametrize("spin_us", [0.0, 100.0])
def test_closing_leaves_no_descriptor_and_no_mapping_once_the_values_are_gone(
    transport: Transport, spin_us: float
) -> None:
    gc.collect()
    descriptors, files = len(os.listdir("/proc/self/fd")), memory_files()
    plans = channel(0, targets=("b", "c")), channel(1, "b", ("a",))
    for _ in range(3):
        with opened(*plans, transport=transport, spin_us=spin_us) as ends:
            sent = loaned(ends["a"]).fill_(4)
            ends["a"].send(0, [sent, np.ones(SIZE)], 0)
            ends["b"].send(1, torch.ones(SIZE), 0)
            other = take(ends["a"], 1)
            got = take(ends["b"])
            dropped = loaned(ends["a"])
        # What was received can be read as long as it is there, although the deployment has ended.
        assert got[0].sum() == sent.sum() == 4 * SIZE
        assert other.sum() == SIZE
        del got, sent, other, dropped
        gc.collect()
        assert memory_files() == files
        assert len(os.listdir("/proc/self/fd")) == descriptors
