"""What somebody who watches or listens would see: misses, freezes, underruns, real-time factor, skew. Pure.

Source: ``spec/measuring.md``, points 2 to 5; W3C webrtc-stats, ``freezeCount``, for freezes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Samples of which none may be over, for the share below to be at most that with 99 % confidence: log 0.01 / log share.
NEEDED = {"p90": 44, "p99": 459, "p99.9": 4603}
FREEZE_TIMES = 3
FREEZE_MS = 150.0
BUFFERS = {"without": 0, "one_batch": 1, "two_batches": 2}
MAX_SKEW_POINTS = 100_000
CHANGE_ERRORS = 6.0
FAR_OUT = 10
BEYOND = 2
HICCUPS_BY_CHANCE = 1e-3
"""A row of hiccups at the begin that is rarer than this is a level."""
MIN_SEGMENT = 3
MIN_TAIL = 12


def suffice(num_samples: int) -> dict[str, dict[str, Any]]:
    """Return for each high percentile how many samples there are, are needed, and whether they suffice."""
    return {
        share: {"samples": num_samples, "needed": needed, "suffices": num_samples >= needed}
        for share, needed in NEEDED.items()
    }


def shown_ns(visible_ns: np.ndarray, interval_ns: float, delay_ns: float = 0.0) -> np.ndarray:
    """Return when a player shows each element: it begins `delay_ns` after the first came, and never drops one."""
    steps = np.arange(len(visible_ns)) * interval_ns
    ready = np.asarray(visible_ns - visible_ns[0] - steps, float)
    ready[0] = delay_ns
    return np.asarray(np.maximum.accumulate(ready) + steps)


def one_percent_low(shown: np.ndarray) -> float | None:
    """Return the rate in the slowest 1 % of times between shown elements, at least one of them; per s."""
    gaps = np.sort(np.diff(shown))
    slowest = gaps[-max(math.ceil(len(gaps) / 100), 1) :] if len(gaps) else gaps
    return float(1e9 / slowest.mean()) if len(slowest) and slowest.mean() > 0 else None


def freezes(shown: np.ndarray) -> tuple[int, float]:
    """Return (freezes, share of the time in them): times of at least max(3 × mean, mean + 150 ms) between elements."""
    gaps = np.diff(shown) / 1e6
    if not len(gaps) or gaps.sum() <= 0:
        return 0, 0.0
    frozen = gaps[gaps >= max(FREEZE_TIMES * gaps.mean(), gaps.mean() + FREEZE_MS)]
    return len(frozen), float(frozen.sum() / gaps.sum())


def underruns(visible_ns: np.ndarray, interval_ns: float, delay_ns: float) -> int:
    """Return how often a player that begins `delay_ns` after the first element has to wait for one."""
    gaps = np.diff(shown_ns(visible_ns, interval_ns, delay_ns))
    # A nanosecond is the resolution of the stamps.
    return int((gaps > interval_ns + 1).sum())


def deadlines(offsets_ms: np.ndarray, stated_d0_ms: float | None) -> dict[str, Any]:
    """Return the misses of elements shown `stated_d0_ms` after their schedule, and the least offset without one.

    `offsets_ms` are those of the stream's elements, in order.
    """
    found: dict[str, Any] = {"stated_d0_ms": stated_d0_ms, "smallest_d0_ms": float(offsets_ms.max())}
    if stated_d0_ms is None:
        return found
    missed = offsets_ms > stated_d0_ms
    return {
        **found,
        "misses": int(missed.sum()),
        "miss_share": float(missed.mean()),
        "longest_run": longest_run(missed),
    }


def longest_run(flags: np.ndarray) -> int:
    """Return the length of the longest run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(flags, int), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def play(visible_ns: np.ndarray, interval_ns: float, batch_ns: float) -> dict[str, Any]:
    """Return what a player of the stream shows: 1 %-low, freezes, underruns with buffers of whole batches."""
    shown = shown_ns(visible_ns, interval_ns)
    count, share = freezes(shown)
    return {
        "one_percent_low": one_percent_low(shown),
        "freezes": count,
        "freeze_share": share,
        "underruns": {
            name: underruns(visible_ns, interval_ns, batches * batch_ns) for name, batches in BUFFERS.items()
        },
    }


def real_time_factor(fps: float, media_rate: float | None) -> float | None:
    """Return how many seconds one second of media takes; below 1 is faster than real time. None: no rate is known."""
    return media_rate / fps if media_rate is not None and math.isfinite(fps) and fps > 0 else None


