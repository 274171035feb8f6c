"""What a user says, turn by turn: one second of speech-like sound, never the same twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flashrt.apps.shared.voice import utterance

SECONDS = 1.0


def batches(seed: int, count: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Yield `count` batches {"speech": float32 [16000]}, one utterance a turn.

    The stream is a function of the seed only: a longer stream begins with the shorter one.
    """
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield {"speech": utterance(random, SECONDS)}
