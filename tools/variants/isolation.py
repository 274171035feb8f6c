"""A folder of its own for every variant, so that none disturbs another or the user's files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashrt.errors import input_error
from flashrt.variants.copying import copy_tree
from flashrt.variants.worktree import Checkout, GitFailedError, add_worktree, find_checkout, remove_worktree


@dataclass(frozen=True)
class IsolatedFolder:
    """Where a variant lives.

    Parameters
    ----------
    path
        The variant's view of the workspace: a path relative to the workspace holds relative to this folder too.
    kind
        A git work tree (detached), or a copy.
    linked
        Files over 256 MB, which are symbolic links to the originals: not to be written.
    note
        Why it is a copy although there is a repository; else empty.
    """

    path: Path
    kind: Literal["worktree", "copy"]
    linked: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return kind, linked files and note, as the queue keeps them."""
        return {"kind": self.kind, "linked": list(self.linked), "note": self.note}


def variants_folder(workspace: Path) -> Path:
    """Return the folder that holds the variants' folders."""
    return workspace.resolve() / ".flashrt" / "variants"


def make_folder(workspace: Path, variant_id: str, parent_folder: Path | None = None) -> Path:
    """Make the isolated folder of a variant and return it; see `isolate`."""
    return isolate(workspace, variant_id, parent_folder).path


def isolate(workspace: Path, variant_id: str, parent_folder: Path | None = None) -> IsolatedFolder:
    """Make ``.flashrt/variants/<id>`` show what the workspace, or the parent's folder, holds now.

    A work tree where there is a repository with a commit, changed and untracked (not ignored) files included; where
    the workspace is a folder inside the repository, only its part, and the returned path is that part. Else a copy.
    Whatever an interrupted attempt left there is removed first.

    Raises
    ------
    InputError
        A file cannot be read, or the folder cannot be written.
    """
    root = workspace.resolve()
    target = variants_folder(root) / variant_id
    remove_folder(root, variant_id)
    source = root if parent_folder is None else parent_folder.resolve()
    checkout = _checkout_of(root, source, parent_folder is not None)
    note = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if checkout is not None:
            try:
                linked = add_worktree(source, checkout, target)
                return IsolatedFolder(target / checkout.prefix, "worktree", tuple(linked))
            except GitFailedError as error:
                note = f"git could not make a work tree ({' '.join(str(error).split())})"
                remove_folder(root, variant_id)
        linked = copy_tree(source, target, source)
    except (OSError, shutil.Error) as error:
        remove_folder(root, variant_id)
        raise input_error(
            f"variant '{variant_id}', folder '{target}'", f"a copy of '{source}'", str(error),
            "make the files readable and the folder writable, then call again", rule="cannot-isolate",
        ) from None  # fmt: skip
    except BaseException:
        remove_folder(root, variant_id)
        raise
    return IsolatedFolder(target, "copy", tuple(linked), note)


def _checkout_of(root: Path, source: Path, is_parent: bool) -> Checkout | None:
    checkout = find_checkout(source)
    # A parent that is a plain copy lies in the user's repository too, but is not a part of it.
    if checkout is not None and is_parent and not checkout.root.resolve().is_relative_to(variants_folder(root)):
        return None
    return checkout


def remove_folder(workspace: Path, variant_id: str) -> None:
    """Remove a variant's folder, and its entry in the repository; silent where there is none."""
    target = variants_folder(workspace) / variant_id
    if not target.exists() and not target.is_symlink():
        return
    if (target / ".git").is_file():
        remove_worktree(workspace.resolve(), target)
    shutil.rmtree(target, ignore_errors=True)
