"""The branch and bound over integers: plain functions over arrays, which `load_kernel` compiles with numba.

A node of the tree is a set of placed operations, with the relation of every two of them that share a device. A relation
is the height k of the arc from u to v (v of batch j waits for u of batch j − k); the arc back has the height 1 − k. In
one order for all batches k is 0 or 1; where batches interleave (a modulo schedule) it is any integer. Operations that
are not placed yet have their least times and no transfers, so every node is a relaxation of all below it: the largest
cycle ratio and the longest walks of its graph bound theirs.

A node is left when some point of the archive is at least as good as all that it can lead to. That is asked once a node:
at the smallest period T of the archive's points whose latency is no more than the node's bound, has the graph a cycle
of ratio T or more? The same relaxation yields the longest walks at T, so a better bound on the latency.

Source: ``spec/planners.md``, section 1; E. L. Lawler, *Combinatorial Optimization* (1976), chapter 3, for the question.
"""

from __future__ import annotations

from typing import Any

from flashrt.analysis.search.arrays import (
    BOUND,
    BOUND_SCALE,
    CAPACITY,
    CHOICE,
    DEPTH,
    DEVICES,
    DONE,
    GREATEST,
    GROUPS_BEFORE,
    KIND,
    LEAF,
    LEAST,
    LEAVES,
    MAX_CHOICES,
    NESTED,
    NODES,
    NUM_GROUPS,
    PARTNER,
    PLACE,
    STAGGER,
    STATUS,
    TOO_MANY,
    TURNS,
    UNDECIDED,
    WORKING,
    Archive,
    Problem,
    Search,
)  # fmt: skip
from flashrt.analysis.search.bounds import is_left
from flashrt.analysis.search.graph import popcount, settle


def lowest(mask: int, number: int) -> int:
    """Return the mask of the lowest devices of a mask."""
    found = 0
    for _ in range(number):
        bit = mask & -mask
        found |= bit
        mask ^= bit
    return found


def fits_memory(problem: Problem, search: Search, op: int) -> bool:
    """Return whether every device of an operation still has room for what lives there."""
    capacity = search.control[CAPACITY]
    if capacity < 0:
        return True
    for device in range(search.control[DEVICES]):
        if not search.masks[op] >> device & 1:
            continue
        total = 0
        for other in range(search.masks.shape[0]):
            if search.masks[other] >> device & 1:
                total += problem.memory[other, search.size_of[other]]
        for state in range(problem.state_bytes.shape[0]):
            for other in range(search.masks.shape[0]):
                if search.masks[other] >> device & 1 and problem.uses[other, state]:
                    total += problem.state_bytes[state]
                    break
        if total > capacity:
            return False
    return True


def index_of_size(problem: Problem, mask: int) -> int:
    """Return the index of a mask's size, or -1."""
    size = popcount(mask)
    for index in range(problem.sizes.shape[0]):
        if problem.sizes[index] == size:
            return index
    return -1


def may_have(problem: Problem, search: Search, op: int, mask: int) -> bool:
    """Return whether an operation may run on a mask, beside those placed."""
    size = index_of_size(problem, mask)
    if size < 0 or not problem.allowed[op, size]:
        return False
    clashes = False
    for other in range(search.masks.shape[0]):
        clashes = clashes or (problem.apart[op, other] and search.masks[other] & mask != 0)
    return not clashes


def load_with(problem: Problem, search: Search, op: int, mask: int) -> int:
    """Return the work on a mask's devices once an operation is placed there, in ticks, by which masks are tried.

    Groups in use that have none of the operations right before it come last: returning to them lengthens the cycle.
    """
    load, used, near = problem.totals[op, index_of_size(problem, mask)], False, False
    for other in range(search.masks.shape[0]):
        if search.masks[other] & mask:
            load += problem.totals[other, search.size_of[other]]
            used = True
            near = near or problem.near[other, op]
    return int(load if near or not used else load + problem.longest[0])


def sort_choices(problem: Problem, search: Search, op: int, choices: Any, num: int) -> None:
    """Put first what leaves the least load on the operation's devices."""
    for at in range(1, num):
        mask, key, to = choices[at], load_with(problem, search, op, choices[at]), at
        while to > 0 and load_with(problem, search, op, choices[to - 1]) > key:
            choices[to] = choices[to - 1]
            to -= 1
        choices[to] = mask


def list_choices(problem: Problem, search: Search, place: int) -> None:
    """Write the masks to try for the operation at a place; one of each kind that devices alike make equal."""
    op = problem.sequence[place]
    control, choices = search.control, search.choices[place]
    num = 0
    if problem.pinned[op]:
        if may_have(problem, search, op, problem.pinned[op]):
            choices[0], num = problem.pinned[op], 1
        search.num_choices[place] = num
        return
    for other in range(search.masks.shape[0]):
        if search.masks[other] and problem.kinship[other] == problem.kinship[op]:
            if may_have(problem, search, op, search.masks[other]):
                choices[0], num = search.masks[other], 1
            search.num_choices[place] = num
            return
    groups, num_groups = search.groups, control[NUM_GROUPS]
    for index in range(num_groups):
        if may_have(problem, search, op, groups[index]):
            choices[num] = groups[index]
            num += 1
    num_islands = problem.islands.shape[0]
    for region in range(num_islands + (num_groups if control[NESTED] else 0)):
        whole = problem.islands[region] if region < num_islands else groups[region - num_islands]
        inside, num_children = 0, 0
        children = search.parents
        for index in range(num_groups):
            group = groups[index]
            if group == whole and region < num_islands:
                inside = whole
            if group & ~whole or group == whole:
                continue
            inside |= group
            maximal = True
            for other in range(num_groups):
                wider = groups[other]
                if wider != group and wider != whole and not group & ~wider and not wider & ~whole:
                    maximal = False
            if maximal and num_children < 10:
                children[num_children] = index
                num_children += 1
        free = whole & ~inside
        if region < num_islands:
            repeated = False
            for earlier in range(region):
                other = problem.islands[earlier]
                touched = 0
                for index in range(num_groups):
                    touched |= groups[index] & other
                if control[NESTED] and (touched or inside):
                    continue
                repeated = repeated or popcount(other & ~touched) == popcount(free)
            if repeated:
                continue
        for subset in range(1 << num_children if control[NESTED] else 1):
            union = 0
            for index in range(num_children):
                if subset >> index & 1:
                    union |= groups[children[index]]
            for size in range(problem.sizes.shape[0]):
                missing = problem.sizes[size] - popcount(union)
                if missing < 0 or missing > popcount(free) or not problem.allowed[op, size]:
                    continue
                mask = union | lowest(free, missing)
                known = False
                for index in range(num_groups):
                    known = known or groups[index] == mask
                if known or not may_have(problem, search, op, mask):
                    continue
                if num >= MAX_CHOICES:
                    control[STATUS] = TOO_MANY
                    break
                choices[num] = mask
                num += 1
    sort_choices(problem, search, op, choices, num)
    search.num_choices[place] = num


