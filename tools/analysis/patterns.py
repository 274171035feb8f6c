"""Patterns that name operations in profiles and deployments: a path, a glob, or a node that contains operations.

The same language as `flashrt.ir.find_operations`, for one path at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    parts = [".*" if sign == "*" else "." if sign == "?" else re.escape(sign) for sign in pattern]
    return re.compile("".join(parts) + r"(\[\d+\])?(/.*)?")


def matches(pattern: str, path: str) -> bool:
    """Return whether `pattern` names `path` or a node that contains it; brackets are literal."""
    return pattern == path or _expression(pattern).fullmatch(path) is not None


def specificity(pattern: str, path: str) -> tuple[bool, int]:
    """Return the rank of a pattern that matches `path`: the path itself first, then the longest pattern."""
    return (pattern == path, len(pattern))


def best_patterns(patterns: Iterable[str], path: str) -> list[str]:
    """Return the most specific of the patterns that match `path`; several when they are equally specific."""
    found = [pattern for pattern in patterns if matches(pattern, path)]
    top = max((specificity(pattern, path) for pattern in found), default=None)
    return [pattern for pattern in found if specificity(pattern, path) == top]
