"""The branch and bound, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashrt.analysis.compiled import compile_functions
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


def load_kernel() -> dict[str, Callable[..., Any]]:
    """Return the compiled functions by name; the first use of all on a machine takes about half a minute."""
    if not _compiled:
        _compiled.update(compile_functions(FUNCTIONS, MODULES))
    return _compiled
