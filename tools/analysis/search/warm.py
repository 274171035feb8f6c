"""The search's machine code, made or loaded before a time limit starts to count."""

from __future__ import annotations

from pathlib import Path

from flashrt.analysis.profile import read_profile
from flashrt.analysis.search.model import build_models
from flashrt.analysis.search.request import SearchRequest
from flashrt.analysis.search.resolve import resolve_request
from flashrt.analysis.search.solve import Solver
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

_done: list[bool] = []


def warm_search() -> None:
    """Search a program of two operations once a process, so that the next search finds all machine code in memory.

    The very first search on a machine compiles, for half a minute or more; that is no time that was spent searching.
    """
    if _done:
        return
    built = build(PROGRAM, Path(__file__).parent)
    profile = read_profile(PROFILE, built)
    ask = resolve_request(built, profile, SearchRequest(2))
    Solver(built, profile, ask, build_models(built, profile, ask)).solve(3600)
    _done.append(True)
