"""Questions, spoken by the voice that also answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import real_models as models  # type: ignore[import-not-found]

PLACES = ("France", "Italy", "Spain", "Japan", "Egypt", "Greece", "Norway", "Poland", "Portugal", "Ireland", "Peru")


def batches(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` batches {"question": float32 [samples] at 16 kHz}."""
    voice = models.load_voice()
    order = np.random.default_rng(seed).permutation(len(PLACES))
    for number in range(count):
        text = f"What is the capital of {PLACES[order[number % len(PLACES)]]}?"
        yield {"question": models.to_hearing(models.speak(voice, text), voice.config.sample_rate)}
