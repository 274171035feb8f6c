"""The search's machine code, made or loaded before a time limit starts to count."""

from __future__ import annotations

from pathlib import Path

from flashrt.analysis.profile import read_profile
from flashrt.analysis.search.plan import search_deployments
from flashrt.analysis.search.request import SearchRequest
from flashrt.ir import build

PROGRAM = {
    "schema": "flashrt/program@1", "name": "two", "entry": "app",
    "graphs": {"app": {
        "inputs": {"x": {}}, "outputs": {"y": {}},
        "nodes": {"a": {"op": "a"}, "b": {"op": "b"}},
        "edges": [
            {"from": "x", "to": "a.x", "mode": "blocking"},
            {"from": "a.y", "to": "b.x", "mode": "streaming", "chunks": 2},
            {"from": "b.y", "to": "y", "mode": "blocking"},
        ],
    }},
}  # fmt: skip
PROFILE = {
    "schema": "flashrt/profile@1", "device": "none", "operations": {"a": 1.0, "b": 2.0}, "provenance": "declared",
}  # fmt: skip


def warm_search() -> None:
    """Search a program of two operations, so that the next search finds all machine code in memory.

    The very first search on a machine compiles, for half a minute or more; that is no time that was spent searching.
    """
    built = build(PROGRAM, Path(__file__).parent)
    search_deployments(built, read_profile(PROFILE, built), SearchRequest(2))
