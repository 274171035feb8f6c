"""A variant starts from what the agent sees, and neither its making nor its end touches the user's repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrt.errors import InputError
from flashrt.variants import copying, isolate, make_folder, remove_folder


def run_git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", ".flashrt"}.intersection(path.relative_to(folder).parts)
    }


@pytest.fixture
def repository(workspace: Path) -> Path:
    run_git(workspace, "init", "-q", "-b", "main")
    (workspace / "app").mkdir()
    for name in ("kept", "edited", "deleted", "staged"):
        (workspace / "app" / f"{name}.py").write_text(f"{name} = 1\n")
    (workspace / "other.py").write_text("other = 1\n")
    (workspace / ".gitignore").write_text("*.bin\n.flashrt/\n")
    run_git(workspace, "add", ".")
    run_git(workspace, "commit", "-qm", "first")
    (workspace / "app" / "edited.py").write_text("edited = 2\n")
    (workspace / "app" / "deleted.py").unlink()
    (workspace / "app" / "staged.py").write_text("staged = 2\n")
    (workspace / "app" / "added.py").write_text("added = 2\n")
    run_git(workspace, "add", "app/staged.py", "app/added.py")
    (workspace / "app" / "new näme\twith tab.py").write_text("new = 2\n")
    (workspace / "other.py").write_text("other = 2\n")
    (workspace / "app" / "weights.bin").write_text("ignored")
    hook = workspace / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {workspace}/hook-ran\n")
    hook.chmod(0o755)
    return workspace


def state_of(repository: Path) -> tuple[str, ...]:
    index = (repository / ".git" / "index").read_bytes().hex()
    config = (repository / ".git" / "config").read_text()
    return (index, config, run_git(repository, "for-each-ref"), run_git(repository, "rev-parse", "HEAD"),
            run_git(repository, "--no-optional-locks", "status", "--porcelain"))  # fmt: skip


def test_a_work_tree_shows_dirty_and_new_files_and_touches_nothing(repository: Path) -> None:
    before = state_of(repository)
    seen = tree(repository)
    folder = isolate(repository, "var-0001")
    assert folder.kind == "worktree"
    assert folder.path == repository / ".flashrt" / "variants" / "var-0001"
    seen.pop("app/weights.bin")
    assert tree(folder.path) == seen
    assert state_of(repository) == before
    assert not (repository / "hook-ran").exists()
    assert run_git(folder.path, "rev-parse", "--abbrev-ref", "HEAD").strip() == "HEAD"
    assert "app/edited.py" in run_git(folder.path, "diff", "--name-only")
    remove_folder(repository, "var-0001")
    assert not folder.path.exists()
    assert len(run_git(repository, "worktree", "list").splitlines()) == 1
    assert state_of(repository) == before


def test_a_workspace_inside_a_repository_gets_only_its_part(repository: Path) -> None:
    workspace = repository / "app"
    folder = isolate(workspace, "var-0001")
    top = workspace / ".flashrt" / "variants" / "var-0001"
    assert folder.kind == "worktree"
    assert folder.path == top / "app"
    expected = tree(workspace)
    expected.pop("weights.bin")
    assert tree(folder.path) == expected
    assert sorted(path.name for path in top.iterdir()) == [".git", "app"]
    assert "other.py" not in run_git(top, "status", "--porcelain")
    child = isolate(workspace, "var-0002", folder.path)
    assert child.kind == "worktree"
    assert tree(child.path) == expected


def test_a_child_starts_from_its_parents_folder_and_commit(repository: Path) -> None:
    parent = make_folder(repository, "var-0001")
    (parent / "app" / "kept.py").write_text("kept = 3\n")
    run_git(parent, "add", ".")
    run_git(parent, "commit", "-qm", "in the variant")
    (parent / "app" / "edited.py").write_text("edited = 3\n")
    child = isolate(repository, "var-0002", parent)
    assert child.kind == "worktree"
    assert tree(child.path) == tree(parent)
    assert run_git(child.path, "rev-parse", "HEAD") == run_git(parent, "rev-parse", "HEAD")
    (child.path / "app" / "kept.py").write_text("kept = 4\n")
    assert (parent / "app" / "kept.py").read_text() == "kept = 3\n"
    assert (repository / "app" / "kept.py").read_text() == "kept = 1\n"


def test_variables_of_a_hook_do_not_mislead(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert isolate(repository, "var-0001").kind == "worktree"
    assert not (tmp_path / "index").exists()


def test_what_an_interrupted_attempt_left_is_replaced(repository: Path) -> None:
    folder = make_folder(repository, "var-0001")
    (folder / "half").write_text("half")
    assert not (make_folder(repository, "var-0001") / "half").exists()
    shutil.rmtree(folder)
    assert tree(make_folder(repository, "var-0001"))["app/kept.py"] == "kept = 1\n"


def test_processes_that_add_at_the_same_time_all_get_work_trees(
    repository: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    script = (
        "import sys, pathlib\nfrom flashrt.variants import VariantQueue, open_store\n"
        "queue = VariantQueue(open_store(pathlib.Path(sys.argv[1])))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(4): print(queue.add('h', 't', 'b', 'l').variant.isolation['kind'], flush=True)\n"
    )
    processes = [start_python(script, repository) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    kinds = [kind for process in processes for kind in process.communicate()[0].split()]
    assert kinds == ["worktree"] * 16
    assert len(run_git(repository, "worktree", "list").splitlines()) == 17


def test_without_git_it_is_a_copy(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    folder = isolate(repository, "var-0001")
    assert folder.kind == "copy"
    assert tree(folder.path) == tree(repository)
    assert not (folder.path / ".git").exists()
    monkeypatch.undo()
    child = isolate(repository, "var-0002", folder.path)
    assert child.kind == "copy"
    assert tree(child.path) == tree(repository)


def test_a_repository_without_commit_is_copied(workspace: Path) -> None:
    run_git(workspace, "init", "-q")
    (workspace / "a.py").write_text("a = 1\n")
    folder = isolate(workspace, "var-0001")
    assert folder.kind == "copy"
    assert tree(folder.path) == {"a.py": "a = 1\n"}


def test_where_git_fails_it_is_a_copy_that_says_why(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\ncase "$*" in *checkout-index*) echo "no space" >&2; exit 1;; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    folder = isolate(repository, "var-0001")
    assert folder.kind == "copy"
    assert "no space" in folder.note
    assert tree(folder.path) == tree(repository)
    assert len(run_git(repository, "worktree", "list").splitlines()) == 1


def test_a_copy_skips_environments_and_links_what_is_big(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BIG_BYTES", 100)
    for skipped in (".venv", "node_modules", "__pycache__", ".git"):
        (workspace / "lib" / skipped).mkdir(parents=True)
        (workspace / "lib" / skipped / "x").write_text("x")
    (workspace / "weights").write_text("w" * 101)
    (workspace / "small").write_text("s")
    (workspace / "inside").symlink_to("small")
    (workspace.parent / "shared").write_text("shared")
    (workspace / "outside").symlink_to("../shared")
    (workspace / "dangling").symlink_to("nowhere")
    os.mkfifo(workspace / "pipe")
    folder = isolate(workspace, "var-0001")
    assert folder.linked == ("weights",)
    assert (folder.path / "weights").resolve() == workspace / "weights"
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "dangling", "inside", "lib", "outside", "small", "weights",
    ]  # fmt: skip
    assert list((folder.path / "lib").iterdir()) == []
    assert (folder.path / "inside").resolve() == folder.path / "small"
    assert (folder.path / "outside").read_text() == "shared"
    remove_folder(workspace, "var-0001")
    assert (workspace / "weights").read_text() == "w" * 101


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(workspace: Path) -> None:
    (workspace / ".flashrt").write_text("in the way")
    with pytest.raises(InputError, match="var-0001"):
        make_folder(workspace, "var-0001")


def test_a_workspace_that_the_repository_ignores_is_copied(repository: Path) -> None:
    (repository / ".gitignore").write_text("scratch/\n")
    inner = repository / "scratch" / "app"
    inner.mkdir(parents=True)
    (inner / "ops.py").write_text("here = 1\n")
    before = state_of(repository)
    found = isolate(inner, "var-0001")
    assert found.kind == "copy"
    assert tree(found.path) == {"ops.py": "here = 1\n"}
    assert state_of(repository) == before


def test_files_that_come_and_go_while_they_are_copied_do_no_harm(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "stays.py").write_text("here")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(40):
                (source / f"{number}.part").write_text("gone soon")
                (source / f"folder-{number}").mkdir(exist_ok=True)
            for number in range(40):
                (source / f"{number}.part").unlink()
                (source / f"folder-{number}").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(60):
            copying.copy_tree(source, tmp_path / f"copy-{number}", source)
            assert (tmp_path / f"copy-{number}" / "stays.py").read_text() == "here"
    finally:
        stop.set()
        thread.join()
