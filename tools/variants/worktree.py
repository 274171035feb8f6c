"""A second work tree of the user's repository that shows what the first one holds now; all else in it rests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashrt.variants.copying import SKIPPED, copy_entry, copy_tree

_GITLINK = "160000"
_TIMEOUT_S = 600


class GitFailedError(Exception):
    """Git is missing, refused or failed: a plain copy is made instead."""


@dataclass(frozen=True)
class Checkout:
    """A folder inside a repository with at least one commit.

    Parameters
    ----------
    root
        Top of its work tree.
    prefix
        The folder's path below the top, with a slash at the end, or empty.
    """

    root: Path
    prefix: str


def git(folder: Path, *arguments: str, give: bytes | None = None) -> bytes:
    """Run git without hooks, prompts or needless locks and return what it printed.

    Raises
    ------
    GitFailedError
        It is missing or reports an error.
    """
    # A server that a hook started has variables that would point git at another repository or index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, input=give or b"", capture_output=True, env=environment, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitFailedError(str(error)) from None
    if done.returncode:
        raise GitFailedError(done.stderr.decode(errors="replace").strip())
    return done.stdout


def find_checkout(folder: Path) -> Checkout | None:
    """Return the repository that `folder` lies in; None where there is none, none with a commit, or it is ignored."""
    try:
        git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        lines = git(folder, "rev-parse", "--show-toplevel", "--show-prefix").decode().split("\n")
    except (GitFailedError, UnicodeDecodeError):
        return None
    if not lines[0] or (lines[1] and _is_ignored(folder)):
        return None
    return Checkout(Path(lines[0]), lines[1])


def _is_ignored(folder: Path) -> bool:
    """Return whether the repository ignores the whole folder, so that a work tree would hold nothing of it."""
    try:
        git(folder, "check-ignore", "--quiet", "--", str(folder.resolve()))
    except GitFailedError:
        return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other variants' makers out meanwhile: git fails where it sees another's work tree half registered."""
    common = os.fsdecode(git(folder, "rev-parse", "--git-common-dir").rstrip(b"\n"))
    # A lock on the directory itself leaves no file in the user's repository.
    descriptor = os.open(folder / common, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def add_worktree(source: Path, checkout: Checkout, target: Path) -> list[str]:
    """Make `target` a detached work tree at the source's commit, holding the source's part as it is now.

    Parameters
    ----------
    source
        The folder whose view is wanted: the workspace, or a parent variant's folder.
    target
        Does not exist yet; the source's part lies in ``target/prefix``.

    Returns
    -------
    The files too big to copy, which are symbolic links to the source's.
    """
    # Forced twice: a place that a crashed attempt left registered or locked is ours to take.
    with _alone(source):
        git(
            source, "worktree", "add", "--force", "--force", "--quiet", "--detach", "--no-checkout", str(target), "HEAD"
        )
    git(target, "read-tree", "HEAD")
    if checkout.prefix:
        names = git(target, "ls-files", "-z").split(b"\0")
        outside = [name for name in names if name and not name.startswith(os.fsencode(checkout.prefix))]
        # The rest of the repository is neither checked out nor reported as deleted.
        if outside:
            git(target, "update-index", "-z", "--skip-worktree", "--stdin", give=b"\0".join(outside) + b"\0")
    git(target, "checkout-index", "--all", "--force", "--quiet", "--index")
    destination = target / checkout.prefix
    destination.mkdir(parents=True, exist_ok=True)
    return _overlay(source, destination)


def _overlay(source: Path, destination: Path) -> list[str]:
    """Bring over what the source has changed, deleted and added since its commit; ignored files stay behind."""
    linked: list[str] = []
    fields = git(
        source, "diff", "--no-renames", "--no-ext-diff", "--relative", "--name-status", "-z", "HEAD", "--", "."
    )
    words = fields.split(b"\0")
    for status, name in zip(words[0::2], words[1::2], strict=False):
        path = os.fsdecode(name)
        _discard(destination / path)
        if status[:1] != b"D":
            linked += copy_entry(source / path, destination / path, source)
    for name in git(source, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0"):
        path = os.fsdecode(name).rstrip("/")
        # An environment that nobody ignores is still no part of a variant; listed and gone was deleted meanwhile.
        if path and not SKIPPED.intersection(Path(path).parts) and os.path.lexists(source / path):
            _discard(destination / path)
            linked += copy_entry(source / path, destination / path, source)
    for path in _submodules(source):
        if (source / path).is_dir():
            _discard(destination / path)
            linked += copy_tree(source / path, destination / path, source)
    return linked


def _submodules(source: Path) -> list[str]:
    entries = git(source, "ls-files", "-z", "--stage").split(b"\0")
    return [os.fsdecode(entry.split(b"\t", 1)[1]) for entry in entries if entry.startswith(_GITLINK.encode())]


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def remove_worktree(workspace: Path, target: Path) -> None:
    """Make the repository forget a work tree; silent where it never knew it."""
    try:
        with _alone(workspace):
            _try(workspace, "worktree", "remove", "--force", "--force", str(target))
            if _is_known(workspace, target):
                shutil.rmtree(target, ignore_errors=True)
                _try(workspace, "worktree", "prune")
    except (GitFailedError, OSError):
        # No repository any more: there is nothing that could remember it.
        return


def _is_known(workspace: Path, target: Path) -> bool:
    try:
        lines = git(workspace, "worktree", "list", "--porcelain").split(b"\n")
    except GitFailedError:
        return False
    return b"worktree " + os.fsencode(target) in lines


def _try(folder: Path, *arguments: str) -> None:
    try:
        git(folder, *arguments)
    except GitFailedError:
        return
