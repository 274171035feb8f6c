"""Values as the audit handles them: fingerprints, copies that travel between processes, comparison, perturbation."""

from __future__ import annotations

import functools
import hashlib
import io
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np

from flashrt.bench.equality import DEFAULT_RELATIVE
from flashrt.ir.values import describe, is_array, is_tensor

MAX_DEPTH = 60
ALIGNMENT = 64
CACHED = type(functools.cache(len))
ROUNDED_SHARE = 1e-3
"""Of integers of eight bits, which are rounded numbers more often than not, so many may be off by one."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Generator)


def tensor_bytes(tensor: Any) -> memoryview:
    """Return the bits of a dense tensor in the order of its elements."""
    torch = sys.modules["torch"]
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return memoryview(data)


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.sha1(usedforsecurity=False)
        self.opaque = False
        self.open: dict[int, int] = {}

    def put(self, *parts: object) -> None:
        self.hash.update("\0".join(map(str, parts)).encode(errors="replace") + b"\1")

    def add(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, PLAIN):
            self.put(type(value).__name__, repr(value) if not isinstance(value, bytearray) else bytes(value))
        elif is_tensor(value):
            self.put("tensor", value.dtype, tuple(value.shape))
            if value.layout is sys.modules["torch"].strided and not value.is_meta:
                self.hash.update(tensor_bytes(value))
        elif is_array(value):
            self.put("array", value.dtype, value.shape)
            if value.dtype.hasobject:
                self.add(value.tolist(), depth + 1)
            else:
                self.hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        elif depth > MAX_DEPTH or id(value) in self.open:
            self.put("seen", self.open.get(id(value), "deep"))
        else:
            self.open[id(value)] = len(self.open)
            self._compound(value, depth + 1)
            del self.open[id(value)]

    def _compound(self, value: Any, depth: int) -> None:
        name = type(value).__qualname__
        if isinstance(value, dict):
            self.put(name, len(value))
            for key, item in dict.items(value):
                self.add(key, depth)
                self.add(item, depth)
        elif isinstance(value, set | frozenset):
            self.put(name, *sorted(digest(item) for item in value))
        elif isinstance(value, list | tuple) or name == "deque":
            self.put(name, len(value))
            for item in value:
                self.add(item, depth)
        elif is_generator(value):
            self.put(name)
            self.add(value.get_state(), depth)
        elif isinstance(value, np.random.Generator):
            self.put(name)
            self.add(value.bit_generator.state, depth)
        elif isinstance(value, np.random.RandomState):
            self.add(value.get_state(), depth)
        elif isinstance(value, random.Random):
            self.add(value.getstate(), depth)
        elif isinstance(value, np.generic | np.dtype):
            self.put(name, repr(value))
        elif isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType | MethodType):
            self.put(name, getattr(value, "__qualname__", getattr(value, "__name__", "")))
        elif isinstance(value, GeneratorType):
            self.put(name, value.gi_frame.f_lasti if value.gi_frame else "ended")
            self.add(dict(value.gi_frame.f_locals) if value.gi_frame else None, depth)
        elif isinstance(value, CACHED):
            self.put(name, value.cache_info().misses)
        elif type(value).__module__ == "itertools":
            self.put(name, repr(value))
        elif (parts := attributes(value)) is not None:
            self.put(name)
            self.add(parts, depth)
        else:
            self.opaque = True
            self.put("opaque", name)


def attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes that an object keeps, or None where it shows none."""
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                found[name] = getattr(value, name)
    return found or (None if not hasattr(value, "__dict__") else {})


def digest(value: Any) -> str:
    """Return a fingerprint of a value's content: equal for equal content, wherever it lies in memory."""
    found = _Digest()
    found.add(value)
    return found.hash.hexdigest()


def is_opaque(value: Any) -> bool:
    """Return whether part of the value's content cannot be seen, so that its fingerprint may not change with it."""
    found = _Digest()
    found.add(value)
    return found.opaque


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if is_tensor(value) and type(value).__name__ in {"Tensor", "Parameter"}:
            return _thaw_tensor, _freeze_tensor(value)
        if is_generator(value):
            return _thaw_generator, (value.get_state().numpy().tobytes(),)
        return NotImplemented


def _freeze_tensor(tensor: Any) -> tuple[Any, ...]:
    # The layout travels with the bits: libraries add up in another order where strides or alignment differ.
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if tensor.numel() else 0
    if extent > 2 * tensor.numel():
        tensor = tensor.contiguous()
        stride, extent = tuple(tensor.stride()), tensor.numel()
    flat = tensor.as_strided((extent,), (1,)) if extent else tensor.reshape(-1)
    return bytes(tensor_bytes(flat)), str(tensor.dtype), size, stride, tensor.data_ptr() % ALIGNMENT


