"""``plan_elastic`` through a real client, refusals, and ``flashrt elastic``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt.mcp_server.cli import main
from flashrt.planners.elastic import DATA
from tests.server.connection import connected

pytestmark = pytest.mark.anyio

GIVEN: dict[str, Any] = {"profile": "shipped:video", "workload": "few.yaml", "devices": 8}


@pytest.fixture
def here(workspace: Path) -> Path:
    """A workspace with a small workload and a copy of a shipped profile."""
    workload = yaml.safe_load((DATA / "workload-half.yaml").read_text())
    (workspace / "few.yaml").write_text(yaml.safe_dump({**workload, "num_requests": 40, "repeats": 2}))
    (workspace / "own.yaml").write_text((DATA / "video.yaml").read_text())
    return workspace


async def test_every_policy_has_its_figures_by_class(here: Path) -> None:
    async with connected(here) as session:
        record = await session.outcome("plan_elastic", **GIVEN)
        found = record["result"]
        assert {name: one["best_degree"] for name, one in found["classes"].items()} == {
            "144p": 1, "240p": 2, "360p": 4,
        }  # fmt: skip
        assert {"elastic", "ddit", "static_1", "static_4", "static_partition", "release_only"} <= set(found["policies"])
        for policy in found["policies"].values():
            assert set(policy["classes"]) == {"144p", "240p", "360p"}
            for one in (policy["all"], *policy["classes"].values()):
                assert {"mean_ms", "p50_ms", "p99_ms", "queue_mean_ms", "gpu_s", "promotions"} <= set(one)
        assert found["against_best_static"]["p99_ms"]["best"].startswith("static_")
        assert (found["provenance"], found["figures"]) == ("declared", "predicted")
        assert "monolithic" in found["rate_unit"]
        assert sorted(found["artifacts"]) == ["cdf", "cost", "timeline"]
        assert all((here / path).stat().st_size > 5000 for path in record["artifacts"])
        only = await session.finish(
            "plan_elastic", **{**GIVEN, "profile": "own.yaml", "policy": "ddit", "island_size": 4, "devices": 16}
        )
        assert list(only["policies"]) == ["ddit"]
        assert only["islands"] == [4, 4, 4, 4]


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"profile": "shipped:vidoe", "devices": 0, "policy": "elastik"},
     ["did you mean 'video'", "1 to 1024 devices", "did you mean 'elastic'"]),
    ({"workload": "fewer.yaml"}, ["argument 'workload'", "did you mean 'few.yaml'"]),
    ({"profile": "shipped:public"}, ["'144p'", "'240p'", "'360p'", "conservative", "plan_elastic again"]),
    ({"devices": 2, "policy": "static_partition"}, ["argument 'policy'", "cannot be divided"]),
    ({"devise": 2}, ["did you mean 'devices'"]),
]  # fmt: skip


async def test_wrong_arguments_come_back_all_at_once_before_a_job_starts(here: Path) -> None:
    async with connected(here) as session:
        for changes, words in WRONG:
            text, record = await session.refused("plan_elastic", **{**GIVEN, **changes})
            assert [word for word in words if word not in text] == [], (changes, text)
            assert all(one["fix"] for one in record["diagnostics"]), changes
        assert not list(here.glob(".flashrt/jobs/*"))


def test_the_commands_print_and_write(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    assert main(["elastic", "simulate", "own.yaml", "few.yaml", "--plots", "plots", "--json", "all.json"]) == 0
    said = capsys.readouterr().out
    for words in ("elastic", "static_2", "360p", "B = 4", "declared", "predicted", "plots/timeline.png"):
        assert words in said
    assert json.loads((here / "all.json").read_text())["num_devices"] == 8
    few = yaml.safe_load((here / "few.yaml").read_text())
    (here / "few.yaml").write_text(yaml.safe_dump({**few, "num_requests": 6, "repeats": 1}))
    assert main(["elastic", "serve", "own.yaml", "few.yaml", "--devices", "4", "--speedup", "40"]) == 0
    said = capsys.readouterr().out
    for words in ("EMULATED", "against the simulator"):
        assert words in said
    assert main(["elastic", "simulate", "own.yaml", "few.yaml", "--policy", "ditt"]) == 2
    assert "did you mean 'ddit'" in capsys.readouterr().err
