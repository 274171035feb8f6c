"""Places beside the declared states where an op could keep something: what is reachable from the ops and their files.

A walk gives each place a name, a fingerprint, and a way to put another value there.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Literal

import numpy as np

from flashrt.bench.audit.values import PLAIN, attributes, digest, is_generator
from flashrt.ir.values import is_array, is_tensor

MAX_PLACES = 100_000
MAX_DEPTH = 24
MAX_ITEMS = 2_000
"""Of one list or mapping; larger ones are one place."""

FOREIGN = {bool, int, float, str, list, dict}
CACHED = type(functools.cache(len))

PlaceKind = Literal["global", "attribute", "buffer", "random", "environment"]


@dataclass(frozen=True)
class Place:
    """Somewhere that keeps a value between calls."""

    name: str
    kind: PlaceKind
    value: Any
    put: Callable[[Any], None] | None = None
    """Puts another value there; None: it cannot be replaced."""


def own_modules(folder: Path) -> list[ModuleType]:
    """Return the loaded modules of a program's folder, and of what applications share."""
    roots = (os.path.realpath(folder) + os.sep,)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        inside = bool(file) and os.path.realpath(str(file)).startswith(roots) and "site-packages" not in str(file)
        if inside or name.startswith("flashrt.apps."):
            found.append(module)
    return found


class _Walk:
    def __init__(self, folder: Path) -> None:
        self.modules = own_modules(folder)
        self.names = {module.__name__ for module in self.modules}
        self.seen: set[int] = set()
        self.alive: list[Any] = []
        self.found: list[Place] = []
        self.skipped = 0

    def add(self, value: Any, name: str, kind: PlaceKind, put: Callable[[Any], None] | None, depth: int = 0) -> None:
        if isinstance(value, PLAIN) or is_array(value) or isinstance(value, np.generic) or is_tensor(value):
            if len(self.found) < MAX_PLACES:
                self.found.append(Place(name, kind, value, put))
            else:
                self.skipped += 1
            return
        if id(value) in self.seen or depth > MAX_DEPTH:
            return
        self.seen.add(id(value))
        # Whatever is looked at stays alive until the walk ends, so that no identity is met twice.
        self.alive.append(value)
        if isinstance(value, ModuleType):
            return
        if isinstance(value, FunctionType):
            self._function(value, name, depth)
        elif isinstance(value, MethodType):
            self.add(value.__self__, f"{name}.__self__", "attribute", None, depth + 1)
            self.add(value.__func__, name, kind, None, depth + 1)
        elif isinstance(value, functools.partial):
            self.add(value.func, name, kind, None, depth + 1)
            self._items(dict(enumerate(value.args)), name, "attribute", None, depth)
            self._items(value.keywords, name, "attribute", value.keywords.__setitem__, depth)
        elif isinstance(value, CACHED):
            self.found.append(Place(f"{name} (its cache)", kind, value))
            self.add(getattr(value, "__wrapped__", None), name, kind, None, depth + 1)
        elif is_generator(value) or isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            self.found.append(Place(name, "random", value, functools.partial(put_generator, value)))
        elif isinstance(value, type):
            if value.__module__ in self.names:
                for key, item in list(vars(value).items()):
                    if not key.startswith("__"):
                        self.add(item, f"{name}.{key}", "attribute", functools.partial(setattr, value, key), depth + 1)
        elif isinstance(value, GeneratorType) or type(value).__module__ == "itertools":
            self.found.append(Place(name, kind, value, put))
        elif isinstance(value, dict):
            self._mapping(value, name, kind, put, depth)
        elif isinstance(value, list) and len(value) <= MAX_ITEMS and not _is_plain(value):
            self._items(dict(enumerate(value)), name, kind, value.__setitem__, depth)
            self.found.append(Place(f"len({name})", kind, len(value)))
        elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
            self.found.append(Place(name, kind, value, put))
            if isinstance(value, tuple):
                self._items(dict(enumerate(value)), name, kind, None, depth)
        else:
            self._object(value, name, kind, put, depth)

    def _mapping(
        self, value: dict[Any, Any], name: str, kind: PlaceKind, put: Callable[[Any], None] | None, depth: int
    ) -> None:
        # As a plain mapping: libraries have some that import half of themselves when they are asked for an item.
        if len(value) > MAX_ITEMS or _is_plain(dict.values(value)):
            # Whole: keys come and go, and the value that was there can be put back with all of them.
            self.found.append(Place(name, kind, value, functools.partial(_refill, value)))
            return
        self._items(dict(dict.items(value)), name, kind, functools.partial(dict.__setitem__, value), depth)
        self.found.append(Place(f"keys of {name}", kind, [str(key) for key in dict.keys(value)]))

    def _items(
        self, items: Mapping[Any, Any], name: str, kind: PlaceKind, put: Callable[..., None] | None, depth: int
    ) -> None:
        for key, item in list(items.items()):
            setter = functools.partial(put, key) if put is not None else None
            self.add(item, f"{name}[{key!r}]", kind, setter, depth + 1)

    def _function(self, value: FunctionType, name: str, depth: int) -> None:
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                inside = cell.cell_contents
            except ValueError:
                continue
            setter = functools.partial(setattr, cell, "cell_contents")
            self.add(inside, f"'{variable}' in the closure of {value.__name__}", "attribute", setter, depth + 1)
        for number, default in enumerate(value.__defaults__ or ()):
            self.add(default, f"default {number} of {value.__name__}", "attribute", None, depth + 1)
        for key, default in (value.__kwdefaults__ or {}).items():
            self.add(default, f"default '{key}' of {value.__name__}", "attribute", None, depth + 1)
        for key, item in value.__dict__.items():
            if key != "__wrapped__":
                self.add(
                    item, f"{value.__name__}.{key}", "attribute", functools.partial(setattr, value, key), depth + 1
                )
        self.add(value.__dict__.get("__wrapped__"), name, "attribute", None, depth + 1)

    def _object(self, value: Any, name: str, kind: PlaceKind, put: Callable[[Any], None] | None, depth: int) -> None:
        if hasattr(value, "_buffers") and hasattr(value, "_parameters") and hasattr(value, "_modules"):
            for group in ("_parameters", "_buffers"):
                for key, item in getattr(value, group).items():
                    setter = functools.partial(getattr(value, group).__setitem__, key)
                    self.add(item, f"{name}.{key}", "buffer", setter, depth + 1)
            for key, item in value._modules.items():
                self.add(item, f"{name}.{key}", kind, None, depth + 1)
            rest = {key: item for key, item in vars(value).items()
                    if key not in {"_parameters", "_buffers", "_modules"}}  # fmt: skip
        else:
            rest = attributes(value) or {}
            if not rest and not hasattr(value, "__dict__"):
                self.found.append(Place(name, kind, value, put))
                return
        for key, item in rest.items():
            self.add(item, f"{name}.{key}", "attribute", functools.partial(_set_attribute, value, key), depth + 1)


