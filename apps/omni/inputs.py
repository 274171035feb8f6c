"""Requests to an assistant: a few words, a second of sound, a small picture; never the same twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flashrt.apps.shared.voice import utterance

TEXT_TOKENS = 12
NUM_WORDS = 400
"""Text tokens are drawn from these; those above are marks."""
SIDE = 32


def batches(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` requests {"text": int64 [12], "sound": float32 [16000], "image": uint8 [32, 32, 3]}.

    The stream is a function of the seed only: a longer stream begins with the shorter one.
    """
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    for _ in range(count):
        # Words come as often as in a language: the n-th most frequent about 1/n as often as the first.
        words = np.minimum(random.zipf(1.3, TEXT_TOKENS), NUM_WORDS) - 1
        sky, ground = random.integers(0, 256, (2, 3))
        centre, radius = random.uniform(8, 24, 2), random.uniform(4, 10)
        image = np.where((rows > random.integers(12, 24))[..., None], ground, sky)
        disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
        image = np.where(disc[..., None], random.integers(0, 256, 3), image)
        yield {"text": words.astype(np.int64), "sound": utterance(random, 1.0), "image": image.astype(np.uint8)}
