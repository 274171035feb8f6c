"""Plain functions over arrays, compiled by numba, with the machine code kept for the next process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def cache_folder(modules: Sequence[ModuleType]) -> Path:
    """Return where the machine code is kept: a folder of these very sources, because numba looks at one file only."""
    digest = hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in modules)).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flashrt" / f"kernel-{digest[:16]}"


def compile_functions(
    functions: Sequence[tuple[Any, ...]], modules: Sequence[ModuleType], *, nogil: bool = False
) -> dict[str, Callable[..., Any]]:
    """Compile functions and put them in their modules' place, so that they call each other; return them by name.

    The machine code is kept in the user's cache folder, so only the first use of all compiles it; where that folder
    cannot be written, every process compiles.

    Parameters
    ----------
    functions
        (module, name, name, …), those that others call first.
    modules
        All that use them.
    nogil
        Whether other threads of Python may run meanwhile.
    """
    import numba

    config: Any = numba.config
    folder, before = cache_folder(modules), config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cached = os.access(folder, os.W_OK)
    except OSError:
        cached = False
    compiled: dict[str, Callable[..., Any]] = {}
    config.CACHE_DIR = str(folder)
    try:
        for module, *names in functions:
            for name in names:
                compiled[name] = numba.njit(cache=cached, nogil=nogil)(getattr(module, name))
                for user in modules:
                    if hasattr(user, name):
                        setattr(user, name, compiled[name])
    finally:
        config.CACHE_DIR = before
    return compiled
