"""What a worker checks of the values that its operations take and make."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashrt.errors import InputError, input_error
from flashrt.ir.values import is_array, is_tensor


class Arrivals:
    """What has come from elsewhere for one operation's batch.

    Attributes
    ----------
    ready_ns
        When the last of it was there, on the emulated clock.
    """

    def __init__(self, ready_ns: int = 0) -> None:
        self.ready_ns = ready_ns
        self._tensors: list[tuple[str, Any, int]] = []

    def add(self, port: str, ready_ns: int, tensors: tuple[Any, ...]) -> None:
        """Note a value that has come on a port, and the tensors in it."""
        self.ready_ns = max(self.ready_ns, ready_ns)
        self._tensors += [(port, tensor, tensor._version) for tensor in tensors]

    def check_unwritten(self, where: str) -> None:
        """Refuse an operation that wrote in place to what it received.

        Raises
        ------
        InputError
            Names the operation and the port.
        """
        for port, tensor, version in self._tensors:
            if tensor._version != version:
                raise input_error(
                    f"{where}, port '{port}'", "an input that is only read: others may read the same memory",
                    "it was written in place", "clone it before writing to it, then call again", rule="input-written",
                )  # fmt: skip


def nan_flag(value: Any) -> Any:
    """Return whether a value has a NaN somewhere: a bool, or a tensor on a device that will say so.

    A sum costs one pass over the memory and is NaN if any element is; only then every element is looked at.
    """
    if is_tensor(value):
        return _tensor_nan_flag(value)
    if is_array(value) or isinstance(value, np.generic):
        if value.dtype.kind not in "fc":
            return False
        with np.errstate(all="ignore"):
            return bool(np.isnan(np.sum(value))) and bool(np.isnan(value).any())
    if isinstance(value, float):
        return value != value
    if isinstance(value, dict):
        return _any(map(nan_flag, value.values()))
    if isinstance(value, list | tuple):
        return _any(map(nan_flag, value))
    return False


def _tensor_nan_flag(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or tensor.is_meta:
        return False
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.itemsize == 1:
        tensor = tensor.to(torch.float32)
    if tensor.device.type != "cpu":
        return torch.isnan(tensor).any()
    return bool(torch.isnan(tensor.sum())) and bool(torch.isnan(tensor).any())


def _any(flags: Any) -> Any:
    found: Any = False
    for flag in flags:
        if isinstance(flag, bool):
            found = flag or found
        else:
            found = flag if found is False else found | flag
        if found is True:
            return True
    return found


class NanWatch:
    """The NaN flags of one operation's outputs: those on the host are looked at once, others when the batch ends."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._pending: list[tuple[str, Any]] = []

    def look(self, outputs: Mapping[str, Any]) -> None:
        """Look at the outputs of one piece.

        Raises
        ------
        InputError
            Names the operation and the port.
        """
        for port, value in outputs.items():
            try:
                flag = nan_flag(value)
            except RecursionError:
                # Inside itself, or too deep: whoever sends it says so.
                flag = False
            if flag is True:
                raise _refused(self._where, port)
            if flag is not False:
                self._pending.append((port, flag))

    def settle(self) -> None:
        """Look at the flags that were still being computed on a device."""
        pending, self._pending = self._pending, []
        for port, flag in pending:
            if bool(flag):
                raise _refused(self._where, port)


def _refused(where: str, port: str) -> InputError:
    return input_error(
        f"{where}, port '{port}'", "numbers", "a NaN",
        "correct the op, or its input; where NaNs are wanted, write nan: pass in the deployment; then call again",
        rule="nan",
    )  # fmt: skip
