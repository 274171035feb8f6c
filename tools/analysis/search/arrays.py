"""The arrays of the branch and bound: the problem, the node in work, and the archive of points.

Times are integer ticks, devices are bits of a mask. What `archive`, `graph`, `bounds` and `tree` have is plain
functions over these, which numba compiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

UNDECIDED = 127
"""In place of the relation of two operations that share no device, or that have none yet."""
BELOW_ALL = -(1 << 62)
MAX_CHOICES = 4096
DONE, WORKING, LEAF, TOO_MANY = 0, 1, 2, 3
DEVICES, NESTED, STAGGER, TURNS, STATUS, DEPTH, LEAVES, NODES, COUNT, OBJECTIVE, NUM_GROUPS, CAPACITY, PRICE = range(13)
FRONT, RATE, LATENCY = 0, 1, 2
PRICES = 128
"""Prices of device time are 1, 2, 4, … of these parts."""
MAX_PRICE = 9
# Frame of the explicit stack: kind, place in the sequence, next choice, partner's place, least and greatest relation,
# latency bound (numerator, denominator), groups before.
KIND, PLACE, CHOICE, PARTNER, LEAST, GREATEST, BOUND, BOUND_SCALE, GROUPS_BEFORE, FRAME = range(10)


class Problem(NamedTuple):
    """What does not change during a search. n operations, N parts, D sizes of groups, A arcs, S states."""

    first: Any
    """Operation -> its first part; shape [n]."""
    last: Any
    """Operation -> its last part; shape [n]."""
    owner: Any
    """Part -> its operation; shape [N]."""
    times: Any
    """Ticks of each part by size; shape [D, N]."""
    totals: Any
    """Ticks of each operation by size; shape [n, D]."""
    allowed: Any
    """Whether an operation may have a size; shape [n, D]."""
    sizes: Any
    """Device counts; shape [D]."""
    arcs: Any
    """Source part, target part, height, lag where the ends do not share a resource; shape [A, 4]."""
    entries: Any
    """Whether a part waits for the batch alone; shape [N]."""
    outputs: Any
    """Parts whose completion is an output's last; shape [O]."""
    memory: Any
    """Bytes on each device by size; shape [n, D]."""
    state_bytes: Any
    """Shape [S]."""
    uses: Any
    """Whether an operation uses a state; shape [n, S]."""
    islands: Any
    """Bit masks of devices between which a group may span; shape [I]."""
    pinned: Any
    """Bit mask of the devices an operation must have, or 0; shape [n]."""
    kinship: Any
    """Operations with the same number share their devices; shape [n]."""
    has_kin: Any
    """Whether an operation shares its number with another; shape [n]."""
    apart: Any
    """Whether two operations may share no device; shape [n, n]."""
    before: Any
    """Whether dataflow or state makes one wait for the other within a batch; shape [n, n]."""
    near: Any
    """Whether an arc leads from one to the other within a batch; shape [n, n]."""
    stream: Any
    """Operations that streaming edges join have the same number; shape [n]."""
    sequence: Any
    """Operations in the order in which they are placed; shape [n]."""
    tails: Any
    """Least time from an operation's end to the last output that waits for it, or -1 where none does; shape [n]."""
    longest: Any
    """A period that every deployment can keep; shape [1]."""
    limits: Any
    """Largest period (numerator, denominator) and latency (the same) wanted, ticks; -1 for none; shape [4]."""


class Search(NamedTuple):
    """What changes: the node, the explicit stack, buffers."""

    control: Any
    """Settings and counters, by the names above; shape [13]."""
    masks: Any
    """Operation -> devices, 0 where not placed; shape [n]."""
    size_of: Any
    """Operation -> index of its size; shape [n]."""
    relation: Any
    """Height of the arc from one operation to another; shape [n, n]."""
    groups: Any
    """Masks in use; shape [n + pinned]."""
    frames: Any
    """The stack; shape [depth, FRAME]."""
    choices: Any
    """Masks to try for the operation at each place; shape [n, MAX_CHOICES]."""
    num_choices: Any
    """Shape [n]."""
    loads: Any
    """Work of each group's busiest device; shape as `groups`."""
    counts: Any
    """How many devices each group has; shape as `groups`."""
    areas: Any
    """Device time of each operation, of an unplaced one the least; shape [n]."""
    open_groups: Any
    """Whether some unplaced operation may join a group; shape as `groups`."""
    takes: Any
    """Whether an unplaced operation may still have a size; shape [n, D]."""
    target: Any
    """Period to be below (numerator, denominator), and 1 where below means less, -1 where equal will do; shape [3]."""
    edges: Any
    """Buffer for arcs: source, target, weight, height; shape [E, 4]."""
    part_times: Any
    """Shape [N]."""
    values: Any
    """Shape [N]."""
    parents: Any
    """Shape [N]."""
    bound: Any
    """Of the node in work: bound on the latency (numerator, denominator), bound on the period times the number of
    devices, least device time of what is not placed; shape [4]."""


class Archive(NamedTuple):
    """Points found, no one dominating another: what they are and what is asked of a better one."""

    figures: Any
    """Period and latency (numerator, denominator each), devices; shape [P, 5]."""
    asked: Any
    """The same four, lowered by the tolerance: what reaches all of a row is no better than its point; shape [P, 4]."""
    masks: Any
    """Shape [P, n]."""
    relation: Any
    """Shape [P, n, n]."""
    tag: Any
    """Which variant of the program, and whether devices take turns; shape [P, 2]."""
    count: Any
    """Number of points, the tolerance as parts of a thousand, and whether there was no room for one; shape [3]."""
