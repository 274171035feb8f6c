"""Questions, spoken by the voice that also answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import real_models as models  # type: ignore[import-not-found]

PLACES = ("France", "Italy", "Spain", "Japan", "Egypt", "Germany", "Greece", "Canada", "Norway", "Poland")
FORMS = ("What is the capital of {}?", "Which language do people speak in {}?", "What is {} famous for?")


def batches(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` batches {"question": float32 [samples] at 16 kHz}."""
    voice = models.load_voice()
    questions = [form.format(place) for form in FORMS for place in PLACES]
    random = np.random.default_rng(seed)
    for number in range(count):
        text = questions[int(random.integers(len(questions)))] if number else questions[seed % len(PLACES)]
        yield {"question": models.to_hearing(models.speak(voice, text), voice.config.sample_rate)}
