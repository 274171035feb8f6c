"""From a plan to nodes: which statements are one operation, what goes between them, and what outlives a batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashrt.bench.trace.closing import is_stage, modules_in
from flashrt.bench.trace.plan import Call, Loop, Namer, Part, Step, steps_of
from flashrt.bench.trace.run import Evidence, Runner
from flashrt.bench.trace.states import Kept
from flashrt.bench.trace.syntax import flow_of, names_read


class StaysClosedError(Exception):
    """An opened call or loop cannot be drafted as nodes of its own; carries it, and why."""

    def __init__(self, part: Loop | Call, why: str) -> None:
        super().__init__(why)
        self.part = part
        self.why = why


@dataclass(eq=False)
class Unit:
    """A node of the draft: statements that are one operation, or a graph of its own (`block`).

    Attributes
    ----------
    needs
        Names of the batch that it takes from others.
    gives
        Names of the batch that it binds or changes.
    soft
        Names that it binds on some ways through only: it takes them where there is something to take.
    copies
        Names that it takes and changes in place: it has to work on copies.
    reads, writes
        States.
    """

    name: str
    steps: list[Step] = field(default_factory=list)
    block: Block | None = None
    part: Loop | Call | None = None
    needs: set[str] = field(default_factory=set)
    gives: set[str] = field(default_factory=set)
    soft: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    """Those of `gives` that others use."""

    def every_unit(self) -> Iterator[Unit]:
        """Yield this operation, or all operations inside of this graph."""
        if self.block is None:
            yield self
        else:
            for unit in self.block.units:
                yield from unit.every_unit()

    def state_access(self, *, writes: bool) -> set[str]:
        """Return the states that it, or anything in it, writes (or reads)."""
        return {state for unit in self.every_unit() for state in (unit.writes if writes else unit.reads)}


@dataclass(eq=False)
class Block:
    """The nodes of one graph, in the order of the reference.

    Attributes
    ----------
    inputs, outputs
        Names that come from outside, and that are used there.
    times, carry
        Of a repeated graph: how often, and the names that one turn hands to the next.
    index
        Of a repeated graph: the name that counts its turns, where something needs it.
    order
        Pairs of units that only their states order.
    """

    units: list[Unit]
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    times: int | None = None
    carry: set[str] = field(default_factory=set)
    index: str | None = None
    order: list[tuple[int, int]] = field(default_factory=list)

    def producer(self, name: str, before: int) -> int | None:
        """Return the last unit before a place that gives a name, or None where it comes from outside."""
        return next((at for at in range(before - 1, -1, -1) if name in self.units[at].outputs), None)


class Units:
    """Cuts a plan into nodes.

    Parameters
    ----------
    batch
        Names that belong to one batch; all others are of the set-up, or states.
    """

    def __init__(self, runner: Runner, namer: Namer, kept: Kept) -> None:
        self.runner = runner
        self.namer = namer
        self.kept = kept
        self.names: set[str] = set()

    def evidence(self, step: Step) -> Evidence:
        """Return what a statement was seen to do."""
        return self.runner.evidence[step.number]

    def needs_of(self, step: Step) -> set[str]:
        """Return the names that a statement takes from before it, those that it only changes included."""
        changed = {
            name for name in self.evidence(step).changed if name in self.kept.variables or name in self.reads(step)
        }
        flow = self.runner.flow(step)
        return set(flow.reads | flow.changes) | changed

    def reads(self, step: Step) -> set[str]:
        """Return every name that a statement reads or changes."""
        flow = self.runner.flow(step)
        return set(flow.reads | flow.changes)

    def gives_of(self, step: Step) -> set[str]:
        """Return the names that a statement binds or changes."""
        flow = self.runner.flow(step)
        return set(flow.binds) | set(flow.changes) | (self.evidence(step).changed & self.needs_of(step))

    def is_batch(self, name: str) -> bool:
        """Return whether a name belongs to one batch."""
        return name in self.kept.batch_names

    def block(
        self, parts: Sequence[Part], live: set[str], owner: Loop | Call | None, available: set[str], *,
        only_modules: bool,
    ) -> Block:  # fmt: skip
        """Return the nodes of a block.

        Parameters
        ----------
        live
            Names of the block that are used after it.
        owner
            The loop or call that it is the body of.
        available
            Names that have a value before it.
        """
        units = self._group(parts, live, only_modules=only_modules)
        before: list[set[str]] = []
        known = set(available)
        for unit in units:
            unit.needs |= unit.soft & known
            before.append(set(known))
            known |= unit.gives
        after = set(live)
        for at in range(len(units) - 1, -1, -1):
            unit = units[at]
            unit.outputs = {name for name in unit.gives if name in after and self.is_batch(name)}
            if unit.block is not None:
                self._settle(unit, before[at], only_modules=only_modules)
            after = (after - (unit.gives - unit.needs)) | {name for name in unit.needs if self.is_batch(name)}
        block = Block(units)
        for at, unit in enumerate(units):
            for name in unit.needs:
                if self.is_batch(name) and block.producer(name, at) is None:
                    block.inputs.add(name)
        block.outputs = {name for name in live if block.producer(name, len(units)) is not None}
        self._check_ports(block, owner)
        self._order(block, owner)
        return block

    def _settle(self, unit: Unit, available: set[str], *, only_modules: bool) -> None:
        """Build the graph of a unit now that it is known which of its names are used after it."""
        part = unit.part
        assert part is not None, "a graph is made of a part"
        inner = only_modules or (isinstance(part, Call) and modules_in(part, self.runner) > 0)
        if isinstance(part, Call):
            unit.block = self.block(part.body, unit.outputs, part, available, only_modules=inner)
            unit.needs = set(unit.block.inputs)
            return
        body = self._turn(part)
        carried = self._carried(part, body)
        sometimes = self._sometimes(body)
        lost = sometimes & (unit.outputs | self.exposed(body, set())[0]) - available
        if lost:
            raise StaysClosedError(part, f"'{min(lost)}' is bound in some turns only")
        carried |= {name for name in sometimes & available if self.is_batch(name)}
        live = carried | unit.outputs
        block = self.block(body, live, part, available | {part.index, part.items}, only_modules=inner)
        block.times = next(iter(self.runner.counts[part.number]))
        block.carry = {name for name in carried if name in block.inputs and name in block.outputs}
        # What leaves only to be used outside has to be made in the last turn; a name that is handed on and not made
        # anew in a turn stays as it came.
        block.index = part.index if part.index in block.inputs else None
        unit.block = block
        unit.needs = set(block.inputs) - ({part.index} if block.index else set())

    def _turn(self, loop: Loop) -> list[Part]:
        """Return a loop's body with the statement that gives a turn its element."""
        element = ast.Subscript(self._items(loop), ast.Name(loop.index, ast.Load()), ast.Load())
        more = ast.BinOp(ast.Name(loop.index, ast.Load()), ast.Add(), ast.Constant(1))
        target = ast.Tuple([loop.target, ast.Name(loop.index, ast.Store())], ast.Store())
        given = ast.Assign([target], ast.Tuple([element, more], ast.Load()))
        step = Step(ast.fix_missing_locations(ast.copy_location(given, loop.whole.statement)), loop.whole.place)
        step.number = -loop.number - 1
        return [step, *loop.body]

    def items_are_constant(self, loop: Loop) -> bool:
        """Return whether what a loop goes through is the same in every batch, so that each turn can find its own."""
        read = names_read(loop.iterable)
        varying = self.kept.variables - self.kept.per_iteration.keys()
        return not any(self.is_batch(name) or name in varying for name in read)

    def _items(self, loop: Loop) -> ast.expr:
        if not self.items_are_constant(loop):
            return ast.Name(loop.items, ast.Load())
        if isinstance(loop.iterable, ast.Call) and isinstance(loop.iterable.func, ast.Name) and (
            loop.iterable.func.id == "range"
        ):  # fmt: skip
            return loop.iterable
        return ast.Call(ast.Name("list", ast.Load()), [loop.iterable], [])

    def _carried(self, loop: Loop, body: Sequence[Part]) -> set[str]:
        """Return the names that a turn gives to the next: needed before they are bound, and bound or changed."""
        needed, _ = self.exposed(body, set())
        given = self._given(body)
        return {name for name in needed & given if self.is_batch(name)}

    def _sometimes(self, body: Sequence[Part]) -> set[str]:
        """Return the names that a turn may bind or not."""
        found: set[str] = set()
        for step in steps_of(body):
            flow = self.runner.flow(step)
            found |= flow.binds - flow.certain
        return found - self.exposed(body, set())[1]

    def exposed(self, parts: Sequence[Part], bound: set[str]) -> tuple[set[str], set[str]]:
        """Return the names that parts need from before, and those that are certainly bound after them."""
        needed: set[str] = set()
        bound = set(bound)
        for part in parts:
            if isinstance(part, Step):
                needed |= self.needs_of(part) - bound
                bound |= self.runner.flow(part).certain
            elif isinstance(part, Call):
                inner, bound = self.exposed(part.body, bound)
                needed |= inner
            else:
                body = self._turn(part)
                needed |= set(names_read(part.iterable)) - bound
                # The count of turns is the loop's own.
                inner, after = self.exposed(body, bound | {part.index, part.items})
                needed |= inner
                bound = after
        return needed, bound

    def _given(self, parts: Sequence[Part]) -> set[str]:
        return {name for step in steps_of(parts) for name in self.gives_of(step)}

    def _group(self, parts: Sequence[Part], live: set[str], *, only_modules: bool) -> list[Unit]:
        """Attach plumbing to the operations that use it, or that made what it is about."""
        units: list[Unit] = []
        pending: list[Step] = []
        for part in parts:
            if isinstance(part, Step) and not is_stage(part, self.runner, only_modules=only_modules):
                pending.append(part)
                continue
            if isinstance(part, Loop) and not self.items_are_constant(part):
                head = ast.Call(ast.Name("list", ast.Load()), [part.iterable], [])
                given = ast.Assign([ast.Name(part.items, ast.Store())], head)
                step = Step(ast.fix_missing_locations(ast.copy_location(given, part.whole.statement)), part.whole.place)
                step.number = part.number
                pending.append(step)
            used = self.exposed([part], set())[0] | ({part.items} if isinstance(part, Loop) else set())
            taken, pending = self._taken(pending, used, set(self._given([part])))
            if isinstance(part, Step):
                units.append(self._op([*taken, part], self._name_of(part)))
            elif isinstance(part, Call):
                part.body = [*taken, *part.body]
                units.append(self._graph(part))
            else:
                outside = self._op(taken, f"before_{self._loop_name(part)}") if taken else None
                units += [outside] if outside else []
                units.append(self._graph(part))
        self._leave(units, pending, live)
        if not units and pending:
            units.append(self._op(pending, "compute"))
        return units

    def _taken(self, pending: list[Step], used: set[str], given: set[str]) -> tuple[list[Step], list[Step]]:
        """Return the plumbing that has to run with (or before) what uses and gives such names, and the rest."""
        taken: list[Step] = []
        rest: list[Step] = []
        wanted, changing = set(used), set(given)
        for step in reversed(pending):
            reads, gives = self.needs_of(step) | set(self.runner.flow(step).needs), self.gives_of(step)
            ties = gives & wanted or gives & changing or reads & changing
            acts = self.evidence(step).slots
            if ties or acts:
                taken.insert(0, step)
                wanted |= reads
                changing |= gives
            else:
                rest.insert(0, step)
        return taken, rest

    def _leave(self, units: list[Unit], pending: list[Step], live: set[str]) -> None:
        """Attach what nobody after it uses to the operation whose results it is about."""
        pending = [step for step in pending if not self._is_idle(step, live, pending)]
        for step in pending:
            needed = self.needs_of(step)
            sources = [unit for unit in units if unit.gives & needed]
            last = sources[-1] if sources else (units[-1] if units else None)
            if last is None or (last.block is not None and isinstance(last.part, Loop)):
                units.append(self._op([step], "after"))
                continue
            later = units[units.index(last) + 1 :]
            clash = any(unit.gives & (needed | self.gives_of(step)) for unit in later)
            if last.block is not None or last.part is not None:
                whole = sources and all(source is last for source in sources) and not clash
                if whole and isinstance(last.part, Call):
                    last.part.body = [*last.part.body, step]
                    last.gives |= self.gives_of(step)
                    last.needs |= needed
                else:
                    units.append(self._op([step], "after"))
            elif clash:
                units.append(self._op([step], "after"))
            else:
                self._add(last, step)

    def _is_idle(self, step: Step, live: set[str], others: Sequence[Step]) -> bool:
        """Return whether nothing at all needs a statement: a loop's own count that nobody looks at."""
        if step.number >= 0 or not isinstance(step.statement, ast.Assign):
            return False
        gives = self.gives_of(step)
        return not any(gives & self.needs_of(one) for one in others if one is not step)

    def _op(self, steps: Sequence[Step], name: str) -> Unit:
        unit = Unit(self._fresh(name))
        for step in steps:
            self._add(unit, step)
        return unit

    def _add(self, unit: Unit, step: Step) -> None:
        needs = self.needs_of(step) - self.certain(unit)
        unit.needs |= {name for name in needs if self.is_batch(name)}
        unit.gives |= {name for name in self.gives_of(step) if self.is_batch(name)}
        flow = self.runner.flow(step)
        unit.soft |= {name for name in flow.binds - flow.certain - self.certain(unit) if self.is_batch(name)}
        changed = (self.evidence(step).changed | self.runner.flow(step).changes) & needs
        unit.copies |= {name for name in changed if self.is_batch(name)}
        unit.steps.append(step)
        access = self.kept.access(step)
        unit.reads |= access.reads
        unit.writes |= access.writes

    def certain(self, unit: Unit) -> set[str]:
        """Return the names that an operation has certainly bound by itself so far."""
        return set(flow_of([one for step in unit.steps for one in step.statements]).certain)

    def _graph(self, part: Loop | Call) -> Unit:
        name = self._loop_name(part) if isinstance(part, Loop) else part.name
        unit = Unit(self._fresh(name), part=part, block=Block([]))
        needed, _ = self.exposed([part], set())
        unit.needs = {name for name in needed if self.is_batch(name)}
        unit.gives = {name for name in self._given([part]) if self.is_batch(name)}
        return unit

    def _loop_name(self, part: Loop) -> str:
        stages = [one for one in part.body if is_stage(one, self.runner, only_modules=False)]
        for one in stages:
            if not isinstance(one, Loop):
                return f"each_{one.name if isinstance(one, Call) else self._name_of(one)}"
        return "each_turn"

    def _name_of(self, step: Step) -> str:
        if step.label is not None:
            return step.label
        for _, site in sorted(self.evidence(step).sites.items(), key=lambda item: str(item[0])):
            if site.own or site.num_modules:
                name = getattr(site.callee, "__name__", type(site.callee).__name__)
                if name not in {"list", "cat", "stack", "next", "tuple", "<lambda>"}:
                    return str(name).strip("_").lower() or "call"
        bound = sorted(self.runner.flow(step).binds)
        return f"make_{bound[0]}" if bound else "act"

    def _fresh(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.names:
            number += 1
            name = f"{wanted}_{number}"
        self.names.add(name)
        return name

    def _check_ports(self, block: Block, owner: Loop | Call | None) -> None:
        for at, unit in enumerate(block.units):
            for name in unit.copies & unit.needs:
                if any(name in self.evidence(step).aliased for step in unit.steps) and owner is not None:
                    raise StaysClosedError(owner, f"'{name}' is changed in place and has other names")
            if owner is None:
                continue
            for name in unit.needs:
                if block.producer(name, at) is not None and not self.travels(name):
                    raise StaysClosedError(owner, f"'{name}' cannot go to another process")

    def travels(self, name: str) -> bool:
        """Return whether all values that a name was seen to have can go to another process."""
        return all(seen.travels for seen in self.kept.seen(name))

    def _order(self, block: Block, owner: Loop | Call | None) -> None:
        """Find the pairs of units that touch one state and that no value orders."""
        before: list[set[int]] = []
        for at, unit in enumerate(block.units):
            direct = {made for name in unit.needs if (made := block.producer(name, at)) is not None}
            before.append(direct | {far for near in direct for far in before[near]})
        for later, unit in enumerate(block.units):
            for earlier in range(later - 1, -1, -1):
                if earlier in before[later]:
                    continue
                first = block.units[earlier]
                written = first.state_access(writes=True) | unit.state_access(writes=True)
                touched_first = first.state_access(writes=False) | first.state_access(writes=True)
                touched_later = unit.state_access(writes=False) | unit.state_access(writes=True)
                if written & touched_first & touched_later:
                    block.order.append((earlier, later))
                    for place in range(later, len(block.units)):
                        if place == later or later in before[place]:
                            before[place] |= {earlier, *before[earlier]}


def exposed_names(parts: Sequence[Part], units: Units, inputs: Mapping[str, str]) -> set[str]:
    """Return the names that a batch needs from before it, its inputs apart."""
    return units.exposed(parts, set(inputs.values()))[0]
