"""Confidence intervals over autocorrelated batches and few restarts. Pure.

Source: Künsch (1989), block bootstrap; Davison & Hinkley (1997), section 3.8, for resampling restarts, then blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flashrt.bench.resampling import restart_interval_95

METHOD = (
    "percentile bootstrap over restarts, then over blocks of neighbouring batches within each (2000 resamples); "
    "figures with one value a restart: expanded percentile bootstrap over at least 5 restarts, Student's t over 2 to "
    "4, none for one"
)
NUM_RESAMPLES = 2000
MAX_BLOCKS = 20
SEED = 20250701

Statistic = Callable[[np.ndarray], np.ndarray]


def cut_blocks(values: np.ndarray) -> list[np.ndarray]:
    """Cut a series into neighbouring blocks of equal length to within one, at least about n^(1/3) batches each."""
    count = min(MAX_BLOCKS, int(len(values) / max(round(len(values) ** (1 / 3)), 1)))
    return list(np.array_split(values, max(count, 1)))


def block_means(values: np.ndarray) -> list[float]:
    """Return the means of a series' blocks: what a later comparison resamples."""
    return [float(block.mean()) for block in cut_blocks(np.asarray(values, float))]


def resample_means(runs: Sequence[Sequence[float]]) -> np.ndarray:
    """Return resampled means of block means, over restarts and then over each one's blocks; shape [resamples].

    One restart shows the spread within it only; between few restarts the interval spans about their range.
    """
    generator = np.random.default_rng(SEED)
    chosen = generator.integers(len(runs), size=(NUM_RESAMPLES, len(runs)))
    by_run = []
    for run in runs:
        blocks = np.asarray(run, float)
        # One set of draws for each time that the restart can be chosen.
        picks = generator.integers(len(blocks), size=(NUM_RESAMPLES, len(runs), len(blocks)))
        by_run.append(blocks[picks].mean(axis=2))
    drawn = np.stack(by_run)
    return np.asarray(drawn[chosen, np.arange(NUM_RESAMPLES)[:, None], np.arange(len(runs))[None, :]].mean(axis=1))


def resample_quantiles(runs: Sequence[np.ndarray], quantiles: Sequence[float]) -> np.ndarray:
    """Return resampled quantiles (in percent), averaged over restarts; shape [resamples, quantiles]."""
    generator = np.random.default_rng(SEED)
    found = np.empty((NUM_RESAMPLES // 4, len(quantiles)))
    blocks = [cut_blocks(np.asarray(run, float)) for run in runs]
    for row in found:
        drawn = []
        for index in generator.integers(len(runs), size=len(runs)):
            picks = generator.integers(len(blocks[index]), size=len(blocks[index]))
            drawn.append(np.percentile(np.concatenate([blocks[index][pick] for pick in picks]), quantiles))
        row[:] = np.mean(drawn, axis=0)
    return found


def middle_95(draws: np.ndarray) -> list[float]:
    """Return the interval that holds the middle 95 % of resampled figures."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return [float(low), float(high)]


def students_t_95(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % confidence interval of the mean over restarts, or None for fewer than two."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return None
    from scipy import stats

    mean, error = float(np.mean(finite)), float(stats.sem(finite))
    if error == 0:
        return [mean, mean]
    low, high = stats.t.interval(0.95, len(finite) - 1, loc=mean, scale=error)
    return [float(low), float(high)]


def one_a_restart_95(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of a figure with one value a restart: bootstrap where there are enough, else t.

    Student's t of two or three restarts may reach below zero, where no time or rate of positive values is: then it is
    taken on their logarithms.
    """
    found = restart_interval_95(values) or students_t_95(values)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if found is not None and found[0] <= 0 < min(finite):
        logs = students_t_95([math.log(value) for value in finite])
        return [math.exp(end) for end in logs] if logs is not None else None
    return found


def ratio_draws(base: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return resampled ratios of two independent figures."""
    # Both were drawn with one seed: shuffled, or a chance of the draw would move both alike.
    return np.asarray(other / np.random.default_rng(SEED + 1).permutation(base))


def usable(samples: Mapping[str, Sequence[Sequence[float]]] | None, name: str) -> Sequence[Sequence[float]] | None:
    """Return a record's block means of one figure, when it has any for every restart."""
    runs = (samples or {}).get(name)
    return runs if runs and all(len(run) for run in runs) else None
