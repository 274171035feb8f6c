"""``flashrt init DIR``: a working application to begin with."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from flashrt.errors import input_error
from flashrt.mcp_server.demo import application_root

SKELETON = "skeleton"


def run_init_command(options: argparse.Namespace) -> int:
    """Carry out the command."""
    return run_init(options.folder)


def run_init(folder: Path) -> int:
    """Lay out a small application in a new or empty folder, and say what to call next; return the exit status.

    Raises
    ------
    InputError
        The folder has other files, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise input_error(
            f"folder '{folder}'", "a new or empty folder", "a file" if folder.is_file() else "one with files",
            "name another; nothing was written", rule="not-empty",
        )  # fmt: skip
    source = application_root() / SKELETON
    try:
        shutil.copytree(
            source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "__init__.py")
        )
    except OSError as error:
        # Of a tree that was copied in part, `shutil.Error` names every file; the first says enough.
        cause = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise input_error(
            f"folder '{folder}'", "a folder that can be written", str(cause), "name another", rule="not-writable"
        ) from None
    name = "".join(letter if letter.isalnum() else "_" for letter in folder.resolve().name).strip("_") or SKELETON
    program = folder / "program.yaml"
    program.write_text(program.read_text().replace(f"name: {SKELETON}", f"name: '{name}'"))
    print(f"laid out {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: cd {shlex.quote(str(folder))}, then the four commands of README.md; they work as they are")
    sys.stdout.flush()
    return 0
