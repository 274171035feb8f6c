"""The ``flashrt`` command: exit statuses, JSON alone on standard output, from any folder."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashrt import __version__
from flashrt.mcp_server.cli import main
from flashrt.mcp_server.http import is_loopback
from flashrt.mcp_server.tools import Tools
from tests.conftest import interruptible, wait_until

INPUTS = "inputs.py:batches"


def flashrt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", *arguments], cwd=cwd, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_call_prints_json_waits_for_jobs_and_works_from_another_folder(workspace: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(tool: str, status: int = 0, **arguments: object) -> dict[str, object]:
        done = flashrt("call", tool, json.dumps(arguments), "--workspace", str(workspace), cwd=elsewhere)
        assert done.returncode == status, done.stderr
        record: dict[str, object] = json.loads(done.stdout)
        assert record["ok"] is (status == 0)
        return record

    program = call("ir_build", document="program.yaml")["program"]
    proved = call("equivalence_check", baseline="reference.py:serve", candidate=program, inputs=INPUTS, count=2)
    assert proved["equivalent"] is True
    assert call("job_wait", job=proved["job"])["state"] == "done"
    refused = call("ir_build", 5, documents="program.yaml")
    assert "did you mean 'document'" in str(refused["error"])
    crashed = call(
        "equivalence_check", 5, baseline="reference.py:serve", candidate="variants.py:raises", inputs=INPUTS, count=3
    )
    assert "boom in batch 2" in str(crashed["error"])
    assert sorted(elsewhere.iterdir()) == []


def test_call_works_in_the_current_folder_without_arguments(workspace: Path) -> None:
    done = flashrt("call", "variant_list", cwd=workspace)
    assert done.returncode == 0
    assert json.loads(done.stdout)["may_stop"] is False
    assert (workspace / ".flashrt").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["call", "ir_build", "{not json"], "no JSON"),
        (["call", "ir_build", "[1]"], "no JSON object"),
        (["call", "ir_build", "{}", "--workspace", "absent"], "absent"),
        (["serve", "--workspace", "absent"], "absent"),
        (["serve", "--http", "nowhere"], "HOST:PORT"),
        (["serve", "--http", "127.0.0.1:99999"], "HOST:PORT"),
        (["serve", "--http", "0.0.0.0:8765"], "--allow-remote"),
        (["serve", "--http", "example.org:8765"], "tunnel"),
        (["cal"], "call"),
        ([], "COMMAND"),
        (["call"], "flashrt call --list"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(workspace: Path, arguments: list[str], words: str) -> None:
    done = flashrt(*arguments, cwd=workspace)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_call_lists_and_describes_the_tools(tmp_path: Path) -> None:
    listed = flashrt("call", "--list", cwd=tmp_path)
    assert listed.returncode == 0
    assert "\nbench_run system* inputs* scenario devices" in listed.stdout
    assert "\n    Lease devices, all or none" in listed.stdout
    described = flashrt("call", "bench_run", "--describe", cwd=tmp_path)
    assert described.returncode == 0
    assert "system (required, string) file.py:function" in described.stdout
    assert "period_ms (number, above 0) realtime" in described.stdout
    assert "one of 'single_stream', 'realtime', 'poisson', 'burst', 'trace', 'max_rate'" in described.stdout
    wrong = flashrt("call", "bench_rn", "--describe", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'bench_run'" in wrong.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error(workspace: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flashrt.mcp_server", "call", "variant_list"], cwd=workspace, stdout=writing,
            stderr=subprocess.PIPE, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


def test_help_lists_the_commands_and_version_is_the_package_s(tmp_path: Path) -> None:
    shown = flashrt("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for command in ("serve", "demo", "call", "plan", "deploy", "doctor"):
        assert command in shown.stdout
    assert flashrt("--version", cwd=tmp_path).stdout.split() == ["flashrt", __version__]
    script = Path(sys.executable).with_name("flashrt")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["flashrt", __version__]


def test_doctor_says_what_works_here(tmp_path: Path) -> None:
    done = flashrt("doctor", cwd=tmp_path)
    assert done.returncode in {0, 1}
    assert "Traceback" not in done.stderr
    for word in ("packages", "devices", "host", "torch", f"{len(os.sched_getaffinity(0))}"):
        assert word in done.stdout


def test_what_a_library_prints_is_not_in_the_answer(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = Tools.variant_list

    @functools.wraps(original)
    def noisy(*arguments: Any, **named: Any) -> Any:
        os.write(1, b"noise of a driver\n")
        return original(*arguments, **named)

    monkeypatch.setattr(Tools, "variant_list", noisy)
    assert main(["call", "variant_list", "--workspace", str(workspace)]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["ok"] is True
    assert "noise of a driver" in said.err


def test_an_interrupted_command_leaves_its_job_running_and_says_how_to_end_it(workspace: Path) -> None:
    bench = ["bench", "variants.py:hangs", INPUTS, "--timeout-s", "600", "--workspace", str(workspace)]
    command = interruptible(*bench)

    def jobs() -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(flashrt("jobs", "--json", cwd=workspace).stdout)["jobs"]
        return found

    try:
        wait_until(lambda: any(one["state"] == "running" for one in jobs()), "a running job")
        command.send_signal(signal.SIGINT)
        out, said = command.communicate(timeout=100)
    finally:
        command.kill()
    assert (command.returncode, out) == (130, "")
    assert "flashrt jobs cancel" in said
    assert "Traceback" not in said
    (job,) = jobs()
    assert job["state"] == "running"
    assert flashrt("jobs", "cancel", job["job"], cwd=workspace).returncode == 0
    wait_until(lambda: jobs()[0]["state"] == "cancelled", "the job's end")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_only_this_machine_reaches_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
