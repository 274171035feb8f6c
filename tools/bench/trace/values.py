"""What a value is, as a port of a document says it, and whether it can go to another process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from flashrt.bench.trace.watch import PLAIN, is_array, is_tensor

MAX_ITEMS = 100_000


@dataclass(frozen=True)
class Seen:
    """A value that was seen, or several at one place, merged.

    Attributes
    ----------
    shape
        Axis lengths; None along an axis whose length varies.
    travels
        Whether it can be handed to another process; else `kind` names what cannot.
    """

    kind: str
    dtype: str | None
    shape: tuple[int | None, ...] | None
    num_bytes: int
    travels: bool
    was_none: bool = False

    def merged(self, other: Seen) -> Seen:
        """Return what holds of both."""
        none = self.was_none or other.was_none
        if other.kind == "NoneType" != self.kind:
            return Seen(self.kind, self.dtype, self.shape, self.num_bytes, self.travels, True)
        if self.kind == "NoneType":
            return Seen(other.kind, other.dtype, other.shape, other.num_bytes, other.travels, True)
        shape = None
        if self.shape is not None and other.shape is not None and len(self.shape) == len(other.shape):
            shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        kind = self.kind if self.kind == other.kind else "value"
        dtype = self.dtype if self.dtype == other.dtype else None
        return Seen(kind, dtype, shape, max(self.num_bytes, other.num_bytes), self.travels and other.travels, none)


def describe_value(value: Any) -> Seen:
    """Return what a value is."""
    kind = type(value).__name__
    if is_tensor(value) or is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return Seen("tensor" if is_tensor(value) else "array", dtype, tuple(value.shape), int(value.nbytes), True)
    travels, num_bytes = _contents(value)
    return Seen(kind, None, None, num_bytes, travels, value is None)


def _contents(value: Any) -> tuple[bool, int]:
    travels, num_bytes, count = True, 0, 0
    pending = [value]
    while pending and count < MAX_ITEMS:
        one = pending.pop()
        count += 1
        if is_tensor(one) or is_array(one):
            num_bytes += int(one.nbytes)
        elif isinstance(one, PLAIN):
            num_bytes += len(one) if isinstance(one, str | bytes) else 8
        elif type(one) in (list, tuple):
            pending += one
        elif type(one) is dict:
            pending += one.values()
            travels = travels and all(isinstance(key, str) for key in one)
        else:
            numpy = sys.modules.get("numpy")
            travels = travels and numpy is not None and isinstance(one, numpy.generic)
    return travels, num_bytes
