"""Drives the branch and bound: rounds of falling tolerance, the clock, and leaves in which devices take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from flashrt.analysis.constraints import build_constraints
from flashrt.analysis.ordering import apply_order
from flashrt.analysis.profile import Profile
from flashrt.analysis.search import arrays
from flashrt.analysis.search.arrays import Archive, Search
from flashrt.analysis.search.closing import Answer, Question
from flashrt.analysis.search.kernel import load_kernel
from flashrt.analysis.search.layout import Found, is_order, place_found
from flashrt.analysis.search.model import Model
from flashrt.analysis.search.resolve import Ask
from flashrt.analysis.search.seeds import plant_seeds
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram

TOLERANCES = (400, 100, 0)
"""In thousandths: a round leaves what cannot be better by more. Each round starts with the points of the one before."""
FINE_TOLERANCES = (400, 250, 150, 100, 70, 50, 30, 20, 10, 0)
"""For programs that the time limit probably cuts: the last round that ends is the gap."""
MANY_OPERATIONS = 14
TREE_SHARE = 0.5
CLOSING_TOLERANCES = (Fraction(5, 100), Fraction(1, 100), Fraction(0))
"""In rounds: first all boxes but for a share of five per cent, then what is left."""
MAX_POINTS = 2048
NODES_PER_STEP = 20_000
Figures = Sequence[tuple[Fraction, Fraction]]
"""Period and latency of points, the smallest period first; ticks of the search."""
OBJECTIVES = {"front": arrays.FRONT, "rate": arrays.RATE, "latency": arrays.LATENCY, "devices": arrays.FRONT}


@dataclass
class Solution:
    """What a search found and how far it got."""

    found: list[Found]
    """By period, the smallest first."""
    tolerance: Fraction | None
    """No deployment is better than all points by more than this share in both figures; 0: proved; None: no proof."""
    gaps: list[Fraction | None]
    """The same of each point: none is better than it by more in both figures."""
    num_nodes: int = 0
    seconds: float = 0.0


class Boxes:
    """The regions in which a better deployment than the points would be, and what is known of them.

    Parameters
    ----------
    furthest
        Ticks that stand for no bound.
    share
        No deployment is better than all points by more than this share in both figures, or None.
    """

    def __init__(self, objective: int, furthest: int, share: Fraction | None) -> None:
        self._objective = objective
        self._furthest = furthest
        self._share = share
        self.empty: list[tuple[int, int]] = []
        """Periods and latencies, in ticks, that no deployment keeps both."""

    def find_open(self, figures: Figures, share: Fraction) -> list[tuple[int, int]]:
        """Return the period and latency of every box that is not known to be empty but for a share."""
        found = []
        for period, latency in self._list(figures):
            box = self._below(period, share), self._below(latency, share)
            if min(box) >= 0 and not any(box[0] <= a and box[1] <= b for a, b in self.empty):
                found.append(box)
        return found

    def find_gaps(self, figures: Figures) -> list[Fraction | None]:
        """Return for every box by how much its contents may be better; empty regions close all but a tick of period."""
        gaps: list[Fraction | None] = []
        for period, latency in self._list(figures):
            known = [] if self._share is None else [self._share]
            if (period is not None and period <= 0) or (latency is not None and latency <= 0):
                known.append(Fraction(0))
            for a, b in self.empty:
                if (period is None and a < self._furthest) or (latency is None and b < self._furthest) or not a:
                    continue
                # Periods may be fractions of ticks: what has one above a is not ruled out. Latencies at whole periods
                # are whole.
                by_period = Fraction(0) if period is None else period / a - 1
                by_latency = Fraction(0) if latency is None else latency / (b + 1) - 1
                known.append(max(by_period, by_latency, Fraction(0)))
            gaps.append(min(known, default=None))
        return gaps

    def gap_of(self, figures: Figures, at: int) -> Fraction | None:
        """Return by how much a deployment may be better than a point."""
        gaps = self.find_gaps(figures)
        beside = gaps if self._objective in (arrays.RATE, arrays.LATENCY) else gaps[at : at + 2]
        return None if None in beside else max(gap for gap in beside if gap is not None)

    def _list(self, figures: Figures) -> list[tuple[Fraction | None, Fraction | None]]:
        """Return the bounds below which each box lies; None for none."""
        if not figures:
            return [(None, None)]
        if self._objective == arrays.RATE:
            return [(figures[0][0], None), (figures[0][0] + 1, figures[0][1])]
        if self._objective == arrays.LATENCY:
            return [(None, figures[-1][1]), (figures[-1][0], figures[-1][1] + 1)]
        periods = [*(period for period, _ in figures), None]
        latencies = [None, *(latency for _, latency in figures)]
        return list(zip(periods, latencies, strict=True))

    def _below(self, figure: Fraction | None, share: Fraction) -> int:
        """Return the largest number of ticks that is below a figure by more than a share."""
        return self._furthest if figure is None else -(-figure // (1 + share)) - 1


@dataclass
class Solver:
    """One search over all variants of a program."""

    built: BuiltProgram
    profile: Profile
    ask: Ask
    models: Sequence[Model]
    objective: int = arrays.FRONT
    nested: bool = False
    first_only: bool = False
    """Stop at the first deployment: for questions of feasibility."""
    archive: Archive = field(init=False)
    num_nodes: int = 0

    def __post_init__(self) -> None:
        import numpy as np

        num_ops = len(self.ask.degrees)
        self.archive = Archive(
            figures=np.zeros((MAX_POINTS, 5), np.int64),
            asked=np.zeros((MAX_POINTS, 4), np.int64),
            masks=np.zeros((MAX_POINTS, num_ops), np.int64),
            relation=np.zeros((MAX_POINTS, num_ops, num_ops), np.int64),
            tag=np.zeros((MAX_POINTS, 2), np.int64),
            count=np.zeros(3, np.int64),
        )

    def solve(self, time_limit_s: float) -> Solution:
        """Return the points found within the limit, with what is proved of them."""
        kernel = load_kernel()
        begin = time.monotonic()
        deadline = begin + time_limit_s
        proved: int | None = None
        # Half of the time is for the tree; what it leaves open is asked of CP-SAT.
        own = deadline if self.first_only else begin + time_limit_s * TREE_SHARE
        if not self.first_only:
            for variant, model in enumerate(self.models):
                plant_seeds(kernel, model, variant, self.archive, partial(self._fresh, model, turns=False))
        if self.nested and not self.first_only:
            # Disjoint groups are a small part of the space, and most of its best points.
            self.nested = False
            self._round(kernel, begin + time_limit_s / 4)
            self.nested, self.archive.count[2] = True, 0
        tolerances = FINE_TOLERANCES if len(self.ask.degrees) > MANY_OPERATIONS else TOLERANCES
        for tolerance in (0,) if self.first_only else tolerances:
            self.archive.count[1] = tolerance
            for index in range(self.archive.count[0]):
                kernel["lower"](self.archive, index)
            if not self._round(kernel, own):
                break
            proved = tolerance
        share = None if proved is None else Fraction(proved, 1000)
        boxes = Boxes(self.objective, int(self.models[0].problem.longest[0]), share)
        if share != 0 and not self.first_only:
            self.archive.count[1] = self.archive.count[2] = 0
            self._close(kernel, boxes, deadline)
        found = sorted(self._points(), key=lambda found: (found.period, found.latency))
        figures = self._figures()
        gaps = boxes.find_gaps(figures)
        whole = None if None in gaps else max(gap for gap in gaps if gap is not None)
        of_points = [boxes.gap_of(figures, at) for at in range(len(found))]
        return Solution(found, whole, of_points, self.num_nodes, time.monotonic() - begin)

    def _figures(self) -> Figures:
        """Return period and latency of every point, in ticks of the search, the smallest period first."""
        rows = self.archive.figures[: self.archive.count[0]].tolist()
        return sorted((Fraction(row[0], row[1]), Fraction(row[2], row[3])) for row in rows)

    def _close(self, kernel: Any, boxes: Boxes, deadline: float) -> None:
        """Ask CP-SAT, box by box, whether anything is better; put what it finds into the archive."""
        for share in CLOSING_TOLERANCES:
            given_up: set[tuple[int, int]] = set()
            while True:
                open_ones = [box for box in boxes.find_open(self._figures(), share) if box not in given_up]
                left = deadline - time.monotonic()
                if not open_ones or left <= 0:
                    break
                box = open_ones[0]
                limit_s = max(left / len(open_ones), min(left, 0.5))
                if not self._ask_box(kernel, boxes, box, limit_s):
                    given_up.add(box)

    def _ask_box(self, kernel: Any, boxes: Boxes, box: tuple[int, int], limit_s: float) -> bool:
        """Return whether the box is closed now, or a point was found in it."""
        limits = [int(value) for value in self.models[0].problem.limits]
        period = box[0] if limits[0] < 0 else min(box[0], limits[0] // limits[1])
        latency = box[1] if limits[2] < 0 else min(box[1], limits[2] // limits[3])
        until = time.monotonic() + limit_s
        for variant, model in enumerate(self.models):
            question = Question(self.ask, model, period, latency, nested=self.nested)
            share_s = (until - time.monotonic()) / (len(self.models) - variant)
            while answer := question.solve(share_s):
                before = self.archive.figures.copy()
                self._offer(kernel, variant, model, answer)
                if (before != self.archive.figures).any():
                    return True
                question.forbid_last()
                share_s = (until - time.monotonic()) / (len(self.models) - variant)
            if answer is None:
                return False
        boxes.empty.append(box)
        return True

    def _offer(self, kernel: Any, variant: int, model: Model, answer: Answer) -> None:
        """Find the exact figures of what CP-SAT has found."""
        if not is_order(answer[1]):
            return
        for turns in (False, True) if model.has_turns else (False,):
            search = self._fresh(model, turns=turns)
            search.control[arrays.NUM_GROUPS] = 0
            for op, mask in enumerate(answer[0]):
                search.masks[op], search.size_of[op] = mask, kernel["index_of_size"](model.problem, mask)
            for mask in sorted(set(answer[0])):
                search.groups[search.control[arrays.NUM_GROUPS]] = mask
                search.control[arrays.NUM_GROUPS] += 1
            search.relation[:] = answer[1]
            kernel["set_times"](model.problem, search, int(model.problem.longest[0]), 1)
            if turns:
                self._offer_turns(kernel, variant, model, search)
            else:
                kernel["settle"](model.problem, search, self.archive, variant)

    def _round(self, kernel: Any, deadline: float) -> bool:
        """Search every variant to its end; return False when the time or the room for points ran out."""
        for variant, model in enumerate(self.models):
            for turns in (False, True) if model.has_turns else (False,):
                search = self._fresh(model, turns=turns)
                kernel["push"](search, 0, 0, 0, 0, 0)
                kernel["list_choices"](model.problem, search, 0)
                status = arrays.WORKING
                while status != arrays.DONE:
                    status = kernel["explore"](model.problem, search, self.archive, variant, NODES_PER_STEP)
                    self.num_nodes += int(search.control[arrays.NODES])
                    if status == arrays.LEAF:
                        self._offer_turns(kernel, variant, model, search)
                    if self.first_only and self.archive.count[0]:
                        return True
                    late = time.monotonic() > deadline and status != arrays.DONE
                    if late or status == arrays.TOO_MANY or self.archive.count[2]:
                        return False
        return True

    def _fresh(self, model: Model, *, turns: bool) -> Search:
        import numpy as np

        problem = model.problem
        num_ops, num_parts = len(problem.first), len(problem.owner)
        pinned = sorted({int(mask) for mask in problem.pinned if mask})
        control = np.zeros(13, np.int64)
        control[arrays.DEVICES] = self.ask.num_devices
        control[arrays.NESTED] = self.nested
        control[arrays.STAGGER] = self.ask.max_stagger
        control[arrays.TURNS] = turns
        control[arrays.STATUS] = arrays.WORKING
        control[arrays.OBJECTIVE] = self.objective
        control[arrays.NUM_GROUPS] = len(pinned)
        control[arrays.PRICE] = 3
        control[arrays.CAPACITY] = -1 if self.ask.capacity is None else self.ask.capacity
        groups = np.zeros(num_ops + len(pinned) + 1, np.int64)
        groups[: len(pinned)] = pinned
        return Search(
            control=control,
            masks=np.zeros(num_ops, np.int64),
            size_of=np.zeros(num_ops, np.int64),
            relation=np.full((num_ops, num_ops), arrays.UNDECIDED, np.int64),
            groups=groups,
            frames=np.zeros((num_ops * (num_ops + 1) // 2 + 4, arrays.FRAME), np.int64),
            choices=np.zeros((num_ops, arrays.MAX_CHOICES), np.int64),
            num_choices=np.zeros(num_ops, np.int64),
            loads=np.zeros(len(groups), np.int64),
            counts=np.zeros(len(groups), np.int64),
            areas=np.zeros(num_ops, np.int64),
            open_groups=np.zeros(len(groups), np.int64),
            takes=np.zeros((num_ops, len(problem.sizes)), np.bool_),
            target=np.zeros(3, np.int64),
            edges=np.zeros((len(problem.arcs) + num_ops * num_ops + 1, 4), np.int64),
            part_times=np.zeros(num_parts, np.int64),
            values=np.zeros(num_parts, np.int64),
            parents=np.zeros(max(num_parts, 16), np.int64),
            bound=np.array([0, 1, 0, 0], np.int64),
        )

    def _offer_turns(self, kernel: Any, variant: int, model: Model, search: Search) -> None:
        """Find the figures of a complete node whose devices take turns, and offer it to the archive."""
        placement = place_found(self.ask, model, search.masks, search.relation, turns=True)
        constraints = build_constraints(self.built, self.profile, placement)
        try:
            ordered = apply_order(constraints, placement.order, True, self.profile.frames_per_batch, "optimal")
        except InputError:
            return
        if not ordered.interleave:
            return
        period, latency = ordered.figures.ratio.ratio / model.unit, ordered.figures.latency / model.unit
        if self.ask.max_period is not None and period * model.unit > self.ask.max_period:
            return
        if self.ask.max_latency is not None and latency * model.unit > self.ask.max_latency:
            return
        kernel["insert"](
            self.archive, period.numerator, period.denominator, latency.numerator, latency.denominator,
            placement.num_devices, search.masks, search.relation, variant, 1,
        )  # fmt: skip

    def _points(self) -> list[Found]:
        points = []
        for index in range(int(self.archive.count[0])):
            row = [int(value) for value in self.archive.figures[index]]
            variant, turns = (int(value) for value in self.archive.tag[index])
            model = self.models[variant]
            placement = place_found(
                self.ask, model, self.archive.masks[index], self.archive.relation[index], turns=bool(turns)
            )
            period, latency = Fraction(row[0], row[1]) * model.unit, Fraction(row[2], row[3]) * model.unit
            points.append(Found(period, latency, placement))
        return points
