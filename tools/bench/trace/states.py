"""What outlives a batch: variables of the reference, places in its objects, generators; and who touches them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashrt.bench.trace.plan import Call, Loop, Part, Step, steps_of
from flashrt.bench.trace.questions import Questions
from flashrt.bench.trace.run import Runner
from flashrt.bench.trace.values import Seen, describe_value
from flashrt.bench.trace.watch import GENERATORS, MODULES, Slot, is_array, is_tensor, state_slots, value_at

Lookup = (LookupError, AttributeError, ValueError)
RANDOM = {"torch": "torch", "numpy": "NumPy", "python": "Python"}


@dataclass(frozen=True)
class Access:
    """States that a statement reads and writes."""

    reads: frozenset[str]
    writes: frozenset[str]


@dataclass
class SlotState:
    """Places in objects that are kept together as one state."""

    name: str
    slots: list[Slot]
    writers: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    num_bytes: int = 0

    @property
    def is_random(self) -> bool:
        """Whether it is a generator of the process."""
        return self.slots[0].root == GENERATORS


class Kept:
    """The states of a draft.

    Attributes
    ----------
    variables
        Names of the reference that a batch leaves for the next one.
    per_iteration
        Variable -> how its element of a turn is spelled (``kv_of_step[step]``): each turn has a state of its own.
    batch_names
        Names that belong to one batch.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.variables: set[str] = set()
        self.per_iteration: dict[str, str] = {}
        self.batch_names: set[str] = set()
        self.slot_states: list[SlotState] = []
        self.parts: Sequence[Part] = ()
        self.boxed: set[str] = set()

    def seen(self, name: str) -> list[Seen]:
        """Return all kinds of values that a name was seen to have in a batch."""
        return [found for evidence in self.runner.evidence.values() if (found := evidence.made.get(name)) is not None]

    def merged(self, name: str) -> Seen | None:
        """Return what holds of all values that a name was seen to have."""
        total: Seen | None = None
        for one in self.seen(name):
            total = one if total is None else total.merged(one)
        return total

    def access(self, step: Step) -> Access:
        """Return the states that a statement reads and writes."""
        evidence, flow = self.runner.evidence[step.number], self.runner.flow(step)
        changed = evidence.changed | flow.changes
        text = ast.unparse(step.statement)
        here = {name for name in self.variables if self.per_iteration.get(name, "") in text}
        reads = {name for name in here if name in flow.needs or name in evidence.changed}
        writes = {name for name in here if name in flow.binds or name in changed}
        for state in self.slot_states:
            if step.number in state.writers:
                reads.add(state.name)
                writes.add(state.name)
            elif step.number in state.readers:
                reads.add(state.name)
        return Access(frozenset(reads), frozenset(writes))

    def num_bytes(self, name: str) -> int:
        """Return the size of one instance of a state."""
        slot = next((one for one in self.slot_states if one.name == name), None)
        if slot is not None:
            return slot.num_bytes
        value: Any = self.runner.values.get(name)
        if name in self.per_iteration and isinstance(value, list | dict) and value:
            items = value.values() if isinstance(value, dict) else value
            return max(describe_value(one).num_bytes for one in items)
        if hasattr(value, "get_state"):
            return describe_value(value.get_state()).num_bytes
        return describe_value(value).num_bytes