def skew_ms(streams: Mapping[str, np.ndarray], media_rate: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return by how much each pair of streams with rates is apart: positive where the second comes later, in ms.

    `streams` are the visible times of every element, in ns. What belongs together has the same time in its medium.
    """
    known = [name for name in sorted(streams) if name in media_rate and len(streams[name])]
    found = {}
    for index, first in enumerate(known):
        for second in known[index + 1 :]:
            lasts = min(len(streams[name]) / media_rate[name] for name in (first, second))
            num = max(int(min(lasts * min(media_rate[first], media_rate[second]), MAX_SKEW_POINTS)), 1)
            moments = np.arange(num) * (lasts / num)
            # The element that a moment of the medium falls into; none is shown before those ahead of it.
            at = [
                np.maximum.accumulate(streams[name])[(moments * media_rate[name] + 1e-9).astype(int)]
                for name in (first, second)
            ]
            apart = (at[1] - at[0]) / 1e6
            found[f"{first} -> {second}"] = {
                "mean": float(apart.mean()),
                "p99_abs": float(np.percentile(np.abs(apart), 99)),
                "max": float(np.abs(apart).max()),
            }
    return found


def change_point(values: Sequence[float] | np.ndarray) -> int:
    """Return how many values at the begin are on another level than the rest; 0 where none are.

    The cut into two levels with the least squares, among the first half; taken where the levels are six standard
    errors apart, that of the rest from the means of its blocks, so that a wandering series is not cut. Values far out
    count as ten deviations, so that one hiccup in the midst does not lift all that was before it; but where so many of
    them stand at the begin in a row as hiccups hardly would, they are the level, however many hiccups follow. So are
    those at the begin that are twice as far out as any hiccup that follows.
    """
    series = np.asarray(values, float)
    num = len(series)
    if num < MIN_SEGMENT + MIN_TAIL:
        return 0
    middle = float(np.median(series))
    deviation = 1.4826 * float(np.median(np.abs(series - middle)))
    if row := _beyond_the_rest(series - middle):
        return min(row, num - MIN_TAIL)
    if deviation > 0:
        if row := _far_in_a_row((series - middle) / deviation):
            return min(row, num - MIN_TAIL)
        series = np.clip(series, middle - FAR_OUT * deviation, middle + FAR_OUT * deviation)
    cuts = np.arange(1, min(num // 2, num - MIN_TAIL) + 1)
    sums = np.cumsum(series)
    heads, tails = sums[cuts - 1] / cuts, (sums[-1] - sums[cuts - 1]) / (num - cuts)
    # Between-level squares: the larger, the better the cut.
    cut = int(cuts[np.argmax(cuts * (num - cuts) * (heads - tails) ** 2)])
    rest = series[cut:]
    blocks = np.asarray([block.mean() for block in np.array_split(rest, 6)])
    length = len(rest) / 6
    # Of one block; a head as short as `cut` scatters more than a block, by the root of their lengths.
    spread = max(float(blocks.std(ddof=1)), float(rest.std(ddof=1)) / math.sqrt(length))
    error = spread * math.sqrt(length / cut + 1 / 6)
    apart = abs(float(series[:cut].mean() - rest.mean()))
    return cut if apart > CHANGE_ERRORS * error else 0


def _beyond_the_rest(distances: np.ndarray) -> int:
    """Return how many values at the begin are twice as far from the median as any later one, all to one side.

    If their order were chance, the k furthest of n would come first once in C(n, k) times; 0 where that is likely.
    """
    side = np.sign(distances[0])
    far = side * distances
    nearest = np.minimum.accumulate(far)
    furthest_later = np.maximum.accumulate(np.abs(distances)[::-1])[::-1]
    rows = np.arange(1, len(far) // 2 + 1)
    found = rows[nearest[rows - 1] > BEYOND * furthest_later[rows]]
    row = int(found[-1]) if side and len(found) else 0
    return row if row and 1 / math.comb(len(far), row) < HICCUPS_BY_CHANCE else 0


def _far_in_a_row(deviations: np.ndarray) -> int:
    """Return how many values at the begin are far out to one side, where so many hiccups in a row are unlikely.

    `deviations` are the distances from the median in robust standard deviations.
    """
    side = np.sign(deviations[0])
    far = side * deviations > FAR_OUT
    row = int(np.argmin(far)) if not far.all() else len(far)
    share = (far[row:].sum() + 1) / (len(far) - row + 1)
    return row if row and row <= len(far) // 2 and share**row < HICCUPS_BY_CHANCE else 0
