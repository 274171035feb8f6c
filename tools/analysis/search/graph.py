"""Bounds of a node and figures of a leaf, from the node's graph; compiled by numba.

The graph has the arcs of dataflow, chunks and state, with the transfers between operations that are placed, and two
arcs for every two related operations. Source: ``spec/cost-model.md``, "Going past the bounds".
"""

from __future__ import annotations

from typing import Any

from flashrt.analysis.search.archive import insert
from flashrt.analysis.search.arrays import BELOW_ALL, NUM_GROUPS, TURNS, UNDECIDED, Archive, Problem, Search


def popcount(mask: int) -> int:
    """Return how many devices a mask has."""
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number


def find_edges(problem: Problem, search: Search) -> int:
    """Write the arcs of the node's graph into the buffer; return their number."""
    edges, masks = search.edges, search.masks
    num = 0
    for index in range(problem.arcs.shape[0]):
        arc = problem.arcs[index]
        source, target = problem.owner[arc[0]], problem.owner[arc[1]]
        edge = edges[num]
        edge[0], edge[1], edge[3] = arc[0], arc[1], arc[2]
        edge[2] = search.part_times[arc[0]]
        if masks[source] and masks[target] and masks[target] & ~masks[source]:
            edge[2] += arc[3]
        num += 1
    turns = search.control[TURNS]
    for u in range(masks.shape[0]):
        if masks[u] == 0:
            continue
        for v in range(masks.shape[0]):
            height = search.relation[u, v]
            if height == UNDECIDED or u == v:
                continue
            if turns and height == 0 and problem.stream[u] == problem.stream[v]:
                continue
            implied = False
            for middle in range(masks.shape[0]):
                # An arc over a third operation says the same, and more.
                if not turns and search.relation[u, middle] + search.relation[middle, v] == height:
                    implied = True
                    break
            if implied:
                continue
            edge = edges[num]
            edge[0], edge[1] = problem.last[u], problem.first[v]
            edge[2], edge[3] = search.part_times[problem.last[u]], height
            num += 1
    return num


def relax(
    edges: Any,
    num: int,
    values: Any,
    numerator: int,
    denominator: int,
    low: int,
    low_scale: int,
    factor: int,
    slope: int,
) -> bool:
    """Raise `values` to the longest walks; return whether there is a positive cycle.

    An arc counts ``factor · (denominator · weight − numerator · height) + slope · height``; one of negative height
    takes the period `low` / `low_scale` instead, where `low_scale` is above 0.
    """
    limit = values.shape[0] + 1
    for turn in range(limit + 1):
        changed = False
        for index in range(num):
            edge = edges[index]
            value = values[edge[0]]
            if value == BELOW_ALL:
                continue
            if edge[3] < 0 and low_scale > 0:
                period = low * denominator // low_scale
                value += factor * (denominator * edge[2] - period * edge[3])
            else:
                value += factor * (denominator * edge[2] - numerator * edge[3]) + slope * edge[3]
            if value > values[edge[1]]:
                values[edge[1]] = value
                changed = True
        if not changed:
            return False
        if turn == limit:
            return True
    return True


def start(problem: Problem, values: Any) -> None:
    """Set walks to their beginning at the entries."""
    for part in range(values.shape[0]):
        values[part] = 0 if problem.entries[part] else BELOW_ALL


def used_devices(search: Search) -> int:
    """Return how many devices the groups have together."""
    used = 0
    for index in range(search.control[NUM_GROUPS]):
        used |= search.groups[index]
    return popcount(used)


def longest_end(problem: Problem, search: Search, factor: int) -> int:
    """Return when the last output is complete, from the walks in `values`, without their slope."""
    end = 0
    for index in range(problem.outputs.shape[0]):
        part = problem.outputs[index]
        value = search.values[part]
        end = max(end, (value + factor // 2) // factor)
    return end


def settle(problem: Problem, search: Search, archive: Archive, variant: int) -> bool:
    """Find the exact figures of a complete node and offer it to the archive."""
    num = find_edges(problem, search)
    edges, values, parents = search.edges, search.values, search.parents
    num_parts = values.shape[0]
    values[:] = 0
    # A cycle of height 0 or less is the only positive one where an arc counts 1 less its height times more than all.
    for index in range(num_parts + 2):
        changed = False
        for at in range(num):
            value = values[edges[at, 0]] + 1 - edges[at, 3] * (num_parts + 1)
            if value > values[edges[at, 1]]:
                values[edges[at, 1]] = value
                changed = True
        if not changed:
            break
        if index == num_parts + 1:
            return False
    period, scale = 0, 1
    for op in range(search.masks.shape[0]):
        period = max(period, problem.totals[op, search.size_of[op]])
    found = True
    while found:
        found = False
        values[:] = 0
        parents[:] = -1
        changed = True
        while changed and not found:
            changed = False
            for at in range(num):
                edge = edges[at]
                value = values[edge[0]] + scale * edge[2] - period * edge[3]
                if value > values[edge[1]]:
                    values[edge[1]] = value
                    parents[edge[1]] = at
                    changed = True
            if not changed:
                break
            for root in range(num_parts):
                node, steps = root, 0
                while parents[node] >= 0 and steps <= num_parts:
                    node = edges[parents[node], 0]
                    steps += 1
                if steps > num_parts:
                    weight, height, end = 0, 0, node
                    while True:
                        weight += edges[parents[node], 2]
                        height += edges[parents[node], 3]
                        node = edges[parents[node], 0]
                        if node == end:
                            break
                    period, scale, found = weight, height, True
                    break
    start(problem, values)
    relax(edges, num, values, period, scale, 0, 0, 1, 0)
    latency = 0
    for index in range(problem.outputs.shape[0]):
        part = problem.outputs[index]
        latency = max(latency, values[part] + scale * search.part_times[part])
    limits = problem.limits
    if limits[0] >= 0 and period * limits[1] > limits[0] * scale:
        return False
    if limits[2] >= 0 and latency * limits[3] > limits[2] * scale:
        return False
    return insert(
        archive, period, scale, latency, scale, used_devices(search), search.masks, search.relation, variant, 0
    )