def push(search: Search, kind: int, place: int, partner: int, least: int, greatest: int) -> None:
    """Put a frame on the stack, with the node's bound on the latency."""
    frame = search.frames[search.control[DEPTH]]
    frame[KIND], frame[PLACE], frame[CHOICE], frame[PARTNER] = kind, place, -1, partner
    frame[LEAST], frame[GREATEST] = least, greatest
    frame[BOUND], frame[BOUND_SCALE] = search.bound[0], search.bound[1]
    frame[GROUPS_BEFORE] = search.control[NUM_GROUPS]
    search.control[DEPTH] += 1


def advance(problem: Problem, search: Search, archive: Archive, place: int, partner: int, variant: int) -> None:
    """Relate the operation at a place to those before it, from `partner` on, then go on below or branch.

    A relation that others imply is set; one that is open becomes a frame.
    """
    op, stagger = problem.sequence[place], search.control[STAGGER]
    relation, num_ops = search.relation, search.masks.shape[0]
    for at in range(partner, place):
        other = problem.sequence[at]
        if not search.masks[op] & search.masks[other]:
            continue
        least, greatest = -stagger, 1 + stagger
        if problem.before[other, op]:
            greatest = 0
        if problem.before[op, other]:
            least = 1
        for middle in range(num_ops):
            if relation[other, middle] != UNDECIDED and relation[middle, op] != UNDECIDED:
                greatest = min(greatest, relation[other, middle] + relation[middle, op])
                least = max(least, 1 - relation[op, middle] - relation[middle, other])
        if least > greatest:
            return
        if least == greatest:
            relation[other, op], relation[op, other] = least, 1 - least
            continue
        if is_left(problem, search, archive):
            return
        push(search, 1, place, at, least, greatest)
        return
    if is_left(problem, search, archive):
        return
    if place + 1 < num_ops:
        push(search, 0, place + 1, 0, 0, 0)
        list_choices(problem, search, place + 1)
        return
    search.control[LEAVES] += 1
    if search.control[TURNS]:
        search.control[STATUS] = LEAF
        return
    settle(problem, search, archive, variant)


def explore(problem: Problem, search: Search, archive: Archive, variant: int, budget: int) -> int:
    """Go on with the search for at most `budget` nodes; return DONE, WORKING, LEAF or TOO_MANY.

    At a LEAF, which only a search with turns has, the node is complete and left to the caller.
    """
    control, masks, relation = search.control, search.masks, search.relation
    control[NODES] = 0
    while control[NODES] < budget:
        if control[DEPTH] == 0:
            return DONE
        frame = search.frames[control[DEPTH] - 1]
        place = frame[PLACE]
        op = problem.sequence[place]
        partner = frame[PARTNER] if frame[KIND] == 1 else 0
        for at in range(partner, place):
            other = problem.sequence[at]
            relation[op, other] = relation[other, op] = UNDECIDED
        frame[CHOICE] += 1
        search.bound[0], search.bound[1] = frame[BOUND], frame[BOUND_SCALE]
        if frame[KIND] == 0:
            masks[op] = 0
            control[NUM_GROUPS] = frame[GROUPS_BEFORE]
            if frame[CHOICE] >= search.num_choices[place]:
                control[DEPTH] -= 1
                continue
            mask = search.choices[place, frame[CHOICE]]
            masks[op], search.size_of[op] = mask, index_of_size(problem, mask)
            if not fits_memory(problem, search, op):
                continue
            known = False
            for index in range(control[NUM_GROUPS]):
                known = known or search.groups[index] == mask
            if not known:
                search.groups[control[NUM_GROUPS]] = mask
                control[NUM_GROUPS] += 1
            advance(problem, search, archive, place, 0, variant)
        else:
            least, greatest = frame[LEAST], frame[GREATEST]
            if frame[CHOICE] > greatest - least:
                control[DEPTH] -= 1
                continue
            # 0 first, then 1, -1, 2, -2, …, of those that are open.
            seen, height = -1, 0
            for number in range(4 * (control[STAGGER] + 2)):
                height = (number + 1) // 2 if number % 2 else -(number // 2)
                if least <= height <= greatest:
                    seen += 1
                    if seen == frame[CHOICE]:
                        break
            other = problem.sequence[partner]
            relation[other, op], relation[op, other] = height, 1 - height
            advance(problem, search, archive, place, partner + 1, variant)
        if control[STATUS] != WORKING:
            status = int(control[STATUS])
            control[STATUS] = WORKING
            return status
    return WORKING
