"""The operations of `flashrt.bench.profile_transfer`: one makes a value again, one takes it on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

Op = Callable[[Mapping[str, Any], MutableMapping[str, Any]], Mapping[str, Any]]


def load(context: Any) -> dict[str, Op]:
    """Return ``make``: `value`, `in_place` -> `value`, new on its device; and ``take``: `value` -> `taken`."""

    def make(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {"value": _made(inputs["value"], context, in_place=bool(inputs["in_place"]))}

    def take(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {"taken": 1}

    return {"make": make, "take": take}


def _made(value: Any, context: Any, *, in_place: bool) -> Any:
    """Return a copy of `value`, its tensors on the context's device; `in_place`: in the memory of the channel."""
    if hasattr(value, "untyped_storage"):
        if in_place:
            target = context.empty("value", value.shape, value.dtype)
            return target.copy_(value)
        return value.to(context.device, copy=True)
    if hasattr(value, "__array_interface__") and hasattr(value, "copy"):
        return value.copy()
    if isinstance(value, dict):
        return {key: _made(item, context, in_place=False) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(item, context, in_place=False) for item in value)
    return value
