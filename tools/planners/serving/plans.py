"""Phases 3 and 4: logical plans, and the executors that each node of one may have.

Source: ``papers/002`` (Cornfigurator), sections 4.2 and 4.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashrt.planners.serving.problem import Problem
from flashrt.planners.serving.subplans import Simple, route_of

Allocation = tuple[tuple[int, int], ...]
"""Executors of a node: (configuration, how many), by configuration."""


@dataclass(frozen=True)
class Logical:
    """Subplans side by side: requests take one path through, each node is shared within its subplan alone.

    Attributes
    ----------
    subplans
        The simple subplans of each.
    nodes
        (subplan, components as bits) of each node.
    paths
        (subplan, simple subplan) of each path that a request may take.
    """

    subplans: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, int], ...]
    paths: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Route:
    """How a type passes a path: nodes of the logical plan in order, and for each which of them it waits for."""

    nodes: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class RouteArrays:
    """Routes as the compiled functions take them.

    Attributes
    ----------
    number : [types, paths]
        Of the route, or -1.
    length : [routes]
    node, before : [routes, places]
        The nodes that a request passes, and for each, as bits, the places that it waits for.
    """

    number: np.ndarray
    length: np.ndarray
    node: np.ndarray
    before: np.ndarray


class Routes(dict[tuple[int, int], Route]):
    """(type, path) -> route, of one logical plan."""

    _arrays: RouteArrays | None = None

    def arrays(self, num_types: int, num_paths: int) -> RouteArrays:
        """Return the routes as arrays, made once."""
        if self._arrays is None:
            places = max(len(route.nodes) for route in self.values())
            number = np.full((num_types, num_paths), -1, np.int64)
            node, before = (np.zeros((len(self), places), np.int64) for _ in range(2))
            for index, (key, route) in enumerate(self.items()):
                number[key] = index
                node[index, : len(route.nodes)] = route.nodes
                before[index, : len(route.nodes)] = [sum(1 << one for one in waits) for waits in route.before]
            length = np.array([len(route.nodes) for route in self.values()], np.int64)
            self._arrays = RouteArrays(number, length, node, before)
        return self._arrays


@dataclass(frozen=True, eq=False)
class Plan:
    """A physical plan: a logical one with executors and routing.

    Attributes
    ----------
    allocation
        Executors of each node.
    path_share : [types, paths]
        Where requests of a type enter.
    split : [types, nodes, at most configurations of a node]
        How a node's requests of a type go to its configurations; executors of one configuration share equally.
    rate_per_s
        The largest total rate at which no executor is overloaded.
    """

    logical: Logical
    allocation: tuple[Allocation, ...]
    path_share: np.ndarray
    split: np.ndarray
    rate_per_s: float

    def num_gpus(self, problem: Problem) -> int:
        """Return how many GPUs its executors take."""
        return sum(problem.configurations[k].gpus * count for node in self.allocation for k, count in node)


def make_logical(simple: Sequence[Simple], subplans: Sequence[tuple[int, ...]]) -> Logical:
    """Return subplans put side by side."""
    nodes = [
        (place, node)
        for place, members in enumerate(subplans)
        for node in sorted({node for one in members for node in simple[one].nodes})
    ]
    paths = [(place, one) for place, members in enumerate(subplans) for one in members]
    return Logical(tuple(subplans), tuple(nodes), tuple(paths))


def logical_plans(
    simple: Sequence[Simple], subplans: Sequence[tuple[int, ...]], most: int, num_types: int
) -> Iterator[tuple[int, ...]]:
    """Yield every composition of up to `most` different subplans that serves all types, as their places."""
    serves = [np.bitwise_or.reduce([simple[one].types for one in members]) for members in subplans]
    every = (1 << num_types) - 1
    for size in range(1, most + 1):
        for chosen in itertools.combinations(range(len(subplans)), size):
            if np.bitwise_or.reduce([serves[one] for one in chosen]) == every:
                yield chosen


def routes(problem: Problem, simple: Sequence[Simple], logical: Logical) -> Routes:
    """Return (type, path) -> route, for the types that a path serves."""
    number = {node: place for place, node in enumerate(logical.nodes)}
    found = Routes()
    for path, (subplan, one) in enumerate(logical.paths):
        for place in range(len(problem.types)):
            if simple[one].types >> place & 1:
                passed, before = route_of(problem, simple[one], place)
                nodes = tuple(number[subplan, simple[one].nodes[index]] for index in passed)
                found[place, path] = Route(nodes, before)
    return found


def allocations_of(
    problem: Problem, mask: int, most_gpus: int, max_kinds: int | None = None
) -> list[tuple[int, Allocation]]:
    """Return every way to give a node executors for up to `most_gpus` GPUs, as (GPUs, executors).

    The coin change problem, with configurations that cost the same kept apart.

    Parameters
    ----------
    max_kinds
        Most configurations that a node may mix; None: any number.
    """
    return list(_allocations(
        tuple((k, problem.configurations[k].gpus) for k in problem.configurations_of(mask)), most_gpus, max_kinds
    ))  # fmt: skip


@lru_cache(maxsize=4096)
def _allocations(
    coins: tuple[tuple[int, int], ...], most_gpus: int, max_kinds: int | None
) -> tuple[tuple[int, Allocation], ...]:
    found: list[tuple[int, Allocation]] = []

    def extend(place: int, left: int, taken: Allocation) -> None:
        if place == len(coins):
            if taken:
                found.append((most_gpus - left, taken))
            return
        extend(place + 1, left, taken)
        number, cost = coins[place]
        if max_kinds is None or len(taken) < max_kinds:
            for count in range(1, left // cost + 1):
                extend(place + 1, left - count * cost, (*taken, (number, count)))

    extend(0, most_gpus, ())
    return tuple(sorted(found))


def count_allocations(problem: Problem, mask: int, num_gpus: int) -> np.ndarray:
    """Return how many ways a node has to spend exactly 0, 1, … GPUs; shape [GPUs + 1], exact up to 2^53."""
    ways = np.zeros(num_gpus + 1)
    ways[0] = 1
    for k in problem.configurations_of(mask):
        cost = problem.configurations[k].gpus
        for spent in range(cost, num_gpus + 1):
            ways[spent] += ways[spent - cost]
    ways[0] = 0
    return ways


def count_physical(
    problem: Problem, simple: Sequence[Simple], subplans: Sequence[tuple[int, ...]], most: int, num_gpus: int
) -> tuple[int, float]:
    """Return how many logical plans there are, and physical ones but for their routing; none is made.

    Subplans that serve the same types are counted together: their ways to spend GPUs add up, those of subplans side by
    side convolve.
    """
    by_node: dict[int, np.ndarray] = {}
    serves: dict[int, list[np.ndarray]] = {}
    for members in subplans:
        ways = np.zeros(num_gpus + 1)
        ways[0] = 1
        for node in {node for one in members for node in simple[one].nodes}:
            if node not in by_node:
                by_node[node] = count_allocations(problem, node, num_gpus)
            ways = np.convolve(ways, by_node[node])[: num_gpus + 1]
        types = 0
        for one in members:
            types |= simple[one].types
        serves.setdefault(types, []).append(ways)
    # Elementary symmetric sums by what is served: the coefficient of `size` subplans, each used once.
    every = (1 << len(problem.types)) - 1
    sums: dict[tuple[int, int], tuple[float, np.ndarray]] = {(0, 0): (1.0, np.eye(1, num_gpus + 1)[0])}
    for types, ways_of in serves.items():
        group = _chosen(ways_of, most, num_gpus)
        grown: dict[tuple[int, int], tuple[float, np.ndarray]] = {}
        for (covered, size), (count, ways) in sums.items():
            for more, (number, own) in enumerate(group[: most - size + 1]):
                key = (covered | types if more else covered, size + more)
                before = grown.get(key, (0.0, np.zeros(num_gpus + 1)))
                grown[key] = before[0] + count * number, before[1] + np.convolve(ways, own)[: num_gpus + 1]
        sums = grown
    complete = [value for (covered, size), value in sums.items() if covered == every and size]
    return round(sum(count for count, _ in complete)), float(sum(ways.sum() for _, ways in complete))


def _chosen(ways_of: Sequence[np.ndarray], most: int, num_gpus: int) -> list[tuple[float, np.ndarray]]:
    """Return for 0, 1, … `most` different subplans out of these: how many choices, and their ways to spend GPUs."""
    found = [(0.0, np.zeros(num_gpus + 1)) for _ in range(most + 1)]
    found[0] = (1.0, np.eye(1, num_gpus + 1)[0])
    for ways in ways_of:
        for size in range(most, 0, -1):
            count, sums = found[size - 1]
            found[size] = found[size][0] + count, found[size][1] + np.convolve(sums, ways)[: num_gpus + 1]
    return found
