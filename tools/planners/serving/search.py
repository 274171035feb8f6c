"""Phases 1 to 7 of a serving plan, and what each looked at.

The space is never made as a whole. A logical plan is bounded by its GPUs shared out as if they could be cut; its
executors by the rate that each node must reach for the bound to beat the best estimate known; what is left is
estimated, and the best estimates are simulated until no other is expected to beat the best simulation.

Source: ``papers/002`` (Cornfigurator), algorithms 1 and 2; ``spec/planners.md``, section 2.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from flashrt.errors import Finding, InputError, listed
from flashrt.planners.serving.documents import RETRY
from flashrt.planners.serving.evaluate import Evaluator, Load, Simulated
from flashrt.planners.serving.flow import best_routing, grid_routings, is_redundant, only_paths, width
from flashrt.planners.serving.guided import improve, refine
from flashrt.planners.serving.plans import Logical, Plan, Routes, count_physical
from flashrt.planners.serving.policies import Policy, most_value, undominated, value_of
from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.space import Space, make_space
from flashrt.planners.serving.subplans import Restriction
from flashrt.planners.serving.targets import with_targets

Progress = Callable[[float, str], None]
Clock = Callable[[], float]
"""Seconds since whenever; it is looked at before every step, so one that counts looks allows as many steps anywhere."""

FIRST_SHARE, IMPROVED_SHARE, REFINED_SHARE, EXHAUSTED_SHARE, SIMULATED_SHARE = 0.08, 0.34, 0.55, 0.75, 0.85
"""Shares of the time by which each phase ends; the last is for polishing."""
MOST_EXHAUSTED = 2e6
"""A space with more physical candidates is not gone through plan by plan."""
ESTIMATE_SLACK = 1.0
"""By how much a simulation may beat the estimate of its plan before the search would miss it."""
NUM_SHORT = 6000
NUM_FIRST = 8
NUM_FINAL = 16
NUM_POLISHED = 5
NUM_EACH = 6
NUM_WHOLE = 100
"""So few plans are simulated one and all, however little their estimates promise."""


@dataclass(frozen=True)
class Settings:
    """How the search goes.

    Attributes
    ----------
    max_compound, max_subplans
        k_c and k_s of the paper.
    max_kinds
        Most configurations that a node may mix; None: any number.
    routing
        ``lp``: the routing with the largest rate; ``grid``: every routing in steps of `step`, as in the paper.
    keep_redundant
        Also plans of which an executor can go without a loss of rate: they have less latency.
    target_percentile
        Where a type's missing target lies in its latencies.
    max_kept, max_simulated
        Most plans that are kept by their estimate, and simulated.
    """

    max_compound: int = 2
    max_subplans: int = 2
    max_kinds: int | None = 2
    routing: Literal["lp", "grid"] = "lp"
    step: float = 0.1
    keep_redundant: bool = True
    policy: Policy = "total"
    target_percentile: float = 25.0
    time_limit_s: float = 7.0
    max_kept: int = 2000
    max_simulated: int = 400
    max_logical: int = 4000
    load: Load = field(default_factory=Load)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A physical plan with what is known of it."""

    chosen: tuple[int, ...]
    plan: Plan
    routes: Routes
    value: float
    estimate_per_s: np.ndarray
    simulated: Simulated | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The best plan, the plans that no other beats in every type, and what was looked at.

    Attributes
    ----------
    complete
        Every plan of the space was looked at, or cannot beat the best by its bound or its estimate.
    counts, seconds
        By phase.
    """

    problem: Problem
    space: Space
    settings: Settings
    best: Candidate
    front: tuple[Candidate, ...]
    complete: bool
    counts: dict[str, float]
    seconds: dict[str, float]
    notes: tuple[str, ...]


class OutOfTimeError(Exception):
    """The time limit is over."""


@dataclass
class _Kept:
    """The best candidates by estimate."""

    most: int
    heap: list[tuple[float, int, Candidate]] = field(default_factory=list)
    best: float = 0.0
    num: int = 0

    def add(self, candidate: Candidate) -> None:
        self.num += 1
        self.best = max(self.best, candidate.value)
        entry = candidate.value, -self.num, candidate
        if len(self.heap) < self.most:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)

    def in_order(self) -> list[Candidate]:
        return [entry[2] for entry in sorted(self.heap, key=lambda entry: (-entry[0], -entry[1]))]


def plan_serving(
    problem: Problem,
    num_gpus: int,
    settings: Settings | None = None,
    *,
    allowed: Restriction = lambda nodes: True,
    progress: Progress = lambda share, text: None,
    clock: Clock = time.monotonic,
) -> Answer:
    """Return the deployment with the highest goodput on so many GPUs.

    Parameters
    ----------
    allowed
        Which subplans may be used: a baseline restricts them.
    clock
        What the time limit is read from.

    Raises
    ------
    InputError
        Nothing serves all types on these GPUs, or a target that no plan can meet.
    """
    settings = settings or Settings()
    search = _Search(problem, num_gpus, settings, allowed, progress, clock)
    return search.run()


class _Search:
    def __init__(
        self, problem: Problem, num_gpus: int, settings: Settings, allowed: Restriction, progress: Progress,
        clock: Clock,
    ) -> None:  # fmt: skip
        self.settings, self.progress, self.clock = settings, progress, clock
        self.begin = self.mark = clock()
        self.counts: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        progress(0.02, "subplans")
        self.space = make_space(
            problem, num_gpus, max_compound=settings.max_compound, max_subplans=settings.max_subplans,
            max_kinds=settings.max_kinds, allowed=allowed,
        )  # fmt: skip
        self.counts["simple_subplans"] = self.space.num_simple
        self.counts["simple_subplans_served"] = len(self.space.simple)
        self.counts["subplans"] = len(self.space.subplans)
        self._lap("subplans")
        _require_plan(problem, num_gpus, self.space)
        self.problem = with_targets(problem, self.space, settings.load, settings.target_percentile)
        self.space.problem = self.problem
        self.evaluator = Evaluator(self.problem, settings.load)
        self._lap("targets")
        # The time limit is the search's: the first use of all compiles the kernels.
        self.searching = self.mark
        self.kept = _Kept(settings.max_kept)
        self.seen: set[tuple[object, ...]] = set()
        self.shown: dict[int, Simulated] = {}
        self.floor = 0.0

    def _lap(self, phase: str) -> None:
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.mark
        self.mark = now

    def _spent(self, share: float) -> bool:
        return self.clock() - self.searching > share * self.settings.time_limit_s

    def run(self) -> Answer:
        settings, space = self.settings, self.space
        num_logical, num_physical = count_physical(
            self.problem, space.simple, space.subplans, settings.max_subplans, space.num_gpus
        )
        self.counts["logical_plans"], self.counts["physical_candidates"] = num_logical, num_physical
        self.progress(0.08, f"bounds of {num_logical:,} logical plans, {num_physical:.1e} physical ones")
        if settings.max_subplans <= 2 and num_logical > settings.max_logical:
            logical, whole = space.best_logical(settings.max_logical)
        else:
            logical = sorted(space.all_logical(), key=lambda chosen: (-space.bound_per_s(chosen), chosen))
            whole = True
        self._lap("bounds")
        self._guide(logical, num_physical > MOST_EXHAUSTED)
        self._lap("guided")
        for candidate in self.kept.in_order()[:NUM_FIRST]:
            self._simulated(candidate)
        self._lap("simulated")
        complete = num_physical <= MOST_EXHAUSTED and self._exhaust(logical) and whole
        self._lap("exhaustive")
        self.counts["estimated"] = self.kept.num
        done, proved = self._simulate()
        self._lap("simulated")
        if not (complete and proved):
            done += self._polish(done)
            self._lap("polished")
        finals = self._finals(done)
        self._lap("simulated")
        return self._answer(finals, complete and proved)

    def _bound(self, chosen: tuple[int, ...]) -> float:
        """Return a value that no plan of these subplans exceeds."""
        rate = self.settings.load.alpha * self.space.bound_per_s(chosen)
        return most_value(self.problem, self.settings.policy, rate)

    def _consider(self, chosen: tuple[int, ...], plan: Plan, own: Routes) -> float:
        """Estimate a plan, keep it, and return its value."""
        if plan.rate_per_s <= 0:
            return 0.0
        found = self.evaluator.estimate(plan, own)
        value = value_of(self.problem, self.settings.policy, found.goodput_per_s)
        key = chosen, plan.allocation, plan.path_share.tobytes(), plan.split.tobytes()
        if key not in self.seen:
            self.seen.add(key)
            self.kept.add(Candidate(chosen, plan, own, value, found.goodput_per_s))
        return value

    def _guide(self, logical: list[tuple[int, ...]], alone: bool) -> None:
        """Improve logical plans by small changes, those that look best most.

        Parameters
        ----------
        alone
            Nothing else will be looked at, so that there is more time.
        """
        if self.settings.routing == "grid":
            return
        scale = EXHAUSTED_SHARE / REFINED_SHARE if alone else 1.0
        # What baselines are made of comes first: one simple subplan alone, however it looks.
        alone_first = [chosen for chosen in logical if self._is_simple(chosen)]
        others = [chosen for chosen in logical if not self._is_simple(chosen)]
        improved = self._improved(alone_first, IMPROVED_SHARE * scale / 2)
        sketched: list[tuple[float, tuple[int, ...]]] = []
        for chosen in others:
            if self._spent(FIRST_SHARE * scale + IMPROVED_SHARE * scale / 2) or self._bound(chosen) <= self.floor:
                break
            found = improve(self.space, chosen, self._judge(chosen), lambda: True)
            if found is not None:
                sketched.append((found[1], chosen))
        self.counts["logical_tried"] = len(sketched) + len(improved)
        sketched.sort(key=lambda one: -one[0])
        improved += self._improved([chosen for _, chosen in sketched], IMPROVED_SHARE * scale)
        self.counts["logical_improved"] = len(improved)
        improved.sort(key=lambda one: -one[0])
        refined = 0
        for value, chosen, plan in improved:
            if self._spent(REFINED_SHARE * scale):
                break
            refined += 1
            self.progress(0.3 + 0.2 * refined / len(improved), f"refining: {self.kept.best:.3g} requests/s")
            until = self.clock() + self.settings.time_limit_s * REFINED_SHARE * scale / 8

            def is_over(until: float = until) -> bool:
                return self.clock() > until

            refine(self.space, chosen, plan, value, self._judge(chosen), is_over)
        self.counts["logical_refined"] = refined

    def _is_simple(self, chosen: tuple[int, ...]) -> bool:
        return len(chosen) == 1 and len(self.space.subplans[chosen[0]]) == 1

    def _improved(self, logical: list[tuple[int, ...]], until: float) -> list[tuple[float, tuple[int, ...], Plan]]:
        """Return logical plans with their values and plans after changes of their sketches, at least one."""
        found: list[tuple[float, tuple[int, ...], Plan]] = []
        for chosen in logical:
            if found and self._spent(until):
                break
            plan = improve(self.space, chosen, self._judge(chosen), lambda: self._spent(until))
            self.progress(0.1 + 0.1 * len(found) / len(logical), f"improving: {self.kept.best:.3g} requests/s")
            if plan is not None:
                found.append((plan[1], chosen, plan[0]))
        return found

    def _judge(self, chosen: tuple[int, ...]) -> Callable[[Plan, Routes], float]:
        return lambda plan, own: self._consider(chosen, plan, own)

    def _exhaust(self, logical: list[tuple[int, ...]]) -> bool:
        """Look at every plan that can beat the best estimate; return whether the time sufficed."""
        settings, looked, pruned = self.settings, 0, 0
        scale = most_value(self.problem, settings.policy, settings.load.alpha)
        until = EXHAUSTED_SHARE
        try:
            for number, chosen in enumerate(logical):
                # No plan is worth more than the rate that it is run at: what is below the best simulation is left.
                floor = self.floor
                if self._bound(chosen) <= floor:
                    pruned = len(logical) - number
                    break
                looked += 1
                self.progress(0.5 + 0.3 * number / len(logical), f"logical plan {number + 1} of {len(logical)}")
                own = self.space.logical(chosen)[1]
                for allocation in self.space.allocations(chosen, floor / scale):
                    if self._spent(until):
                        raise OutOfTimeError
                    for plan in self._routed(chosen, allocation):
                        if plan.rate_per_s * scale <= floor:
                            continue
                        if not settings.keep_redundant and is_redundant(
                            self.problem, own, plan, grid=settings.step if settings.routing == "grid" else None
                        ):
                            self.counts["redundant"] = self.counts.get("redundant", 0) + 1
                            continue
                        self._consider(chosen, plan, own)
        except OutOfTimeError:
            return False
        finally:
            self.counts["logical_exhausted"], self.counts["logical_bounded_away"] = looked, pruned
        return True

    def _routed(self, chosen: tuple[int, ...], allocation: tuple[object, ...]) -> Iterator[Plan]:
        logical: Logical
        logical, own = self.space.logical(chosen)
        executors: tuple[tuple[tuple[int, int], ...], ...] = allocation  # type: ignore[assignment]
        if self.settings.routing == "lp" or (width(executors) == 1 and only_paths(self.problem, own) is not None):
            yield best_routing(self.problem, own, logical, executors, self.space.routings)
        else:
            for plan in grid_routings(self.problem, own, logical, executors, self.settings.step):
                if self._spent(EXHAUSTED_SHARE):
                    raise OutOfTimeError
                yield plan

    def _simulated(self, candidate: Candidate) -> Simulated:
        """Return what a short simulation of a candidate shows; the best of all is the floor."""
        if id(candidate) not in self.shown:
            found = self.evaluator.simulate(candidate.plan, candidate.routes, num=NUM_SHORT)
            self.shown[id(candidate)] = found
            self.floor = max(self.floor, self._value(found))
        return self.shown[id(candidate)]

    def _simulate(self) -> tuple[list[Candidate], bool]:
        """Simulate shortly, from the best estimate down; return whether no other can be expected to be better."""
        settings, proved = self.settings, True
        done: list[Candidate] = []
        for candidate in self._to_simulate():
            if id(candidate) in self.shown:
                done.append(replace(candidate, simulated=self.shown[id(candidate)]))
                continue
            hopeless = self.floor >= candidate.value * (1 + ESTIMATE_SLACK)
            if hopeless and self.floor > 0 and len(self.kept.heap) > NUM_WHOLE:
                continue
            if len(done) >= settings.max_simulated or (len(done) >= NUM_FIRST and self._spent(SIMULATED_SHARE)):
                proved = False
                continue
            self.progress(0.82 + 0.1 * len(done) / settings.max_simulated, f"simulation {len(done) + 1}")
            done.append(replace(candidate, simulated=self._simulated(candidate)))
        if self.kept.num > settings.max_kept:
            # Those that were dropped were estimated below all that were kept.
            least = self.kept.in_order()[-1].value
            proved &= self.floor >= least * (1 + ESTIMATE_SLACK)
        self.counts["simulated"] = len(done)
        return done, proved

    def _to_simulate(self) -> list[Candidate]:
        """Return what was kept, by estimate; the best of each simple subplan first, because estimates err."""
        ranked = self.kept.in_order()
        places: dict[int, int] = {}
        seen: dict[tuple[int, ...], int] = {}
        for candidate in ranked:
            if self._is_simple(candidate.chosen) and seen.get(candidate.chosen, 0) < NUM_EACH:
                places[id(candidate)] = seen[candidate.chosen] = seen.get(candidate.chosen, 0) + 1
        return sorted(ranked, key=lambda one: places.get(id(one), NUM_EACH + 1))

    def _polish(self, done: list[Candidate]) -> list[Candidate]:
        """Exchange executors of the best simulated plans as long as simulations get better and time is left."""
        found: list[Candidate] = []
        ranked = sorted(done, key=lambda one: -self._value(one.simulated))
        starts = {one.chosen: one for one in reversed(ranked)}
        for start in sorted(starts.values(), key=lambda one: -self._value(one.simulated))[:NUM_POLISHED]:

            def judge(plan: Plan, own: Routes, chosen: tuple[int, ...] = start.chosen) -> float:
                estimate = self.evaluator.estimate(plan, own).goodput_per_s
                value = value_of(self.problem, self.settings.policy, estimate)
                if value * (1 + ESTIMATE_SLACK) <= self.floor:
                    return 0.0
                shown = self.evaluator.simulate(plan, own, num=NUM_SHORT)
                self.floor = max(self.floor, self._value(shown))
                found.append(Candidate(chosen, plan, own, value, estimate, shown))
                return self._value(shown)

            until = self.clock() + (1 - SIMULATED_SHARE) * self.settings.time_limit_s / 2

            def is_over(until: float = until) -> bool:
                return self._spent(1.0) or self.clock() > until

            refine(self.space, start.chosen, start.plan, self._value(start.simulated), judge, is_over)
        self.counts["polished"] = len(found)
        return found

    def _finals(self, done: list[Candidate]) -> list[Candidate]:
        """Return the best of the short simulations, simulated in full, best first."""
        ranked = sorted(done, key=lambda one: -self._value(one.simulated))
        apart = undominated([one.simulated.goodput_per_s for one in ranked if one.simulated is not None])
        # Short simulations near overload vary much: the best of every logical plan has another chance.
        by_logical = {one.chosen: index for index, one in reversed(list(enumerate(ranked)))}
        finalists = dict.fromkeys(
            [*range(min(NUM_FINAL, len(ranked))), *sorted(by_logical.values())[:NUM_FINAL], *apart[:NUM_FINAL]]
        )
        finals = [
            replace(ranked[index], simulated=self.evaluator.simulate(ranked[index].plan, ranked[index].routes, seed=1))
            for index in finalists
        ]
        return sorted(finals, key=lambda one: -self._value(one.simulated))

    def _value(self, found: Simulated | None) -> float:
        assert found is not None, "it has been simulated"
        return value_of(self.problem, self.settings.policy, found.goodput_per_s)

    def _answer(self, finals: list[Candidate], complete: bool) -> Answer:
        kept = undominated([one.simulated.goodput_per_s for one in finals if one.simulated is not None])
        front = tuple(finals[index] for index in kept)
        self.counts["final"] = len(front)
        notes = [*self.problem.notes]
        if not complete:
            notes.append(
                f"the space was not looked at as a whole in {self.settings.time_limit_s:g} s: the plan is the best of "
                f"{self.kept.num:,} that were estimated; raise time_limit_s for more"
            )
        self.seconds["all"] = self.clock() - self.begin
        return Answer(
            self.problem, self.space, self.settings, finals[0], front, complete, self.counts, self.seconds, tuple(notes)
        )


def _require_plan(problem: Problem, num_gpus: int, space: Space) -> None:
    served = {place for one in space.simple for place in range(len(problem.types)) if one.types >> place & 1}
    missing = [name for place, name in enumerate(problem.types) if place not in served]
    if missing:
        raise InputError([
            Finding(
                f"workload, type '{name}'", "a subplan whose nodes all have an engine that serves it",
                f"none on {num_gpus} GPUs: it needs {listed(problem.workload.types[name].components)}",
                f"add engines to the profile, or GPUs, or lift the restriction; {RETRY}", rule="no-path",
            )
            for name in missing
        ])  # fmt: skip
    if not any(math.isfinite(space.bound_per_s(chosen)) for chosen in itertools.islice(space.all_logical(), 10_000)):
        least = min((int(space.least_gpus[list(c)].sum()) for c in _covering(space)), default=None)
        needs = f"{least} at least" if least else "more subplans side by side than max_subplans allows"
        raise InputError(
            Finding("argument 'devices'", "GPUs for one executor of every node of some plan that serves all types",
                    f"{num_gpus}; it takes {needs}", "raise devices and call plan_serving again", rule="too-few-gpus")
        )  # fmt: skip


def _covering(space: Space) -> Iterator[tuple[int, ...]]:
    for chosen in itertools.islice(itertools.combinations(range(len(space.subplans)), 1), 10_000):
        if np.isfinite(space.least_gpu_s[list(chosen)].min(axis=0)).all():
            yield chosen
    for chosen in itertools.islice(itertools.combinations(range(len(space.subplans)), 2), 10_000):
        if np.isfinite(space.least_gpu_s[list(chosen)].min(axis=0)).all():
            yield chosen
