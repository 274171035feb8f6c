"""First points for the archive: the operations cut into stretches, each on a group of its own, loads balanced.

They prove nothing; they let the first rounds of the search leave most of the tree at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashrt.analysis.search import arrays
from flashrt.analysis.search.arrays import Archive, Search
from flashrt.analysis.search.model import Model

MAX_COMPOSITIONS = 400


def plant_seeds(
    kernel: dict[str, Callable[..., Any]], model: Model, variant: int, archive: Archive, fresh: Callable[[], Search]
) -> None:
    """Offer the archive the best cut for every sequence of group sizes that the devices have room for."""
    problem = model.problem
    sequence = _dataflow_order(model)
    sizes = [int(size) for size in problem.sizes]
    search = fresh()
    num_devices = int(search.control[arrays.DEVICES])
    if int(search.control[arrays.NUM_GROUPS]) or len(problem.islands) > 1:
        return
    totals, allowed = problem.totals.tolist(), problem.allowed.tolist()
    for chosen in _compositions(sizes, num_devices, len(sequence)):
        ends = _cut([[totals[op][sizes.index(size)] if allowed[op][sizes.index(size)] else None for op in sequence]
                     for size in chosen])  # fmt: skip
        if ends is not None:
            _offer(kernel, model, variant, archive, fresh(), chosen, ends)


def _dataflow_order(model: Model) -> list[int]:
    """Return the operations so that each comes after all that it waits for within a batch."""
    num_before = model.problem.before.sum(axis=0).tolist()
    return sorted(range(len(num_before)), key=lambda op: (num_before[op], op))


def _compositions(sizes: Sequence[int], room: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yield sequences of sizes that fit, the short ones first, at most MAX_COMPOSITIONS of them."""
    level: list[tuple[int, ...]] = [()]
    count = 0
    for _ in range(longest):
        level = [(*chosen, size) for chosen in level for size in sizes if sum(chosen) + size <= room]
        for chosen in level:
            count += 1
            if count > MAX_COMPOSITIONS:
                return
            yield chosen


def _cut(times: Sequence[Sequence[int | None]]) -> list[int] | None:
    """Return where each stretch ends so that the largest load is least, or None; `times` by stretch and place."""
    num = len(times[0])
    best: list[tuple[int, list[int]] | None] = [(0, []), *[None] * num]
    for stretch in times:
        following: list[tuple[int, list[int]] | None] = [None] * (num + 1)
        for begin, known in enumerate(best):
            load = 0
            for end in range(begin + 1, num + 1) if known is not None else ():
                value = stretch[end - 1]
                if value is None:
                    break
                load += value
                assert known is not None
                worst, held = max(known[0], load), following[end]
                if held is None or worst < held[0]:
                    following[end] = (worst, [*known[1], end])
        best = following
    whole = best[num]
    return None if whole is None else whole[1]


def _offer(
    kernel: dict[str, Callable[..., Any]], model: Model, variant: int, archive: Archive, search: Search,
    chosen: Sequence[int], ends: Sequence[int],
) -> None:  # fmt: skip
    problem = model.problem
    sequence = _dataflow_order(model)
    begin, device = 0, 0
    for size, end in zip(chosen, ends, strict=True):
        mask = ((1 << size) - 1) << device
        for place in range(begin, end):
            op = sequence[place]
            kin = [other for other in sequence[:place] if problem.kinship[other] == problem.kinship[op]]
            if any(int(search.masks[other]) != mask for other in kin):
                return
            if not kernel["may_have"](problem, search, op, mask):
                return
            search.masks[op], search.size_of[op] = mask, kernel["index_of_size"](problem, mask)
            if not kernel["fits_memory"](problem, search, op):
                return
            for other in sequence[begin:place]:
                search.relation[other, op], search.relation[op, other] = 0, 1
        search.groups[search.control[arrays.NUM_GROUPS]] = mask
        search.control[arrays.NUM_GROUPS] += 1
        begin, device = end, device + size
    kernel["set_times"](problem, search, int(problem.longest[0]), 1)
    kernel["settle"](problem, search, archive, variant)
