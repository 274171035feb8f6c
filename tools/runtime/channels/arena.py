"""Memory for values in transit: each sender has an arena, an anonymous file that its readers map too.

A sender takes a block, fills it (or lets an operation write its output into it), and publishes its number. Readers map
the block for reading alone: they see the sender's bytes without a copy, and a write to them ends the process instead of
changing what others read. A block is free again when every reader has let go of it and nobody in the sender's own
process still uses it.

Anonymous files have no name: nothing is left in /dev/shm after a crash, and its size is no limit.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrt.errors import InputError, input_error
from flashrt.runtime.channels.board import PAGE, fence
from flashrt.runtime.channels.mapping import Mapping

MAX_BLOCKS = 8192
SMALL_BLOCK_BYTES = 64 << 10
MAX_SPAN_TYPES = 1024
RESERVE_SHARE = 0.05
"""Part of the free memory that stays free: the last bytes of a machine are not ours to take."""

Release = Callable[[], None]


class _Span:
    """Bytes in shared memory that call back when the last user lets go: what tensors and arrays hold on to."""

    release: Release | None = None
    memory: Any = None
    born = 0

    def __del__(self) -> None:
        # What a forked child drops of its parent's is still the parent's.
        if self.release is not None and self.born == _num_forks:
            self.release()


_num_forks = 0
"""How many forks lie between the first process of the program and this one."""


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


_SPAN_TYPES: dict[int, type[Any]] = {}


def _span_type(num_bytes: int) -> type[Any]:
    kind = _SPAN_TYPES.get(num_bytes)
    if kind is None:
        if len(_SPAN_TYPES) == MAX_SPAN_TYPES:
            _SPAN_TYPES.clear()
        kind = _SPAN_TYPES[num_bytes] = type("Span", (_Span, ctypes.c_uint8 * num_bytes), {})
    return kind


def holder_of(address: int, num_bytes: int, release: Release, memory: Any = None) -> Any:
    """Return an object with the buffer protocol over memory that `release` gives back when the object dies.

    `memory` is what keeps the memory mapped.
    """
    span = _span_type(num_bytes).from_address(address)
    span.release = release
    span.memory = memory
    span.born = _num_forks
    return span


class Block:
    """A piece of a sender's arena, at its sender.

    Attributes
    ----------
    generation
        Counts its uses; readers write it down when they let go.
    readers
        Numbers of the endpoints that still have it.
    """

    def __init__(self, number: int, offset: int, memory: Mapping) -> None:
        self.number = number
        self.offset = offset
        self.num_bytes = memory.num_bytes
        self.memory = memory
        self.address = memory.address
        self.generation = 0
        self.readers: tuple[int, ...] = ()
        self.in_use = False
        """Whether something in the sender's own process still uses the memory."""

    def reference(self) -> tuple[int, int, int, int, int]:
        """Return what a reader needs to find this use of the block."""
        return self.number, 0, self.generation, self.offset, self.num_bytes

    def let_go(self) -> None:
        """Say that nothing in the sender's own process uses the memory any more."""
        self.in_use = False


