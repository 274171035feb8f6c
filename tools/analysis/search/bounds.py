"""Whether a node can be left: bounds on its period, its latency and both together; compiled by numba."""

from __future__ import annotations

from flashrt.analysis.search.archive import reaches
from flashrt.analysis.search.arrays import (
    BELOW_ALL,
    DEVICES,
    LATENCY,
    MAX_PRICE,
    NESTED,
    NODES,
    NUM_GROUPS,
    OBJECTIVE,
    PRICE,
    PRICES,
    RATE,
    STAGGER,
    Archive,
    Problem,
    Search,
)
from flashrt.analysis.search.graph import find_edges, longest_end, popcount, relax, start, used_devices


def set_loads(problem: Problem, search: Search) -> int:
    """Set how many devices each group has, and its busiest one's work in ticks; return the largest."""
    largest = 0
    for index in range(search.control[NUM_GROUPS]):
        group, load = search.groups[index], 0
        search.counts[index] = popcount(group)
        while group:
            device = group & -group
            group = group ^ device if search.control[NESTED] else 0
            own = 0
            for op in range(search.masks.shape[0]):
                if search.masks[op] & device:
                    own += problem.totals[op, search.size_of[op]]
            load = max(load, own)
        search.loads[index] = load
        largest = max(largest, load)
    return largest


def kin_of(problem: Problem, search: Search, op: int) -> int:
    """Return the mask that an unplaced operation has to have, or 0 where it may choose."""
    if problem.pinned[op]:
        return int(problem.pinned[op])
    if problem.has_kin[op]:
        for other in range(search.masks.shape[0]):
            if search.masks[other] and problem.kinship[other] == problem.kinship[op]:
                return int(search.masks[other])
    return 0


def may_take(
    problem: Problem, search: Search, op: int, size: int, kin: int, free: int, period: int, scale: int
) -> bool:
    """Return whether an unplaced operation may still have a size, at a period below `period` / `scale`."""
    total = problem.totals[op, size]
    if not problem.allowed[op, size] or total * scale > period:
        return False
    if search.control[NESTED]:
        return True
    count = problem.sizes[size]
    found = kin == 0 and count <= free
    for index in range(search.control[NUM_GROUPS]):
        fits = search.counts[index] == count and kin in (0, search.groups[index])
        if fits and (search.loads[index] + total) * scale <= period:
            search.open_groups[index] = 1
            found = True
    return found


def set_times(problem: Problem, search: Search, period: int, scale: int) -> bool:
    """Set the parts' times and the bounds of a node below a period; return False where an operation has no place.

    The bound on the period is the largest load of a device, or the least area of all operations over the devices: both
    times the number of devices, so that it is an integer.
    """
    masks, control = search.masks, search.control
    used = 0
    for index in range(control[NUM_GROUPS]):
        used |= search.groups[index]
        search.open_groups[index] = 0
    free = 0
    for index in range(problem.islands.shape[0]):
        free = max(free, popcount(problem.islands[index] & ~used))
    load, area, needed = set_loads(problem, search), 0, 0
    for op in range(masks.shape[0]):
        begin, end = problem.first[op], problem.last[op] + 1
        if masks[op]:
            size = search.size_of[op]
            search.areas[op] = problem.sizes[size] * problem.totals[op, size]
            area += search.areas[op]
            for part in range(begin, end):
                search.part_times[part] = problem.times[size, part]
            continue
        for part in range(begin, end):
            search.part_times[part] = -1
        least, smallest = -1, -1
        kin = kin_of(problem, search, op)
        for size in range(problem.sizes.shape[0]):
            search.takes[op, size] = may_take(problem, search, op, size, kin, free, period, scale)
            if not search.takes[op, size]:
                continue
            count, total = problem.sizes[size], problem.totals[op, size]
            if least < 0 or total < least:
                least = total
            if smallest < 0 or count * total < smallest:
                smallest = count * total
            for part in range(begin, end):
                if search.part_times[part] < 0 or problem.times[size, part] < search.part_times[part]:
                    search.part_times[part] = problem.times[size, part]
        if least < 0:
            return False
        search.areas[op] = smallest
        needed += smallest
        load = max(load, least)
    search.bound[2] = max(load * control[DEVICES], area + needed)
    search.bound[3] = needed
    return True