def _thaw_tensor(data: bytes, dtype: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not data:
        return torch.empty(size, dtype=kind)
    room = torch.empty(len(data) + ALIGNMENT, dtype=torch.uint8)
    flat = room[offset : offset + len(data)] if offset % kind.itemsize == 0 else room[: len(data)]
    flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return flat.view(kind).as_strided(size, stride)


def _thaw_generator(data: bytes) -> Any:
    import torch

    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return generator


def freeze(value: Any) -> bytes:
    """Return a copy of a value as bytes, its tensors with their layout.

    Raises
    ------
    TypeError
        It cannot be copied: names the type.
    """
    room = io.BytesIO()
    try:
        _Pickler(room, protocol=5).dump(value)
    except Exception as error:
        raise TypeError(f"{describe(value)} cannot be copied: {type(error).__name__}: {error}"[:300]) from error
    return room.getvalue()


def thaw(data: bytes) -> Any:
    """Return a new value from what `freeze` returned."""
    return pickle.loads(data)


@dataclass(frozen=True)
class Difference:
    """Where two values differ, and by how much.

    `bits_only`: by no more than another order of additions does.
    """

    place: str
    expected: str
    got: str
    bits_only: bool = False

    def __str__(self) -> str:
        return f"{self.place or 'value'}: {self.expected} became {self.got}"


def compare(expected: Any, got: Any, place: str = "") -> Difference | None:
    """Return the first place where two values differ, the gravest first; None: they are the same, bit for bit."""
    found = list(_differences(expected, got, place))
    return next((one for one in found if not one.bits_only), found[0] if found else None)


def _differences(a: Any, b: Any, place: str) -> Iterator[Difference]:
    if (is_tensor(a) and is_tensor(b)) or (is_array(a) and is_array(b)):
        found = _compare_arrays(a, b, place)
        if found is not None:
            yield found
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            yield from _differences(a[key], b[key], f"{place}.{key}" if place else str(key))
        return
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{place}[{index}]")
        return
    if isinstance(a, float) and isinstance(b, float) and a != b:
        yield Difference(place, repr(a), repr(b), math.isclose(a, b, rel_tol=1e-12))
        return
    if type(a) is not type(b) or digest(a) != digest(b):
        yield Difference(place, _brief(a), _brief(b))


def _brief(value: Any) -> str:
    text = repr(value) if isinstance(value, PLAIN) else describe(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _numbers(value: Any) -> np.ndarray:
    if is_tensor(value):
        value = value.detach().cpu()
        torch = sys.modules["torch"]
        if value.dtype in {torch.bfloat16, torch.float16} or str(value.dtype).startswith("torch.float8"):
            value = value.float()
        return np.asarray(value.resolve_conj().resolve_neg().numpy())
    return np.asarray(value)


def _compare_arrays(a: Any, b: Any, place: str) -> Difference | None:
    if str(a.dtype) != str(b.dtype) or tuple(a.shape) != tuple(b.shape):
        return Difference(place, describe(a), describe(b))
    if digest(a) == digest(b):
        return None
    x, y = _numbers(a), _numbers(b)
    if x.dtype.kind not in "fiub":
        return Difference(place, describe(a), "other values")
    with np.errstate(all="ignore"):
        errors = np.abs(x.astype(np.float64) - y.astype(np.float64))
        same = (x == y) | (np.isnan(x.astype(np.float64)) & np.isnan(y.astype(np.float64)))
        errors[same] = 0
        errors[np.isnan(errors)] = np.inf
        finite = x[np.isfinite(x.astype(np.float64))].astype(np.float64)
        scale = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    relative = DEFAULT_RELATIVE.get(str(a.dtype).removeprefix("torch."), 0.0)
    bits_only = bool(errors.max() <= relative * scale)
    if x.dtype.itemsize == 1 and x.dtype.kind in "iu":
        bits_only = bool(errors.max() <= 1 and (errors > 0).mean() <= ROUNDED_SHARE)
    index = np.unravel_index(int(np.argmax(errors)), errors.shape)
    where = f"{place}{[int(i) for i in index]}"
    return Difference(where, str(x[index].item()), str(y[index].item()), bits_only)


def perturb(value: Any, seed: int = 1) -> Any:
    """Return a value of the same form with other content; what has no other content comes back as it is."""
    if value is None:
        return value
    if isinstance(value, str):
        return value[::-1] if value != value[::-1] else value + value[:1]
    if isinstance(value, bytes):
        return value[::-1] if value != value[::-1] else value + value[:1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + seed
    if isinstance(value, float):
        return -1.5 * value + 0.25 * seed
    if is_tensor(value):
        torch = sys.modules["torch"]
        if value.dtype.is_floating_point or value.dtype.is_complex:
            ramp = torch.linspace(0.1, 0.7, max(value.numel(), 1))[: value.numel()].reshape(value.shape)
            return (-1.5 * value.detach().float() + seed * ramp).to(value.dtype)
        return ~value if value.dtype == torch.bool else _mixed(value, torch.flip)
    if is_array(value):
        if value.dtype.kind in "fc":
            ramp = np.linspace(0.1, 0.7, max(value.size, 1))[: value.size].reshape(value.shape)
            return (-1.5 * value + seed * ramp).astype(value.dtype)
        return ~value if value.dtype.kind == "b" else _mixed(value, np.flip)
    if isinstance(value, Mapping):
        return {key: perturb(item, seed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(perturb(item, seed) for item in value) if type(value) in {list, tuple} else value
    return value


def _mixed(value: Any, flip: Callable[..., Any]) -> Any:
    """Return whole numbers in another order, so that they stay what an index may be; equal ones one apart."""
    turned = flip(value, tuple(range(value.ndim)))
    return turned if digest(turned) != digest(value) else value ^ 1


def storages(value: Any, depth: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first, after last) of the memory that each tensor and array of a value is a view of."""
    if is_tensor(value):
        if value.layout is sys.modules["torch"].strided and value.numel() and not value.is_meta:
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif is_array(value):
        base = value
        while is_array(base.base):
            base = base.base
        if is_tensor(base.base):
            yield from storages(base.base)
        elif base.size:
            first = int(base.__array_interface__["data"][0])
            yield first, first + base.nbytes
    elif depth < MAX_DEPTH and isinstance(value, dict):
        for item in dict.values(value):
            yield from storages(item, depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, list | tuple | set):
        for item in value:
            yield from storages(item, depth + 1)
    elif depth < 4 and not isinstance(value, (*PLAIN, type, FunctionType, ModuleType)):
        yield from storages(attributes(value) or {}, depth + 1)


def overlap(a: Any, b: Any) -> bool:
    """Return whether two values share memory."""
    others = list(storages(b))
    return any(first < end and start < last for first, last in storages(a) for start, end in others)
