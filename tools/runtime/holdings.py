"""What an operation keeps in memory: the tensors and arrays that it reaches, and the most that one call adds to them.

Counted are bytes of storage, once each, on one device; neither the interpreter nor libraries are in it. What native
code holds without a tensor or array over it cannot be seen on the CPU; on a GPU, torch's allocator sees all of it.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from flashrt.ir.ops import Context
from flashrt.ir.values import is_array, is_tensor

MIN_BYTES_OBJECT = 4096
"""Shorter ``bytes`` are names and the like."""
Storages = dict[tuple[str, int], int]
"""(kind, address) -> bytes."""

METHOD_CPU = (
    "bytes of the tensors and arrays that the op and its states reach, and the most that one call allocates on top "
    "(torch's memory profiler, tracemalloc for NumPy and Python); the interpreter and libraries are not in it"
)
METHOD_GPU = (
    "bytes of the tensors on the device that the op and its states reach, and the most that one call allocates on top "
    "(torch.cuda.max_memory_allocated); the CUDA context is not in it"
)


def find_storages(roots: Iterable[Any], folder: Path, device: str = "cpu") -> Storages:
    """Return the memory of all tensors and arrays that `roots` reach.

    Followed are containers, objects, closures, and the globals that functions of `folder` use by name; not classes,
    other modules, or the context that the operations were loaded with.

    Parameters
    ----------
    device
        ``cpu`` or a GPU as torch spells it: what lies elsewhere is not counted.
    """
    prefix = str(folder.resolve())
    found: Storages = {}
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, str | int | float | type | CodeType | Context | None):
            continue
        seen[id(value)] = value
        if is_tensor(value):
            _add_tensor(found, value, device)
            stack.append(value.grad if value.is_leaf else None)
        elif is_array(value):
            if device == "cpu" and value.nbytes:
                base = value
                while is_array(base.base):
                    base = base.base
                found["array", base.__array_interface__["data"][0]] = base.nbytes
            if value.dtype.hasobject:
                stack.extend(value.ravel().tolist())
        elif isinstance(value, bytes | bytearray):
            if device == "cpu" and len(value) >= MIN_BYTES_OBJECT:
                found["bytes", id(value)] = len(value)
        elif isinstance(value, FunctionType):
            stack.extend(_parts_of_function(value, prefix))
        elif isinstance(value, MethodType):
            stack += [value.__self__, value.__func__]
        elif not isinstance(value, ModuleType):
            stack.extend(gc.get_referents(value))
    return found


def _add_tensor(found: Storages, tensor: Any, device: str) -> None:
    kind = "cpu" if device == "cpu" else "cuda"
    if tensor.device.type != kind:
        return
    try:
        storage = tensor.untyped_storage()
        found["tensor", storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):
        # A sparse or wrapped tensor has no storage of its own; what it is made of is reached as tensors.
        found["tensor", id(tensor)] = tensor.numel() * tensor.element_size()


def _parts_of_function(function: FunctionType, prefix: str) -> Iterator[Any]:
    """Yield what a function holds, and of its module what it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield function.__dict__
    if not function.__code__.co_filename.startswith(prefix):
        return
    names = set(_names_in(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield value
        elif str(getattr(value, "__file__", None) or "").startswith(prefix):
            yield from (vars(value)[part] for part in names & vars(value).keys())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@dataclass
class Peak:
    """The most bytes that were in use beyond those at the beginning."""

    num_bytes: int = 0


@contextmanager
def track_peak(device: str) -> Iterator[Peak]:
    """Yield a `Peak` that holds, once the context has ended, the most that was allocated within it on `device`."""
    peak = Peak()
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.num_bytes = max(torch.cuda.max_memory_allocated() - before, 0)
        return
    was_tracing = tracemalloc.is_tracing()
    # Made first, so that what it imports is not counted.
    profiler = _memory_profiler() if "torch" in sys.modules else nullcontext()
    with profiler as events:
        if not was_tracing:
            tracemalloc.start(1)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            yield peak
        finally:
            peak.num_bytes = max(tracemalloc.get_traced_memory()[1] - before, 0)
            if not was_tracing:
                tracemalloc.stop()
    peak.num_bytes += _most_allocated(events) if events is not None else 0


def _memory_profiler() -> Any:
    """Return torch's profiler, told to note what its CPU allocator gives and takes back."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _most_allocated(profiler: Any) -> int:
    """Return the most bytes that were in use at once, of those allocated since the profiler began."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
