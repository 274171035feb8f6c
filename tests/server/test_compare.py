"""Two systems compared in turns through the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.connection import connected

pytestmark = pytest.mark.anyio

PAIR = {"systems": ["reference.py:serve", "variants.py:honest_chunks"], "inputs": "inputs.py:batches"}


async def test_wrong_comparisons_are_refused_before_anything_runs(workspace: Path) -> None:
    async with connected(workspace) as session:
        for arguments in ({}, {**PAIR, "runs": ["run-1", "run-2"]}):
            text, _ = await session.refused("bench_compare", **arguments)
            assert "exactly one of 'runs' (finished) and 'systems'" in text
        text, record = await session.refused(
            "bench_compare", systems=["reference.py:serve", "absent.py:serve"], scenario="burst", devices="gpu-7"
        )
        for expected in ("'rate_hz'", "'burst_size'", "'inputs'", "'systems[1]'", "'devices'"):
            assert expected in text
        assert len(record["diagnostics"]) == 5


async def test_two_systems_take_turns_and_few_pairs_decide_nothing(workspace: Path) -> None:
    async with connected(workspace) as session:
        found = await session.finish(
            "bench_compare", **PAIR, pairs=2, scenario="poisson", rate_hz=40, seed=7, duration_s=0.4, warmup=1
        )
        assert found["comparison"].startswith("cmp-")
        assert found["order"][:4] == "ABBA"
        arrivals = [seeds["arrivals"] for seeds in found["seeds"]]
        assert arrivals == [7 + turn // 2 for turn in range(len(arrivals))]
        for metric in found["comparisons"][0]["metrics"].values():
            assert metric["verdict"] == "inconclusive"
            assert metric["reason"]
        for path in found["artifacts"].values():
            assert (workspace / path).is_file()
