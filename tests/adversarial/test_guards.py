"""What a candidate sees of the reference and of the records, and that each guard says whether it is active."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flashrt.bench import guards, resolve_system
from flashrt.bench.drive import run_all
from flashrt.bench.guards import guard_records, private_files, reference_files
from flashrt.bench.process import SystemProcess

SYSTEMS = """
import ctypes, os, subprocess, sys

def look(path):
    try:
        return open(path).read() if os.path.isfile(path) else ",".join(os.listdir(path))
    except Exception as error:
        return type(error).__name__

def looks(io):
    io.ready()
    for paths in io.inputs["paths"]:
        io.outputs["seen"].write([look(path) for path in paths])
        code = f"import sys; sys.path.insert(0, {os.getcwd()!r}); import looking; print(*map(looking.look, {paths!r}))"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        io.outputs["child"].write([child.stdout.strip()])
        libc = ctypes.CDLL(None, use_errno=True)
        io.outputs["away"].write([libc.umount2(path.encode(), 2) for path in paths])
        io.outputs["own"].write([open(__file__).read()[:1]])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "looking.py").write_text(SYSTEMS)
    (tmp_path / "reference.py").write_text("SECRET = 1\ndef serve(io):\n    pass\n")
    jobs = tmp_path / ".flashrt" / "jobs" / "job-1"
    jobs.mkdir(parents=True)
    (jobs / "outputs.npz").write_text("SECRET")
    (tmp_path / ".flashrt" / "flashrt.db").write_text("SECRET")
    return tmp_path


def see(folder: Path, private: list[Path] | None = None) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    system, baseline = resolve_system("looking.py:looks", folder), resolve_system("reference.py:serve", folder)
    paths = [str(folder / name) for name in ("reference.py", ".flashrt/flashrt.db", ".flashrt/jobs")]
    with SystemProcess(
        system, ["paths"], hidden=reference_files(system, baseline), private=private or private_files(folder),
        log_path=folder / "log.txt",
    ) as process:  # fmt: skip
        process.wait_ready(120)
        recorder = run_all(process, [{"paths": paths}], 120)
        records = guard_records(process.events)
    values = {name: [item for value in parts for item in value] for name, parts in recorder.values().items()}
    assert values["own"] == ["\n"]
    return values, records


def test_reference_and_records_are_out_of_sight_and_stay_so(folder: Path) -> None:
    values, records = see(folder)
    if records["records-hidden"]["how"].startswith("no mount namespace"):
        # A host that allows none: the guard says so, and the reference is still out of reach of the first process.
        assert not records["records-hidden"]["active"]
        assert values["seen"][0] == "ImportError"
        return
    assert records == {
        "reference-hidden": {"active": True, "how": "mount namespace"},
        "records-hidden": {"active": True, "how": "mount namespace"},
        "harness-out-of-reach": {"active": True, "how": "user namespace"},
    }
    for text in (*values["seen"], *values["child"]):
        assert "SECRET" not in text
        assert "outputs" not in text
    assert values["seen"][2] == ""
    assert all(status != 0 for status in values["away"])
    # Nobody else's view has changed.
    assert "SECRET" in (folder / "reference.py").read_text()
    assert (folder / ".flashrt" / "jobs" / "job-1" / "outputs.npz").is_file()


def test_a_journal_that_goes_meanwhile_leaves_the_rest_hidden(folder: Path) -> None:
    journal = folder / ".flashrt" / "flashrt.db-wal"
    journal.write_text("")
    private = private_files(folder)
    assert journal in private
    journal.unlink()
    values, records = see(folder, private)
    if not records["records-hidden"]["how"].startswith("no mount namespace (Operation"):
        assert records["records-hidden"] == {"active": True, "how": "mount namespace"}
        assert "SECRET" not in "".join(values["seen"])


def test_a_host_without_namespaces_says_so_and_guards_what_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own process is made to believe that the kernel refuses."""
    (folder / "sitecustomize.py").write_text(
        f"from flashrt.bench import guards\nguards._enter_namespaces = lambda: {errno.errorcode[errno.EPERM]!r}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    values, records = see(folder)
    assert records["reference-hidden"]["active"] is True
    assert "audit hook, in the first process only" in records["reference-hidden"]["how"]
    assert records["records-hidden"] == {"active": False, "how": "no mount namespace (EPERM)"}
    if not records["harness-out-of-reach"]["active"]:
        assert "no user namespace (EPERM)" in records["harness-out-of-reach"]["how"]
    assert values["seen"][0] == "ImportError"
    assert values["seen"][1] == "SECRET"


def test_what_cannot_be_hidden_is_not(folder: Path) -> None:
    baseline = resolve_system("reference.py:serve", folder)
    copy = folder / "variant"
    copy.mkdir()
    (copy / "reference.py").write_text((folder / "reference.py").read_text())
    (copy / "mine.py").write_text("def serve(io):\n    pass\n")
    assert reference_files(baseline, baseline) == []
    assert reference_files(resolve_system("looking.py:looks", folder), None) == []
    (hidden, own) = reference_files(resolve_system("variant/mine.py:serve", folder), baseline)
    assert {hidden, own} == {folder / "reference.py", copy / "reference.py"}
    assert guards.hide([], [])[0]["active"] is False


PRYING = """
import ctypes, os

def attempt(act):
    try:
        return f"got {len(act())}"
    except OSError as error:
        return type(error).__name__

def attach(number):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, number, None, None) != 0:
        raise PermissionError(ctypes.get_errno(), "ptrace")
    return "attached"

def pries(io):
    io.ready()
    for number in io.inputs["harness"]:
        io.outputs["got"].write([
            attempt(lambda: open(f"/proc/{number}/mem", "rb").read(1)),
            attempt(lambda: open(f"/proc/{number}/environ", "rb").read(1)),
            attempt(lambda: os.readlink(f"/proc/{number}/fd/0")),
            attempt(lambda: attach(number)),
        ])
        with open("made.txt", "w") as file:
            file.write("x")
        io.outputs["owner"].write([os.stat("made.txt").st_uid, os.geteuid()])
"""


def test_the_harness_cannot_be_read_or_traced_and_files_keep_their_owner(tmp_path: Path) -> None:
    (tmp_path / "prying.py").write_text(PRYING)
    with SystemProcess(
        resolve_system("prying.py:pries", tmp_path), ["harness"], log_path=tmp_path / "log.txt"
    ) as process:  # fmt: skip
        process.wait_ready(120)
        recorder = run_all(process, [{"harness": os.getpid()}], 120)
        records = guard_records(process.events)
    values = {name: [item for value in parts for item in value] for name, parts in recorder.values().items()}
    if records["harness-out-of-reach"]["active"]:
        assert values["got"] == ["PermissionError"] * 4
    else:
        # A host that allows no user namespaces: the guard says why, and nothing else changes.
        assert "its memory can be read" in records["harness-out-of-reach"]["how"]
    assert values["owner"] == [os.geteuid()] * 2
    assert (tmp_path / "made.txt").stat().st_uid == os.geteuid()
