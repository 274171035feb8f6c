"""Bad input: named by place, expectation and next call; the store is left as it was."""

from __future__ import annotations

import contextlib
import copy
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flashrt.ir import read_document
from tests.server.connection import connected, raw_server, store_state

pytestmark = pytest.mark.anyio

INPUTS = "inputs.py:batches"
CHECK: dict[str, Any] = {"baseline": "reference.py:serve", "candidate": "split.yaml", "inputs": INPUTS}
BENCH: dict[str, Any] = {"system": "reference.py:serve", "inputs": INPUTS}
WORDS = {"hypothesis": "h", "transformation": "t", "bottleneck": "b", "legality": "l"}

# tool, arguments, what the text must say
REFUSALS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("ir_buid", {}, ["no such tool", "did you mean 'ir_build'"]),
    ("nothing_like_it", {}, ["no such tool", "'variant_list'"]),
    # Unknown, missing, mistyped.
    ("ir_build", {"documents": "program.yaml"}, ["argument 'documents'", "did you mean 'document'"]),
    ("ir_build", {"document": "program.yaml", "strict": True}, ["argument 'strict'", "unknown argument"]),
    ("ir_build", {}, ["exactly one of 'document' and 'program'", "neither"]),
    ("ir_build", {"document": "program.yaml", "program": {}}, ["exactly one of", "both"]),
    ("ir_build", {"document": 3}, ["argument 'document'", "string", "3"]),
    ("ir_build", {"program": [1]}, ["argument 'program'"]),
    ("ir_show", {}, ["argument 'program'", "nothing"]),
    ("ir_show", {"program": "program.yaml", "view": "sumary"}, ["argument 'view", "'summary'", "sumary"]),
    ("gpu_status", {"verbose": True}, ["argument 'verbose'", "unknown argument"]),
    ("gpu_acquire", {"count": "two", "holder": "me"}, ["argument 'count'", "integer", "two"]),
    ("gpu_acquire", {"count": 1, "holdr": "me"}, ["'holdr'", "did you mean 'holder'", "argument 'holder'", "nothing"]),
    ("gpu_acquire", {"count": 1, "holder": "m" * 201}, ["argument 'holder'", "at most 200"]),
    ("gpu_acquire", {"count": 1, "holder": "me", "ttl_s": 1e9}, ["argument 'ttl_s'", "604800"]),
    ("bench_run", {**BENCH, "timeout_s": 1e9}, ["argument 'timeout_s'", "86400"]),
    ("bench_compare", {"runs": ["run-1"]}, ["argument 'runs'", "at least 2"]),
    ("job_wait", {"job": "job-1", "wait_s": 26}, ["argument 'wait_s'", "25"]),
    ("bench_run", {**BENCH, "scenario": "realtme"},
     ["argument 'scenario'", "expected one of 'single_stream', 'realtime', 'poisson',", "did you mean 'realtime'"]),
    ("variant_update", {"variant": "var-0001"}, ["argument 'state'", "one of 'measured', 'removed', 'pending'"]),
    ("analyze", {"program": "program.yaml", "max_devices": 0}, ["max_devices", "expected greater than or equal to 1"]),
    ("variant_next", {"variant": "var-0099"}, ["'var-0099'", "did you mean 'var-0001'"]),
    ("gpu_renew", {"lease": "lease-9-abcdef", "ttl_s": 60}, ["lease-9-abcdef"]),
    ("bench_run", {**BENCH, "scenario": "burst", "trace": "absent.csv", "system": "something"},
     ["argument 'rate_hz'", "argument 'burst_size'", "argument 'trace'", "an existing file", "argument 'system'"]),
    ("bench_run", {**BENCH, "duration_s": 0, "runs": 0}, ["argument 'duration_s'", "argument 'runs'"]),
    ("equivalence_check", {**CHECK, "tolerance": "nearly"}, ["nearly"]),
    ("equivalence_check", {**CHECK, "count": 0}, ["argument 'count'"]),
    # Paths.
    ("ir_build", {"document": "../outside.yaml"}, ["argument 'document'", "inside the workspace"]),
    ("ir_build", {"document": "/etc/hostname"}, ["argument 'document'", "inside the workspace"]),
    ("ir_build", {"document": "link.yaml"}, ["argument 'document'", "inside the workspace"]),
    ("ir_build", {"document": "."}, ["argument 'document'", "'program.yaml'"]),
    ("ir_build", {"document": ""}, ["argument 'document'", "'program.yaml'"]),
    ("ir_build", {"document": "a\0b.yaml"}, ["argument 'document'"]),
    ("ir_build", {"document": "a" * 5000 + ".yaml"}, ["argument 'document'"]),
    ("bench_run", {**BENCH, "system": "a\0b.py:serve"}, ["argument 'system'"]),
    ("bench_run", {**BENCH, "inputs": "a" * 300 + ".frec"}, ["argument 'inputs'"]),
    ("ir_build", {"document": "inputs.py"}, ["document 'inputs.py'", "JSON or YAML"]),
    ("ir_show", {"program": "split.yaml"}, ["schema", "flashrt/program@1"]),
    ("ir_show", {"program": "prog-../../etc"}, ["'prog-../../etc'"]),
    ("job_wait", {"job": "../../x"}, ["'../../x'"]),
    ("ir_build", {"document": "programme.yaml"}, ["'programme.yaml'", "did you mean 'program.yaml'"]),
    ("ir_show", {"program": "../outside.yaml"}, ["argument 'program'", "inside the workspace"]),
    ("analyze", {"program": "program.yaml", "profile": "../outside.yaml"}, ["argument 'profile'", "inside the work"]),
    ("analyze", {"program": "program.yaml", "profile": "profile.yaml", "deployment": "/outside.yaml"},
     ["argument 'deployment'", "inside the workspace"]),
    ("equivalence_check", {**CHECK, "candidate": "../outside.py:serve"}, ["argument 'candidate'", "inside the work"]),
    ("bench_run", {**BENCH, "inputs": "../outside.py:batches"}, ["argument 'inputs'", "inside the workspace"]),
    ("ir_interpret", {"program": "program.yaml", "inputs": "input.py:batches", "baseline": "refrence.py:serve"},
     ["argument 'baseline'", "argument 'inputs'", "did you mean 'inputs.py'", "did you mean 'reference.py'"]),
    ("bench_run", {**BENCH, "system": "reference.py"}, ["argument 'system'", "function"]),
    ("bench_run", {**BENCH, "system": "something"}, ["argument 'system'", "file.py:function"]),
    ("bench_run", {**BENCH, "system": "profile.yaml"}, ["argument 'system'", "schema"]),
    # Ids.
    ("ir_show", {"program": "prog-000000000000"}, ["'prog-000000000000'", "ir_build"]),
    ("analyze", {"program": "program.yaml", "profile": "profile-0"}, ["profile 'profile-0'", "profile_measure"]),
    ("analyze", {"program": "program.yaml", "deployment": "split.yaml"}, ["profile_measure"]),
    ("bench_compare", {"runs": ["run-1", "run-2"]}, ["run 'run-1'", "bench_run"]),
    ("gpu_release", {"lease": "lease-9-abcdef"}, ["lease-9-abcdef"]),
    ("variant_add", {**WORDS, "parent": "var-0099"}, ["parent", "'var-0099'", "did you mean 'var-0001'"]),
    ("variant_add", {**WORDS, "legality": " ", "hypothesis": ""}, ["legality", "hypothesis"]),
    ("variant_update", {"variant": "var-0002", "state": "removed", "reason": "it is not faster at all"},
     ["'var-0002'", "did you mean 'var-0001'"]),
    ("variant_update", {"variant": "var-0001", "state": "done"}, ["argument 'state'", "'measured'", "done"]),
    ("variant_update", {"variant": "var-0001", "state": "measured"}, ["equivalence_check", "bench_run"]),
    ("variant_update", {"variant": "var-0001", "state": "measured", "equivalence": "eq-1", "run": "run-1"},
     ["'eq-1'", "'run-1'"]),
    ("variant_update", {"variant": "var-0001", "state": "removed"}, ["why it is removed"]),
    ("job_wait", {"job": "job-00000000"}, ["'job-00000000'"]),
    ("job_cancel", {"job": "job-00000000"}, ["'job-00000000'"]),
    # Devices.
    ("gpu_acquire", {"count": 0, "holder": ""}, ["count", "holder"]),
    ("gpu_acquire", {"count": 4096, "holder": "me", "kind": "cpu"}, ["4096"]),
]  # fmt: skip


