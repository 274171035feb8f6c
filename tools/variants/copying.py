"""Copies of a user's folder: code and documents are copied, very big files are symbolic links to the originals."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

SKIPPED = {".flashrt", ".git", ".venv", "node_modules", "__pycache__"}
BIG_BYTES = 256 * 1024 * 1024


def copy_tree(source: Path, destination: Path, root: Path) -> list[str]:
    """Copy a folder without version control, environments, caches and the store.

    Parameters
    ----------
    root
        The folder that is being isolated: symbolic links that leave it are made absolute, so that they still hold.

    Returns
    -------
    The files that are symbolic links to the originals for their size, relative to `root`.
    """
    destination.mkdir(parents=True, exist_ok=True)
    linked: list[str] = []
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name not in SKIPPED:
                linked += copy_entry(Path(entry.path), destination / entry.name, root)
    shutil.copystat(source, destination)
    return linked


def copy_entry(source: Path, destination: Path, root: Path) -> list[str]:
    """Copy one file, link or folder; sockets, pipes and devices are left out. Returns as `copy_tree` does.

    What goes meanwhile, as others' temporary files do, is left out too.
    """
    try:
        return _copy(source, destination, root)
    except FileNotFoundError as error:
        if not Path(os.fsdecode(error.filename or "")).is_relative_to(source):
            raise
        return []


def _copy(source: Path, destination: Path, root: Path) -> list[str]:
    status = source.lstat()
    destination.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(_held(source, root), destination)
    elif stat.S_ISDIR(status.st_mode):
        return copy_tree(source, destination, root)
    elif stat.S_ISREG(status.st_mode):
        if status.st_size > BIG_BYTES:
            os.symlink(source.resolve(), destination)
            return [str(source.relative_to(root))]
        shutil.copy2(source, destination)
    return []


def _held(link: Path, root: Path) -> str:
    """Return where a copied link must point: the same words when it stays inside, else the place it means now."""
    target = os.readlink(link)
    if os.path.isabs(target):
        return target
    meant = Path(os.path.normpath(link.parent / target))
    return target if meant.is_relative_to(root) else str(meant)
