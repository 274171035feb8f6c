"""The space of plans: what is in it, how large it is, and what the best of a logical plan can be at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from flashrt.planners.serving.flow import NodeRoutings
from flashrt.planners.serving.plans import (
    Allocation,
    Logical,
    Routes,
    allocations_of,
    logical_plans,
    make_logical,
    routes,
)
from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.subplans import Restriction, Simple, compound_subplans, simple_subplans

CHUNK = 256


@dataclass(eq=False)
class Space:
    """All plans of a problem on so many GPUs.

    Attributes
    ----------
    simple, subplans
        Simple subplans, and subplans as the simple ones they are made of.
    least_gpu_s : [subplans, types]
        GPU seconds that a request of a type takes at least; infinite where it is not served.
    least_gpus : [subplans]
        GPUs for one executor a node.
    max_kinds
        Most configurations that a node may mix; None: any number.
    """

    problem: Problem
    num_gpus: int
    max_subplans: int
    max_kinds: int | None
    simple: tuple[Simple, ...]
    subplans: list[tuple[int, ...]]
    num_simple: int
    least_gpu_s: np.ndarray
    least_gpus: np.ndarray
    routings: NodeRoutings = field(default_factory=dict)
    _made: dict[tuple[int, ...], tuple[Logical, Routes]] = field(default_factory=dict)

    def logical(self, chosen: tuple[int, ...]) -> tuple[Logical, Routes]:
        """Return the logical plan of some subplans, and its routes."""
        if chosen not in self._made:
            logical = make_logical(self.simple, [self.subplans[one] for one in chosen])
            self._made[chosen] = logical, routes(self.problem, self.simple, logical)
        return self._made[chosen]

    def bound_per_s(self, chosen: tuple[int, ...]) -> float:
        """Return a total rate that no plan of these subplans exceeds: GPUs shared out as if they could be cut."""
        needed = float(self.problem.fractions @ self.least_gpu_s[list(chosen)].min(axis=0))
        return self.num_gpus / needed

    def fits(self, chosen: tuple[int, ...]) -> bool:
        """Return whether one executor a node fits in the GPUs."""
        return bool(self.least_gpus[list(chosen)].sum() <= self.num_gpus)

    def all_logical(self) -> Iterator[tuple[int, ...]]:
        """Yield every logical plan that fits."""
        num_types = len(self.problem.types)
        every = logical_plans(self.simple, self.subplans, self.max_subplans, num_types)
        return (chosen for chosen in every if self.fits(chosen))

    def best_logical(self, most: int) -> tuple[list[tuple[int, ...]], bool]:
        """Return the logical plans with the largest bounds, best first, and whether these are all that fit.

        Pairs are looked at as arrays; more than two subplans are pairs, each extended by one.
        """
        order = np.argsort(self.least_gpus, kind="stable")
        layers: list[list[tuple[int, ...]]] = [[(one,) for one in range(len(self.subplans)) if self.fits((one,))]]
        for _ in range(self.max_subplans - 1):
            layers.append(self._extended(layers[-1], order, most))
        every = [chosen for layer in layers for chosen in layer if np.isfinite(self.bound_per_s(chosen))]
        every = [chosen for chosen in every if self.bound_per_s(chosen) > 0]
        bounds = {chosen: self.bound_per_s(chosen) for chosen in every}
        every.sort(key=lambda chosen: (-bounds[chosen], chosen))
        alone = [chosen for chosen in every if len(chosen) == 1]
        return list(dict.fromkeys([*every[:most], *alone])), len(every) <= most

    def _extended(self, layer: list[tuple[int, ...]], order: np.ndarray, most: int) -> list[tuple[int, ...]]:
        fractions, kept = self.problem.fractions, []
        needs: list[np.ndarray] = []
        for begin in range(0, len(layer), CHUNK):
            part = layer[begin : begin + CHUNK]
            own = np.array([self.least_gpu_s[list(chosen)].min(axis=0) for chosen in part])
            gpus = np.array([self.least_gpus[list(chosen)].sum() for chosen in part])
            last = np.array([chosen[-1] for chosen in part])
            room = order[self.least_gpus[order] <= self.num_gpus - gpus.min()]
            needed = np.minimum(own[:, None, :], self.least_gpu_s[None, room, :]) @ fractions
            allowed = (gpus[:, None] + self.least_gpus[None, room] <= self.num_gpus) & (room[None, :] > last[:, None])
            # A subplan that takes nothing off the others carries nothing at the bound; it may still with whole GPUs.
            rows, columns = np.nonzero(allowed & np.isfinite(needed))
            values = needed[rows, columns]
            best = np.argsort(values, kind="stable")[:most]
            kept += [(*part[rows[index]], int(room[columns[index]])) for index in best]
            needs += [values[best]]
        if not kept:
            return []
        best = np.argsort(np.concatenate(needs), kind="stable")[: most + 1]
        return [kept[index] for index in best]

    def allocations(self, chosen: tuple[int, ...], least_rate_per_s: float) -> Iterator[tuple[Allocation, ...]]:
        """Yield executors for every node that fit in the GPUs, but for those that cannot reach a total rate.

        A node's executors can carry no more than if each type were served by what serves it best.
        """
        logical, own = self.logical(chosen)
        problem = self.problem
        forced = [np.zeros(len(problem.types), bool) for _ in logical.nodes]
        for place in range(len(problem.types)):
            passing = [set(route.nodes) for (kind, _), route in own.items() if kind == place]
            for node in set.intersection(*passing) if passing else ():
                forced[node][place] = True
        least = [min(problem.configurations[k].gpus for k in problem.configurations_of(mask))
                 for _, mask in logical.nodes]  # fmt: skip
        spare = self.num_gpus - sum(least)
        if spare < 0:
            return
        options: list[list[tuple[int, Allocation]]] = []
        for (_, mask), types, cheapest in zip(logical.nodes, forced, least, strict=True):
            every = allocations_of(problem, mask, spare + cheapest, self.max_kinds)
            options.append([
                (gpus, executors) for gpus, executors in every if self._reaches(executors, types, least_rate_per_s)
            ])  # fmt: skip
        order = sorted(range(len(options)), key=lambda node: len(options[node]))
        rest = [0] * (len(order) + 1)
        for index in range(len(order) - 1, -1, -1):
            cheapest = min((gpus for gpus, _ in options[order[index]]), default=self.num_gpus + 1)
            rest[index] = rest[index + 1] + cheapest
        taken: list[Allocation] = [()] * len(order)

        def descend(index: int, left: int) -> Iterator[tuple[Allocation, ...]]:
            if index == len(order):
                yield tuple(taken)
                return
            for gpus, executors in options[order[index]]:
                if gpus + rest[index + 1] > left:
                    break
                taken[order[index]] = executors
                yield from descend(index + 1, left - gpus)

        yield from descend(0, self.num_gpus)

    def _reaches(self, executors: Allocation, types: np.ndarray, rate_per_s: float) -> bool:
        capacity = self.problem.capacity[[k for k, _ in executors]]
        best = capacity.max(axis=0)
        if (best[types] <= 0).any():
            return False
        needed = rate_per_s * float((self.problem.fractions[types] / best[types]).sum())
        return needed <= sum(count for _, count in executors) * (1 + 1e-9)


def make_space(
    problem: Problem,
    num_gpus: int,
    *,
    max_compound: int = 2,
    max_subplans: int = 2,
    max_kinds: int | None = None,
    allowed: Restriction = lambda nodes: True,
) -> Space:
    """Return the space of plans, with its subplans listed and nothing else."""
    simple, num_simple = simple_subplans(problem, num_gpus, allowed)
    subplans = compound_subplans(simple, max_compound)
    num_types = len(problem.types)
    by_node: dict[int, np.ndarray] = {}
    cheapest: dict[int, int] = {}
    for node in {node for one in simple for node in one.nodes}:
        numbers = problem.configurations_of(node)
        gpus = np.array([problem.configurations[k].gpus for k in numbers])[:, None]
        with np.errstate(divide="ignore"):
            by_node[node] = (gpus / problem.capacity[numbers]).min(axis=0)
        cheapest[node] = int(gpus.min())
    own = np.full((len(simple), num_types), np.inf)
    for number, one in enumerate(simple):
        for place, need in enumerate(problem.needs):
            if one.types >> place & 1:
                own[number, place] = sum(by_node[node][place] for node in one.nodes if node & need)
    least_gpu_s = np.array([own[list(members)].min(axis=0) for members in subplans]).reshape(-1, num_types)
    least_gpus = np.array([
        sum(cheapest[node] for node in {node for one in members for node in simple[one].nodes}) for members in subplans
    ], int)  # fmt: skip
    return Space(problem, num_gpus, max_subplans, max_kinds, simple, subplans, num_simple, least_gpu_s, least_gpus)
