"""From the ranks' own measurements to an operation's times: pure.

*Source*: ``spec/cost-model.md``: an operation holds its group from its start to its completion, so its time on several
devices runs from when the first rank begins until the last one has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

MIN_WARMUP = 3
NUM_STEADY = 3
MAX_DEVIATIONS, MIN_BAND, MAX_BAND, MIN_BAND_MS = 3.0, 0.05, 0.5, 0.02
MAX_SHARED = 0.01
WARMUP_RULE = (
    f"cut are the first {MIN_WARMUP} batches, and more until {NUM_STEADY} in a row lie within {MAX_DEVIATIONS:g} "
    "robust deviations (1.4826 × the median absolute one) of the median of the second half, which count for no less "
    f"than {MIN_BAND:.0%} of it or {MIN_BAND_MS} ms and no more than {MAX_BAND:.0%}; at most half is cut"
)
TIME_METHOD = (
    "median over batches, one in flight and one operation at a time; of several ranks, which begin together, from when "
    "the first begins until the last has ended, without what an operation waits for values from elsewhere"
)
Stretch = tuple[int, int]


@dataclass(frozen=True)
class Sampled:
    """One operation's time for one batch."""

    batch: int
    time_ms: float
    disturbed_by: str | None
    """An operation of another group that worked on one of its devices meanwhile."""


def busy_ns(stretches: Iterable[Sequence[Stretch]]) -> int:
    """Return how long a group was busy with an operation.

    From the first beginning to the last end, without the times in which nobody works because a rank waits within the
    operation (for a value from elsewhere, or while it hands one over).

    Parameters
    ----------
    stretches
        For each rank, when it worked: (start, end), in order, in ns.
    """
    ranks = [list(rank) for rank in stretches if rank]
    waits = [(before[1], after[0]) for rank in ranks for before, after in pairwise(rank)]
    total, end = 0, None
    for start, stop in sorted(stretch for rank in ranks for stretch in rank):
        if end is None or start > end:
            is_wait = end is not None and any(begin <= end and start <= finish for begin, finish in waits)
            total += stop - start if end is None or is_wait else stop - end
            end = stop
        elif stop > end:
            total += stop - end
            end = stop
    return total


def operation_times(spans: Iterable[Mapping[str, Any]]) -> dict[str, list[Sampled]]:
    """Return operation -> its time for each batch, from the ``span`` events of a run of the runtime."""
    worked: dict[tuple[int, str], dict[str, list[Stretch]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[str, str] = {}
    devices: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        group = str(span["worker"]).partition("#")[0]
        path = str(span["name"])
        worked[int(span["batch"]), path][str(span["worker"])].append((int(span["start_ns"]), int(span["end_ns"])))
        groups[path] = group
        devices[group].add(str(span["device"]))
    found: dict[str, list[Sampled]] = defaultdict(list)
    by_batch: dict[int, list[str]] = defaultdict(list)
    for batch, path in worked:
        by_batch[batch].append(path)
    for (batch, path), ranks in sorted(worked.items(), key=lambda item: item[0][0]):
        others = [
            (other, stretch)
            for other in by_batch[batch]
            if groups[other] != groups[path] and devices[groups[other]] & devices[groups[path]]
            for rank in worked[batch, other].values()
            for stretch in rank
        ]
        found[path].append(
            Sampled(batch, busy_ns(ranks.values()) / 1e6, _disturber(list(ranks.values()), others))
        )  # fmt: skip
    return dict(found)


def _disturber(ranks: Sequence[Sequence[Stretch]], others: Sequence[tuple[str, Stretch]]) -> str | None:
    own = sorted(stretch for rank in ranks for stretch in rank)
    total = sum(end - start for start, end in own)
    shared: dict[str, int] = defaultdict(int)
    for name, (begin, finish) in others:
        for start, end in own:
            shared[name] += max(min(end, finish) - max(start, begin), 0)
    worst = max(shared, key=lambda name: shared[name], default=None)
    return worst if worst is not None and shared[worst] > MAX_SHARED * total else None


def warmup_end(times: Sequence[float]) -> tuple[int, bool]:
    """Return (how many of the first times are warm-up, whether the rest is steady); see `WARMUP_RULE`.

    At most half is cut, and never so much that fewer than `NUM_STEADY` are left.
    """
    values = np.asarray(times, float)
    least = min(MIN_WARMUP, max(len(values) - NUM_STEADY, 0))
    most = max(len(values) // 2, least)
    steady = values[len(values) // 2 :]
    middle = float(np.median(steady))
    deviation = MAX_DEVIATIONS * 1.4826 * float(np.median(np.abs(steady - middle)))
    band = max(min(max(deviation, MIN_BAND * middle), MAX_BAND * middle), MIN_BAND_MS)
    inside = np.abs(values - middle) <= band
    for cut in range(least, most + 1):
        if inside[cut : cut + NUM_STEADY].all():
            return cut, True
    return most, False


def relative_spread(times: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 where the median is 0."""
    low, middle, high = np.percentile(np.asarray(times, float), (25, 50, 75))
    return float((high - low) / middle) if middle else 0.0