async def test_bad_input_is_refused_in_words_and_the_store_is_left_as_it_was(workspace: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.yaml"
    outside.write_bytes((workspace / "program.yaml").read_bytes())
    (tmp_path / "outside.py").write_text("raise SystemExit('ran')")
    (workspace / "link.yaml").symlink_to(outside)
    problems = []
    async with connected(workspace) as session:
        await session.call("ir_build", document="program.yaml")
        await session.call("variant_add", **WORDS)
        before = store_state(workspace)
        for tool, arguments, words in REFUSALS:
            result = await session.client.call_tool(tool, arguments)
            record = result.structured_content or {}
            text = str(record.get("error"))
            call = f"{tool} {json.dumps(arguments)}"
            if not result.is_error or record.get("ok") is not False:
                problems.append(f"{call}: was not refused: {record}")
                continue
            missing = [word for word in words if word not in text]
            if missing:
                problems.append(f"{call}: {missing} not in: {text}")
            if "Traceback" in text or "Input should" in text or "failed inside FlashRT" in text:
                problems.append(f"{call}: {text}")
            for finding in record["diagnostics"] or [{}]:
                if not all(finding.get(key) for key in ("severity", "where", "message", "fix", "rule")):
                    problems.append(f"{call}: incomplete finding {finding}")
            if store_state(workspace) != before:
                problems.append(f"{call}: changed the store")
                before = store_state(workspace)
        # What works still does.
        await session.call("variant_list")
    assert not problems, "\n".join(problems)


def wrong_program(workspace: Path, change: str) -> tuple[dict[str, Any], list[str]]:
    document = copy.deepcopy(read_document(workspace / "program.yaml"))
    app = document["graphs"]["app"]
    if change == "unknown port":
        app["edges"][1]["from"] = "drift.latent"
        app["nodes"]["drift"]["outputs"] = {"latents": {}}
        return document, ["latent", "did you mean"]
    if change == "missing mode":
        del app["edges"][0]["mode"]
        return document, ["mode", "blocking", "streaming"]
    if change == "cycle":
        app["edges"].append({"from": "render.frames", "to": "drift.back", "mode": "blocking"})
        return document, ["cycle", "drift", "render"]
    if change == "unordered writers":
        app["nodes"]["other"] = {"op": "drift", "writes": ["drift.seen"]}
        app["edges"] += [{"from": "actions", "to": "other.actions", "mode": "blocking"}]
        return document, ["drift.seen", "other"]
    assert change == "all at once"
    del app["edges"][0]["mode"]
    app["nodes"]["render"]["reads"] = ["render.lst"]
    return document, ["mode", "render.lst", "did you mean 'render.last'"]


async def test_a_wrong_program_is_refused_with_all_findings(workspace: Path) -> None:
    async with connected(workspace) as session:
        await session.call("ir_build", document="program.yaml")
        before = store_state(workspace)
        for change in ("unknown port", "missing mode", "cycle", "unordered writers", "all at once"):
            document, words = wrong_program(workspace, change)
            text, record = await session.refused("ir_build", program=document)
            assert [word for word in words if word not in text] == [], f"{change}: {text}"
            assert all(finding["fix"] for finding in record["diagnostics"]), change
            assert store_state(workspace) == before, change


def spoil(database: Path, how: str) -> None:
    if how == "corrupt":
        size = database.stat().st_size
        database.write_bytes(database.read_bytes()[:100] + bytes(range(256)) * (size // 256))
    elif how == "no database":
        database.write_bytes(b"a note by somebody")
    else:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA user_version = 4711")
            connection.commit()


@pytest.mark.parametrize("how", ["corrupt", "no database", "newer"])
def test_a_database_that_cannot_be_read_is_refused_and_left_byte_for_byte(workspace: Path, how: str) -> None:
    with raw_server(workspace) as server:
        program = server.call("ir_build", document="program.yaml")["program"]
    database = workspace / ".flashrt" / "flashrt.db"
    spoil(database, how)
    before = {path: path.read_bytes() for path in (workspace / ".flashrt").rglob("*") if path.is_file()}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("ir_build", {"document": "program.yaml"}),
        ("ir_show", {"program": program}),
        ("analyze", {"program": "program.yaml", "seed_queue": True}),
        ("equivalence_check", CHECK),
        ("bench_compare", {"runs": ["run-1", "run-2"]}),
        ("variant_add", WORDS),
        ("variant_next", {}),
        ("variant_list", {}),
        ("job_wait", {"job": "job-1"}),
        ("job_cancel", {"job": "job-1"}),
    ]
    with raw_server(workspace) as server:
        for tool, arguments in calls:
            record = server.call(tool, **arguments)
            assert record["ok"] is False, tool
            assert "flashrt.db" in record["error"], (tool, record)
            if how == "newer":
                assert "4711" in record["error"]
                assert "upgrade flashrt" in record["error"]
        # Devices have nothing to do with the workspace.
        assert server.call("gpu_status")["ok"] is True
    after = {path: path.read_bytes() for path in (workspace / ".flashrt").rglob("*") if path.is_file()}
    assert after == before


async def test_a_program_whose_operations_changed_has_to_be_built_again(workspace: Path) -> None:
    async with connected(workspace) as session:
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        with (workspace / "toy_ops.py").open("a") as file:
            file.write("\nCHANGED = True\n")
        text, _ = await session.refused("ir_show", program=program)
        assert "changed" in text
        assert "ir_build again" in text
        await session.call("ir_build", document="program.yaml")


async def test_what_a_job_needs_is_checked_before_it_starts_and_a_job_that_fails_says_why(workspace: Path) -> None:
    async with connected(workspace) as session:
        lease = await session.call("gpu_acquire", count=1, holder="agent-1", kind="cpu")
        await session.call("gpu_release", lease=lease["lease"])
        text, _ = await session.refused("bench_run", **BENCH, devices=lease["lease"])
        assert lease["lease"] in text
        text, _ = await session.refused("bench_run", **BENCH, devices="gpu-0")
        assert "'gpu-0'" in text
        assert "gpu_acquire" in text
        text, _ = await session.refused("profile_measure", program="program.yaml", inputs=BENCH["inputs"], degrees=[2])
        assert "degrees" in text
        assert not list((workspace / ".flashrt" / "jobs").glob("*"))
        failed = await session.outcome("bench_run", **{**BENCH, "system": "variants.py:absent"})
        assert failed["state"] == "failed"
        assert failed["job"].startswith("job-")
        assert "'absent'" in failed["error"]
