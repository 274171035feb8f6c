"""Block bootstrap of autocorrelated series, and what few restarts still allow to say. Pure.

Source: Politis & Romano (1992), circular blocks; Politis & White (2004) with Patton, Politis & White (2009), the length
of blocks; Davison & Hinkley (1997), section 3.8, restarts on top of blocks; Hesterberg (2015), "What teachers should
know about the bootstrap", sections 4.3 and 5, few values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MIN_RESTARTS = 5
NUM_DRAWS = 2000
NUM_RESTART_DRAWS = 20_000
SEED = 20250701


def block_length(values: np.ndarray) -> int:
    """Return the length of blocks with the least error of a resampled mean's variance.

    *Source*: Politis & White (2004), section 3.2, circular blocks, with the constant of the 2009 correction.
    """
    num = len(values)
    if num < 8:
        return 1
    centred = np.asarray(values, float) - np.mean(values)
    lookahead = max(5, math.ceil(math.sqrt(math.log10(num))))
    most = min(math.ceil(math.sqrt(num)) + lookahead, num - 1)
    covariance = np.asarray([centred[: num - lag] @ centred[lag:] for lag in range(most + 1)]) / num
    if covariance[0] <= 0:
        return 1
    quiet = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(num) / num)
    last = next((lag for lag in range(most - lookahead + 1) if quiet[lag : lag + lookahead].all()), most - lookahead)
    width = min(2 * max(last, 1), most)
    lags = np.arange(-width, width + 1)
    # A flat top: covariances of half of the lags count in full, the others less and less.
    weights = np.clip(2 * (1 - np.abs(lags) / width), 0, 1)
    parts = weights * covariance[np.abs(lags)]
    bias, spectrum = float(np.abs(lags) @ parts), float(parts.sum())
    if spectrum <= 0:
        return 1
    length = (2 * bias**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * num ** (1 / 3)
    return int(np.clip(math.ceil(length), 1, math.ceil(min(3 * math.sqrt(num), num / 3))))


def resampled_means(values: np.ndarray, num_draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return means of a series put together anew from circular blocks of itself; shape [draws]."""
    series = np.asarray(values, float)
    num, length = len(series), block_length(series)
    if num == 1:
        return np.full(num_draws, series[0])
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([series, series[: length - 1]]))])
    blocks = (sums[length:] - sums[:-length]) / length
    return np.asarray(blocks[generator.integers(num, size=(num_draws, -(-num // length)))].mean(axis=1))


def restarts_drawn(figures: np.ndarray, by_restart: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return means over restarts drawn with replacement, each with a draw of its own; shape [draws].

    What restarts differ by contains already what the noise within each makes them differ by. That part is taken out
    before the noise within is added, or it would count twice (Davison & Hinkley, section 3.8: shrunk centres).

    Parameters
    ----------
    figures : [restarts]
        Each restart's own figure.
    by_restart : [restarts, draws]
        The same, resampled within the restart.
    """
    num, num_draws = by_restart.shape
    between = float(figures.var())
    within = float(by_restart.var(axis=1).mean())
    # Of few restarts the plain variance is too small by num / (num - 1).
    share = max(between * num / (num - 1) - within, 0.0) / between if between > 0 and num > 1 else 0.0
    centres = figures.mean() + math.sqrt(share) * (figures - figures.mean())
    moved = by_restart - figures[:, None] + centres[:, None]
    chosen = generator.integers(num, size=(num_draws, num))
    # A restart that is chosen twice must not bring the same draw twice.
    column = (np.arange(num_draws)[:, None] + np.arange(num)[None, :] * (num_draws // num or 1)) % num_draws
    return np.asarray(moved[chosen, column].mean(axis=1))


def restart_interval_95(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the mean of figures with one value a restart; None below `MIN_RESTARTS`.

    Percentiles of the bootstrap are too narrow for few values; they are taken further out, by how much Student's t
    and the lost degree of freedom ask for (Hesterberg's expanded percentile interval).
    """
    finite = np.asarray([value for value in values if value is not None and math.isfinite(value)], float)
    num = len(finite)
    if num < MIN_RESTARTS:
        return None
    from scipy import stats

    generator = np.random.default_rng(SEED)
    draws = finite[generator.integers(num, size=(NUM_RESTART_DRAWS, num))].mean(axis=1)
    tail = float(stats.norm.cdf(-math.sqrt(num / (num - 1)) * stats.t.ppf(0.975, num - 1)))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return [float(low), float(high)]
