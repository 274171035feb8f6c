"""The store keeps records between processes, and leaves alone a database that it must not touch."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashrt.errors import InputError
from flashrt.variants import Store, VariantQueue, new_id, open_store
from flashrt.variants.database import SCHEMA_VERSION


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_is_found_again_with_its_path_wherever_the_workspace_moves(workspace: Path, tmp_path: Path) -> None:
    document = workspace / "docs" / "app.yaml"
    document.parent.mkdir()
    document.write_text("name: app\n")
    with open_store(workspace) as store:
        store.put_record("program", "p1", {"name": "app"}, document)
        assert store.find_record("p1") == ("program", {"name": "app"}, document)
    moved = workspace.rename(tmp_path / "moved")
    record = open_store(moved).get_record("program", "p1")
    assert record.path == moved / "docs" / "app.yaml"
    assert record.payload == {"name": "app"}


def test_putting_again_replaces_and_listing_is_oldest_first(store: Store) -> None:
    store.put_record("run", "run-1", {"n": 1})
    store.put_record("run", "run-2", {"n": 2})
    store.put_record("run", "run-1", {"n": 3})
    assert [(record.id, record.payload["n"]) for record in store.list_records("run")] == [("run-1", 3), ("run-2", 2)]
    assert store.list_records("plan") == []
    assert store.find_record("nothing") is None


def test_an_unknown_id_gets_the_nearest_and_the_call_that_makes_one(store: Store) -> None:
    store.put_record("run", "run-0a1b2c3d", {})
    store.put_record("equivalence", "eq-00000000", {})
    with pytest.raises(InputError, match=r"did you mean 'run-0a1b2c3d'.*bench_run"):
        store.get_record("run", "run-0a1b2c3e")
    with pytest.raises(InputError, match="the id of an equivalence"):
        store.get_record("run", "eq-00000000")


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside.yaml"])
def test_a_path_outside_the_workspace_is_refused(store: Store, path: str) -> None:
    with pytest.raises(InputError, match="inside the workspace"):
        store.put_record("program", "p", {}, Path(path))
    assert store.list_records("program") == []


def test_new_ids_have_a_prefix_and_eight_digits() -> None:
    prefix, _, digits = new_id("run").partition("-")
    assert prefix == "run"
    assert len(digits) == 8
    int(digits, 16)


def test_git_ignores_the_folder(store: Store) -> None:
    assert (store.folder / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("left_open", [False, True], ids=["closed", "in use, version still in the log"])
def test_a_newer_database_is_refused_and_left_as_it_is(workspace: Path, left_open: bool) -> None:
    path = open_store(workspace).path
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 6}")
    if not left_open:
        connection.close()
    before = contents(workspace)
    with pytest.raises(InputError) as caught:
        open_store(workspace)
    text = str(caught.value)
    assert str(path) in text
    assert f"version {SCHEMA_VERSION + 6}" in text
    assert f"version {SCHEMA_VERSION} " in text
    assert "upgrade flashrt" in text
    if left_open:
        connection.close()
    else:
        assert contents(workspace) == before


def damage_nothing_of_ours(path: Path) -> None:
    path.write_bytes(b"this was never a database, but somebody's notes\n" * 50)


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


def damage_length(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def damage_by_another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")


@pytest.mark.parametrize("damage", [damage_nothing_of_ours, damage_pages, damage_length, damage_by_another_program])
def test_a_corrupt_database_is_refused_and_left_as_it_is(workspace: Path, damage: Callable[[Path], None]) -> None:
    store = open_store(workspace)
    for number in range(50):
        store.put_record("run", f"run-{number}", {"samples": list(range(200))})
    damage(store.path)
    before = contents(workspace)
    with pytest.raises(InputError, match=r"sound database.*move 'flashrt.db'"):
        open_store(workspace)
    assert contents(workspace) == before


def test_damage_that_shows_only_in_use_is_told_in_the_same_words(store: Store) -> None:
    for number in range(50):
        store.put_record("run", f"run-{number}", {"samples": list(range(200))})
    damage_pages(store.path)
    with pytest.raises(InputError, match=r"move 'flashrt.db'"):
        store.list_records("run")


def test_after_the_file_is_moved_aside_a_new_one_is_made(workspace: Path) -> None:
    store = open_store(workspace)
    damage_nothing_of_ours(store.path)
    store.path.rename(store.path.with_suffix(".old"))
    open_store(workspace).put_record("run", "run-1", {})


def test_a_workspace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="existing folder"):
        open_store(tmp_path / "absent")
    (tmp_path / ".flashrt").write_text("a file where the folder belongs")
    with pytest.raises(InputError, match=r"--workspace"):
        open_store(tmp_path)
    with pytest.raises(InputError, match=r"--workspace"):
        open_store(Path("/proc"))


def test_a_failed_write_keeps_nothing(store: Store) -> None:
    def fail() -> None:
        with store.writing() as connection:
            connection.execute("INSERT INTO records VALUES ('run', 'run-1', '{}', NULL, 0)")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError):
        fail()
    assert store.list_records("run") == []


def test_many_processes_make_and_fill_one_store(
    workspace: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    script = (
        "import sys, pathlib\nfrom flashrt.variants import open_store\n"
        "sys.stdin.readline()\n"
        "for n in range(20): open_store(pathlib.Path(sys.argv[1])).put_record('run', f'run-{sys.argv[2]}-{n}', {})\n"
    )
    processes = [start_python(script, workspace, number) for number in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert len(open_store(workspace).list_records("run")) == 80


def test_threads_share_one_store(store: Store) -> None:
    threads = [
        threading.Thread(target=lambda n=n: store.put_record("run", f"run-{n}", {}))  # type: ignore[misc]
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.list_records("run")) == 12


def test_importing_loads_no_framework() -> None:
    code = (
        "import sys, flashrt.variants, flashrt.mcp_server.jobs\n"
        "print(sorted({'torch', 'numpy', 'networkx', 'scipy', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_queue_survives_reopening(workspace: Path) -> None:
    VariantQueue(open_store(workspace)).add("h", "t", "b", "l")
    assert [variant.id for variant in VariantQueue(open_store(workspace)).list().variants] == ["var-0001"]
