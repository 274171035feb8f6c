"""Running a plan: each statement of the reference, with what it called, made, read and changed."""

from __future__ import annotations

import ast
import copy
import traceback
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrt.bench.io import Outputs, SystemIO
from flashrt.bench.trace.plan import Loop, Part, Step, calls_of
from flashrt.bench.trace.syntax import Flow, flow_of
from flashrt.bench.trace.values import Seen, describe_value
from flashrt.bench.trace.watch import (
    PLAIN,
    Held,
    Slot,
    Watch,
    changed_slots,
    hold,
    is_module,
    process_generators,
    state_slots,
    storage_of,
    value_at,
)
from flashrt.clock import monotonic_ns
from flashrt.errors import FlashrtError, input_error

PROBE = "__probe__"
RAN = "__ran__"
UNPROBED = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "print", "isinstance", "len"})


@dataclass
class Site:
    """What was called at one place."""

    callee: Any = None
    own: bool = False
    num_modules: int = 0
    generator: bool = False


@dataclass
class Evidence:
    """What a statement was seen to do, over all batches in which it ran.

    Attributes
    ----------
    times_ns
        Batch -> time of each time that it ran.
    made
        Name -> what was bound to it.
    changed
        Names of the batch or of the set-up whose value it changed in place.
    slots
        Places that outlive a batch which it changed.
    read_storages, written_storages
        Addresses of the memory that tensors operations read and wrote, in the batch that was looked at closely.
    aliased
        Those of `changed` whose value has another name too, or is in a place that outlives the batch.
    """

    times_ns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_modules: int = 0
    made: dict[str, Seen] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    slots: set[Slot] = field(default_factory=set)
    read_storages: dict[int, int] = field(default_factory=dict)
    written_storages: set[int] = field(default_factory=set)
    sites: dict[Any, Site] = field(default_factory=dict)
    aliased: set[str] = field(default_factory=set)
    read_slots: set[Slot] = field(default_factory=set)
    branches: set[int] = field(default_factory=set)
    """Lines at which a branch that was taken begins."""

    @property
    def calls_own(self) -> bool:
        """Whether it called a function of the application, or ran a module."""
        return self.num_modules > 0 or any(site.own for site in self.sites.values())


@dataclass(frozen=True)
class SetUp:
    """One statement of the set-up: what it does to names, and which it changed in place."""

    step: Step
    flow: Flow
    changed: frozenset[str]


