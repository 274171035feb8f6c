import numpy as np


def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {"actions": generator.standard_normal((6, 3)).astype(np.float32)}