class Arena:
    """A sender's blocks.

    Parameters
    ----------
    descriptor
        The arena's memfd; it grows as blocks are needed.
    num_endpoints
        How many endpoints the deployment has: each has a row in the table of releases.
    """

    def __init__(self, descriptor: int, num_endpoints: int) -> None:
        self._descriptor = descriptor
        self._end = table_bytes(num_endpoints)
        self._table = _map_table(descriptor, num_endpoints)
        self._released = self._table.view().cast("q")
        self._blocks: list[Block] = []
        self._free: dict[int, list[Block]] = {}
        self._busy: deque[Block] = deque()

    def take(self, num_bytes: int, where: str) -> Block:
        """Return a free block of at least `num_bytes`, warm where there is one.

        Raises
        ------
        InputError
            The machine has too little memory left for it; names `where`.
        """
        size = block_bytes(num_bytes)
        free = self._free.get(size)
        if not free:
            self._collect()
            free = self._free.get(size)
        block = free.pop() if free else self._grow(size, where)
        block.generation += 1
        block.in_use = True
        return block

    def publish(self, block: Block, readers: tuple[int, ...]) -> None:
        """Hand the block to endpoints; it comes back when they and the sender's own users are done."""
        block.readers = readers
        self._busy.append(block)

    def give_back(self, block: Block) -> None:
        """Take back a block that was never published."""
        block.readers = ()
        self._busy.append(block)

    def _collect(self) -> None:
        released = self._released
        for _ in range(len(self._busy)):
            block = self._busy.popleft()
            if block.readers:
                number, wanted = block.number, block.generation
                block.readers = tuple(r for r in block.readers if released[r * MAX_BLOCKS + number] != wanted)
            if block.readers or block.in_use:
                self._busy.append(block)
            else:
                self._free.setdefault(block.num_bytes, []).append(block)

    def _grow(self, size: int, where: str) -> Block:
        if len(self._blocks) == MAX_BLOCKS:
            raise input_error(
                where, f"at most {MAX_BLOCKS} values kept by those that received them",
                "as many, none of them let go", "clone what an operation keeps for long; then call again",
                rule="values-kept",
            )  # fmt: skip
        check_memory(size, where, available_bytes())
        try:
            os.posix_fallocate(self._descriptor, self._end, size)
        except OSError as error:
            raise _no_memory(where, size, available_bytes(), str(error)) from error
        memory = Mapping(self._descriptor, self._end, size, writable=True)
        block = Block(len(self._blocks), self._end, memory)
        self._end += size
        self._blocks.append(block)
        return block

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)


class ArenaReader:
    """A sender's arena, at one of its readers."""

    def __init__(self, descriptor: int, num_endpoints: int, reader: int) -> None:
        self._descriptor = descriptor
        self._table = _map_table(descriptor, num_endpoints)
        own = self._table.view()[reader * MAX_BLOCKS * 8 : (reader + 1) * MAX_BLOCKS * 8]
        self._released = own.cast("q")
        self._mapped: dict[int, Mapping] = {}

    def borrow(self, number: int, generation: int, offset: int, num_bytes: int) -> Any:
        """Return the block's bytes; the sender may use it again when the last user of what is returned is gone."""
        memory = self._mapped.get(offset)
        if memory is None:
            memory = self._mapped[offset] = Mapping(self._descriptor, offset, num_bytes, writable=False)
        released, table = self._released, self._table

        def release() -> None:
            fence()
            released[number] = generation

        return holder_of(memory.address, num_bytes, release, (memory, table))


def table_bytes(num_endpoints: int) -> int:
    """Return the size of an arena's table of releases, which comes before its blocks."""
    return -(-num_endpoints * MAX_BLOCKS * 8 // PAGE) * PAGE


def _map_table(descriptor: int, num_endpoints: int) -> Mapping:
    size = table_bytes(num_endpoints)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return Mapping(descriptor, 0, size, writable=True)


def block_bytes(num_bytes: int) -> int:
    """Return the size of the block for a value: whole pages, and few different sizes so that blocks are used again."""
    if num_bytes <= SMALL_BLOCK_BYTES:
        return max(PAGE, 1 << (num_bytes - 1).bit_length())
    step = 1 << ((num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // step) * step


def available_bytes() -> int:
    """Return how much more memory this process can use: what the machine has left, or its control group allows."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    left = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return left
    return min(left, int(limit) - used) if limit.isdigit() else left


def check_memory(wanted: int, where: str, available: int, place: str = "memory") -> None:
    """Refuse what would not fit, before the kernel ends a process for it.

    Raises
    ------
    InputError
        Says how much is needed and how much there is.
    """
    if wanted > available * (1 - RESERVE_SHARE):
        raise _no_memory(where, wanted, available, "", place)


def _no_memory(where: str, wanted: int, available: int, why: str, place: str = "memory") -> InputError:
    return input_error(
        where, f"{wanted / 1e6:.0f} MB of shared memory for its value",
        f"{available / 1e6:.0f} MB of {place} available{f' ({why})' if why else ''}",
        "make the value smaller, stream it in chunks, or place both ends in one group; then call again",
        rule="no-shared-memory",
    )  # fmt: skip
