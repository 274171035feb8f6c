"""A deployment as a service: runs until it is stopped, for one client at a time on a Unix socket.

A client sends ``input`` messages, one a batch, and gets ``output`` and ``batch_done`` messages; see `Client`. Outputs
of a client that has gone are dropped; its batches in flight are finished, so that the program's state stays whole.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flashrt.errors import InputError, input_error, listed
from flashrt.ir.building import BuiltProgram
from flashrt.ir.interpreter import check_input
from flashrt.ir.values import join
from flashrt.runtime.serve import serve_deployment
from flashrt.runtime.trace import ACTIVITIES
from flashrt.runtime.wire import Connection

MAX_EVENTS = 200_000
MAX_PENDING = 64
"""Batches that are taken from a client and not done."""
CLIENT_TIMEOUT_S = 5
HANDOVER_S = 2.0
"""How long a new client waits for the one before it to go."""
_CLOSED = object()


class _Input:
    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read(self) -> Any:
        """Return the next item.

        Raises
        ------
        EOFError
            The service stops.
        """
        item = self.items.get()
        if item is _CLOSED:
            raise EOFError
        return item


class _Output:
    def __init__(self, name: str, write: Callable[[str, Any, int], None]) -> None:
        self._name = name
        self._write_named = write

    def write(self, value: Any, batch: int) -> None:
        """Hand a value to the client."""
        self._write_named(self._name, value, batch)


class Service:
    """One deployment and its socket.

    Parameters
    ----------
    devices
        Names of the devices, as leased.
    address
        Where the socket is made; an old socket there is replaced, any other file refused.
    on_ready
        Called when everything is loaded and the socket listens.

    Attributes
    ----------
    activities
        The latest `MAX_EVENTS` spans, waits and transfers.
    notes
        What the workers found worth saying.
    num_done
        How many batches are done.
    """

    def __init__(
        self, built: BuiltProgram, devices: Sequence[str], address: Path, on_ready: Callable[[], None]
    ) -> None:
        entry = built.program.graphs[built.program.entry]
        self.devices = list(devices)
        self.config: dict[str, Any] = {}
        self.inputs = {name: _Input() for name in entry.inputs}
        self.outputs = {name: _Output(name, self._write) for name in entry.outputs}
        self.activities: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.notes: list[str] = []
        self.num_done = 0
        self._built = built
        self._address = address
        self._on_ready = on_ready
        self._listener: socket.socket | None = None
        # A signal may come while the main thread holds it.
        self._lock = threading.RLock()
        self._client: Connection | None = None
        self._gone = threading.Event()
        self._gone.set()
        self._owner: deque[Connection] = deque()
        self._num_taken = 0
        self._stopping = False
        self.is_ready = False
        self._inode = 0
        self._room = threading.Condition()
        if not entry.inputs:
            raise input_error(
                f"program '{built.program.name}'", "at least one input, from which batches come", "none",
                "give its entry graph an input", rule="no-inputs",
            )  # fmt: skip

    def run(self, program: Path, deployment: Path, profile: Path | None) -> None:
        """Serve until `stop` is called.

        Raises
        ------
        InputError
            The deployment does not fit the program or the devices, a worker fails, or the socket cannot be made.
        """
        try:
            serve_deployment(self._built, program, deployment, self, profile)
        finally:
            self._close()

    def ready(self) -> None:
        """Open the socket: everything is loaded."""
        address = self._address
        if address.exists() and not address.is_socket():
            raise input_error(
                f"socket '{address}'", "no file, or an old socket", "another file", "name another path with --socket"
            )  # fmt: skip
        if address.exists():
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.connect(str(address))
                raise input_error(
                    f"socket '{address}'", "a path where nobody listens", "another service answers there",
                    "stop that one, or name another path with --socket", rule="socket-taken",
                )  # fmt: skip
        with suppress(FileNotFoundError):
            address.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(address))
            address.chmod(0o600)
            listener.listen(8)
            self._inode = address.stat().st_ino
        except OSError as error:
            listener.close()
            raise input_error(
                f"socket '{address}'", "a path where a socket can be made (at most 107 bytes)", str(error),
                "name another path with --socket",
            ) from error  # fmt: skip
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self.is_ready = True
        self._on_ready()

    def batch_done(self, batch: int) -> None:
        """Tell the client that a batch is complete."""
        owner = self._owner.popleft()
        with self._room:
            self.num_done += 1
            self._room.notify_all()
        self._say(owner, {"kind": "batch_done", "batch": batch})

    def note(self, event: dict[str, Any]) -> None:
        """Keep what happened beside the outputs."""
        if event["kind"] in ACTIVITIES:
            self.activities.append(event)
        elif event["kind"] == "note":
            self.notes.append(str(event["text"]))

    def on_where(self, ask: Callable[[], None]) -> None:
        """Nobody asks a service where it is."""

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def stop(self) -> None:
        """Take no more items; `run` returns when the batches in flight are done."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            with self._room:
                self._room.notify_all()
            for buffer in self.inputs.values():
                buffer.items.put(_CLOSED)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            # A client that takes nothing for so long is given up.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CLIENT_TIMEOUT_S, 0))
            client = Connection(stream, torch=False)
            if self._gone.wait(HANDOVER_S):
                self._gone.clear()
                threading.Thread(target=self._serve_client, args=(client,), daemon=True).start()
                continue
            with suppress(OSError):
                client.send({"kind": "refused", "text": "another client is connected; end it first"})
            client.close()

    def _serve_client(self, client: Connection) -> None:
        self._client = client
        welcome = {"inputs": list(self.inputs), "outputs": list(self.outputs), "batch": self._num_taken}
        self._say(client, {"kind": "welcome"}, welcome)
        try:
            while (message := client.receive()) is not None:
                self._take(client, message)
        except Exception as error:  # noqa: BLE001 - whatever one client sends, the next one is served
            self._say(client, {"kind": "refused", "text": f"no message of a client: {type(error).__name__}: {error}"})
        finally:
            self._client = None
            client.close()
            self._gone.set()

    def _take(self, client: Connection, message: Mapping[str, Any]) -> None:
        item = message["value"]
        if message.get("kind") != "input" or not isinstance(item, dict) or item.keys() != self.inputs.keys():
            got = listed(item) if isinstance(item, dict) else type(item).__name__
            text = f"expected a message of kind 'input' with values for {listed(self.inputs)}, got {got}"
            self._say(client, {"kind": "refused", "text": text})
            return
        try:
            for name, value in item.items():
                check_input(self._built.program, name, value, self._num_taken)
        except InputError as error:
            self._say(client, {"kind": "refused", "text": str(error)})
            return
        with self._room:
            # What is not begun yet waits in the client's socket, not here.
            self._room.wait_for(lambda: self._stopping or self._num_taken - self.num_done < MAX_PENDING)
        with self._lock:
            if self._stopping:
                self._say(client, {"kind": "refused", "text": "the service is stopping"})
                return
            self._owner.append(client)
            self._num_taken += 1
            for name, value in item.items():
                self.inputs[name].items.put(value)

    def _write(self, name: str, value: Any, batch: int) -> None:
        # By place, not in a loop: the client's thread adds to the queue meanwhile.
        self._say(self._owner[batch - self.num_done], {"kind": "output", "name": name, "batch": batch}, value)

    def _say(self, client: Connection, head: Mapping[str, Any], value: Any = None) -> None:
        # A client that has gone misses its outputs; nobody else does.
        if client is self._client:
            with suppress(OSError):
                client.send(head, value)

    def _close(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            with suppress(OSError):
                # Somebody else's by now, if another service was started here after all.
                if self._address.stat().st_ino == self._inode:
                    self._address.unlink()
        client = self._client
        if client is not None:
            client.shutdown()


class Client:
    """A connection to a service; a context manager.

    Parameters
    ----------
    address
        Path of its socket.
    torch
        Whether tensors come as torch tensors, or as `flashrt.runtime.wire.Tensor`.

    Raises
    ------
    InputError
        Nobody listens there.
    """

    def __init__(self, address: Path | str, *, torch: bool = True, timeout_s: float | None = None) -> None:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(timeout_s)
        try:
            stream.connect(os.fspath(address))
        except OSError as error:
            stream.close()
            raise input_error(
                f"socket '{address}'", "a service that listens", str(error), "start it with flashrt deploy DOCUMENT"
            ) from error  # fmt: skip
        self._connection = Connection(stream, torch=torch)
        welcome = self._next()
        assert welcome is not None
        self.inputs: list[str] = welcome["value"]["inputs"]
        self.outputs: list[str] = welcome["value"]["outputs"]
        self._batch = int(welcome["value"]["batch"])

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> dict[str, Any] | None:
        message = self._connection.receive()
        if message is not None and message["kind"] == "refused":
            raise InputError(str(message["text"]))
        return message

    def send(self, item: Mapping[str, Any]) -> int:
        """Send one batch's inputs; return the batch's number.

        Raises
        ------
        InputError
            The item has not one value for each input.
        """
        if item.keys() != set(self.inputs):
            raise input_error(
                "item", f"a value for each of {listed(self.inputs)}", listed(item), "send them all, and no others",
                rule="wrong-inputs",
            )  # fmt: skip
        self._connection.send({"kind": "input"}, dict(item))
        self._batch += 1
        return self._batch - 1

    def receive(self) -> tuple[str | None, Any, int]:
        """Return the next (output name, value, batch); a name of None says that the batch is complete.

        Raises
        ------
        EOFError
            The service has stopped.
        InputError
            The service refused an item.
        """
        message = self._next()
        if message is None:
            raise EOFError("the service has stopped")
        if message["kind"] == "batch_done":
            return None, None, int(message["batch"])
        return str(message["name"]), message["value"], int(message["batch"])

    def call(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Send one batch's inputs and return its outputs, chunks joined along their first axis."""
        wanted = self.send(item)
        parts: dict[str, list[Any]] = {}
        for name, value, batch in iter(self.receive, None):
            if batch == wanted and name is None:
                break
            if batch == wanted and name is not None:
                parts.setdefault(name, []).append(value)
        return {name: join(values) for name, values in parts.items()}

    def __iter__(self) -> Iterator[tuple[str | None, Any, int]]:
        while True:
            try:
                yield self.receive()
            except EOFError:
                return

    def close(self) -> None:
        """End the connection."""
        self._connection.shutdown()
        self._connection.close()
