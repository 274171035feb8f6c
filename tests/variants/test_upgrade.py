"""Databases of older releases are upgraded with every record kept, and a copy of the old one beside the new."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrt import __version__
from flashrt.errors import InputError
from flashrt.variants import VariantQueue, open_store
from flashrt.variants.database import SCHEMA_VERSION

OLDER = sorted((Path(__file__).parent / "older").glob("schema-*.sql"))
TABLES = ("records", "reservations", "variants", "history", "jobs")


def lay_out(workspace: Path, dump: Path) -> Path:
    """Write a database as an older release left it; return its path."""
    (workspace / ".flashrt").mkdir()
    path = workspace / ".flashrt" / "flashrt.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())
        connection.execute("PRAGMA journal_mode = WAL")
    return path


def state(path: Path) -> tuple[int, dict[str, list[tuple[object, ...]]]]:
    """Return the schema version and the rows."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        rows = {table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in TABLES}
    return version, rows


def test_there_is_a_fixture_of_every_older_schema() -> None:
    assert [path.stem for path in OLDER] == [f"schema-{version}" for version in range(1, SCHEMA_VERSION)]


@pytest.mark.parametrize("dump", OLDER, ids=lambda path: path.stem)
def test_an_older_database_is_upgraded_and_kept(workspace: Path, dump: Path) -> None:
    path = lay_out(workspace, dump)
    version, rows = state(path)
    assert all(rows.values()), "the fixture has something of everything"
    store = open_store(workspace)
    assert state(path) == (SCHEMA_VERSION, rows)
    assert state(path.with_name(f"flashrt-{dump.stem}.db")) == (version, rows)
    # What came from the older release is found, and new things come beside it.
    assert store.get_record("run", "run-00000001").payload["valid"] is True
    added = VariantQueue(store).add("h", "t", "b", "l").variant
    assert added is not None
    assert len(VariantQueue(store).list().variants) == len(rows["variants"]) + 1
    open_store(workspace)
    assert sorted(one.name for one in path.parent.glob("*.db")) == sorted(["flashrt.db", f"flashrt-{dump.stem}.db"])
    assert not list(path.parent.glob("*.part*"))


def test_many_processes_upgrade_it_once(workspace: Path, start_python: Callable[..., subprocess.Popen[str]]) -> None:
    path = lay_out(workspace, OLDER[0])
    _, rows = state(path)
    script = (
        "import sys, pathlib\nfrom flashrt.variants import open_store\nsys.stdin.readline()\n"
        "open_store(pathlib.Path(sys.argv[1])).put_record('run', f'run-{sys.argv[2]}', {})\n"
    )
    processes = [start_python(script, workspace, number) for number in range(4)]
    for process in processes:
        process.communicate("go\n")
        assert process.returncode == 0
    assert len(state(path)[1]["records"]) == len(rows["records"]) + 4
    assert state(path.with_name("flashrt-schema-1.db")) == (1, rows)


def test_no_room_for_the_copy_is_refused_and_nothing_is_changed(workspace: Path) -> None:
    path = lay_out(workspace, OLDER[0])
    before = state(path)
    script = "import sys, pathlib\nfrom flashrt.variants import open_store\nopen_store(pathlib.Path(sys.argv[1]))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(workspace)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )  # fmt: skip
    assert done.returncode != 0
    assert "ResourceMissingError" in done.stderr
    assert "flashrt.db" in done.stderr
    assert state(path) == before
    assert sorted(one.name for one in path.parent.glob("*.db*") if "-" not in one.name) == ["flashrt.db"]
    assert not list(path.parent.glob("*.part*"))
    open_store(workspace)
    assert state(path) == (SCHEMA_VERSION, before[1])


def test_a_newer_database_names_the_release_that_wrote_it(workspace: Path) -> None:
    path = open_store(workspace).path
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO releases VALUES (99, '7.8.9', 0)")
        connection.execute("PRAGMA user_version = 99")
        connection.commit()
    with pytest.raises(InputError, match=rf"{__version__}.*version 99, written by flashrt 7\.8\.9.*upgrade flashrt"):
        open_store(workspace)
