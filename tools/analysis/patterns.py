"""Which of several patterns that name an operation wins, in profiles and deployments."""

from __future__ import annotations

from collections.abc import Collection

from flashrt.ir import matches

__all__ = ["best_patterns", "matches", "specificity"]


def specificity(pattern: str, path: str) -> tuple[bool, int]:
    """Return the rank of a pattern that matches `path`: the path itself first, then the longest pattern."""
    return (pattern == path, len(pattern))


def best_patterns(patterns: Collection[str], path: str) -> list[str]:
    """Return the most specific of the patterns that match `path`; several when they are equally specific."""
    if path in patterns:
        return [path]
    found = [pattern for pattern in patterns if matches(pattern, path)]
    top = max((specificity(pattern, path) for pattern in found), default=None)
    return [pattern for pattern in found if specificity(pattern, path) == top]
