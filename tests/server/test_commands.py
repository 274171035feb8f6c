"""One command a tool: the same arguments, tables or JSON, exit statuses, completion."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from flashrt.errors import InputError
from flashrt.mcp_server.cli import main
from flashrt.mcp_server.commands import COMMANDS, GPU, JOBS, VARIANTS, arguments_of, part_of, print_part, read_value
from flashrt.mcp_server.rendering import show
from flashrt.mcp_server.server import FlashrtServer
from flashrt.mcp_server.table import TABLE
from flashrt.mcp_server.tools import Tools
from flashrt.mcp_server.workspace import Workspace

ALL = (*COMMANDS, *VARIANTS, *JOBS, *GPU)
# Commands of their own: they have more than the tool's arguments, or show while they wait.
OWN = {"plan_deployment": "plan", "plan_serving": "plan-serving", "plan_elastic": "elastic", "gpu_status": "gpu"}


def flashrt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", *arguments], cwd=cwd, capture_output=True, text=True,
        timeout=200, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_every_tool_has_a_command() -> None:
    assert {command.tool for command in ALL} | set(OWN) == {tool.name for tool in TABLE}


def test_a_command_has_the_tool_s_own_arguments(tmp_path: Path) -> None:
    tools = {tool.name: tool.input_schema for tool in anyio.run(FlashrtServer(Workspace(tmp_path)).list_tools)}
    for command in ALL:
        schema = tools[command.tool]
        found = arguments_of(command.tool)
        assert list(found) == list(schema["properties"]), command.tool
        assert {name for name, (_, needed) in found.items() if needed} == set(schema.get("required", ()))
        for name, (one, _) in found.items():
            theirs = schema["properties"][name]
            assert {key: one.get(key) for key in ("type", "anyOf", "enum", "default", "description")} == {
                key: theirs.get(key) for key in ("type", "anyOf", "enum", "default", "description")
            }, (command.tool, name)
        assert set(command.positional) <= {*found, "items"}


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_names_every_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    (found,) = (one for one in COMMANDS if one.name == command)
    for name in arguments_of(found.tool):
        shown = name.upper().replace("_", "-") if name in found.positional else "--" + name.replace("_", "-")
        if name not in {"runs", "systems"} or command != "compare":
            assert shown in said, name
    assert "--json" in said


@pytest.mark.parametrize(
    ("tool", "name", "text", "expected"),
    [
        ("bench_run", "duration_s", "2.5", 2.5),
        ("bench_run", "runs", "3", 3),
        ("bench_run", "devices", "cpu-0,cpu-1", ["cpu-0", "cpu-1"]),
        ("bench_run", "devices", "lease-12", "lease-12"),
        ("bench_run", "media_rate", '{"frames": 24}', {"frames": 24}),
        ("ir_audit", "degrees", "2,4", [2, 4]),
        ("ir_audit", "degrees", "none", []),
        ("ir_audit", "degrees", "[2]", [2]),
        ("equivalence_check", "tolerance", "numeric", "numeric"),
        ("equivalence_check", "tolerance", "0.01", 0.01),
        ("equivalence_check", "tolerance", '{"tier": "numeric"}', {"tier": "numeric"}),
        ("variant_add", "hypothesis", "a, b and [c]", "a, b and [c]"),
        ("report_write", "runs", "run-1,run-2", ["run-1", "run-2"]),
    ],
)
def test_values_are_read_as_the_argument_wants_them(tool: str, name: str, text: str, expected: Any) -> None:
    found = read_value(name, text, arguments_of(tool)[name][0])
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("tool", "name", "text", "words"),
    [
        ("bench_run", "runs", "three", "option --runs: expected a whole number, got 'three'"),
        ("bench_run", "period_ms", "fast", "option --period-ms: expected a number"),
        ("bench_run", "config", "{oops", "option --config: expected JSON"),
        ("bench_run", "config", "seed=1", "expected a JSON object"),
        ("ir_audit", "degrees", "two", "option --degrees: expected a whole number"),
    ],
)
def test_other_values_are_refused_by_name(tool: str, name: str, text: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        read_value(name, text, arguments_of(tool)[name][0])


def test_a_part_of_an_answer_is_found_by_its_path() -> None:
    record = {"run": "run-1", "front": [{"id": "deploy-1", "fps": 2.5}]}
    assert part_of(record, "run") == "run-1"
    assert part_of(record, "front.0.fps") == "2.5"
    for wrong, words in (("runs", "did you mean 'run'"), ("front.1", "one of '0'"), ("run.x", "'x'")):
        with pytest.raises(InputError, match=re.escape(words)):
            part_of(record, wrong)


def test_a_program_that_is_not_equal_is_to_be_audited(workspace: Path) -> None:
    inputs = "inputs.py:batches"
    other = flashrt(
        "interpret", "program.yaml", inputs, "--baseline", "variants.py:one_value", "--count", "6", cwd=workspace
    )
    assert other.returncode == 1, other.stderr
    assert "at [32, 1, 3] (batch 5): expected" in " ".join(other.stdout.split())
    last = other.stdout.strip().splitlines()[-1]
    assert last == f"next: flashrt audit program.yaml {inputs} finds state that is not declared"


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ("variants.py:one_value", "next: it begins well"),
        ("variants.py:zeros", "next: it differs about from the first batch on"),
        ("other_split.yaml", "next: flashrt check reference.py:serve PROGRAM inputs.py:batches"),
    ],
)
def test_what_a_first_difference_says_is_said(workspace: Path, candidate: str, words: str) -> None:
    # A deployment of a program with an op that computes something else.
    (workspace / "other_ops.py").write_text(
        "import toy_ops\n\n\ndef load(context):\n    made = toy_ops.load(context)\n\n"
        "    def render(inputs, state):\n        return {'frames': made['render'](inputs, state)['frames'] + 1}\n\n"
        "    return {**made, 'render': render}\n"
    )
    for file, old, new in (
        ("program.yaml", "toy_ops.py:load", "other_ops.py:load"), ("split.yaml", "program.yaml", "other_program.yaml")
    ):  # fmt: skip
        text = (workspace / file).read_text()
        (workspace / f"other_{file}").write_text(text.replace(old, new))
    done = flashrt("check", "reference.py:serve", candidate, "inputs.py:batches", "--count", "6", cwd=workspace)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in " ".join(done.stdout.split())


def test_a_part_of_a_run_that_is_not_valid_comes_with_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"run": "run-1f3a", "job": "job-0b", "system": "a-b", "valid": False, "reasons": ["too few", "late"]}
    print_part(record, "run")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("run-1f3a\n", "not valid: too few; late\n")
    with pytest.raises(InputError, match="metrics"):
        print_part({**record, "valid": True}, "metrics.fps")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "the call is done; run: run-1f3a, job: job-0b\n")


def test_answers_are_tables_json_or_a_part_and_a_no_ends_with_1(workspace: Path) -> None:
    built = flashrt("build", "program.yaml", cwd=workspace)
    assert built.returncode == 0, built.stderr
    assert "operations: drift, render" in built.stdout
    same = ("check", "reference.py:serve", "program.yaml", "inputs.py:batches", "--count", "2")
    equal = flashrt(*same, "--json", cwd=workspace)
    assert equal.returncode == 0, equal.stderr
    assert json.loads(equal.stdout)["equivalent"] is True
    other = flashrt("check", "reference.py:serve", "variants.py:one_value", "inputs.py:batches", cwd=workspace)
    assert other.returncode == 1, other.stderr
    assert "NOT EQUAL" in other.stdout
    assert "batch 5" in other.stdout
    assert "{'position'" not in other.stdout
    part = flashrt(*same, "--get", "outputs.frames.mismatched", cwd=workspace)
    assert (part.returncode, part.stdout) == (0, "0\n")
    refused = flashrt("check", "reference.py:serve", "absent.py:serve", "inputs.py:batches", cwd=workspace)
    assert refused.returncode == 5
    assert refused.stdout == ""
    jobs = flashrt("jobs", "--json", cwd=workspace)
    records = json.loads(jobs.stdout)["jobs"]
    assert [one["tool"] for one in records] == ["equivalence_check"] * 3
    waited = flashrt("jobs", "wait", records[0]["job"], cwd=workspace)
    assert waited.returncode == 0
    assert "done" in waited.stdout
    cancelled = flashrt("jobs", "cancel", records[0]["job"], cwd=workspace)
    assert cancelled.returncode == 5
    assert "there is nothing to cancel" in cancelled.stderr


def test_a_composition_is_shown_by_its_parts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Tools(Workspace(workspace)).analyze("program.yaml")
    whole = [one["legality"] for one in record["candidates"] if "+" in one["transformation"]]
    assert whole
    assert all(text.startswith("both are legal and choose different things") for text in whole)
    show("analyze", record, workspace)
    said = capsys.readouterr().out
    assert said.count("both are legal:") == len(whole)
    assert "choose" not in said


def test_variants_and_leases_have_commands(workspace: Path) -> None:
    words = ("--transformation", "stream", "--bottleneck", "the path", "--legality", "no state")
    added = flashrt("variants", "add", "chunks [red]leave[/]", *words, "--expected", '{"rate_ratio": 1.4}',
                    "--get", "variant", cwd=workspace)  # fmt: skip
    assert added.returncode == 0, added.stderr
    variant = added.stdout.strip()
    listed = flashrt("variants", cwd=workspace)
    assert listed.returncode == 0
    assert "chunks [red]leave[/]" in listed.stdout
    assert "the search may not stop yet" in listed.stdout
    decided = flashrt(
        "variants", "update", variant, "removed", "--reason", "no faster than before", "--json", cwd=workspace
    )
    assert json.loads(decided.stdout)["may_stop"] is True
    leased = flashrt("gpu", "acquire", "1", "a test", "--kind", "cpu", "--ttl-s", "60", "--get", "lease", cwd=workspace)
    assert leased.returncode == 0, leased.stderr
    shown = flashrt("gpu", "--once", "--json", cwd=workspace)
    assert [one["holder"] for one in json.loads(shown.stdout)["leases"]] == ["a test"]
    released = flashrt("gpu", "release", leased.stdout.strip(), cwd=workspace)
    assert released.returncode == 0, released.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["build"],
        ["bench", "reference.py:serve"],
        ["bench", "reference.py:serve", "inputs.py:batches", "--scenario", "fastest"],
        ["bench", "reference.py:serve", "inputs.py:batches", "--runs", "many"],
        ["variants", "update", "var-0001", "better"],
        ["compare", "run-1", "--workspace", "absent"],
        ["report", "--workspace", "absent"],
        ["gpu", "restore"],
        ["completion", "cmd"],
    ],
)
def test_wrong_usage_ends_with_2(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status: Any = main(line)
    except SystemExit as ended:
        status = ended.code
    assert status == 2


def test_doctor_says_it_as_json_too(tmp_path: Path) -> None:
    done = flashrt("doctor", "--json", cwd=tmp_path)
    record = json.loads(done.stdout)
    assert done.returncode == (0 if record["ok"] else 1)
    assert {one["package"] for one in record["packages"]} >= {"mcp", "torch"}
    assert record["devices"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_have_every_command(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("interpret", "plan-serving", "dashboard"):
        assert command in script
    for option in ("reason", "scenario", "duration-s"):
        assert option in script
    path = tmp_path / "script"
    path.write_text(script)
    program = shutil.which(shell)
    if program is not None:
        done = subprocess.run([program, "-n", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    if shell == "bash":
        assert complete_in_bash(path, "flashrt be") == ["bench"]
        assert complete_in_bash(path, "flashrt bench --scen") == ["--scenario"]
        assert complete_in_bash(path, "flashrt variants up") == ["update"]


def complete_in_bash(script: Path, line: str) -> list[str]:
    """Return what bash offers for a line, as Tab would."""
    asked = (
        f'source "{script}"; COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; read -ra COMP_WORDS <<< "$COMP_LINE"; '
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "
        "name=$(complete -p flashrt | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $name 2>/dev/null; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
    return done.stdout.split()
