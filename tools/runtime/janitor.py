"""Removes a deployment's named shared memory when its supervisor has gone, however it went.

Started as ``python -I -S janitor.py FD TOKEN`` in a session of its own: reads from FD, whose other end the supervisor
holds, until that closes. It uses the standard library alone, so that it starts at once and is small.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SHM = Path("/dev/shm")
LAST_LOOK_S = 0.3
"""How long after the first removal to look again: workers may have been writing while they died."""
END_TIMEOUT_S = 10


def remove_files(token: str) -> None:
    """Remove the files in /dev/shm of the deployments whose token begins with `token`."""
    for path in SHM.glob(f"flashrt-{token}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


class Janitor:
    """The supervisor's hold on its janitor."""

    def __init__(self, token: str) -> None:
        read, self._hold = os.pipe()
        try:
            # Without the mark of the system: it has to outlive everything that carries it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read), token],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[read],
                env={},
                start_new_session=True,
            )
        finally:
            os.close(read)

    def close(self) -> None:
        """Let it remove what is there, and reap it; nobody uses it any more."""
        os.write(self._hold, b".")
        os.close(self._hold)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Wait for the supervisor's end, then remove."""
    number, token = int(sys.argv[1]), sys.argv[2]
    polite = bool(os.read(number, 1))
    remove_files(token)
    if not polite:
        time.sleep(LAST_LOOK_S)
        remove_files(token)


if __name__ == "__main__":
    main()
