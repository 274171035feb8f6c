"""The computation, as pure functions: what outlives a batch comes in and goes out as plain values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

NUM_KNOBS = 4
NUM_STEPS = 2
SIDE = 16
SEED = 5


def load_weights() -> Array:
    """Return seeded weights, float32 [knobs, knobs]; a real application reads a checkpoint here."""
    return np.random.default_rng(SEED).standard_normal((NUM_KNOBS, NUM_KNOBS)).astype(np.float32)


def refine(weights: Array, field: Array, memory: Array) -> tuple[Array, Array]:
    """Take one step: the field [rows, knobs] looks at what this very step made of the batch before.

    Returns
    -------
    The refined field, and the memory of the next batch.
    """
    refined = np.tanh(field @ weights + 0.5 * memory).astype(np.float32)
    return refined, refined


def first_memory(num_rows: int) -> Array:
    """Return a step's memory before the first batch."""
    return np.zeros((num_rows, NUM_KNOBS), np.float32)


def draw(field: Array, ink: Array) -> tuple[NDArray[np.uint8], Array]:
    """Draw one frame a row of the field; each is drawn over the one before, so rows may come in any chunks.

    Returns
    -------
    Frames, uint8 [rows, 16, 16], and the picture that the next frame is drawn over.
    """
    rows, columns = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) / SIDE
    frames = []
    for a, b, c, d in field:
        wave = np.sin(6.0 * (a * rows + b * columns) + c) * d
        ink = (0.7 * ink + 0.3 * wave).astype(np.float32)
        frames.append(np.round((np.clip(ink, -1, 1) + 1) * 127.5).astype(np.uint8))
    return np.stack(frames), ink


def first_ink() -> Array:
    """Return the picture before the first frame."""
    return np.zeros((SIDE, SIDE), np.float32)
