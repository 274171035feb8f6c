"""From a node of the search to a placement: devices, the order of each, and staggers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from typing import Any

from flashrt.analysis.deployment import DEPLOYMENT_SCHEMA, Deployment, Placement
from flashrt.analysis.search.arrays import UNDECIDED
from flashrt.analysis.search.model import Model
from flashrt.analysis.search.resolve import Ask
from flashrt.analysis.structure import find_units
from flashrt.ir import BuiltProgram


@dataclass(frozen=True)
class Found:
    """A deployment that the search found; ticks of the analysis."""

    period: Fraction
    latency: Fraction
    placement: Placement


def place_found(ask: Ask, model: Model, masks: Any, relation: Any, *, turns: bool) -> Placement:
    """Return the placement of a complete node."""
    paths = list(ask.degrees)
    devices = {path: bits(int(mask)) for path, mask in zip(paths, masks, strict=True)}
    number = {path: index for index, path in enumerate(paths)}
    stagger = find_staggers(paths, relation)

    def earlier(a: str, b: str) -> int:
        return -1 if relation[number[a], number[b]] == stagger[a] - stagger[b] else 1

    order = {
        device: tuple(sorted((path for path in paths if device in devices[path]), key=cmp_to_key(earlier)))
        for device in sorted({device for group in devices.values() for device in group})
    }
    staggered = {path: count for path, count in stagger.items() if count}
    document = Deployment(
        groups={}, place={}, blocking=model.blocking, interleave=turns, stagger=staggered, order=order or None
    )
    return Placement(document, devices, order, stagger=staggered)


def is_order(relation: Sequence[Sequence[int]]) -> bool:
    """Return whether every cycle of relations has a positive height: nothing waits for itself."""
    count = range(len(relation))
    least = [[math.inf if height == UNDECIDED else int(height) for height in row] for row in relation]
    for middle in count:
        for u in count:
            for v in count:
                least[u][v] = min(least[u][v], least[u][middle] + least[middle][v])
    return all(least[u][u] > 0 for u in count)


def find_staggers(paths: list[str], relation: Any) -> dict[str, int]:
    """Return the least staggers n ≥ 0 with n_u − n_v in {k − 1, k} for every relation k of u and v.

    These are difference constraints, n_u ≤ n_v + k and n_v ≤ n_u + 1 − k, so shortest walks solve them; no cycle is
    negative, because every cycle of relations has a positive height.
    """
    staggers = [0] * len(paths)
    changed = True
    while changed:
        changed = False
        for u in range(len(paths)):
            for v in range(len(paths)):
                height = int(relation[u, v])
                if u != v and height != UNDECIDED and staggers[v] + height < staggers[u]:
                    staggers[u] = staggers[v] + height
                    changed = True
    joined = list(range(len(paths)))
    for u in range(len(paths)):
        for v in range(len(paths)):
            if u != v and relation[u, v] != UNDECIDED and joined[u] != joined[v]:
                joined = [joined[u] if number == joined[v] else number for number in joined]
    least = {number: min(staggers[i] for i in range(len(paths)) if joined[i] == number) for number in joined}
    return {path: staggers[index] - least[joined[index]] for index, path in enumerate(paths)}


def bits(mask: int) -> tuple[int, ...]:
    """Return the device numbers of a mask."""
    return tuple(device for device in range(mask.bit_length()) if mask >> device & 1)


def write_document(
    built: BuiltProgram, placement: Placement, *, device_kind: str | None, profile_name: str | None
) -> dict[str, Any]:
    """Return the deployment document of a placement; a top-level node on one group is placed as one."""
    group_of: dict[tuple[int, ...], str] = {}
    for devices in placement.devices.values():
        group_of.setdefault(devices, group_name(len(group_of)))
    place: dict[str, str] = {}
    for unit in find_units(built):
        used = {group_of[placement.devices[path]] for path in unit.operations}
        if len(used) == 1 and unit.pattern:
            place[unit.pattern] = used.pop()
        else:
            place.update({path: group_of[placement.devices[path]] for path in unit.operations})
    found = placement.document
    document: dict[str, Any] = {
        "schema": DEPLOYMENT_SCHEMA,
        "program": built.id,
        "groups": {name: list(devices) for devices, name in group_of.items()},
        "place": place,
        "order": {device: list(paths) for device, paths in placement.order.items()},
        "interleave": found.interleave,
    }
    extra: Mapping[str, Any] = {
        "devices": device_kind, "profile": profile_name, "blocking": list(found.blocking),
        "stagger": dict(found.stagger),
    }  # fmt: skip
    return document | {key: value for key, value in extra.items() if value}


def group_name(index: int) -> str:
    """Return a short name for the group of a number: a … z, then g26 and on."""
    return chr(ord("a") + index) if index < 26 else f"g{index}"
