"""The branch and bound, compiled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrt.analysis.search import archive, arrays, bounds, graph, tree

FUNCTIONS = (
    (archive, "reaches", "lower", "insert"),
    (graph, "popcount", "find_edges", "relax", "start", "used_devices", "longest_end", "settle"),
    (bounds, "set_loads", "kin_of", "may_take", "set_times", "room_left", "priced_latency", "price_room",
     "device_floor", "find_target", "is_left"),
    (tree, "lowest", "fits_memory", "index_of_size", "may_have", "load_with", "sort_choices", "list_choices", "push",
     "advance", "explore"),
)  # fmt: skip
"""Modules with their functions, those that others call first."""
MODULES = (arrays, archive, graph, bounds, tree)
_compiled: dict[str, Callable[..., Any]] = {}


def cache_folder() -> Path:
    """Return where the machine code is kept: a folder of these very sources, because numba looks at one file only."""
    digest = hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in MODULES)).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flashrt" / f"kernel-{digest[:16]}"


def load_kernel() -> dict[str, Callable[..., Any]]:
    """Return the compiled functions by name.

    The machine code is kept in the user's cache folder, so only the first use of all compiles it, for about half a
    minute; where that folder cannot be written, every process compiles.
    """
    if _compiled:
        return _compiled
    import numba

    config: Any = numba.config
    folder, before = cache_folder(), config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cached = os.access(folder, os.W_OK)
    except OSError:
        cached = False
    config.CACHE_DIR = str(folder)
    try:
        for module, *names in FUNCTIONS:
            for name in names:
                _compiled[name] = numba.njit(cache=cached)(getattr(module, name))
                for user in MODULES:
                    if hasattr(user, name):
                        setattr(user, name, _compiled[name])
    finally:
        config.CACHE_DIR = before
    return _compiled
