"""Run an inputs function and record its items.

``python -m flashrt.bench.generate FILE.py:FUNCTION SEED COUNT DESCRIPTOR PARENT``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from flashrt.bench.record import ERROR_MARK, EXIT_USER_ERROR, write_items
from flashrt.errors import FlashrtError, InputError, input_error
from flashrt.ir.documents import shown
from flashrt.ir.ops import load_function, user_error
from flashrt.runtime.lifeline import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Generate items and write them; exit status 3 when the user's function is at fault."""
    reference, seed, count, out, parent = arguments
    die_with_parent(int(parent))
    file, _, function = reference.rpartition(":")
    where = f"inputs '{Path(file).name}:{function}'"
    try:
        generate = load_function(Path(file), function)
        try:
            items = _iterate(generate(int(seed), int(count)))
            with os.fdopen(int(out), "wb") as recording:
                write_items(recording, islice(items, int(count)))
        except InputError as error:
            raise InputError([replace(one, where=f"{where}, {one.where}") for one in error.findings]) from error
        except Exception as error:
            raise user_error(
                where, "items {input name: value}", error, "correct the function and call again"
            ) from error
    except FlashrtError as error:
        print(ERROR_MARK, error, file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return 0


def _iterate(returned: Any) -> Iterator[Any]:
    try:
        return iter(returned)
    except TypeError:
        raise input_error(
            "what it returns", "an iterable of items {input name: value}",
            f"{shown(returned)} ({type(returned).__name__})", "yield one mapping a batch, and call again",
            rule="items-not-iterable",
        ) from None  # fmt: skip


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads of the user's code that still run must not hold the process.
    os._exit(code)
