"""What the branch and bound leaves open, asked of CP-SAT: is anything better than these points, or is it infeasible?

A question is a box: a period and a latency in whole ticks, both to be kept. At a given period the model is linear:
starts of the parts of one batch, and for every two operations that share a device a height k, by which one waits for
the other's batch j − k. A longer period never delays anything in one order for all batches, so the box's own period
stands for all below it. Where batches interleave, a height may be negative, and the period is a variable. Answers that
are deployments go back to the kernel, which finds their exact figures.

*Source*: ``spec/planners.md``, section 1; L. Perron and F. Didier, *CP-SAT*, Google OR-Tools.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, Literal

from flashrt.analysis.search.arrays import UNDECIDED, Problem
from flashrt.analysis.search.model import Model
from flashrt.analysis.search.resolve import Ask

Answer = tuple[list[int], list[list[int]]]
"""Masks by operation, and the heights of every two operations; `UNDECIDED` where they share no device."""


LARGEST = 1 << 26
"""Numbers that CP-SAT is given: with far larger ones its presolve has called a feasible model infeasible (9.15)."""


class Question:
    """One variant of a program as a CP-SAT model for one box.

    Parameters
    ----------
    period, latency
        What a deployment has to keep, in the model's ticks.
    nested
        Whether groups may lie inside one another.
    """

    def __init__(self, ask: Ask, model: Model, period: int, latency: int, *, nested: bool) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.ask, self.problem = ask, _coarser(model.problem, period, latency)
        unit = _unit(model.problem, period, latency)
        self.period, self.latency = -(-period // unit), -(-latency // unit)
        self.memory_unit = max(1, (ask.capacity or 0) // LARGEST)
        self.actual: Any = period
        """The period, in whole ticks; where heights may be negative, a fraction that it leaves out adds to walks."""
        self.nested, self.has_turns = nested, model.has_turns
        self.solver_model = cp_model.CpModel()
        if ask.max_stagger:
            self.actual = self.solver_model.new_int_var(0, period, "")
            self.latency += ask.max_stagger * len(ask.degrees)
        self.num_ops = len(ask.degrees)
        self.sizes = [int(size) for size in self.problem.sizes]
        self.share: dict[tuple[int, int], Any] = {}
        """u < v -> whether they share a device."""
        self.inside: dict[tuple[int, int], Any] = {}
        """u, v -> whether all devices of u are among those of v."""
        self.height: dict[tuple[int, int], Any] = {}
        self._flags_of: dict[int, dict[int, Any]] = {}
        self._last: tuple[list[Any], tuple[int, ...]] = ([], ())
        self._add_sizes()
        if nested:
            self._place_on_devices()
        else:
            self._place_in_groups()
        self._add_starts()
        self._add_orders()

    def solve(self, limit_s: float) -> Answer | Literal[False] | None:
        """Return a deployment, False where there is none, or None where the time ran out."""
        if limit_s <= 0:
            return None
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = limit_s
        status = solver.solve(self.solver_model)
        if status == self.cp.INFEASIBLE:
            return False
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        return self._read(solver)

    @property
    def capacity(self) -> int:
        """Room of a device, in units of memory; what is held is rounded down, which takes nothing away."""
        assert self.ask.capacity is not None
        return self.ask.capacity // self.memory_unit

    def forbid_last(self) -> None:
        """Take the last answer out, because its exact figures are not those asked for.

        Streams may take turns with their chunks, for which the model has no constraints.
        """
        variables, values = self._last
        self.solver_model.add_forbidden_assignments(variables, [values])

    def _flag(self) -> Any:
        return self.solver_model.new_bool_var("")

    def _add_sizes(self) -> None:
        """Every operation has one size, at which it takes no more than the period; all have room on the devices."""
        problem, model = self.problem, self.solver_model
        self.has_size: list[dict[int, Any]] = []
        for op in range(self.num_ops):
            fitting = [
                index for index in range(len(self.sizes))
                if problem.allowed[op, index] and problem.totals[op, index] <= self.period
            ]  # fmt: skip
            flags = {index: self._flag() for index in fitting}
            self.has_size.append(flags)
            model.add_exactly_one(flags.values())
        areas = [
            self.sizes[k] * int(problem.totals[op, k]) * flag
            for op, flags in enumerate(self.has_size)
            for k, flag in flags.items()
        ]
        model.add(sum(areas) <= self.ask.num_devices * self.actual)

    def _time_of(self, part: int) -> Any:
        flags = self.has_size[int(self.problem.owner[part])]
        return sum(int(self.problem.times[k, part]) * flag for k, flag in flags.items())

    def _place_in_groups(self) -> None:
        """Groups share no device: each has a size, an island, and the operations in it."""
        problem, model, ask = self.problem, self.solver_model, self.ask
        num_groups = min(self.num_ops, ask.num_devices)
        groups, islands = range(num_groups), range(len(ask.islands))
        self.in_group = [[self._flag() for _ in groups] for _ in range(self.num_ops)]
        self.group_size = [[self._flag() for _ in self.sizes] for _ in groups]
        self.island_of = [[self._flag() for _ in islands] for _ in groups]
        count = []
        for group in groups:
            empty = self._flag()
            model.add_exactly_one([empty, *self.group_size[group]])
            model.add_exactly_one(self.island_of[group])
            count.append(sum(size * flag for size, flag in zip(self.sizes, self.group_size[group], strict=True)))
            for island in islands:
                model.add(count[group] <= len(ask.islands[island])).only_enforce_if(self.island_of[group][island])
            for op in range(self.num_ops):
                model.add_implication(self.in_group[op][group], empty.negated())
        for island, devices in enumerate(ask.islands):
            held = []
            for group in groups:
                part = model.new_int_var(0, len(devices), "")
                model.add(part == count[group]).only_enforce_if(self.island_of[group][island])
                model.add(part == 0).only_enforce_if(self.island_of[group][island].negated())
                held.append(part)
            model.add(sum(held) <= len(devices))
        sequence = [int(op) for op in problem.sequence]
        for place, op in enumerate(sequence):
            model.add_exactly_one(self.in_group[op])
            for group in groups:
                flag = self.in_group[op][group]
                # Groups are alike: each is opened by the first operation in it, in turn.
                if group > place:
                    model.add(flag == 0)
                elif group:
                    model.add_bool_or([self.in_group[other][group - 1] for other in sequence[:place]]).only_enforce_if(
                        flag
                    )
                for k in range(len(self.sizes)):
                    if k in self.has_size[op]:
                        model.add_implication(self.has_size[op][k], self.group_size[group][k]).only_enforce_if(flag)
                    else:
                        model.add_bool_or([flag.negated(), self.group_size[group][k].negated()])
        for group in groups:
            for k in range(len(self.sizes)):
                work = sum(int(problem.totals[op, k]) * self.in_group[op][group]
                           for op in range(self.num_ops) if k in self.has_size[op])  # fmt: skip
                model.add(work <= self.actual).only_enforce_if(self.group_size[group][k])
                if ask.capacity is not None:
                    self._add_group_memory(group, k)
        for u, v in combinations(range(self.num_ops), 2):
            both = self._flag()
            self.share[u, v] = self.inside[u, v] = self.inside[v, u] = both
            for group in groups:
                a, b = self.in_group[u][group], self.in_group[v][group]
                model.add_implication(a, b).only_enforce_if(both)
                model.add_bool_or([a.negated(), b.negated(), both])
            if problem.apart[u, v] or self._pinned_apart(u, v):
                model.add(both == 0)
            if problem.kinship[u] == problem.kinship[v] or self._pinned_alike(u, v):
                model.add(both == 1)
        for op in range(self.num_ops):
            self._pin_in_group(op)

    def _pinned_alike(self, u: int, v: int) -> bool:
        return bool(self.problem.pinned[u]) and self.problem.pinned[u] == self.problem.pinned[v]

    def _pinned_apart(self, u: int, v: int) -> bool:
        pinned = self.problem.pinned
        return bool(pinned[u]) and bool(pinned[v]) and pinned[u] != pinned[v]

    def _pin_in_group(self, op: int) -> None:
        pinned = int(self.problem.pinned[op])
        if not pinned:
            return
        self.solver_model.add(self._count_of(op) == pinned.bit_count())
        (home,) = [i for i, island in enumerate(self.ask.islands) if any(pinned >> device & 1 for device in island)]
        for group, flag in enumerate(self.in_group[op]):
            self.solver_model.add_implication(flag, self.island_of[group][home])

    def _count_of(self, op: int) -> Any:
        return sum(self.sizes[k] * flag for k, flag in self.has_size[op].items())

    def _add_group_memory(self, group: int, k: int) -> None:
        problem, model = self.problem, self.solver_model
        held = [int(problem.memory[op, k]) // self.memory_unit * self.in_group[op][group] for op in range(self.num_ops)]
        for state, size in enumerate(problem.state_bytes):
            here = self._flag()
            for op in range(self.num_ops):
                if problem.uses[op, state]:
                    model.add_implication(self.in_group[op][group], here)
            held.append(int(size) // self.memory_unit * here)
        model.add(sum(held) <= self.capacity).only_enforce_if(self.group_size[group][k])

    def _place_on_devices(self) -> None:
        """Groups are sets of devices, any two of them apart or one inside the other."""
        problem, model, ask = self.problem, self.solver_model, self.ask
        devices = range(ask.num_devices)
        self.on = [[self._flag() for _ in devices] for _ in range(self.num_ops)]
        for op in range(self.num_ops):
            model.add(sum(self.on[op]) == self._count_of(op))
            home = [self._flag() for _ in ask.islands]
            model.add_exactly_one(home)
            for island, flag in zip(ask.islands, home, strict=True):
                for device in devices:
                    if device not in island:
                        model.add_implication(flag, self.on[op][device].negated())
            pinned = int(problem.pinned[op])
            for device in devices if pinned else ():
                model.add(self.on[op][device] == (pinned >> device & 1))
        if not any(problem.pinned) and len(ask.islands) == 1:
            first = int(problem.sequence[0])
            for device in devices[1:]:
                model.add_implication(self.on[first][device], self.on[first][device - 1])
        for device in devices:
            model.add(sum(self._work_on(op, device) for op in range(self.num_ops)) <= self.actual)
            if ask.capacity is not None:
                self._add_device_memory(device)
        for u, v in combinations(range(self.num_ops), 2):
            self.share[u, v] = self._flag()
            for a, b in ((u, v), (v, u)):
                self.inside[a, b] = self._flag()
                for device in devices:
                    model.add_implication(self.on[a][device], self.on[b][device]).only_enforce_if(self.inside[a, b])
            model.add_bool_or([self.share[u, v].negated(), self.inside[u, v], self.inside[v, u]])
            model.add_implication(self.inside[u, v], self.share[u, v])
            model.add_implication(self.inside[v, u], self.share[u, v])
            for device in devices:
                model.add_bool_or([self.on[u][device].negated(), self.on[v][device].negated(), self.share[u, v]])
            if problem.apart[u, v]:
                model.add(self.share[u, v] == 0)
            if problem.kinship[u] == problem.kinship[v]:
                model.add(self.inside[u, v] == 1)
                model.add(self.inside[v, u] == 1)

    def _work_on(self, op: int, device: int) -> Any:
        """Return a variable that is at least an operation's work where it has the device."""
        problem = self.problem
        work = self.solver_model.new_int_var(0, int(max(problem.totals[op])), "")
        for k, flag in self.has_size[op].items():
            self.solver_model.add(work >= int(problem.totals[op, k])).only_enforce_if(flag, self.on[op][device])
        return work

    def _add_device_memory(self, device: int) -> None:
        problem, model = self.problem, self.solver_model
        held = []
        for op in range(self.num_ops):
            taken = model.new_int_var(0, int(max(problem.memory[op])), "")
            for k, flag in self.has_size[op].items():
                model.add(taken >= int(problem.memory[op, k]) // self.memory_unit).only_enforce_if(
                    flag, self.on[op][device]
                )
            held.append(taken)
        for state, size in enumerate(problem.state_bytes):
            here = self._flag()
            for op in range(self.num_ops):
                if problem.uses[op, state]:
                    model.add_implication(self.on[op][device], here)
            held.append(int(size) // self.memory_unit * here)
        model.add(sum(held) <= self.capacity)

    def _add_starts(self) -> None:
        """Starts of one batch's parts, after all that they wait for; the last outputs within the latency."""
        problem, model = self.problem, self.solver_model
        num_parts = len(problem.owner)
        horizon = self.latency + int(problem.longest[0]) + (self.ask.max_stagger + 2) * self.period
        # What waits for no input has no beginning: only differences count.
        self.start = [
            model.new_int_var(0 if problem.entries[part] else -horizon, horizon, "") for part in range(num_parts)
        ]
        for source, target, height, lag in problem.arcs.tolist():
            u, v = int(problem.owner[source]), int(problem.owner[target])
            ready = self.start[source] + self._time_of(source) - height * self.actual
            if u != v and lag:
                ready += lag * (1 - self.inside[v, u])
            model.add(self.start[target] >= ready)
        for part in problem.outputs.tolist():
            model.add(self.start[part] + self._time_of(part) <= self.latency)

    def _add_orders(self) -> None:
        """Two operations that share a device run one after the other, whichever batches meet there."""
        problem, model, stagger = self.problem, self.solver_model, self.ask.max_stagger
        for (u, v), shared in self.share.items():
            least = 1 if problem.before[v, u] else -stagger
            greatest = 0 if problem.before[u, v] else 1 + stagger
            height = model.new_int_var(least, max(least, greatest), "")
            self.height[u, v] = height
            if least > greatest:
                model.add(shared == 0)
                continue
            # One value where it says nothing, so that no answer comes twice.
            model.add(height == least).only_enforce_if(shared.negated())
            streams = self.has_turns and problem.stream[u] == problem.stream[v]
            for first, second, back in ((u, v, False), (v, u, True)):
                end = self.start[int(problem.last[first])] + self._time_of(int(problem.last[first]))
                start = self.start[int(problem.first[second])]
                if not streams and not stagger:
                    waits = 1 - height if back else height
                    model.add(start >= end - waits * self.period).only_enforce_if(shared)
                    continue
                for value in range(least, greatest + 1):
                    behind = 1 - value if back else value
                    # Streams that take turns with their chunks wait for other batches only.
                    if behind or not streams:
                        model.add(start >= end - behind * self.actual).only_enforce_if(shared, self._is(height, value))

    def _is(self, height: Any, value: int) -> Any:
        """Return whether a height has a value."""
        found = self._flags_of.setdefault(height.index, {})
        if value not in found:
            found[value] = self._flag()
            self.solver_model.add(height == value).only_enforce_if(found[value])
            self.solver_model.add(height != value).only_enforce_if(found[value].negated())
        return found[value]

    def _read(self, solver: Any) -> Answer:
        flags = [flag for row in (self.on if self.nested else self.in_group) for flag in row]
        flags += [flag for by_size in self.has_size for flag in by_size.values()]
        variables = [*flags, *self.height.values()]
        self._last = variables, tuple(int(solver.value(variable)) for variable in variables)
        if self.nested:
            masks = [sum(1 << d for d, flag in enumerate(on) if solver.boolean_value(flag)) for on in self.on]
        else:
            masks = self._lay_out(solver)
        relation = [[UNDECIDED] * self.num_ops for _ in range(self.num_ops)]
        for (u, v), height in self.height.items():
            if masks[u] & masks[v]:
                relation[u][v] = int(solver.value(height))
                relation[v][u] = 1 - relation[u][v]
        return masks, relation

    def _lay_out(self, solver: Any) -> list[int]:
        """Give the groups devices of their islands, pinned ones their own."""
        masks = [int(mask) for mask in self.problem.pinned]
        taken = 0
        for mask in masks:
            taken |= mask
        for group in range(len(self.group_size)):
            members = [op for op in range(self.num_ops) if solver.boolean_value(self.in_group[op][group])]
            if not members:
                continue
            given = next((masks[op] for op in members if masks[op]), 0)
            if not given:
                (home,) = [i for i, flag in enumerate(self.island_of[group]) if solver.boolean_value(flag)]
                size = next(s for s, flag in zip(self.sizes, self.group_size[group], strict=True)
                            if solver.boolean_value(flag))  # fmt: skip
                free = [device for device in self.ask.islands[home] if not taken >> device & 1]
                given = sum(1 << device for device in free[:size])
            taken |= given
            for op in members:
                masks[op] = given
        return masks


def _unit(problem: Problem, period: int, latency: int) -> int:
    return max(1, max(period, latency, int(problem.longest[0])) // LARGEST)


def _coarser(problem: Problem, period: int, latency: int) -> Problem:
    """Return the problem in larger ticks, all times rounded down: whatever kept the box still keeps it."""
    unit = _unit(problem, period, latency)
    if unit == 1:
        return problem
    arcs = problem.arcs.copy()
    arcs[:, 3] //= unit
    return problem._replace(
        times=problem.times // unit, totals=problem.totals // unit, arcs=arcs, longest=problem.longest // unit + 1
    )