def room_left(problem: Problem, search: Search, period: int, scale: int) -> int:
    """Return the device time that unplaced operations can have in one period, in ticks times `scale`."""
    used, room = 0, 0
    for index in range(search.control[NUM_GROUPS]):
        used |= search.groups[index]
        if search.open_groups[index] and not search.control[NESTED]:
            room += popcount(search.groups[index]) * (period - search.loads[index] * scale)
    if search.control[NESTED]:
        room = search.control[DEVICES] * period
        for op in range(search.masks.shape[0]):
            if search.masks[op]:
                room -= scale * problem.sizes[search.size_of[op]] * problem.totals[op, search.size_of[op]]
        return int(room)
    return int(room + (search.control[DEVICES] - popcount(used)) * period)


def priced_latency(problem: Problem, search: Search, num: int, room: int, scale: int, price: int) -> int:
    """Return a bound on the latency where device time costs `price` / PRICES, in ticks times PRICES · `scale`.

    What takes less time on more devices takes more device time, and there is no more than `room`. With a price on
    it (a Lagrange multiplier) every part chooses its size for itself, so the longest path is a bound for every price.

    *Source*: M. L. Fisher, "The Lagrangian relaxation method", *Management Science* 27 (1981).
    """
    constant, values, prices = -price * room, search.values, search.parents
    for op in range(search.masks.shape[0]):
        for part in range(problem.first[op], problem.last[op] + 1):
            if search.masks[op]:
                prices[part] = PRICES * scale * search.part_times[part]
                continue
            smallest, least = -1, -1
            for size in range(problem.sizes.shape[0]):
                if not search.takes[op, size]:
                    continue
                ticks = problem.times[size, part]
                area = problem.sizes[size] * ticks
                if smallest < 0 or area < smallest:
                    smallest = area
                if least < 0 or PRICES * ticks + price * area < least:
                    least = PRICES * ticks + price * area
            constant += price * scale * smallest
            prices[part] = scale * (least - price * smallest)
    start(problem, values)
    changed = True
    while changed:
        changed = False
        for index in range(num):
            edge = search.edges[index]
            if edge[3] != 0 or values[edge[0]] == BELOW_ALL:
                continue
            # The arc's weight is the source's time and the lag; the time is priced anew.
            lag = PRICES * scale * (edge[2] - search.part_times[edge[0]])
            value = values[edge[0]] + prices[edge[0]] + lag
            if value > values[edge[1]]:
                values[edge[1]] = value
                changed = True
    longest = 0
    for index in range(problem.outputs.shape[0]):
        part = problem.outputs[index]
        longest = max(longest, values[part] + prices[part])
    return longest + constant


