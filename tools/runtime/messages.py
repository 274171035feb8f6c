"""What a supervisor and its workers say to each other, beside the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flashrt.runtime.wire import Connection


@dataclass(frozen=True)
class Message:
    """Base of all messages; on the wire, ``kind`` names the class."""

    def send(self, connection: Connection) -> None:
        """Send this message.

        Raises
        ------
        OSError
            The other side is gone.
        """
        connection.send({"kind": type(self).__name__}, {f.name: getattr(self, f.name) for f in fields(self)})

    @staticmethod
    def receive(connection: Connection) -> Message | None:
        """Return the next message, or None when the other side has closed.

        Raises
        ------
        ValueError
            The bytes are no message of ours.
        """
        raw = connection.receive()
        if raw is None:
            return None
        kind = _KINDS.get(str(raw.get("kind")))
        value = raw["value"]
        if kind is None or not isinstance(value, dict) or value.keys() != {f.name for f in fields(kind)}:
            raise ValueError(f"a message of kind {raw.get('kind')!r}"[:200])
        return kind(**value)


@dataclass(frozen=True)
class Hello(Message):
    """Supervisor → worker, first: what to run and how to reach the others."""

    program: str
    folder: str
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    wiring: Mapping[str, Any]
    store: int | str | None
    """Where the ranks of a group meet: a file's descriptor, or ``HOST:PORT``; None for a group of one."""
    supervisor: int
    """Its process id."""


@dataclass(frozen=True)
class Where(Message):
    """Supervisor → worker: say where you are."""


@dataclass(frozen=True)
class Cancel(Message):
    """Supervisor → worker: give up the current batch and end."""

    reason: str


@dataclass(frozen=True)
class Admit(Message):
    """Supervisor → worker on another host: a cycle begins with a batch; or (not -1) how many cycles there are."""

    cycle: int
    batch: int
    stop_after: int


@dataclass(frozen=True)
class Join(Message):
    """Worker on another host → supervisor, first: who it is, and the word that only our workers know."""

    worker: str
    token: str


@dataclass(frozen=True)
class Beat(Message):
    """Worker on another host → supervisor, each second: the number of its operation (-1: none), batch, for how long."""

    operation: int
    batch: int
    for_ns: int


@dataclass(frozen=True)
class Ready(Message):
    """Worker → supervisor: the operations are loaded and warm."""


@dataclass(frozen=True)
class At(Message):
    """Worker → supervisor: where the main thread is."""

    text: str


@dataclass(frozen=True)
class Spans(Message):
    """Worker → supervisor: what it did in a batch.

    `rows` are (category, name, batch, start ns, end ns, bytes): ``operation``, ``wait`` (for a value), ``transfer``
    (sent to received), ``overrun`` (an emulated operation whose work took longer than it stands for), and what is
    measured for a profile: ``memory``, ``held`` and ``file`` (see `flashrt.runtime.measuring`).
    """

    rows: list[tuple[str, str, int, int, int, int]]


@dataclass(frozen=True)
class Note(Message):
    """Worker → supervisor: something that the user should know."""

    text: str


@dataclass(frozen=True)
class Failed(Message):
    """Worker → supervisor: the reason why it ends."""

    text: str
    traceback: str
    """Empty where the reason says all."""


@dataclass(frozen=True)
class Done(Message):
    """Worker → supervisor: all batches are done."""

    usage: Mapping[str, Any]


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Where, Cancel, Admit, Join, Beat, Ready, At, Spans, Note, Failed, Done)
}


def as_event(row: tuple[str, str, int, int, int, int], device: str, worker: str = "") -> dict[str, Any]:
    """Return one row of `Spans` as the event that a system reports."""
    category, name, batch, start_ns, end_ns, num_bytes = row
    if category == "overrun":
        return {"kind": "overrun", "name": name, "batch": batch, "over_ns": end_ns - start_ns}
    if category == "memory":
        # start and end: bytes in all, and those that a call adds; the last: those of the weights.
        figures = {"total_bytes": start_ns, "call_bytes": end_ns, "weights_bytes": num_bytes}
        return {"kind": "memory", "name": name, "worker": worker, **figures}
    if category in {"held", "file"}:
        return {"kind": category, "name": name, "worker": worker, "num_bytes": num_bytes}
    kind = "span" if category == "operation" else category
    event = {"kind": kind, "name": name, "batch": batch, "device": device, "start_ns": start_ns, "end_ns": end_ns}
    event["worker"] = worker
    return {**event, "num_bytes": num_bytes} if category == "transfer" else event