class Runner:
    """Holds the names of the reference and runs its statements.

    Parameters
    ----------
    items
        The batches, one mapping {input: value} each.
    """

    def __init__(self, io: SystemIO, watch: Watch, input_names: Sequence[str]) -> None:
        self.io = io
        self.watch = watch
        self.input_names = list(input_names)
        self.values: dict[str, Any] = {"__builtins__": __builtins__, PROBE: self._probe, RAN: self._ran}
        self.setups: list[SetUp] = []
        self.evidence: dict[int, Evidence] = defaultdict(Evidence)
        self.flows: dict[int, Flow] = {}
        self.counts: dict[int, set[int]] = defaultdict(set)
        """Loop -> how many turns it took, over all its runs."""
        self.iterables: dict[int, str] = {}
        self.slots: set[Slot] = set()
        self.late_slots: set[Slot] = set()
        """Slots that changed in a batch before anybody watched them."""
        self.slot_batches: dict[Slot, set[int]] = defaultdict(set)
        self.slot_owners: dict[Slot, int] = {}
        self.slot_storages: dict[Slot, set[int]] = {}
        self.generator_values: set[int] = set()
        self.batch = 0
        self.num_modules = 0
        self._code: dict[int, tuple[types.CodeType, Step]] = {}
        self._current: list[Step] = []
        self._closely = False
        self._slot_addresses: dict[int, Slot] = {}
        self._setup_marks = process_generators()
        self._walked: tuple[list[str] | None, dict[Slot, Held]] = (None, {})
        self.roots: list[str] = []
        self.written: dict[str, list[Seen]] = defaultdict(list)

    def set_up(self, statement: ast.stmt, place: str, contexts: tuple[ast.expr, ...] = ()) -> None:
        """Run a statement of the set-up and keep what it changed."""
        step = Step(statement, place, contexts)
        flow = flow_of(step.statements)
        before = self._setup_marks
        self._execute(step)
        after = self._setup_marks = self._marks_of_setup()
        changed = {
            slot.root if slot.path == () or not slot.root.startswith("@") else f"@{slot.spelled}"
            for slot in changed_slots(before, after)
            if slot in before
        }
        self.setups.append(SetUp(step, flow, frozenset(changed - flow.binds)))

    def _marks_of_setup(self) -> dict[Slot, Held]:
        names = {name: value for name, value in self.values.items() if not _is_hidden(name, value)}
        return {slot: held for slot, held in self.watch.walk(names).items() if slot.root != "@modules"}

    def peek(self, expression: ast.expr) -> Any:
        """Return the value of a name with attributes and items, or None where it has none yet."""
        code = compile(ast.fix_missing_locations(ast.Expression(copy.deepcopy(expression))), "<trace>", "eval")
        try:
            return eval(code, self.values)
        except (NameError, AttributeError, LookupError, TypeError):
            return None

    def is_io(self, expression: ast.expr) -> bool:
        """Return whether an expression is the reference's own `io`."""
        return isinstance(expression, ast.Name | ast.Attribute) and self.peek(expression) is self.io

    def run_batch(
        self, parts: Sequence[Part], item: Mapping[str, Any], *, closely: bool = False, walk: bool = True
    ) -> None:
        """Run one batch.

        Parameters
        ----------
        closely
            Look at every tensor operation.
        walk
            Look through all that outlives the batch for changes since it was last looked through.
        """
        self.values.update(item)
        kept = {name: self.values[name] for name in self.roots if name in self.values}
        if self._walked[0] != self.roots:
            self._walked = (self.roots, self.watch.walk(kept))
        with ExitStack() as stack:
            self._closely = closely
            if closely:
                from flashrt.bench.trace.storages import Storages

                stack.enter_context(Storages(self._touched))
            self._run(parts)
        if not walk:
            self.batch += 1
            return
        after = self.watch.walk(kept)
        changed = state_slots(changed_slots(self._walked[1], after))
        self._walked = (self.roots, after)
        self.late_slots |= changed - self.slots
        self.slots |= changed
        for slot in changed:
            self.slot_batches[slot].add(self.batch)
        for slot in self.slots:
            self._note_slot(slot)
        self.batch += 1

    def _note_slot(self, slot: Slot) -> None:
        try:
            owner = value_at(Slot(slot.root, slot.path[:-1]), self.values) if slot.path else None
            value = value_at(slot, self.values) if not slot.root.startswith("@random") else None
        except (LookupError, AttributeError, ValueError, KeyError):
            return
        if owner is not None:
            self.slot_owners[slot] = id(owner)
        found = {address for one in _tensors(value) if (address := storage_of(one)) is not None}
        self.slot_storages[slot] = found | self.slot_storages.get(slot, set())

    def _find_addresses(self) -> None:
        """Note where the tensors of watched places are now: addresses are told apart only while they are in use."""
        self._slot_addresses.clear()
        for slot in self.slots:
            try:
                value = value_at(slot, self.values) if slot.root != "@random" else None
            except (LookupError, AttributeError, ValueError):
                continue
            for one in _tensors(value):
                address = storage_of(one)
                if address is not None:
                    self._slot_addresses[address] = slot

    def _touched(self, read: Iterable[tuple[int, int]], written: Iterable[int]) -> None:
        if self._current:
            evidence = self.evidence[self._current[-1].number]
            evidence.read_slots |= {slot for address, _ in read if (slot := self._slot_addresses.get(address))}
            evidence.read_storages.update(read)
            evidence.written_storages.update(written)

    def _run(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, Step):
                self._observe(part)
            elif isinstance(part, Loop):
                self._loop(part)
            else:
                self._run(part.body)

    def _loop(self, loop: Loop) -> None:
        head = Step(_assigned(loop.items, loop.iterable), loop.whole.place, loop.whole.contexts)
        # One number for every run, so that evidence gathers.
        head.number = loop.number
        self._observe(head)
        items = self.values[loop.items]
        self.iterables[loop.number] = type(items).__name__
        count = 0
        code = compile(
            ast.fix_missing_locations(ast.Module([_assigned_to(loop.target, loop.items + "_now")], [])),
            "<trace>",
            "exec",
        )
        for item in items:
            self.values[loop.items + "_now"] = item
            exec(code, self.values)
            self.values[loop.index] = count
            self._run(loop.body)
            count += 1
        self.counts[loop.number].add(count)

    def _observe(self, step: Step) -> None:
        evidence = self.evidence[step.number]
        flow = self.flow(step)
        names = self._marks()
        slots = self._slot_marks()
        modules = self.num_modules
        if self._closely:
            self._find_addresses()
        self._current.append(step)
        try:
            spent = self._execute(step)
        finally:
            self._current.pop()
        evidence.times_ns[self.batch].append(spent)
        evidence.num_modules += self.num_modules - modules
        after = self._marks()
        for name, held in names.items():
            if name not in flow.binds and after.get(name) != held:
                evidence.changed.add(name)
                if self._has_alias(name):
                    evidence.aliased.add(name)
        for slot, held in self._slot_marks().items():
            if slots.get(slot) != held:
                evidence.slots.add(slot)
        for name in flow.binds:
            if name in self.values:
                seen = describe_value(self.values[name])
                known = evidence.made.get(name)
                evidence.made[name] = seen if known is None else known.merged(seen)
        if step.writes is not None:
            (name,) = flow.binds
            self.written[step.writes].append(evidence.made[name])

    def _has_alias(self, name: str) -> bool:
        """Return whether what a name holds, or its memory, is also reached in another way."""
        value = self.values.get(name)
        address = storage_of(value)
        others = [other for key, other in self.values.items() if key != name and not key.endswith("_now")]
        if any(other is value or (address is not None and storage_of(other) == address) for other in others):
            return True
        for slot in self.slots:
            try:
                if slot.path and value_at(slot, self.values) is value:
                    return True
            except (LookupError, AttributeError, ValueError):
                continue
        return address is not None and any(address in found for found in self.slot_storages.values())

    def _marks(self) -> dict[str, Held]:
        return {
            name: hold(value)
            for name, value in self.values.items()
            if not _is_hidden(name, value) and not isinstance(value, PLAIN)
        }

    def _slot_marks(self) -> dict[Slot, Held]:
        found = process_generators()
        for slot in self.slots:
            if slot.root == "@random":
                continue
            try:
                found[slot] = hold(value_at(slot, self.values))
            except (LookupError, AttributeError, ValueError):
                continue
        return found

    def flow(self, step: Step) -> Flow:
        """Return what a statement does to names, found once."""
        if step.number not in self.flows:
            self.flows[step.number] = flow_of(step.statements)
        return self.flows[step.number]

    def _execute(self, step: Step) -> int:
        known = self._code.get(step.number)
        if known is None or (known[1] is not step and ast.dump(known[1].statement) != ast.dump(step.statement)):
            known = self._code[step.number] = (self._compile(step), step)
        begin = monotonic_ns()
        try:
            exec(known[0], self.values)
        except FlashrtError:
            raise
        except Exception as error:
            frames = [one for one in traceback.extract_tb(error.__traceback__) if self.watch.is_own_file(one.filename)]
            deepest = f", raised at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            text = " ".join(str(error).split())[:500]
            raise input_error(
                f"reference at {step.place}", "statements that run", f"{type(error).__name__}: {text}{deepest}",
                "correct the reference (or the inputs) and call ir_trace again", rule="user-code",
            ) from error  # fmt: skip
        return monotonic_ns() - begin

    def _compile(self, step: Step) -> types.CodeType:
        positions = {id(call): index for index, call in enumerate(calls_of(step.statement))}
        number = step.number

        class Prober(ast.NodeTransformer):
            def visit_Call(self, node: ast.Call) -> ast.expr:
                position = positions.get(id(node))
                self.generic_visit(node)
                if isinstance(node.func, ast.Name) and node.func.id in UNPROBED:
                    return node
                head = [ast.Constant(number), ast.Constant(position), node.func]
                probe = ast.Call(ast.Name(PROBE, ast.Load()), [*head, *node.args], node.keywords)
                return ast.copy_location(probe, node)

            def visit_If(self, node: ast.If) -> ast.stmt:
                self.generic_visit(node)
                for block in (node.body, node.orelse):
                    if block:
                        told: list[ast.expr] = [ast.Constant(number), ast.Constant(block[0].lineno)]
                        block.insert(0, ast.Expr(ast.Call(ast.Name(RAN, ast.Load()), told, [])))
                return node

            def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
                return node

            def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
                return node

            visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

        # Calls are told by identity, so the copy is made of trees that are probed, and the original stays.
        probed = Step(copy.deepcopy(step.statement), step.place, step.contexts)
        positions.update({id(call): index for index, call in enumerate(calls_of(probed.statement))})
        probed.statement = Prober().visit(probed.statement)
        module = ast.Module(probed.statements, [])
        return compile(ast.fix_missing_locations(module), step.place.rpartition(":")[0], "exec")

    def _probe(self, number: int, position: int | None, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        modules = self.num_modules
        result = callee(*args, **kwargs)
        # Calls that are not made on every way through are told by what is called.
        key = getattr(callee, "__qualname__", type(callee).__name__) if position is None else position
        site = self.evidence[number].sites.setdefault(key, Site())
        site.callee = callee
        site.num_modules += self.num_modules - modules
        site.own = site.own or self.is_own(callee)
        site.generator = site.generator or isinstance(result, Iterator)
        return result

    def _ran(self, number: int, line: int) -> None:
        self.evidence[number].branches.add(line)

    def is_own(self, callee: Any) -> bool:
        """Return whether something called is the application's own function, method or module."""
        if is_module(callee):
            return self.watch.is_own_function(type(callee).forward)
        return self.watch.is_own_function(callee)


def _is_hidden(name: str, value: Any) -> bool:
    return name.startswith("__") or isinstance(value, types.ModuleType | type | SystemIO | Outputs) or (
        type(value).__module__ == "flashrt.bench.io"
    )  # fmt: skip


def _tensors(value: Any, depth: int = 4) -> Iterator[Any]:
    if storage_of(value) is not None:
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(made, value))


def _assigned_to(target: ast.expr, name: str) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], ast.Name(name, ast.Load())), target))
