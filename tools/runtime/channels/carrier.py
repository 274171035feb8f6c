"""What moves a channel's messages: the interface, and the one over anonymous shared memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashrt.runtime.channels.arena import Arena, ArenaReader, Block, holder_of
from flashrt.runtime.channels.board import ENTRY_BYTES, WEAKLY_ORDERED, Board, fence
from flashrt.runtime.channels.codec import PLACE, Message, Received, plain_tensor
from flashrt.runtime.channels.plan import ChannelPlan

ENTRY = struct.Struct("<HHIqqqqBBIIqQIIQQQ")
"""Blocks, whether the rest lies in the last of them, length of the rest; a message's head; its first place; the first
block's reference."""
REFERENCE = struct.Struct("<IIQQQ")
"""A block: number, unused, generation, offset in the arena, bytes."""
NO_PLACE = (-1, 0)
NO_BLOCK = (0, 0, 0, 0, 0)
MAX_LOANS = 16


@dataclass(eq=False)
class Loan:
    """Memory that a sender fills and then publishes.

    Attributes
    ----------
    address, num_bytes
        Where it is and how much was asked for.
    span
        The same as an object with the buffer protocol, for tensors over it; the memory stays theirs while they live.
    token
        The carrier's own.
    """

    address: int
    num_bytes: int
    span: Any
    token: Any
    published: bool = False
    channel: int = -1
    """For which it was asked."""
    abandoned: bool = False
    """Whether its memory went back before it was published."""

    def hand_out(self) -> Any:
        """Return `span` and forget it here: from now on its users alone keep the memory."""
        span, self.span = self.span, None
        return span


class Polled:
    """A message as it was found.

    Parameters
    ----------
    message
        What it says beside its blocks.
    num_blocks
        How many blocks it has for its arrays.
    open_block
        Block of its list -> an object over its bytes that gives the block back when it dies.
    source_waits
        Whether the sender waits for room, so that it has to be woken.
    """

    def __init__(
        self, message: Message, num_blocks: int, open_block: Callable[[int], Any], *, source_waits: bool = False
    ) -> None:
        self.message = message
        self.source_waits = source_waits
        self._spans: list[Any] = [None] * num_blocks
        self._open = open_block

    def borrow(self, block: int) -> Any:
        """Return an object with the buffer protocol over a block's bytes."""
        if self._spans[block] is None:
            self._spans[block] = self._open(block)
        return self._spans[block]

    def finish(self) -> None:
        """Give back the blocks that nobody asked for."""
        for block, span in enumerate(self._spans):
            if span is None:
                self._open(block)
        self._spans.clear()


class Rest:
    """Says that the next message is not one plain tensor, so that `Carrier.poll` has to take it."""


REST = Rest()


class Carrier(Protocol):
    """Moves messages and blocks of one endpoint's channels."""

    max_loans: int
    """Blocks that one message may have beside the one for its copied arrays; 0: everything is copied."""

    wake: Callable[[str], None]
    """Called with a sender that waits for room, when `take_plain` has made some."""

    def loan(self, channel: int, num_bytes: int, where: str) -> Loan:
        """Return memory to fill."""

    def publish(self, channel: int, message: Message, loans: Sequence[Loan]) -> None:
        """Send a message with its blocks to every target; there is room."""

    def take_plain(self, channel: int) -> Received | Rest | None:
        """Return the next message if it is one plain tensor, in as few steps as it takes; None: there is none yet."""

    def rehearse(self, channel: int) -> None:
        """Prepare for taking the next message, before sleeping for it."""

    def poll(self, channel: int) -> Polled | None:
        """Return the next message, or None when there is none yet."""

    def has_room(self, channel: int) -> bool:
        """Return whether one more message may be published."""

    def close(self) -> None:
        """Let go of everything."""


class _Coming:
    """One channel at one of its readers: where everything is, found once."""

    __slots__ = (
        "capacity", "entries", "memory", "num_taken", "place", "published_at", "reader", "taken_at", "waiting_at",
        "words",
    )  # fmt: skip

    def __init__(self, board: Board, channel: ChannelPlan, place: int, reader: ArenaReader) -> None:
        self.capacity = channel.capacity
        self.entries = board.entry(channel.number, 0)
        self.memory = board.memory
        self.num_taken = 0
        self.place = place
        self.reader = reader
        self.words = board.words
        self.published_at, self.waiting_at, self.taken_at = board.places(channel.number, place)


