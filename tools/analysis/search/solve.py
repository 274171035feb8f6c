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
from flashrt.analysis.search.kernel import load_kernel
from flashrt.analysis.search.layout import Found, place_found
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
MAX_POINTS = 512
NODES_PER_STEP = 20_000
OBJECTIVES = {"front": arrays.FRONT, "rate": arrays.RATE, "latency": arrays.LATENCY, "devices": arrays.FRONT}


@dataclass
class Solution:
    """What a search found and how far it got."""

    found: list[Found]
    """By period, the smallest first."""
    tolerance: Fraction | None
    """No deployment is better than all points by more than this share in both figures; 0: proved; None: no proof."""
    num_nodes: int = 0
    seconds: float = 0.0


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
        if not self.first_only:
            for variant, model in enumerate(self.models):
                plant_seeds(kernel, model, variant, self.archive, partial(self._fresh, model, turns=False))
        tolerances = FINE_TOLERANCES if len(self.ask.degrees) > MANY_OPERATIONS else TOLERANCES
        for tolerance in (0,) if self.first_only else tolerances:
            self.archive.count[1] = tolerance
            for index in range(self.archive.count[0]):
                kernel["lower"](self.archive, index)
            if not self._round(kernel, deadline):
                break
            proved = tolerance
        return Solution(
            sorted(self._points(), key=lambda found: (found.period, found.latency)),
            None if proved is None else Fraction(proved, 1000),
            self.num_nodes,
            time.monotonic() - begin,
        )

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
