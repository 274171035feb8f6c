"""The least device time that a set of requests can cost, when all of them are known.

Source: DDiT, sections 3 and 8: dp[i][j] = min over k, p of dp[i−k][j−1] + k·⌈S·x_j/α⌉·d(p, j).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashrt.planners.elastic.degrees import RequestClass


@dataclass(frozen=True)
class Bound:
    """The offline optimum.

    Attributes
    ----------
    gpu_ns
        Device time of all requests.
    devices, degrees
        By class: how many devices, and the degree of their groups.
    """

    gpu_ns: int
    devices: tuple[int, ...]
    degrees: tuple[int, ...]


def num_groups(devices: Sequence[int], island_of: Sequence[int], degree: int) -> int:
    """Return α: how many groups of a degree some devices form within islands."""
    counts: dict[int, int] = {}
    for device in devices:
        counts[island_of[device]] = counts.get(island_of[device], 0) + 1
    return sum(count // degree for count in counts.values())


def offline_bound(
    classes: Sequence[RequestClass], counts: Sequence[int], islands: Sequence[Sequence[int]]
) -> Bound | None:
    """Return the least device time of `counts` requests by class; None where devices are fewer than classes.

    The DiT phase takes k devices for ⌈S·x_j/α⌉ rounds of d(p, j); the VAE counts with its own devices alone, so that
    no policy that releases the others is better than the bound.
    """
    order = [device for island in islands for device in island]
    island_of = {device: number for number, island in enumerate(islands) for device in island}
    place = [island_of[device] for device in order]
    num = len(order)
    # best[i]: (device time, devices and degrees by class) with the first i devices.
    best: list[tuple[int, tuple[int, ...], tuple[int, ...]] | None] = [(0, (), ())] * (num + 1)
    for one, count in zip(classes, counts, strict=True):
        options = [_dit_and_vae(one, degree) for degree in one.step_ns]
        row: list[tuple[int, tuple[int, ...], tuple[int, ...]] | None] = [None] * (num + 1)
        for i in range(num + 1):
            for k in range(0 if count == 0 else 1, i + 1):
                before = best[i - k]
                if before is None:
                    continue
                if count == 0:
                    row[i] = (before[0], (*before[1], 0), (*before[2], 0))
                    break
                for degree, dit_ns, vae_gpu_ns in options:
                    alpha = num_groups(range(i - k, i), place, degree)
                    if not alpha:
                        continue
                    cost = before[0] + k * -(-count // alpha) * dit_ns + count * vae_gpu_ns
                    found = row[i]
                    if found is None or cost < found[0]:
                        row[i] = (cost, (*before[1], k), (*before[2], degree))
            # Devices may be left over anywhere: the first i are no worse than the first i − 1.
            last = row[i - 1] if i else None
            here = row[i]
            if last is not None and (here is None or last[0] < here[0]):
                row[i] = last
        best = row
    found = best[num]
    return None if found is None else Bound(found[0], found[1], found[2])


def _dit_and_vae(one: RequestClass, degree: int) -> tuple[int, int, int]:
    vae = min(devices * time for devices, time in one.vae_ns.items())
    return degree, one.steps * one.step_ns[degree], vae