def device_floor(problem: Problem, search: Search, factor: int, scale: int) -> int:
    """Return a bound on the latency from what one device, or all, do for a batch, in ticks times `scale`.

    A group's work for a batch comes between the least start of its operations and the least way from one of them to
    the last output. The work of all operations comes within the latency on all devices.
    """
    floor, area = 0, 0
    for index in range(search.control[NUM_GROUPS]):
        group, head, tail, work = search.groups[index], -1, -1, 0
        group &= -group
        for op in range(search.masks.shape[0]):
            if search.masks[op] & group == 0 or problem.tails[op] < 0:
                continue
            first = problem.first[op]
            begin = (search.values[first] + factor // 2) // factor - scale * search.part_times[first]
            head = begin if head < 0 else min(head, begin)
            tail = problem.tails[op] if tail < 0 else min(tail, problem.tails[op])
            work += problem.totals[op, search.size_of[op]]
        if work > 0:
            floor = max(floor, head + scale * (work + tail))
    for op in range(search.masks.shape[0]):
        if problem.tails[op] < 0:
            continue
        area += search.areas[op]
    return int(max(floor, -(-area * scale // search.control[DEVICES])))


def price_room(problem: Problem, search: Search, num: int, room: int, scale: int) -> None:
    """Raise the node's bound on the latency by a good price of device time: the last node's, or one beside it."""
    control, bound = search.control, search.bound
    at = control[PRICE]
    best = priced_latency(problem, search, num, room, scale, 1 << at)
    beside = at + 1 if control[NODES] % 2 and at < MAX_PRICE else max(at - 1, 0)
    latency = priced_latency(problem, search, num, room, scale, 1 << beside)
    if latency > best:
        best, control[PRICE] = latency, beside
    latency = -(-best // PRICES)
    if latency * bound[1] > bound[0] * scale:
        bound[0], bound[1] = latency, scale


def find_target(problem: Problem, search: Search, archive: Archive) -> bool:
    """Set the period that a better deployment has to be below, given the node's bounds; False if none can be better.

    The target is a period (numerator, denominator) and whether equal counts as below (-1) or not (1).
    """
    control, bound, target = search.control, search.bound, search.target
    limits, num_devices, devices = problem.limits, control[DEVICES], used_devices(search)
    if limits[2] >= 0 and bound[0] * limits[3] > limits[2] * bound[1]:
        return False
    if limits[0] >= 0 and bound[2] * limits[1] > limits[0] * num_devices:
        return False
    best = -1
    for index in range(archive.count[0]):
        asked = archive.asked[index]
        worse_by = asked[2] * bound[1] - bound[0] * asked[3]
        if control[OBJECTIVE] == RATE and asked[0] * num_devices < bound[2] * asked[1]:
            return False
        if control[OBJECTIVE] == LATENCY and worse_by < 0:
            return False
        if worse_by > 0 and control[OBJECTIVE] != RATE:
            continue
        if reaches(archive, index, bound[2], num_devices, bound[0], bound[1], devices):
            return False
        if best < 0 or asked[0] * archive.asked[best, 1] < archive.asked[best, 0] * asked[1]:
            best = index
    target[2] = -1
    if best >= 0:
        asked = archive.asked[best]
        target[0], target[1] = asked[0], asked[1]
        worse_by = asked[2] * bound[1] - bound[0] * asked[3]
        if worse_by < 0 or (worse_by == 0 and (archive.count[1] > 0 or archive.figures[best, 4] <= devices)):
            target[2] = 1
        if limits[0] >= 0 and limits[0] * target[1] < target[0] * limits[1]:
            target[0], target[1], target[2] = limits[0], limits[1], -1
    elif limits[0] >= 0:
        target[0], target[1] = limits[0], limits[1]
    else:
        target[0], target[1] = problem.longest[0], 1
    return True


def is_left(problem: Problem, search: Search, archive: Archive) -> bool:
    """Return whether the node can be left: no deployment below it is better than all points.

    ``search.bound`` comes with the parent's bound on the latency and goes with the node's.
    """
    control, bound, target = search.control, search.bound, search.target
    control[NODES] += 1
    bound[2] = 0
    asked_period, asked_scale, asked_slope = -1, 1, -1
    num, factor, negative = 0, 1, False
    while True:
        if not find_target(problem, search, archive):
            return True
        period, scale, slope = target[0], target[1], target[2]
        later = period * asked_scale - asked_period * scale
        if asked_period >= 0 and (later > 0 or (later == 0 and slope <= asked_slope)):
            return False
        asked_period, asked_scale, asked_slope = period, scale, slope
        if not set_times(problem, search, period, scale) or not find_target(problem, search, archive):
            return True
        room, needed = room_left(problem, search, period, scale), bound[3] * scale
        if needed > room:
            return True
        num = find_edges(problem, search)
        negative = False
        for index in range(num):
            if search.edges[index, 3] < 0:
                negative = True
        factor = 4 * (num + 2) * (control[STAGGER] + 2)
        start(problem, search.values)
        if relax(search.edges, num, search.values, period, scale, 0, 0, factor, slope):
            return True
        if negative:
            start(problem, search.values)
            relax(search.edges, num, search.values, period, scale, bound[2], control[DEVICES], factor, slope)
        for part in range(search.values.shape[0]):
            if search.values[part] != BELOW_ALL:
                search.values[part] += factor * scale * search.part_times[part]
        end = longest_end(problem, search, factor)
        if end * bound[1] > bound[0] * scale:
            bound[0], bound[1] = end, scale
        floor = device_floor(problem, search, factor, scale)
        if floor * bound[1] > bound[0] * scale:
            bound[0], bound[1] = floor, scale
        if needed > 0 and not negative:
            price_room(problem, search, num, room, scale)
