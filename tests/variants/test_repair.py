"""A damaged database is kept as a backup, and what can still be read of it is in a new one; only when asked."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashrt.errors import InputError
from flashrt.mcp_server.cli import main
from flashrt.variants import Store, VariantQueue, open_store
from flashrt.variants.repair import repair
from tests.variants.test_store import (
    damage_by_another_program,
    damage_length,
    damage_nothing_of_ours,
    damage_pages,
)

NUM_RUNS = 400


def damage_one_page(path: Path) -> None:
    """Overwrite a page of runs in the middle of the file."""
    data = bytearray(path.read_bytes())
    middle = data.index(b'"marker": "run-200"') // 4096 * 4096
    data[middle : middle + 4096] = b"\xa5" * 4096
    path.write_bytes(data)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace to copy: every record is a commit of its own, which takes a disk its time."""
    store = open_store(tmp_path_factory.mktemp("template"))
    queue = VariantQueue(store)
    for number in range(3):
        queue.add(f"hypothesis {number}", "t", "b", "l")
    for number in range(NUM_RUNS):
        store.put_record("run", f"run-{number}", {"marker": f"run-{number}", "samples": list(range(60))})
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store.workspace


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Store:
    workspace = tmp_path / "workspace"
    shutil.copytree(template, workspace, symlinks=True)
    return open_store(workspace)


@pytest.mark.parametrize(
    ("damage", "least"),
    [(damage_one_page, NUM_RUNS // 2), (damage_pages, 0), (damage_length, 0), (damage_nothing_of_ours, 0),
     (damage_by_another_program, 0)],
)  # fmt: skip
def test_the_damaged_file_is_kept_and_what_can_be_read_is_in_the_new_one(
    filled: Store, damage: Callable[[Path], None], least: int
) -> None:
    damage(filled.path)
    damaged = filled.path.read_bytes()
    with pytest.raises(InputError, match="flashrt repair --workspace"):
        open_store(filled.workspace)
    assert filled.path.read_bytes() == damaged, "nothing is repaired unasked"
    found = repair(filled.workspace)
    assert found.backup.read_bytes() == damaged
    assert found.backup.name in str(found)
    assert not found.whole
    store = open_store(filled.workspace)
    runs = store.list_records("run")
    assert least <= len(runs) < NUM_RUNS or damage is not damage_one_page
    assert len(runs) == found.kept["records"]
    assert all(run.payload["marker"] == run.id for run in runs)
    if least:
        # From both ends: only what was on the page is lost.
        assert {"run-0", f"run-{NUM_RUNS - 1}"} <= {run.id for run in runs}
        assert len(VariantQueue(store).list().variants) == 3
    folders = {path.name for path in (filled.folder / "variants").iterdir()}
    added = VariantQueue(store).add("new", "t", "b", "l").variant
    assert added is not None
    assert added.id not in folders, "the folder of a variant that was lost is not taken"
    assert not list(filled.folder.glob("repair-*"))


def test_each_repair_has_a_backup_of_its_own(filled: Store) -> None:
    names = []
    for _ in range(2):
        damage_nothing_of_ours(filled.path)
        names.append(repair(filled.workspace).backup.name)
    assert names == ["flashrt-damaged-1.db", "flashrt-damaged-2.db"]


def test_what_is_sound_newer_or_absent_is_left_alone(filled: Store, tmp_path: Path) -> None:
    before = filled.path.read_bytes()
    with pytest.raises(InputError, match="nothing to repair"):
        repair(filled.workspace)
    with closing(sqlite3.connect(filled.path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="upgrade flashrt"):
        repair(filled.workspace)
    assert len(filled.path.read_bytes()) == len(before)
    with pytest.raises(InputError, match="makes one"):
        repair(tmp_path)


def test_a_disk_that_refuses_is_told_in_one_sentence(
    filled: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    damage_one_page(filled.path)
    damaged = filled.path.read_bytes()
    monkeypatch.setattr(shutil, "copyfile", full)
    assert main(["repair", "--workspace", str(filled.workspace)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "No space left" in said.err
    assert said.err.count("\n") == 1
    assert filled.path.read_bytes() == damaged
    assert not list(filled.folder.glob("repair-*"))


def test_the_command_says_what_it_did(filled: Store) -> None:
    damage_one_page(filled.path)
    line = [sys.executable, "-P", "-m", "flashrt.mcp_server", "repair", "--workspace", str(filled.workspace)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flashrt-damaged-1.db" in done.stdout
    again = subprocess.run(line, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "nothing to repair" in again.stderr
