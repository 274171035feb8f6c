"""The archive of points, none of which dominates another, and what they ask of a better one; compiled by numba."""

from __future__ import annotations

from typing import Any

from flashrt.analysis.search.arrays import Archive


def reaches(
    archive: Archive, index: int, period: int, scale: int, latency: int, latency_scale: int, devices: int
) -> bool:
    """Return whether a point is at least as good as anything with these bounds."""
    asked = archive.asked[index]
    by_period = asked[0] * scale - period * asked[1]
    if by_period > 0:
        return False
    by_latency = asked[2] * latency_scale - latency * asked[3]
    if by_latency > 0:
        return False
    tied = by_period == 0 and by_latency == 0 and archive.count[1] == 0
    return not tied or archive.figures[index, 4] <= devices


def lower(archive: Archive, index: int) -> None:
    """Set what is asked of a better point than one of the archive, by the tolerance."""
    row, asked, tolerance = archive.figures[index], archive.asked[index], archive.count[1]
    if tolerance == 0:
        asked[0], asked[1], asked[2], asked[3] = row[0], row[1], row[2], row[3]
        return
    for at in (0, 2):
        asked[at] = -(-(row[at] * 1000 // row[at + 1] + 1) // (1000 + tolerance)) + 1
        asked[at + 1] = 1


def insert(
    archive: Archive,
    period: int,
    scale: int,
    latency: int,
    latency_scale: int,
    devices: int,
    masks: Any,
    relation: Any,
    variant: int,
    turns: int,
) -> bool:
    """Add a point unless one is as good, and drop those that it dominates."""
    count = archive.count[0]
    for index in range(count):
        row = archive.figures[index]
        a, b = row[0] * scale - period * row[1], row[2] * latency_scale - latency * row[3]
        if a <= 0 and b <= 0 and (a < 0 or b < 0 or row[4] <= devices):
            return False
    kept = 0
    for index in range(count):
        row = archive.figures[index]
        if row[0] * scale >= period * row[1] and row[2] * latency_scale >= latency * row[3]:
            continue
        if kept != index:
            archive.figures[kept], archive.asked[kept] = archive.figures[index], archive.asked[index]
            archive.masks[kept], archive.relation[kept] = archive.masks[index], archive.relation[index]
            archive.tag[kept] = archive.tag[index]
        kept += 1
    if kept >= archive.figures.shape[0]:
        archive.count[0], archive.count[2] = kept, 1
        return False
    row = archive.figures[kept]
    row[0], row[1], row[2], row[3], row[4] = period, scale, latency, latency_scale, devices
    archive.masks[kept], archive.relation[kept] = masks, relation
    archive.tag[kept, 0], archive.tag[kept, 1] = variant, turns
    archive.count[0] = kept + 1
    lower(archive, kept)
    return True
