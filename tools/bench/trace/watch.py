"""What lives on from batch to batch: places in objects, and marks by which a change of them shows."""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = tuple[str, Any]
"""One step into an object: ``("attr", name)``, ``("item", key)``, ``("cell", name)`` or ``("module", name)``."""
PRIVATE = "_flashrt_user_"
"""What the names of modules begin with that were loaded from a path."""
MAX_OBJECTS = 300_000
MAX_HASHED_BYTES = 1 << 24
CONTAINERS = (list, dict, set, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
GENERATORS = "@random"
MODULES = "@modules"
"""Roots beside the names of the reference: generators of the process, and variables of the application's modules."""


@dataclass(frozen=True)
class Slot:
    """A place that a value can be in: a root, and the way from it."""

    root: str
    path: tuple[Key, ...] = ()

    @property
    def spelled(self) -> str:
        """The place as a reader would write it."""
        text = "" if self.root in {GENERATORS, MODULES} else self.root
        for kind, key in self.path:
            if kind == "module" and str(key).startswith(PRIVATE):
                key = str(key).removeprefix(PRIVATE).rpartition("_")[0]
            text += f"[{key!r}]" if kind == "item" else f".{key}" if text else str(key)
        return text


@dataclass(frozen=True)
class Held:
    """What is in a slot now: its mark, and the values whose identity is in the mark, kept so that no id comes twice."""

    mark: Any
    kept: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.mark == other.mark

    __hash__ = None  # type: ignore[assignment]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: Any) -> bool:
    """Return whether a value is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: Any) -> bool:
    """Return whether a value draws random numbers."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (
        isinstance(value, random.Random)
        or (torch is not None and isinstance(value, torch.Generator))
        or (numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState))
    )


def storage_of(value: Any) -> int | None:
    """Return the address of a tensor's or array's memory; views have that of their base."""
    if is_tensor(value):
        try:
            return int(value.untyped_storage().data_ptr()) or None
        except (RuntimeError, NotImplementedError):
            return None
    if is_array(value):
        while is_array(value.base):
            value = value.base
        return int(value.__array_interface__["data"][0]) or None
    return None


def hold(value: Any) -> Held:
    """Return what a slot holds: equal marks mean that it was neither replaced nor changed in place."""
    if isinstance(value, PLAIN):
        return Held((type(value), value if value == value else "nan"), None)
    if is_tensor(value):
        return Held((id(value), _address(value), _version(value), tuple(value.shape)), value)
    if is_array(value):
        return Held((id(value), _content(value)), value)
    if is_generator(value):
        return Held((id(value), generator_mark(value)), value)
    if isinstance(value, list | tuple | deque):
        return Held((id(value), tuple(_identity(item) for item in value)), (value, tuple(value)))
    if isinstance(value, set | frozenset):
        return Held((id(value), len(value), hash(frozenset(map(_identity, value)))), (value, tuple(value)))
    if isinstance(value, dict):
        marks = tuple((_identity(key), _identity(item)) for key, item in value.items())
        return Held((id(value), marks), (value, tuple(value.items())))
    return Held(id(value), value)


def _identity(value: Any) -> Any:
    return (type(value).__name__, value if value == value else "nan") if isinstance(value, PLAIN) else id(value)


