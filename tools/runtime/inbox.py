"""Where values from other processes wait until an operation of this one asks for them."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

Key = tuple[int, int]


class LinkBrokenError(RuntimeError):
    """The process at the other end is gone, so what was waited for will never come."""


class Inbox:
    """Chunks by (edge number, batch); readers wait, receiving threads fill it.

    It is bounded by the batches that the supervisor admits at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: dict[Key, deque[Any]] = defaultdict(deque)
        self._complete: set[Key] = set()
        self._broken: str | None = None

    def put(self, flow: int, batch: int, value: Any, *, last: bool) -> None:
        """Add a chunk; `last` says that no more come for this edge and batch."""
        with self._changed:
            self._chunks[flow, batch].append(value)
            if last:
                self._complete.add((flow, batch))
            self._changed.notify_all()

    def end(self, flow: int, batch: int) -> None:
        """Say that no more chunks come for this edge and batch: it had fewer than its edge declares."""
        with self._changed:
            self._complete.add((flow, batch))
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Wake every reader with the reason why nothing more comes."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def chunks(self, flow: int, batch: int) -> Iterator[Any]:
        """Yield the chunks of an edge's batch as they come.

        Raises
        ------
        LinkBrokenError
            The sender is gone before the last chunk.
        """
        key = (flow, batch)
        while True:
            with self._changed:
                while not self._chunks[key]:
                    if key in self._complete:
                        self._complete.discard(key)
                        del self._chunks[key]
                        return
                    if self._broken:
                        raise LinkBrokenError(self._broken)
                    self._changed.wait()
                value = self._chunks[key].popleft()
            yield value

    def __len__(self) -> int:
        """How many edges and batches something is kept for."""
        with self._changed:
            return len(self._complete | self._chunks.keys())
