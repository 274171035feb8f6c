"""Speech-like sound, from a seed: voiced syllables with moving formants, and pauses between. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 16_000
SYLLABLE_S = (0.12, 0.28)
PAUSE_S = (0.02, 0.12)
PITCH_HZ = (90.0, 220.0)
FORMANTS_HZ = ((300.0, 800.0), (900.0, 2300.0), (2400.0, 3200.0))


def utterance(random: np.random.Generator, seconds: float, fill: float = 0.85) -> NDArray[np.float32]:
    """Return float32 [16000 * seconds]: syllables over the first share `fill`, silence after.

    Each syllable is a pulse train at a falling pitch, shaped by three formants, with soft ends.
    """
    sound = np.zeros(round(SAMPLE_RATE_HZ * seconds), dtype=np.float64)
    base_hz = random.uniform(*PITCH_HZ)
    at = 0.0
    while at < fill * seconds:
        length = random.uniform(*SYLLABLE_S)
        first = round(at * SAMPLE_RATE_HZ)
        times = np.arange(min(round(length * SAMPLE_RATE_HZ), len(sound) - first)) / SAMPLE_RATE_HZ
        if not len(times):
            break
        pitch = base_hz * (1.0 + 0.1 * random.standard_normal()) * (1.0 - 0.2 * times / length)
        phase = 2.0 * np.pi * np.cumsum(pitch) / SAMPLE_RATE_HZ
        centres = [random.uniform(low, high) for low, high in FORMANTS_HZ]
        syllable = np.zeros_like(times)
        for harmonic in range(1, 24):
            loudness = sum(np.exp(-(((harmonic * base_hz - centre) / 180.0) ** 2)) for centre in centres)
            syllable += (loudness + 0.02) / harmonic**0.5 * np.sin(harmonic * phase)
        sound[first : first + len(times)] += 0.1 * np.sin(np.pi * times / length) ** 0.5 * syllable
        at += length + random.uniform(*PAUSE_S)
    breath = 0.002 * random.standard_normal(len(sound))
    return (sound + breath).astype(np.float32)