def _address(value: Any) -> int:
    try:
        return int(value.data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _version(value: Any) -> Any:
    try:
        return value._version
    except RuntimeError:
        # A tensor of inference mode has no version; what it holds shows a change.
        if value.device.type != "cpu" or value.nbytes > MAX_HASHED_BYTES:
            return None
        import torch

        flat = value.detach().contiguous().view(torch.uint8) if value.ndim else value.detach().reshape(1)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


def _content(value: Any) -> Any:
    if value.dtype.hasobject:
        return tuple(_identity(item) for item in value.ravel()[:4096])
    if value.nbytes > MAX_HASHED_BYTES:
        return zlib.crc32(value.ravel()[:: max(1, value.size // 4096)].tobytes())
    return zlib.crc32(value.tobytes())


def generator_mark(value: Any) -> str:
    """Return a short text that is another one once a generator has been drawn from."""
    if isinstance(value, random.Random):
        state: Any = value.getstate()
    elif hasattr(value, "bit_generator"):
        state = value.bit_generator.state
    else:
        state = value.get_state()
        state = state.numpy().tobytes() if is_tensor(state) else state
    text = state if isinstance(state, bytes) else repr(state).encode()
    return hashlib.sha1(text).hexdigest()[:16]


def process_generators() -> dict[Slot, Held]:
    """Return the marks of the generators that belong to the whole process."""
    found = {Slot(GENERATORS, (("attr", "python"),)): Held(hash(random.getstate()), None)}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        _, key, *rest = numpy.random.get_state()
        found[Slot(GENERATORS, (("attr", "numpy"),))] = Held(hash((key.tobytes(), *rest)), None)
    if torch is not None:
        state = torch.get_rng_state().numpy().tobytes()
        found[Slot(GENERATORS, (("attr", "torch"),))] = Held(hash(state), None)
    return found


class Watch:
    """Walks what the reference's names and modules hold.

    Parameters
    ----------
    folder
        Where the application's own code is: of functions, classes and modules elsewhere only identity counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.cut_short = False
        self._own_files: dict[str, bool] = {}

    def is_own_file(self, name: str | None) -> bool:
        """Return whether a source file belongs to the application."""
        key = str(name)
        if key not in self._own_files:
            self._own_files[key] = bool(name) and Path(key).resolve().is_relative_to(self.folder)
        return self._own_files[key]

    def is_own_function(self, value: Any) -> bool:
        """Return whether a value is a Python function or method of the application's code."""
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        return isinstance(code, types.CodeType) and self.is_own_file(code.co_filename)

    def own_modules(self) -> dict[str, types.ModuleType]:
        """Return the application's loaded modules by name."""
        return {
            name: module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType) and self.is_own_file(getattr(module, "__file__", None))
        }

    def walk(self, names: Mapping[str, Any]) -> dict[Slot, Held]:
        """Return everything that can change, by place: below the names, the application's modules, the generators."""
        found = process_generators()
        seen: set[int] = set()
        for name, value in names.items():
            self._collect(Slot(name), value, seen, found)
        for name, module in self.own_modules().items():
            for key, value in vars(module).items():
                if not key.startswith("__") and not isinstance(value, types.ModuleType | type):
                    slot = Slot(MODULES, (("module", name), ("attr", key)))
                    if isinstance(value, PLAIN):
                        found[slot] = hold(value)
                    elif not callable(value) or self.is_own_function(value):
                        self._collect(slot, value, seen, found)
        return found

    def _collect(self, start: Slot, value: Any, seen: set[int], found: dict[Slot, Held]) -> None:
        pending: list[tuple[Slot, Any]] = [(start, value)]
        while pending:
            slot, value = pending.pop()
            if isinstance(value, PLAIN):
                if slot.path:
                    found[slot] = hold(value)
                continue
            if isinstance(value, types.ModuleType | type) or type(value).__module__ == "flashrt.bench.io":
                continue
            if slot.path or isinstance(value, CONTAINERS) or not hasattr(value, "__dict__") or is_tensor(value):
                found[slot] = hold(value)
            if id(value) in seen:
                continue
            if len(seen) > MAX_OBJECTS:
                self.cut_short = True
                return
            seen.add(id(value))
            for key, inner in self.children(value):
                pending.append((Slot(slot.root, (*slot.path, key)), inner))

    def children(self, value: Any) -> Iterator[tuple[Key, Any]]:
        """Yield what an object holds, with the way to it."""
        if is_tensor(value) or is_array(value) or is_generator(value) or isinstance(value, PLAIN):
            return
        if isinstance(value, list | tuple | deque):
            yield from ((("item", index), item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((("item", key), item) for key, item in value.items() if isinstance(key, PLAIN))
        elif isinstance(value, types.FunctionType):
            if self.is_own_function(value):
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                    if _is_full(cell):
                        yield ("cell", name), cell.cell_contents
                yield from ((("attr", name), item) for name, item in vars(value).items())
        elif isinstance(value, types.MethodType):
            yield ("attr", "__self__"), value.__self__
        elif is_module(value):
            for group in ("_parameters", "_buffers", "_modules"):
                yield from ((("attr", name), item) for name, item in vars(value)[group].items())
            yield from (
                (("attr", name), item) for name, item in vars(value).items()
                if not name.startswith("_") or name not in _MODULE_PARTS
            )  # fmt: skip
        elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            yield from ((("attr", name), item) for name, item in _attributes(value))
            if self.is_own_file(getattr(sys.modules.get(type(value).__module__), "__file__", None)):
                for name, item in vars(type(value)).items():
                    if not name.startswith("__") and not callable(item) and not hasattr(item, "__get__"):
                        yield ("attr", f"__class__.{name}"), item

    def reaches(self, value: Any, wanted: set[int]) -> set[int]:
        """Return which of the objects `wanted` (by id) hang on a value."""
        seen: set[int] = set()
        pending = [value]
        while pending and len(seen) < MAX_OBJECTS:
            one = pending.pop()
            if id(one) in seen or isinstance(one, (*PLAIN, types.ModuleType, type)):
                continue
            seen.add(id(one))
            pending += [inner for _, inner in self.children(one)]
        return seen & wanted


_MODULE_PARTS = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)


def step_into(value: Any, key: Key) -> Any:
    """Return what is at one step from a value."""
    kind, name = key
    if kind == "item":
        return value[name]
    if kind == "module":
        return sys.modules[name]
    if kind == "cell":
        return value.__closure__[value.__code__.co_freevars.index(name)].cell_contents
    for part in name.split("."):
        value = getattr(value, part)
    return value


def value_at(slot: Slot, names: Mapping[str, Any]) -> Any:
    """Return what is in a slot.

    Raises
    ------
    LookupError, AttributeError
        The way there is broken.
    """
    value = None if slot.root == MODULES else names[slot.root]
    for key in slot.path:
        value = step_into(value, key)
    return value


def changed_slots(before: Mapping[Slot, Held], after: Mapping[Slot, Held]) -> set[Slot]:
    """Return the places whose value was replaced or changed, or that are new below one that was there."""
    return {slot for slot, held in after.items() if before.get(slot) != held} | (before.keys() - after.keys())


def state_slots(changed: Iterable[Slot]) -> set[Slot]:
    """Return the places to keep as states: a changed container whole, else the attribute that changed."""
    found = set()
    for slot in changed:
        path = slot.path
        while path and path[-1][0] == "item":
            path = path[:-1]
        found.add(Slot(slot.root, path))
    return {
        slot for slot in found
        if not any(o != slot and o.root == slot.root and slot.path[: len(o.path)] == o.path for o in found)
    }  # fmt: skip
