"""What a system under test is given: input and output buffers, its devices, its options.

Source: ``papers/000`` (FlashRT): the agent drives the back end through the buffers that a user's front end would use.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flashrt.errors import input_error, listed

CLOSED = object()


class InputClosed(EOFError):
    """Raised by `InputBuffer.read` when no more items will come."""


class InputBuffer:
    """One named input: items arrive in order, one a batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self.opened = threading.Event()
        self.wait: Callable[[queue.SimpleQueue[Any]], Any] = lambda items: items.get()

    def put(self, item: Any) -> None:
        """Add an item, or `CLOSED`; the harness side calls this."""
        self._items.put(item)

    def read(self, timeout_s: float | None = None) -> Any:
        """Return the next item, waiting up to `timeout_s` seconds (None: for ever).

        Raises
        ------
        TimeoutError
            Nothing came in time.
        InputClosed
            No more items will come.
        """
        if self._closed:
            raise InputClosed(f"input '{self.name}' is closed")
        if not self.opened.is_set() and timeout_s is None and threading.current_thread() is threading.main_thread():
            # No item comes before ready(), and the thread that would call it is this one: it would wait for ever.
            raise input_error(
                f"io.inputs['{self.name}']", "io.ready() before the first read", "a read before it",
                "load and warm up, call io.ready(), then read", rule="read-before-ready",
            )  # fmt: skip
        try:
            item = self.wait(self._items) if timeout_s is None else self._items.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"input '{self.name}': nothing came in {timeout_s} s") from None
        if item is CLOSED:
            self._closed = True
            raise InputClosed(f"input '{self.name}' is closed")
        return item

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.read()
            except InputClosed:
                return


class OutputBuffer:
    """One named output: a batch's value, whole or in chunks along its first axis."""

    def __init__(self, name: str, write: Callable[[str, Any, int | None], None]) -> None:
        self.name = name
        self._write = write

    def write(self, value: Any, batch: int | None = None) -> None:
        """Hand a value over; it is copied before this returns.

        Parameters
        ----------
        batch
            Which batch it belongs to; needed only where batches yield different amounts and `SystemIO.batch_done` is
            not called after each.
        """
        self._write(self.name, value, batch)


class Outputs(Mapping[str, OutputBuffer]):
    """Output buffers by name; made when first named, since a system decides what it puts out."""

    def __init__(self, write: Callable[[str, Any, int | None], None]) -> None:
        self._write = write
        self._buffers: dict[str, OutputBuffer] = {}

    def __getitem__(self, name: str) -> OutputBuffer:
        return self._buffers.setdefault(name, OutputBuffer(name, self._write))

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)


class Inputs(Mapping[str, InputBuffer]):
    """Input buffers by name; an unknown name is refused with the names there are."""

    def __init__(self, names: list[str]) -> None:
        self._buffers = {name: InputBuffer(name) for name in names}

    def wait_with(self, wait: Callable[[queue.SimpleQueue[Any]], Any]) -> None:
        """Say how a thread waits for an item of a queue, where it can do better than wait."""
        for buffer in self._buffers.values():
            buffer.wait = wait

    def __getitem__(self, name: str) -> InputBuffer:
        if name not in self._buffers:
            raise input_error(
                f"io.inputs['{name}']", f"one of {listed(self._buffers)}", f"'{name}'",
                "read an input that the inputs function yields", rule="unknown-input",
                valid=list(self._buffers), name=name,
            )  # fmt: skip
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)


class SystemIO:
    """The one argument of a system under test.

    Attributes
    ----------
    inputs, outputs
        Buffers by name.
    devices
        The leased devices, as FlashRT names them: ``cpu-0``, ``cuda:0``, ``emulated-3``.
    config
        The options of the run.
    """

    def __init__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        devices: list[str],
        config: dict[str, Any],
        on_ready: Callable[[], None],
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.devices = devices
        self.config = config
        self._on_ready = on_ready
        self._on_event = on_event
        self._where: list[Callable[[], None]] = []

    def ready(self) -> None:
        """Say that everything is loaded and warm; items arrive only after this."""
        for buffer in self.inputs.values():
            buffer.opened.set()
        self._on_ready()

    def batch_done(self, batch: int) -> None:
        """Say that all outputs of a batch have been written, in order of the batches.

        The runtime and the interpreter do; other systems need to only where batches yield different amounts.
        """
        self.note({"kind": "batch_done", "batch": batch})

    def note(self, event: dict[str, Any]) -> None:
        """Send an event beside the outputs: spans of operations, for the trace."""
        if self._on_event is not None:
            self._on_event(event)

    def on_where(self, ask: Callable[[], None]) -> None:
        """Say whom to ask where the system is, when it is silent for too long; answers are ``at`` events."""
        self._where.append(ask)

    def ask_where(self) -> bool:
        """Ask those that `on_where` named; return whether there are any."""
        for ask in self._where:
            ask()
        return bool(self._where)