def _set_attribute(target: Any, key: str, value: Any) -> None:
    object.__setattr__(target, key, value)


def _refill(target: dict[Any, Any], value: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(value)


def _is_plain(items: Any) -> bool:
    return all(isinstance(item, PLAIN) for item in items)


def put_generator(target: Any, source: Any) -> None:
    """Set a random generator to where another one of its kind is."""
    if is_generator(target):
        target.set_state(source.get_state())
    elif isinstance(target, np.random.Generator):
        target.bit_generator.state = source.bit_generator.state
    elif isinstance(target, np.random.RandomState):
        target.set_state(source.get_state())
    else:
        target.setstate(source.getstate())


def _global_generators() -> Iterator[Place]:
    torch = sys.modules.get("torch")
    if torch is not None:
        yield Place("torch's default random generator", "random", torch.default_generator,
                    functools.partial(put_generator, torch.default_generator))  # fmt: skip
    numpy_own = getattr(np.random.mtrand, "_rand", None)
    if numpy_own is not None:
        yield Place("NumPy's global random generator", "random", numpy_own, functools.partial(put_generator, numpy_own))
    own = getattr(random, "_inst", None)
    if own is not None:
        yield Place("the random module's generator", "random", own, functools.partial(put_generator, own))


def find_places(ops: Mapping[str, Any], folder: Path, *, everywhere: bool = True) -> list[Place]:
    """Return every place that the walk reaches, those near the ops first.

    Parameters
    ----------
    everywhere
        Whether plain attributes of other modules are looked at too.
    """
    walk = _Walk(folder)
    walk.found += _global_generators()
    for place in walk.found:
        walk.seen.add(id(place.value))
        walk.alive.append(place.value)
    for name, call in ops.items():
        walk.add(call, f"op '{name}'", "attribute", None)
    for module in walk.modules:
        label = Path(str(module.__file__)).name
        for key, item in list(vars(module).items()):
            if not key.startswith("__"):
                walk.add(item, f"'{key}' of {label}", "global", functools.partial(setattr, module, key))
    walk.found.append(Place("the environment variables", "environment", dict(os.environ),
                            functools.partial(_refill_environment)))  # fmt: skip
    if everywhere:
        walk.found += _foreign_attributes(walk.names)
    return _named_apart(walk.found)


def _named_apart(places: list[Place]) -> list[Place]:
    """Number the later ones of places of one name."""
    count: dict[str, int] = {}
    found = []
    for place in places:
        count[place.name] = count.get(place.name, 0) + 1
        again = count[place.name]
        found.append(place if again == 1 else replace(place, name=f"{place.name} ({again})"))
    return found


def _refill_environment(value: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(value)


def _foreign_attributes(own: set[str]) -> Iterator[Place]:
    """Yield plain attributes of other modules, where something could have been put: builtins, sys, libraries."""
    for name, module in list(sys.modules.items()):
        if name in own or name.startswith("flashrt.bench") or not isinstance(module, ModuleType):
            continue
        for key, item in list(vars(module).items()):
            if not key.startswith("__") and type(item) in FOREIGN and _small(item):
                yield Place(f"'{key}' of module {name}", "global", item, functools.partial(setattr, module, key))


def _small(item: Any) -> bool:
    inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return len(inside) < 64 and _is_plain(inside)


def fingerprints(places: list[Place]) -> dict[str, str]:
    """Return place -> fingerprint of what is there."""
    return {place.name: digest(place.value) for place in places}


def changed(before: Mapping[str, str], places: list[Place]) -> list[Place]:
    """Return the places whose content is not what it was, new ones included."""
    return [place for place in places if before.get(place.name) != digest(place.value)]
