"""Recordings: the items of a stream in a file, made by an inputs function in a process of its own.

That process is `flashrt.bench.generate`: the user's code never runs where the verdict is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from flashrt.bench.systems import find_file, split_function
from flashrt.errors import InputError, input_error
from flashrt.ir.documents import shown
from flashrt.runtime.lifeline import MARK, exit_words, kill_marked
from flashrt.runtime.wire import read_messages, write_message

SUFFIX = ".frec"
MAGIC = b"flashrt/recording@1\n"
EXIT_USER_ERROR = 3
ERROR_MARK = "flashrt: the inputs function is at fault:"


def write_recording(path: Path, items: Iterable[Mapping[str, Any]]) -> int:
    """Write items to `path`, replacing it whole or not at all; return how many."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            count = write_items(file, items)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def write_items(file: IO[bytes], items: Iterable[Mapping[str, Any]]) -> int:
    """Write a recording to an open file; return how many items it holds.

    Raises
    ------
    InputError
        An item is no mapping.
    """
    file.write(MAGIC)
    count = 0
    for item in items:
        if not isinstance(item, Mapping):
            raise input_error(
                f"item {count}", "items {input name: value}", f"{shown(item)} ({type(item).__name__})",
                "yield one mapping a batch, and call again", rule="item-not-a-mapping",
            )  # fmt: skip
        write_message(file, {"kind": "item"}, dict(item))
        count += 1
    return count


def read_recording(path: Path, *, torch: bool = False) -> list[dict[str, Any]]:
    """Return the items of a recording.

    Raises
    ------
    InputError
        The file is no recording, or ends early.
    """
    try:
        with path.open("rb") as file:
            return read_items(file, torch=torch)
    except (OSError, ValueError, KeyError) as error:
        raise input_error(
            f"recording '{path.name}'", "a recording (made by ir_interpret or an inputs function)", str(error),
            "name file.py:function instead, or record again", rule="bad-recording",
        ) from None  # fmt: skip


def read_items(file: IO[bytes], *, torch: bool = False) -> list[dict[str, Any]]:
    """Return the items of an open recording.

    Raises
    ------
    ValueError
        It is no recording, or ends early.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin as a recording does")
    return [message["value"] for message in read_messages(file, torch=torch)]


def read_inputs(reference: str, workspace: Path, seed: int, count: int, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Return up to `count` items of an inputs function or recording, tensors as the harness keeps them.

    Parameters
    ----------
    reference
        ``path/to/file.py:function``, called as ``function(seed, count)``, or the path of a recording.

    Raises
    ------
    InputError
        The reference is wrong, the function fails or hangs, or an item is no mapping of input names.
    """
    where = "argument 'inputs'"
    if reference.endswith(SUFFIX):
        items = read_recording(find_file(workspace, reference, where))[:count]
    else:
        file, function = split_function(reference, where, "inputs.py:batches")
        path = find_file(workspace, file, where)
        items = _generate(reference, path, function, seed, count, timeout_s)
    if not items:
        raise input_error(where, "at least one item", "none", "yield one {input name: value} a batch")
    names = set(items[0])
    for index, item in enumerate(items):
        if set(item) != names:
            raise input_error(
                f"{where}, item {index}", f"the same input names in every item: {sorted(names)}", f"{sorted(item)}",
                "correct the inputs function", rule="input-names",
            )  # fmt: skip
    return items


def _generate(
    reference: str, path: Path, function: str, seed: int, count: int, timeout_s: float
) -> list[dict[str, Any]]:
    # Files without a name: hidden inputs are nowhere to be found, and vanish with this process however it ends.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        code = _run_generator([f"{path}:{function}", str(seed), str(count)], path.parent, out, log, timeout_s)
        out.seek(0)
        log.seek(0)
        if code is None:
            raise input_error(
                f"inputs '{reference}'", f"{count} items within {timeout_s:.0f} s", "nothing", "make it faster",
                rule="hang",
            )  # fmt: skip
        if code != 0:
            text = log.read().decode(errors="replace").strip()[-1500:]
            if code == EXIT_USER_ERROR:
                raise InputError(text.rpartition(ERROR_MARK)[2].strip())
            said = f"; its last output:\n{text}" if text else ""
            raise input_error(
                f"inputs '{reference}'", f"{count} items", f"the process ended with {exit_words(code)}{said}",
                "correct the function and call again", rule="crash",
            )  # fmt: skip
        try:
            return read_items(out)
        except (ValueError, KeyError) as error:
            raise input_error(
                f"inputs '{reference}'", f"{count} items", f"a broken recording of them ({error})",
                "leave the descriptors of the process alone, and call again", rule="bad-recording",
            ) from None  # fmt: skip


def _run_generator(
    arguments: Sequence[str], folder: Path, out: IO[bytes], log: IO[bytes], timeout_s: float
) -> int | None:
    """Run the generating process to its end; return its exit status, or None when it was not done in time.

    Its output goes to a file: a pipe would stay open, and be waited for, as long as anything that it started lives.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flashrt.bench.generate", *arguments, str(out.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
        pass_fds=[out.fileno()], env={**os.environ, MARK: mark},
    )  # fmt: skip
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_marked(mark)
        process.wait()
