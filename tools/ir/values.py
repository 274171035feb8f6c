"""Values that travel on edges: torch tensors, NumPy arrays, text, bytes, numbers, and nested lists and dicts of them.

torch is used only when a value is already a tensor, so that importing this module never imports it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from flashrt.errors import input_error


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Return whether `value` is a NumPy array, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def length(value: Any, axis: int = 0) -> int | None:
    """Return how many pieces `value` can be cut into along `axis`, or None when it cannot be cut."""
    if is_tensor(value) or is_array(value):
        return int(value.shape[axis]) if value.ndim > axis else None
    if isinstance(value, list | tuple | str | bytes) and axis == 0:
        return len(value)
    if isinstance(value, dict) and value:
        lengths = {length(item, axis) for item in value.values()}
        return lengths.pop() if len(lengths) == 1 else None
    return None


def split(value: Any, chunks: int, axis: int = 0) -> list[Any]:
    """Cut `value` into at most `chunks` nearly equal parts along `axis`, the larger parts first.

    A value that cannot be cut (a number, a tensor without that axis) comes back whole, as one part.
    """
    size = length(value, axis)
    if size is None or size == 0 or chunks == 1:
        return [value]
    chunks = min(chunks, size)
    base, extra = divmod(size, chunks)
    bounds = [0]
    for index in range(chunks):
        bounds.append(bounds[-1] + base + (index < extra))
    return [cut(value, start, stop, axis) for start, stop in itertools.pairwise(bounds)]


def cut(value: Any, start: int, stop: int, axis: int = 0) -> Any:
    """Return the part of `value` from `start` to `stop` along `axis`; arrays are views."""
    if is_tensor(value) or is_array(value):
        return value[(slice(None),) * axis + (slice(start, stop),)]
    if isinstance(value, dict):
        return {key: cut(item, start, stop, axis) for key, item in value.items()}
    return value[start:stop]


def join(parts: Sequence[Any], axis: int = 0, *, where: str = "output") -> Any:
    """Join parts along `axis`; the inverse of `split`.

    Raises
    ------
    InputError
        The parts are of different kinds, or their other axes differ.
    """
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return []
    first = parts[0]
    kinds = {type(part).__name__ for part in parts}
    try:
        if all(is_tensor(part) for part in parts):
            return sys.modules["torch"].cat(list(parts), dim=axis)
        if all(is_array(part) for part in parts):
            return sys.modules["numpy"].concatenate(list(parts), axis=axis)
        if len(kinds) == 1 and isinstance(first, str):
            return "".join(parts)
        if len(kinds) == 1 and isinstance(first, bytes):
            return b"".join(parts)
        if len(kinds) == 1 and isinstance(first, list | tuple):
            return type(first)(item for part in parts for item in part)
        if len(kinds) == 1 and isinstance(first, dict):
            return {key: join([part[key] for part in parts], axis, where=where) for key in first}
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise input_error(
            where, "chunks that join along one axis", str(error), "make every chunk's other axes equal",
            rule="chunks-do-not-join",
        ) from None  # fmt: skip
    return list(parts)


def describe(value: Any) -> str:
    """Return a short description for messages: ``float32 [12, 8]``, ``str of 5``, ``dict of 2``."""
    if is_tensor(value) or is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def fits(value: Any, dtype: str | None, shape: Sequence[int | str] | None, axis: int | None = None) -> bool:
    """Return whether an array or tensor has the declared dtype and shape; other values always fit.

    `axis` is left out of the comparison: a chunk is shorter there.
    """
    if not (is_tensor(value) or is_array(value)):
        return True
    if dtype is not None and str(value.dtype).removeprefix("torch.") != dtype:
        return False
    if shape is None:
        return True
    return len(shape) == value.ndim and all(
        not isinstance(wanted, int) or wanted == got or index == axis
        for index, (wanted, got) in enumerate(zip(shape, value.shape, strict=True))
    )
