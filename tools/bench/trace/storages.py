"""Which memory tensor operations read and write: torch's dispatch, looked at one operation at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flashrt.bench.trace.watch import storage_of

Touched = Callable[[Iterable[tuple[int, int]], Iterable[int]], None]


def _mode(touched: Touched) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        """Tells `touched` of (address, bytes) read and of addresses written."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            read: list[tuple[int, int]] = []
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        address = storage_of(tensor)
                        if address is not None:
                            read.append((address, int(tensor.untyped_storage().nbytes())))
            written: list[int] = []
            if func._schema.is_mutable:
                for index, argument in enumerate(func._schema.arguments):
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        value = args[index] if index < len(args) else kwargs.get(argument.name)
                        for tensor in value if isinstance(value, list | tuple) else (value,):
                            address = storage_of(tensor)
                            if address is not None:
                                written.append(address)
            touched(read, written)
            return func(*args, **kwargs)

    return Mode()


class Storages:
    """A context in which `touched` hears of every tensor operation; nothing where torch is not loaded."""

    def __init__(self, touched: Touched) -> None:
        self._touched = touched
        self._inner: Any = None

    def __enter__(self) -> Storages:
        import sys

        if "torch" in sys.modules:
            self._inner = _mode(self._touched)
            self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._inner is not None:
            self._inner.__exit__(*error)