class SharedMemory:
    """The carrier between processes of one host: queues on the board, values in arenas.

    Parameters
    ----------
    arenas
        Endpoint -> descriptor of its arena: this one's own, and those of the endpoints that it hears.
    """

    max_loans = MAX_LOANS

    def __init__(self, board: Board, endpoint: str, channels: Sequence[ChannelPlan], arenas: Mapping[str, int]) -> None:
        self._board = board
        self._channels = channels
        self._me = board.endpoints[endpoint]
        count = len(board.endpoints)
        self._arena = Arena(arenas[endpoint], count) if endpoint in arenas else None
        self._readers = {
            name: ArenaReader(descriptor, count, self._me) for name, descriptor in arenas.items() if name != endpoint
        }
        self._targets = [tuple(board.endpoints[target] for target in channel.targets) for channel in channels]
        self._coming = {
            channel.number: _Coming(board, channel, channel.targets.index(endpoint), self._readers[channel.source])
            for channel in channels
            if endpoint in channel.targets and channel.source in self._readers
        }
        self.wake: Callable[[str], None] = lambda endpoint: None

    def loan(self, channel: int, num_bytes: int, where: str) -> Loan:
        """Return a block of this endpoint's arena; see `Carrier.loan`."""
        assert self._arena is not None
        arena, block = self._arena, self._arena.take(num_bytes, where)
        loan = Loan(block.address, num_bytes, None, block)

        def release() -> None:
            block.let_go()
            if not loan.published:
                loan.abandoned = True
                arena.give_back(block)

        loan.span = holder_of(block.address, num_bytes, release, block.memory)
        return loan

    def publish(self, channel: int, message: Message, loans: Sequence[Loan]) -> None:
        """See `Carrier.publish`."""
        board, arena = self._board, self._arena
        assert arena is not None
        blocks: list[Block] = [loan.token for loan in loans]
        references = [block.reference() for block in blocks]
        places = message.places
        rest = message.form + message.inline
        if len(places) > 1 or len(references) > 1:
            more = [PLACE.pack(*place) for place in places[1:]]
            rest = b"".join((*more, *(REFERENCE.pack(*reference) for reference in references[1:]), rest))
        length, overflows = len(rest), ENTRY.size + len(rest) > ENTRY_BYTES
        if overflows:
            extra = arena.take(length, self._channels[channel].label)
            ctypes.memmove(extra.address, rest, length)
            extra.let_go()
            blocks.append(extra)
            # The extra block's reference has to be in sight: it stands after the fixed part.
            rest = REFERENCE.pack(extra.number, 0, extra.generation, extra.offset, extra.num_bytes)
        at = board.entry(channel, board.published(channel))
        ENTRY.pack_into(
            board.memory, at, len(references), overflows, length, *message[:6], len(places), len(message.form),
            *(places[0] if places else NO_PLACE), *(references[0] if references else NO_BLOCK),
        )  # fmt: skip
        at += ENTRY.size
        board.memory[at : at + len(rest)] = rest
        targets = self._targets[channel]
        for block in blocks:
            arena.publish(block, targets)
        for loan in loans:
            loan.published = True
            # Copied values have no user here; a loaned one may have, and then goes on after this.
            loan.span = None
        board.publish(channel)

    def rehearse(self, channel: int) -> None:
        """Go through the steps of `take_plain` with the last message, so that they are in the processor's caches."""
        if self._coming[channel].num_taken:
            self.take_plain(channel, rehearsal=True)

    def take_plain(self, channel: int, rehearsal: bool = False) -> Received | Rest | None:
        """See `Carrier.take_plain`."""
        coming = self._coming[channel]
        words, taken = coming.words, coming.num_taken - rehearsal
        if words[coming.published_at] == taken:
            return None
        if WEAKLY_ORDERED:
            fence()
        at = coming.entries + taken % coming.capacity * ENTRY_BYTES
        (
            num_blocks, overflows, _, batch, ready_ns, sent_ns, num_bytes, kind, last, num_places, form_length, block,
            place, number, _, generation, offset, size,
        ) = ENTRY.unpack_from(coming.memory, at)  # fmt: skip
        if num_blocks != 1 or num_places != 1 or block or overflows or kind:
            return REST
        at += ENTRY.size
        plain = plain_tensor(coming.memory[at : at + form_length])
        if plain is None:
            return REST
        from_buffer, dtype, count, shape = plain
        span = coming.reader.borrow(number, generation, offset, size)
        if rehearsal:
            # Somebody may still have that value: its memory is not given back here.
            span.release = None
        tensor = from_buffer(span, dtype=dtype, count=count, offset=place)
        if shape is not None:
            tensor = tensor.view(shape)
        received = Received(tensor, batch, last != 0, False, ready_ns, sent_ns, num_bytes, (tensor,))
        if rehearsal:
            return None
        coming.num_taken = words[coming.taken_at] = taken + 1
        if words[coming.waiting_at]:
            self.wake(self._channels[channel].source)
        return received

    def poll(self, channel: int) -> Polled | None:
        """See `Carrier.poll`."""
        board, coming = self._board, self._coming[channel]
        taken = coming.num_taken
        if board.published(channel) == taken:
            return None
        fence()
        at = board.entry(channel, taken)
        entry = ENTRY.unpack_from(board.memory, at)
        num_blocks, overflows, length = entry[:3]
        batch, ready_ns, sent_ns, num_bytes, kind, last, num_places, form_length = entry[3:11]
        references = [entry[13:]]
        at += ENTRY.size
        reader = coming.reader
        if overflows:
            number, _, generation, offset, size = REFERENCE.unpack_from(board.memory, at)
            rest = bytes(memoryview(reader.borrow(number, generation, offset, size)).cast("B")[:length])
        else:
            rest = board.memory[at : at + length]
        coming.num_taken = taken + 1
        waits = board.take(channel, coming.place)
        places: Sequence[Any] = (entry[11:13],)
        if num_places != 1 or num_blocks > 1:
            middle = max(num_places - 1, 0) * PLACE.size
            start = middle + max(num_blocks - 1, 0) * REFERENCE.size
            places = (*places[:num_places], *PLACE.iter_unpack(rest[:middle]))
            references += REFERENCE.iter_unpack(rest[middle:start])
            rest = rest[start:]
        form, inline = rest[:form_length], rest[form_length:]
        message = Message(batch, ready_ns, sent_ns, num_bytes, kind, bool(last), places, form, inline)

        def open_block(block: int) -> Any:
            number, _, generation, offset, size = references[block]
            return reader.borrow(number, generation, offset, size)

        return Polled(message, num_blocks, open_block, source_waits=waits)

    def has_room(self, channel: int) -> bool:
        """See `Carrier.has_room`."""
        return self._board.has_room(channel)

    def close(self) -> None:
        """See `Carrier.close`: the kernel frees an arena with its last user."""
        self._readers.clear()
