"""Knobs as a hand turns them: slowly, and never twice the same way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

ROWS = 8
NUM_KNOBS = 4


def batches(seed: int, count: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Yield `count` batches {"knobs": float32 [8, 4]}; a longer stream begins with the shorter one."""
    random = np.random.default_rng(seed)
    position = random.uniform(-1, 1, NUM_KNOBS)
    for _ in range(count):
        rows = []
        for _ in range(ROWS):
            position = np.clip(position + 0.1 * random.standard_normal(NUM_KNOBS), -1, 1)
            rows.append(position)
        yield {"knobs": np.array(rows, dtype=np.float32)}
