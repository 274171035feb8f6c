"""Key presses as a player makes them: held for a while, sometimes two at once, never both of an opposite pair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

FRAMES_PER_BATCH = 12
KEYS = ("W", "A", "S", "D", "up", "left", "down", "right")
"""The columns of an action row."""

# Each finger group rests or holds one of its keys; the weights favour walking ahead and looking around.
GROUPS: dict[str, tuple[tuple[str | None, float], ...]] = {
    "walk": ((None, 0.25), ("W", 0.6), ("S", 0.15)),
    "strafe": ((None, 0.7), ("A", 0.15), ("D", 0.15)),
    "turn": ((None, 0.5), ("left", 0.25), ("right", 0.25)),
    "pitch": ((None, 0.8), ("up", 0.1), ("down", 0.1)),
}
MEAN_HOLD_FRAMES = 9


def batches(seed: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield `count` batches {"actions": float32 [12, 8]}, one row a displayed frame; no two batches are equal.

    The stream is a function of the seed only: a longer stream begins with the shorter one.
    """
    random = np.random.default_rng(seed)
    held: dict[str, str | None] = dict.fromkeys(GROUPS)
    frames_left = dict.fromkeys(GROUPS, 0)
    seen: set[bytes] = set()
    while len(seen) < count:
        actions = np.zeros((FRAMES_PER_BATCH, len(KEYS)), dtype=np.float32)
        for row in actions:
            for group, choices in GROUPS.items():
                if frames_left[group] == 0:
                    pick = random.choice(len(choices), p=[weight for _, weight in choices])
                    held[group] = choices[pick][0]
                    frames_left[group] = int(random.geometric(1 / MEAN_HOLD_FRAMES))
                frames_left[group] -= 1
                key = held[group]
                if key is not None:
                    row[KEYS.index(key)] = 1.0
        if actions.tobytes() not in seen:
            seen.add(actions.tobytes())
            yield {"actions": actions}
