"""How many devices each class may have, for the policies that divide them."""

from __future__ import annotations

from collections.abc import Sequence


def divide(num_devices: int, demand: Sequence[float], *, at_least: int) -> list[int]:
    """Return devices by class in proportion to `demand`, by largest remainders.

    Parameters
    ----------
    at_least
        What each class with demand gets, as far as there is enough.
    """
    wanting = [index for index, one in enumerate(demand) if one > 0]
    found = [0] * len(demand)
    if not wanting:
        return found
    base = min(at_least, num_devices // len(wanting))
    for index in wanting:
        found[index] = base
    left = num_devices - base * len(wanting)
    total = sum(demand)
    # What is above the minimum is divided by what each still lacks of its share.
    lacks = [max(num_devices * demand[index] / total - found[index], 0.0) for index in range(len(demand))]
    whole = sum(lacks) or 1.0
    exact = [left * one / whole for one in lacks]
    for index, one in enumerate(exact):
        found[index] += int(one)
    rest = num_devices - sum(found)
    for index in sorted(wanting, key=lambda index: (int(exact[index]) - exact[index], index))[:rest]:
        found[index] += 1
    return found
