"""The loop on the toy application, through a real client and a real server: every tool, what it grants and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until
from tests.server.connection import Session, connected, maps_of, processes_of_job

pytestmark = pytest.mark.anyio

INPUTS = "inputs.py:batches"
REFERENCE = "reference.py:serve"
SHORT: dict[str, Any] = {"inputs": INPUTS, "runs": 1, "duration_s": 0.5}


def server_pid(workspace: Path) -> int:
    """Return the number of the one server that this process started on `workspace`."""
    (found,) = [
        child.pid
        for child in psutil.Process().children()
        if "serve" in child.cmdline() and str(workspace) in child.cmdline()
    ]
    return found


async def test_programs_are_built_and_shown(workspace: Path) -> None:
    async with connected(workspace) as session:
        built = await session.call("ir_build", document="program.yaml")
        assert built["diagnostics"] == []
        assert built["operations"] == ["drift", "render"]
        assert built["counts"]["streaming_edges"] == 2
        program = built["program"]

        summary = await session.call("ir_show", program=program)
        assert "drift.latents -> render.latents  streaming in 3" in summary["text"]
        document = (await session.call("ir_show", program=program, view="json"))["document"]
        assert document["name"] == "toy"
        mermaid = await session.call("ir_show", program="program.yaml", view="mermaid")
        assert mermaid["text"].startswith("flowchart")
        drawing = await session.call("ir_show", program=program, view="svg")
        assert (workspace / drawing["path"]).read_text().lstrip().startswith("<svg")

        # The same document inline is the same program: the id is a content hash.
        inline = await session.call("ir_build", program=document)
        assert inline["program"] == program
        renamed = await session.call("ir_build", program={**document, "name": "other"})
        assert renamed["program"] != program
        assert (await session.call("ir_show", program=renamed["program"], view="json"))["document"]["name"] == "other"


async def test_an_analysis_with_profile_and_deployment_seeds_the_queue(workspace: Path) -> None:
    async with connected(workspace) as session:
        alone = await session.call("analyze", program="program.yaml")
        across = {"source": "drift", "target": "drift", "lambda": 1, "state": "drift.seen"}
        assert any(across.items() <= edge.items() for edge in alone["dependencies"])
        assert alone["parallel"]
        assert alone["streaming"]
        for candidate in alone["candidates"]:
            assert {"id", "transformation", "targets", "legality", "bottleneck", "expected"} <= candidate.keys()
        assert "t_min_ms" not in alone
        assert (await session.call("variant_list"))["variants"] == []

        program = (await session.call("ir_build", document="program.yaml"))["program"]
        found = await session.call(
            "analyze", program=program, profile="profile.yaml", deployment="split.yaml", seed_queue=True
        )
        # Each operation has a device of its own, so the slower one sets the period.
        assert found["t_min_ms"] == pytest.approx(60)
        assert found["t_min_resource_ms"] == pytest.approx(60)
        assert found["fps"] == pytest.approx(100)
        assert found["d0_ms"] >= 60
        assert found["critical_cycle"]
        assert found["critical_path"]
        assert found["seeded"]["counts"]["pending"] > 0
        listed = await session.call("variant_list")
        assert listed["may_stop"] is False
        assert len(listed["variants"]) == len(found["candidates"])
        for variant in listed["variants"]:
            assert variant["state"] in {"pending", "removed"}
            assert variant["state"] != "removed" or variant["reason"]

        detailed = await session.call("variant_list", detail=True)
        assert all(variant["history"] for variant in detailed["variants"])
        assert not any("history" in variant for variant in listed["variants"])

        again = await session.call("analyze", program=program, profile="profile.yaml", seed_queue=True)
        assert len((await session.call("variant_list"))["variants"]) == len(listed["variants"])
        assert not again["seeded"]["added"]

        claimed = await session.call("variant_next")
        assert claimed["state"] == "claimed"
        folder = Path(claimed["folder"])
        assert folder.is_relative_to(workspace)
        assert (folder / "program.yaml").is_file()
        pending = [variant["variant"] for variant in listed["variants"] if variant["state"] == "pending"]
        other = await session.call("variant_next", variant=pending[-1])
        assert other["variant"] == pending[-1] != claimed["variant"]


async def test_seeding_for_few_devices_removes_what_needs_more(workspace: Path) -> None:
    async with connected(workspace) as session:
        await session.call("analyze", program="program.yaml", profile="profile.yaml", seed_queue=True, max_devices=1)
        listed = await session.call("variant_list")
        reasons = [str(variant["reason"]) for variant in listed["variants"] if variant["state"] == "removed"]
        assert "it needs 2 devices; max_devices is 1" in reasons


async def test_a_program_is_proved_and_measured_without_torch_in_the_server(workspace: Path) -> None:
    async with connected(workspace) as session:
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        proved = await session.finish("ir_interpret", program=program, inputs=INPUTS, baseline=REFERENCE, count=3)
        assert proved["equivalent"] is True
        assert proved["elements_per_batch"] == {"frames": 6}
        assert (workspace / proved["outputs"]).is_file()
        measured = await session.finish("profile_measure", program=program, inputs=INPUTS, count=3)
        document = json.loads((workspace / measured["path"]).read_text())
        assert document["schema"] == "flashrt/profile@1"
        assert document["provenance"] == "measured"
        assert set(document["operations"]) == {"drift", "render"}
        found = await session.call("analyze", program=program, profile=measured["profile"], deployment="split.yaml")
        assert found["t_min_ms"] > 0
        await session.call("variant_list")
        await session.call("gpu_status")
        maps = maps_of(server_pid(workspace))
        assert "libpython" in maps or "python" in maps
        assert "libtorch" not in maps


async def test_only_proved_and_measured_variants_count(workspace: Path) -> None:
    async with connected(workspace) as session:
        equal = await session.finish(
            "equivalence_check", baseline=REFERENCE, candidate="split.yaml", inputs=INPUTS, count=8
        )
        assert equal["equivalent"] is True
        frames = equal["outputs"]["frames"]
        assert (frames["mismatched"], frames["total"], frames["max_abs"]) == (0, 768, 0)
        assert frames["first_mismatch"] is None

        base = await session.finish("bench_run", system=REFERENCE, warmup=1, **SHORT)
        run = await session.finish(
            "bench_run", system="split.yaml", elements_per_batch={"frames": 6}, warmup=1, **SHORT
        )
        for one in (base, run):
            assert one["valid"] is True, one["reasons"]
            assert one["fps"] > 0
            assert one["elements_per_batch"] == 6
            told = any("'drift') makes all its chunks at once" in note for note in one["notes"])
            assert told is (one is run), "its edge streams, and it returns the whole value"
            assert {"mean", "p50", "p90", "p99", "max"} <= one["latency_ms"].keys()
            for path in one["artifacts"].values():
                assert (workspace / path).is_file()
        compared = await session.call("bench_compare", runs=[base["run"], run["run"]])
        assert compared["baseline"] == base["run"]
        assert compared["comparisons"][0]["run"] == run["run"]

        words = {"hypothesis": "two devices work at once", "transformation": "disaggregate drift|render",
                 "bottleneck": "the one device", "legality": "no dependency leads back"}  # fmt: skip
        added = await session.call("variant_add", system="split.yaml", expected={"rate_ratio": 1.4}, **words)
        variant = added["variant"]
        child = await session.call("variant_add", system="together.yaml", parent=variant, **words)
        assert (await session.call("variant_next"))["variant"] == variant

        text, record = await session.refused("variant_update", variant=variant, state="measured")
        assert {one["rule"] for one in record["diagnostics"]} == {"missing-equivalence", "missing-run"}
        assert "call equivalence_check" in text
        text, _ = await session.refused(
            "variant_update", variant=variant, state="measured", equivalence=equal["equivalence"], run=base["run"]
        )
        assert "a run of the system that was checked" in text
        text, _ = await session.refused("variant_update", variant=variant, state="removed")
        assert "why it is removed" in text
        measured = await session.call(
            "variant_update", variant=variant, state="measured", equivalence=equal["equivalence"], run=run["run"]
        )
        assert measured["state"] == "measured"
        assert measured["may_stop"] is False
        assert child["variant"] in measured["in_the_way"][0]

        text, _ = await session.refused(
            "variant_update", variant=child["variant"], state="measured", equivalence=equal["equivalence"],
            run=run["run"],
        )  # fmt: skip
        assert "together.yaml" in text or "digest" in text
        removed = await session.call(
            "variant_update", variant=child["variant"], state="removed", reason="one device cannot be faster than two"
        )
        assert removed["may_stop"] is True
        listed = await session.call("variant_list")
        lineage = {one["variant"]: one["parent"] for one in listed["variants"]}
        assert lineage == {variant: None, child["variant"]: variant}


async def test_a_changed_value_and_a_dropped_frame_are_named(workspace: Path) -> None:
    async with connected(workspace) as session:
        check: dict[str, Any] = {"baseline": REFERENCE, "inputs": INPUTS}
        changed = await session.finish("equivalence_check", candidate="variants.py:one_value", **check)
        assert changed["equivalent"] is False
        frames = changed["outputs"]["frames"]
        assert frames["mismatched"] == 1
        assert frames["first_mismatch"]["position"] == [5 * 6 + 2, 1, 3]
        assert frames["first_mismatch"]["batch"] == 5
        assert any("'frames'" in reason and "[32, 1, 3]" in reason for reason in changed["reasons"])

        dropped = await session.finish("equivalence_check", candidate="variants.py:drops_a_frame", **check)
        assert dropped["equivalent"] is False
        assert any("expected 48 elements along axis 0, got 47" in reason for reason in dropped["reasons"])

        added = await session.call(
            "variant_add", system="variants.py:one_value", hypothesis="as good", transformation="none",
            bottleneck="none", legality="none",
        )  # fmt: skip
        text, _ = await session.refused(
            "variant_update", variant=added["variant"], state="measured", equivalence=changed["equivalence"],
            run="run-0",
        )  # fmt: skip
        assert "equivalent: true" in text
        assert "[32, 1, 3]" in text


async def test_devices_are_leased_refused_and_released(workspace: Path) -> None:
    async with connected(workspace) as session:
        status = await session.call("gpu_status")
        cores = [device for device in status["devices"] if device["kind"] == "cpu"]
        lease = await session.call("gpu_acquire", count=1, holder="agent-1", kind="cpu")
        assert lease["devices"][0]["kind"] == "cpu"
        assert lease["environment"]["FLASHRT_LEASE"] == lease["lease"]
        text, record = await session.refused("gpu_acquire", count=len(cores), holder="agent-2", kind="cpu")
        assert "agent-1" in text
        assert record["retry_after_s"] > 0
        assert any("agent-1" in holder for holder in record["holders"])
        run = await session.finish("bench_run", system=REFERENCE, devices=lease["lease"], warmup=1, **SHORT)
        assert run["valid"] is True
        renewed = await session.call("gpu_renew", lease=lease["lease"], ttl_s=3600)
        assert renewed["lease"] == lease["lease"]
        assert renewed["remaining_s"] > 3000 > lease["remaining_s"]
        released = await session.call("gpu_release", lease=lease["lease"])
        assert released["released"] == lease["lease"]
        text, _ = await session.refused("gpu_release", lease=lease["lease"])
        assert lease["lease"] in text
        everything = await session.call("gpu_acquire", count=len(cores), holder="agent-2", kind="cpu")
        await session.call("gpu_release", lease=everything["lease"])
        assert (await session.call("gpu_status"))["leases"] == []


async def test_a_hanging_system_is_cancelled_with_everything_it_started(workspace: Path) -> None:
    async with connected(workspace) as session:
        job = await start(session, "gated.py:family")
        wait_until((workspace / "family").exists, "the system has started")
        numbers = [int(text) for text in (workspace / "family").read_text().split()]
        assert (await session.call("job_wait", job=job, wait_s=0))["state"] == "running"
        assert len(processes_of_job(job)) >= 3
        assert (await session.call("job_cancel", job=job))["state"] == "cancelled"
        wait_until(lambda: not any(map(psutil.pid_exists, numbers)), "the system and its child to end")
        assert processes_of_job(job) == []
        assert (await session.call("job_wait", job=job))["state"] == "cancelled"
        text, _ = await session.refused("job_cancel", job=job)
        assert "cancelled" in text


async def test_a_system_that_crashes_or_owes_outputs_fails_in_words(workspace: Path) -> None:
    async with connected(workspace) as session:
        expected = {"raises": "boom in batch 2", "dies": "signal", "writes_nothing": "frames"}
        for name, words in expected.items():
            record = await session.outcome(
                "equivalence_check", baseline=REFERENCE, candidate=f"variants.py:{name}", inputs=INPUTS, count=4
            )
            record = record.get("result") or record
            text = json.dumps(record)
            assert words in text, text
            assert f"variants.py:{name}" in text
            assert record.get("equivalent") is not True


async def start(session: Session, candidate: str) -> str:
    """Start a check that takes longer than the server's first answer; return its job."""
    record = await session.call("equivalence_check", baseline=REFERENCE, candidate=candidate, inputs=INPUTS, count=8)
    assert record["state"] in {"queued", "running"}
    return str(record["job"])
