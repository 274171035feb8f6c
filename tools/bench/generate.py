"""``python -m flashrt.bench.generate FILE.py:FUNCTION SEED COUNT OUT``: run an inputs function, record its items."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from flashrt.bench.record import EXIT_USER_ERROR, write_recording
from flashrt.errors import FlashrtError
from flashrt.ir.ops import load_function, user_error


def main(arguments: Sequence[str]) -> int:
    """Generate items and write them; exit status 3 when the user's function is at fault."""
    reference, seed, count, out = arguments
    file, _, function = reference.rpartition(":")
    where = f"inputs '{Path(file).name}:{function}'"
    try:
        generate = load_function(Path(file), function)
        try:
            write_recording(Path(out), islice(generate(int(seed), int(count)), int(count)))
        except Exception as error:
            raise user_error(
                where, "items {input name: value}", error, "correct the function and call again"
            ) from error
    except FlashrtError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