def find_kept(
    runner: Runner, parts: Sequence[Part], inputs: Iterable[str], exposed: set[str], initial: dict[str, Seen],
    setup_names: set[str], questions: Questions,
) -> Kept:  # fmt: skip
    """Return what outlives a batch of a plan.

    Parameters
    ----------
    exposed
        Names that a batch needs from before it.
    initial
        Name of the set-up -> what it was before the first batch.
    """
    kept = Kept(runner)
    kept.parts = parts
    steps = list(steps_of(parts))
    bound = {name for step in steps for name in runner.flow(step).binds} | set(inputs)
    bound |= {name for loop in _loops(parts) for name in (loop.index, loop.items)}
    bound |= {one.id for loop in _loops(parts) for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    changed = {name for step in steps for name in (runner.evidence[step.number].changed | runner.flow(step).changes)}
    rooted = {slot.root for slot in state_slots(runner.slots) if not slot.path}
    for name in setup_names:
        in_place = name in rooted or (name in changed and _is_value(runner, name))
        if name in exposed if name in bound else in_place:
            kept.variables.add(name)
    kept.batch_names = bound - kept.variables
    for name in sorted(kept.variables):
        pattern = _per_iteration(name, parts)
        if pattern is not None:
            kept.per_iteration[name] = pattern
        none_later = any(one.was_none for one in kept.seen(name))
        first = initial.get(name)
        if none_later and first is not None and first.kind != "NoneType":
            kept.boxed.add(name)
    _find_slots(kept, steps, questions)
    return kept


def _is_value(runner: Runner, name: str) -> bool:
    """Return whether a name holds something that is changed as a whole: a container, tensor or generator."""
    return Slot(name) in runner.slots or is_tensor(runner.values.get(name)) or is_array(runner.values.get(name))


def _loops(parts: Sequence[Part]) -> list[Loop]:
    found: list[Loop] = []
    for part in parts:
        if isinstance(part, Loop):
            found.append(part)
        if isinstance(part, Loop | Call):
            found += _loops(part.body)
    return found


def _per_iteration(name: str, parts: Sequence[Part]) -> str | None:
    """Return how the element of a turn is spelled, where a list is used in one loop only, by its turn."""
    using = [part for part in parts if any(_uses(step, name) for step in _own_steps(part))]
    loop = using[0] if len(using) == 1 and isinstance(using[0], Loop) else None
    if loop is None or not isinstance(loop.target, ast.Name) or not isinstance(loop.iterable, ast.Call):
        return None
    if not (isinstance(loop.iterable.func, ast.Name) and loop.iterable.func.id == "range"):
        return None
    lengths = sum(ast.unparse(one) == f"len({name})" for one in ast.walk(loop.iterable))
    mentions = sum(isinstance(one, ast.Name) and one.id == name for one in ast.walk(loop.iterable))
    if mentions != lengths:
        return None
    index = loop.target.id
    spelling = f"{name}[{index}]"
    for step in steps_of(loop.body):
        plain = sum(isinstance(one, ast.Name) and one.id == name for one in ast.walk(step.statement))
        indexed = sum(isinstance(one, ast.Subscript) and ast.unparse(one) == spelling
                      for one in ast.walk(step.statement))  # fmt: skip
        rebinds = any(isinstance(one, ast.Name) and one.id == index and isinstance(one.ctx, ast.Store)
                      for one in ast.walk(step.statement))  # fmt: skip
        if plain != indexed or rebinds:
            return None
    return spelling


def _own_steps(part: Part) -> list[Step]:
    return [part] if isinstance(part, Step) else list(steps_of(part.body))


def _uses(step: Step, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(step.statement))


def _find_slots(kept: Kept, steps: Sequence[Step], questions: Questions) -> None:
    runner = kept.runner
    last = max((max(found) for found in runner.slot_batches.values() if found), default=0)
    groups: dict[tuple[str, frozenset[int], frozenset[int]], list[Slot]] = defaultdict(list)
    once: dict[str, list[str]] = defaultdict(list)
    for slot in sorted(state_slots(runner.slots), key=lambda one: one.spelled):
        batches = {n for known, found in runner.slot_batches.items() if _covers(slot, known) for n in found}
        if slot.root in kept.variables or (not slot.path and slot.root != GENERATORS):
            continue
        writers = {
            step.number for step in steps
            if any(_covers(slot, one) for one in runner.evidence[step.number].slots)
        }  # fmt: skip
        if slot.root != GENERATORS and batches <= {0} and last > 0:
            once[slot.root].append(slot.spelled)
            continue
        readers = _readers(kept, slot, steps, writers, questions)
        if not writers:
            writers = readers
            questions.ask(
                "unseen-writer", "reference",
                f"'{slot.spelled}' changed in a batch in which it was not watched yet: which operation changed it?",
                [
                    ("any", "as drafted: every operation that reaches it reads and writes it"),
                    ("one", "trace more batches, or keep the state only under the node that writes it"),
                ],
            )  # fmt: skip
        groups[slot.root, frozenset(writers), frozenset(readers)].append(slot)
    for places in once.values():
        questions.ask(
            "state-or-cache", "reference",
            f"{', '.join(map(repr, places[:3]))}{f' and {len(places) - 3} more' if len(places) > 3 else ''} changed in "
            "the first batch only: made once and kept, such as a cache of weights, or state?",
            [
                ("cache", "as drafted: not declared; each process makes its own"),
                ("state", "declare a state under the nodes that use it, and keep it in ops.py"),
            ],
        )  # fmt: skip
    taken: set[str] = set(kept.variables)
    for (root, writers_key, readers_key), slots in groups.items():
        name = _state_name(root, slots)
        while name in taken:
            name += "_more"
        taken.add(name)
        state = SlotState(name, slots, set(writers_key), set(readers_key))
        state.num_bytes = sum(_size(slot, runner) for slot in slots)
        kept.slot_states.append(state)
        if root == GENERATORS:
            questions.ask(
                "process-generator", "reference",
                f"the reference draws from {RANDOM[str(slots[0].path[0][1])]}'s generator of the whole process; is it "
                "seeded in the set-up?",
                [
                    ("seeded", "as drafted: a state that begins as the set-up left it"),
                    ("not seeded", "give the reference a generator of its own with a seed: else no two runs are equal"),
                ],
                f"states.{name}",
            )  # fmt: skip
        else:
            questions.ask(
                "state-or-scratch", "reference",
                f"{', '.join(repr(slot.spelled) for slot in slots[:4])} changes from batch to batch: does the next "
                "batch need what this one left there, or is it written anew before it is read?",
                [
                    ("state", "as drafted: kept from batch to batch"),
                    ("scratch", f"remove '{name}' from states, reads and writes, and from ops.py"),
                ],
                f"states.{name}",
            )  # fmt: skip


def _covers(slot: Slot, other: Slot) -> bool:
    return slot.root == other.root and other.path[: len(slot.path)] == slot.path


def _readers(kept: Kept, slot: Slot, steps: Sequence[Step], writers: set[int], questions: Questions) -> set[int]:
    """Return the statements that read a place: seen by its memory, or those that can reach it, which is a question."""
    runner = kept.runner
    if slot.root == GENERATORS:
        return set(writers)
    storages = any(found for known, found in runner.slot_storages.items() if _covers(slot, known))
    found = set(writers)
    for step in steps:
        if any(_covers(slot, one) for one in runner.evidence[step.number].read_slots):
            found.add(step.number)
    owner = runner.slot_owners.get(slot)
    if storages or owner is None:
        return found
    for step in steps:
        if step.number in found:
            continue
        names = [name for name in runner.flow(step).needs if name in runner.values and name not in kept.batch_names]
        if any(runner.watch.reaches(runner.values[name], {owner}) for name in names):
            found.add(step.number)
            questions.ask(
                "reader", step.place,
                f"does '{ast.unparse(step.statement)[:60]}' read '{slot.spelled}'? It can reach it; reads of plain "
                "attributes are not seen",
                [
                    ("reads", "as drafted: declared, so that its order is kept"),
                    ("does not read", "remove the state from 'reads' of its node"),
                ],
            )  # fmt: skip
    return found


def _state_name(root: str, slots: Sequence[Slot]) -> str:
    if root == GENERATORS:
        return f"random.{slots[0].path[0][1]}"
    if len(slots) > 1:
        return f"{root.lstrip('@')}.kept"
    text = slots[0].spelled
    for sign in "[]'\"/*? <>":
        text = text.replace(sign, "_")
    return text.strip("_")


def _size(slot: Slot, runner: Runner) -> int:
    if slot.root == GENERATORS:
        return 0
    try:
        return describe_value(value_at(slot, runner.values)).num_bytes
    except Lookup:
        return 0


def expression_of(slot: Slot, module_names: dict[str, str]) -> tuple[str, tuple[str, object]]:
    """Return how the object that has a place is spelled, and the last step: ``("net.layer", ("attr", "cache"))``.

    Parameters
    ----------
    module_names
        Module of the application -> its name in the draft.
    """
    text = slot.root
    path = list(slot.path)
    if slot.root == MODULES:
        text = module_names[str(path.pop(0)[1])]
    for kind, key in path[:-1]:
        text = spell_step(text, kind, key)
    return text, path[-1]


def spell_step(text: str, kind: str, key: object) -> str:
    """Return ``text`` with one step more."""
    if kind == "item":
        return f"{text}[{key!r}]"
    if kind == "cell":
        return f"cell({text}, {key!r}).cell_contents"
    if all(part.isidentifier() for part in str(key).split(".")):
        return f"{text}.{key}"
    return f"getattr({text}, {key!r})"
