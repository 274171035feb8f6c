"""The ops file of a draft: the reference's own set-up and statements, cut into operations. Text out."""

from __future__ import annotations

import ast
import os
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashrt.bench.trace.outputs import JOIN
from flashrt.bench.trace.plan import Namer, Step, parse_file
from flashrt.bench.trace.run import Runner, SetUp
from flashrt.bench.trace.states import Kept, SlotState, expression_of, spell_step
from flashrt.bench.trace.syntax import flow_of, replaced, spelled
from flashrt.bench.trace.units import Unit
from flashrt.bench.trace.watch import GENERATORS, MODULES

RANDOM_CALLS = {
    "torch": ("torch.get_rng_state()", "torch.set_rng_state({})"),
    "numpy": ("numpy.random.get_state()", "numpy.random.set_state({})"),
    "python": ("_random.getstate()", "_random.setstate({})"),
}
COPIED = '''
def copied(value: Any) -> Any:
    """Return a copy of a value that the reference changes in place: what came from another operation stays as it is."""
    return value.clone() if hasattr(value, "clone") else _copy.copy(value)
'''
CELL = '''
def cell(function: Any, name: str) -> Any:
    """Return the variable of a closure."""
    return function.__closure__[function.__code__.co_freevars.index(name)]
'''


class OpsFile:
    """Writes the ops file.

    Parameters
    ----------
    path
        The reference's file.
    folder
        Where the ops file will be.
    """

    def __init__(self, path: Path, function: str, folder: Path, runner: Runner, namer: Namer, kept: Kept) -> None:
        self.path = path.resolve()
        self.function = function
        self.folder = folder.resolve()
        self.runner = runner
        self.namer = namer
        self.kept = kept
        self.firsts: dict[str, str] = {}
        """Initial values of states -> how they are spelled."""
        self.first_needs: dict[str, set[str]] = {}
        self.used: set[str] = set()
        """Names of modules and functions that have to be imported."""
        self.module_names: dict[str, str] = {}
        self._random_users: dict[str, set[str]] = {}

    def write(self, units: Sequence[Unit], begins: dict[str, str], order: dict[str, list[str]], io_name: str) -> str:
        """Return the text of the file.

        Parameters
        ----------
        begins
            Op that a repeated graph's count begins with -> the name of the count.
        order
            Operation -> the extra outputs by which others wait for it.
        """
        bodies = [self._operation(unit, order.get(unit.name, [])) for unit in units]
        needs = {unit.name: self._needed(unit) for unit in units}
        lines = [f"{name}: {sorted(numbers)}" for name, numbers in ((repr(n), found) for n, found in needs.items())]
        lines += [f"{name!r}: []" for name in begins]
        setup = self._set_up({number for found in needs.values() for number in found})
        firsts = self._firsts()
        begin = "".join(
            f"\n    def op_{name}(inputs: Any, state: Any) -> Any:\n        return {{{index!r}: 0}}\n"
            for name, index in begins.items()
        )
        names = ", ".join(f"{name!r}: op_{name}" for name in (*(unit.name for unit in units), *begins))
        body = "\n\n".join(textwrap.indent(text, "    ") for text in bodies)
        code = "\n".join([setup, firsts, begin, body])
        helpers = (COPIED + "\n" if "copied(" in code else "") + (CELL + "\n" if "cell(" in code else "")
        self.used |= {one.id for one in ast.walk(ast.parse(textwrap.dedent(code))) if isinstance(one, ast.Name)}
        imports = self._imports()
        return f'''"""Operations of a draft that ir_trace made of {self.path.name}:{self.function}.

They are the reference's own statements; the questions in program.yaml say what could not be seen.
"""

from __future__ import annotations

import copy as _copy
import random as _random
import sys as _sys
from pathlib import Path as _Path
from types import SimpleNamespace as _Namespace
from typing import Any

FOLDER = (_Path(__file__).resolve().parent / {os.path.relpath(self.path.parent, self.folder)!r}).resolve()
if str(FOLDER) not in _sys.path:
    _sys.path.insert(0, str(FOLDER))

{imports}

# Operation -> the statements of the set-up, by number, that it needs.
NEEDS: dict[str, list[int]] = {{
{textwrap.indent("".join(line + "," + chr(10) for line in lines), "    ")}}}

{helpers}
def load(context: Any) -> dict[str, Any]:
    """Return the operations that `context.operations` asks for (None: all), with the set-up that these need."""
    wanted = set(NEEDS) if context.operations is None else set(NEEDS) & set(context.operations)
    needed = {{number for name in wanted for number in NEEDS[name]}}
    {io_name} = _Namespace(
        config=dict(context.config), devices=[context.device], inputs={{}}, outputs={{}}, ready=lambda: None
    )
    first: dict[str, Any] = {{}}
{code}
    made_ops = {{{names}}}
    return {{name: op for name, op in made_ops.items() if name in wanted}}
'''

    def _needed(self, unit: Unit) -> set[int]:
        """Return the numbers of the set-up's statements that an operation needs."""
        wanted = set(flow_of([one for step in unit.steps for one in step.statements]).needs)
        wanted |= (unit.reads | unit.writes) & self.kept.variables
        for state in self.kept.slot_states:
            if state.name in unit.reads | unit.writes:
                wanted |= {f"@{slot.spelled}" if state.is_random else slot.root for slot in state.slots}
        found: set[int] = set()
        self._close_over(wanted, found)
        while True:
            names = {name for number in found for name in self._names(self.runner.setups[number])}
            more = {
                number
                for number, one in enumerate(self.runner.setups)
                if number not in found and self._acts(one) and self._names(one) <= names
            }
            if not more:
                return found
            found |= more

    def _close_over(self, wanted: set[str], found: set[int]) -> None:
        for number in range(len(self.runner.setups) - 1, -1, -1):
            one = self.runner.setups[number]
            if (one.flow.binds | one.changed | one.flow.changes) & wanted:
                found.add(number)
                wanted -= one.flow.certain - one.changed
                wanted |= one.flow.needs | {name for name in one.changed if name.startswith("@")}

    def _names(self, one: SetUp) -> set[str]:
        """Return the names of the set-up that a statement needs."""
        ready = {name for other in self.runner.setups for name in other.flow.binds}
        return set(one.flow.needs) & ready

    def _acts(self, one: SetUp) -> bool:
        """Return whether a statement is there for what it does, not for a name: it may set something global."""
        statement = one.step.statement
        return isinstance(statement, ast.Expr) and not ast.unparse(statement).endswith(".ready()")

    def _set_up(self, needed: Iterable[int]) -> str:
        made = []
        for number in sorted(needed):
            one = self.runner.setups[number]
            text = spelled(one.step.statements)
            made.append(f"if {number} in needed:  # {one.step.place}\n{textwrap.indent(text, '    ')}")
        return textwrap.indent("\n".join(made), "    ")

    def _firsts(self) -> str:
        made = []
        for name, text in sorted(self.firsts.items()):
            needed: set[int] = set()
            self._close_over(set(self.first_needs[name]), needed)
            condition = " and ".join(f"{number} in needed" for number in sorted(needed)[-1:]) or "True"
            if name.startswith("random."):
                condition = " or ".join(
                    f"{unit!r} in wanted" for unit in sorted(self._random_users.get(name, ()))
                ) or "True"  # fmt: skip
            made.append(f"if {condition}:\n    first[{name!r}] = {text}")
        return textwrap.indent("\n".join(made), "    ")

    def _operation(self, unit: Unit, extra: Sequence[str]) -> str:
        lines = [f"def op_{unit.name}(inputs: Any, state: Any) -> Any:"]
        body: list[str] = []
        for name in sorted(unit.needs):
            value = f"inputs[{name!r}]"
            body.append(f"{name} = copied({value})" if name in unit.copies else f"{name} = {value}")
        touched = unit.reads | unit.writes
        variables = sorted(touched & self.kept.variables)
        turning = {name: f"{name}_now" for name in variables if name in self.kept.per_iteration}
        for name in variables:
            self.firsts[name] = name
            self.first_needs[name] = {name}
            if name in turning or name not in unit.reads:
                continue
            kept = f"state[{name!r}]"
            if name in self.kept.boxed:
                body += [f"{name} = first[{name!r}] if {kept} is None else {kept}[0]"]
            else:
                body += [f"{name} = first[{name!r}] if {kept} is None else {kept}"]
        slots = [one for one in self.kept.slot_states if one.name in touched]
        for state in slots:
            body += self._restore(state, unit)
        recalled: set[str] = set()
        for step in unit.steps:
            body += self._statement(step, turning, recalled)
        for name in variables:
            if name in unit.writes:
                value = turning.get(name, name)
                body.append(f"state[{name!r}] = " + (f"({value},)" if name in self.kept.boxed else value))
        for state in slots:
            if state.name in unit.writes:
                body.append(f"state[{state.name!r}] = {self._current(state)}")
        ports = [f"{name!r}: {name}" for name in sorted(unit.outputs)] + [f"{name!r}: True" for name in extra]
        body.append(f"return {{{', '.join(ports)}}}")
        lines.append(textwrap.indent("\n".join(body), "    "))
        return "\n".join(lines)

    def _statement(self, step: Step, turning: dict[str, str], recalled: set[str]) -> list[str]:
        statement = step.statement
        before: list[str] = []
        for name, now in turning.items():
            pattern = self.kept.per_iteration[name]
            if pattern not in ast.unparse(statement):
                continue
            if name not in recalled:
                recalled.add(name)
                kept = f"state[{name!r}]"
                first = pattern.replace(name, f"first[{name!r}]", 1)
                before.append(f"{now} = {first} if {kept} is None else {kept}")
            statement = replaced(statement, pattern, now)
        made = Step(statement, step.place, step.contexts)
        text = spelled(made.statements)
        return [*before, f"{text}  # {step.place}" if "\n" not in text else text]

    def _owner(self, state: SlotState, at: int) -> str:
        owner, (kind, key) = expression_of(state.slots[at], self._modules(state))
        return spell_step(owner, kind, str(key) if kind != "item" else key)

    def _modules(self, state: SlotState) -> dict[str, str]:
        found = {}
        for slot in state.slots:
            if slot.root == MODULES:
                module = str(slot.path[0][1])
                if module not in self.module_names:
                    self.module_names[module] = self.namer.fresh(f"module_{module.rpartition('.')[2].lstrip('_')}"[:40])
                found[module] = self.module_names[module]
        return found

    def _current(self, state: SlotState) -> str:
        if state.slots[0].root == GENERATORS:
            return RANDOM_CALLS[str(state.slots[0].path[0][1])][0]
        places = [self._owner(state, at) for at in range(len(state.slots))]
        return places[0] if len(places) == 1 else f"[{', '.join(places)}]"

    def _restore(self, state: SlotState, unit: Unit) -> list[str]:
        kept = f"state[{state.name!r}]"
        if state.slots[0].root == GENERATORS:
            kind = str(state.slots[0].path[0][1])
            self.firsts[state.name] = RANDOM_CALLS[kind][0]
            self.first_needs[state.name] = {f"@{kind}"}
            self._random_users.setdefault(state.name, set()).add(unit.name)
            value = f"first[{state.name!r}] if {kept} is None else {kept}"
            return [RANDOM_CALLS[kind][1].format(value)]
        places = [self._owner(state, at) for at in range(len(state.slots))]
        target = places[0] if len(places) == 1 else ", ".join(places)
        return [f"if {kept} is not None:", f"    {target} = {kept}"]

    def _imports(self) -> str:
        made: set[str] = set()
        loads: dict[Path, str] = {}
        if JOIN in self.used:
            made.add(f"from flashrt.ir.values import join as {JOIN}")
        for name in ("torch", "numpy"):
            if name in self.used and name not in self.namer.imported:
                made.add(f"import {name}")
        late: list[str] = []
        for name, (path, original) in sorted(self.namer.imported.items()):
            if name not in self.used:
                continue
            statement = _import_of(path, original, name)
            module = _module_name(path)
            if statement is not None:
                made.add(statement)
            elif module is not None:
                made.add(f"from {module} import {original}" + (f" as {name}" if name != original else ""))
            else:
                loads[path] = loads.get(path) or self.namer.fresh(path.stem)
                late.append(f"{name} = {loads[path]}.{original}")
        for module, name in self.module_names.items():
            found = sys.modules[module]
            path = Path(str(found.__file__)).resolve()
            if _module_name(path) is not None:
                made.add(f"import {module} as {name}")
            else:
                loads[path] = loads.get(path) or self.namer.fresh(path.stem)
                late.append(f"{name} = {loads[path]}")
        head = sorted(made)
        if loads:
            head.insert(0, "from flashrt.ir.ops import load_module")
        head += [
            f"{name} = load_module(FOLDER / {os.path.relpath(path, self.path.parent)!r})"
            for path, name in loads.items()
        ]
        return "\n".join([*head, *late])


def _module_name(path: Path) -> str | None:
    """Return the name by which a file can be imported; None where it was loaded under a private name."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
        if file and not name.startswith(("_flashrt_user_", "__main__")) and Path(file).resolve() == path:
            return name
    return None


def _import_of(path: Path, original: str, name: str) -> str | None:
    """Return the statement that imports a name as its file does; None where the file makes it by itself."""
    package = next(
        (str(getattr(m, "__package__", "") or "") for m in list(sys.modules.values())
         if getattr(m, "__file__", None) and Path(str(m.__file__)).resolve() == path), "",
    )  # fmt: skip
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == original:
                    if alias.asname or name == original:
                        return f"import {alias.name}" + (f" as {name}" if alias.asname else "")
                    return f"import {alias.name.partition('.')[0]} as {name}"
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == original:
                    above = package.split(".")
                    base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
                    module = ".".join(one for one in (base, node.module) if one)
                    return f"from {module} import {alias.name}" + (f" as {name}" if name != alias.name else "")
    return None
