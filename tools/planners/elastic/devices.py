"""Devices that nobody has, by island of fast links: which group a request could get, and taking it."""

from __future__ import annotations

from collections.abc import Sequence


def make_islands(num_devices: int, size: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return devices 0 to `num_devices` − 1 in islands of `size`; None: all are joined."""
    size = size or num_devices
    return tuple(tuple(range(begin, min(begin + size, num_devices))) for begin in range(0, num_devices, size))


class FreeDevices:
    """The free devices as a bit mask an island; groups never cross islands."""

    def __init__(self, islands: Sequence[Sequence[int]]) -> None:
        self.island_of = {device: island for island, devices in enumerate(islands) for device in devices}
        self.masks = [sum(1 << device for device in devices) for devices in islands]
        self.counts = [len(devices) for devices in islands]
        self.num_free = sum(self.counts)

    def find_island(self, fit: Sequence[int]) -> tuple[int, int]:
        """Return (island, degree) with the largest degree that `fit` allows; of equal ones the fullest island.

        Parameters
        ----------
        fit
            Number of devices -> degree that a request would run at with so many; the last holds for more. 0: none.
        """
        last = len(fit) - 1
        chosen, degree, left = -1, 0, 0
        for island, count in enumerate(self.counts):
            if not count:
                continue
            possible = fit[min(count, last)]
            if possible > degree or (possible == degree and possible and count < left):
                chosen, degree, left = island, possible, count
        return chosen, degree

    def take(self, island: int, number: int) -> tuple[int, ...]:
        """Take the devices with the lowest ids of an island."""
        mask, taken = self.masks[island], []
        for _ in range(number):
            low = mask & -mask
            taken.append(low.bit_length() - 1)
            mask ^= low
        self.masks[island] = mask
        self.counts[island] -= number
        self.num_free -= number
        return tuple(taken)

    def give(self, devices: Sequence[int]) -> None:
        """Put devices back."""
        for device in devices:
            island = self.island_of[device]
            self.masks[island] |= 1 << device
            self.counts[island] += 1
        self.num_free += len(devices)

    def remove(self, device: int) -> None:
        """Take one device away for good."""
        island = self.island_of[device]
        self.masks[island] ^= 1 << device
        self.counts[island] -= 1
        self.num_free -= 1

    def is_free(self, device: int) -> bool:
        """Whether nobody has it."""
        return bool(self.masks[self.island_of[device]] >> device & 1)
