"""kill -9 of any one process at a random moment: the short form of ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.kills import kill_one


@pytest.mark.parametrize("seed", range(8))
def test_a_process_killed_at_a_random_moment_leaves_nothing_and_hangs_nothing(tmp_path: Path, seed: int) -> None:
    done = kill_one(tmp_path, seed)
    assert not done.problems, f"{done.victim} killed after {done.after_s:.2f} s"
