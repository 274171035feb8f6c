"""Reading what the harness sends, in whichever thread of the system waits for it.

A thread that reads for others wakes up first and then wakes the one that waits: that is a quarter of what an item costs
on its way. So a thread that asks for an item reads the connection itself, and only while none does, a thread of ours.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flashrt.runtime.wire import Connection


class Intake:
    """Receives messages and passes them on, one thread at a time.

    Parameters
    ----------
    take
        Called with each message, in order.
    on_lost
        Called when the harness is gone without a ``bye``, or what it sent cannot be read.
    """

    def __init__(
        self, connection: Connection, take: Callable[[Mapping[str, Any]], None], on_lost: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._take = take
        self._on_lost = on_lost
        self._reading = threading.Lock()
        self._ended = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched = select.epoll()
        self._watched.register(self._bell, select.EPOLLIN)
        self._watched.register(connection.fileno(), select.EPOLLIN)
        self._readable = select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)

    def start(self) -> None:
        """Begin to receive."""
        threading.Thread(target=self._receive, name="intake", daemon=True).start()

    def wait(self, items: queue.SimpleQueue[Any]) -> Any:
        """Return the next of `items`, which a message brings; read messages until it is there, if no thread does."""
        if not items.empty() or self._ended or not self._reading.acquire(blocking=False):
            return items.get()
        try:
            # Our own thread sleeps on while this one reads.
            self._watched.unregister(self._connection.fileno())
            try:
                while items.empty() and not self._ended:
                    if not self._connection.num_buffered:
                        # Handlers of signals may raise here: nothing of a message has been taken then.
                        self._readable.poll()
                    self._take_one()
            finally:
                self._watched.register(self._connection.fileno(), select.EPOLLIN)
                if self._connection.num_buffered:
                    os.eventfd_write(self._bell, 1)
        finally:
            self._reading.release()
        return items.get()

    def _receive(self) -> None:
        while not self._ended:
            self._watched.poll()
            with self._reading:
                # Read out what the bell said, whoever rang.
                if any(number == self._bell for number, _ in self._watched.poll(0)):
                    os.eventfd_read(self._bell)
                while not self._ended and (self._connection.num_buffered or self._readable.poll(0)):
                    self._take_one()

    def _take_one(self) -> None:
        try:
            message = self._connection.receive()
            if message is not None and message["kind"] != "bye":
                self._take(message)
                return
        except BaseException:  # noqa: BLE001 - a broken harness, or a connection that user code closed, ends the system
            traceback.print_exc()
            message = None
        self._ended = True
        if message is None:
            self._on_lost()
