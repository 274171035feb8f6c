"""What a webcam sees: a person who sways before a wall with a window, with the sensor's noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

FRAMES_PER_BATCH = 12
SIDE = 32


def batches(seed: int, count: int) -> Iterator[dict[str, NDArray[np.uint8]]]:
    """Yield `count` batches {"camera": uint8 [12, 32, 32, 3]}, one frame after the other.

    The stream is a function of the seed only: a longer stream begins with the shorter one.
    """
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    wall, skin, shirt = (random.integers(low, high, 3) for low, high in ((60, 200), (140, 230), (20, 180)))
    window = (abs(rows - 0.25) < 0.15) & (abs(columns - random.uniform(0.2, 0.8)) < 0.15)
    phase, pace = random.uniform(0, 6.28), random.uniform(0.05, 0.15)
    for batch in range(count):
        frames = []
        for frame in range(FRAMES_PER_BATCH):
            centre = 0.5 + 0.15 * np.sin(phase + pace * (batch * FRAMES_PER_BATCH + frame))
            head = ((rows - 0.4) / 0.16) ** 2 + ((columns - centre) / 0.12) ** 2 < 1
            body = (rows > 0.58) & (abs(columns - centre) < 0.26 * np.clip((rows - 0.5) * 4, 0, 1))
            image = np.broadcast_to(wall, (SIDE, SIDE, 3)).astype(float)
            for where, colour in ((window, 240), (body, shirt), (head, skin)):
                image = np.where(where[..., None], colour, image)
            frames.append(np.clip(image + 3 * random.standard_normal(image.shape), 0, 255).astype(np.uint8))
        yield {"camera": np.stack(frames)}
