"""What a narrator says, cut into batches of 0.48 s: a prompt of two or three batches, then a pause of a few."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flashrt.apps.shared.voice import SAMPLE_RATE_HZ, utterance

SECONDS = 0.48
"""Twelve frames at 25 a second."""
SAMPLES = round(SECONDS * SAMPLE_RATE_HZ)


def batches(seed: int, count: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Yield `count` batches {"sound": float32 [7680]}: what the microphone took during a batch.

    The stream is a function of the seed only: a longer stream begins with the shorter one.
    """
    random = np.random.default_rng(seed)
    made = 0
    while made < count:
        spoken = int(random.integers(2, 4))
        sound = [utterance(random, SECONDS * spoken, fill=1.0)]
        quiet = int(random.integers(1, 4))
        sound.append((0.001 * random.standard_normal(SAMPLES * quiet)).astype(np.float32))
        for part in np.split(np.concatenate(sound), spoken + quiet)[: count - made]:
            made += 1
            yield {"sound": part}
