"""The plan of a batch: the reference's own statements, with calls opened and loops folded where that shows more.

A plan is what is run while tracing and what the operations of the draft are cut from: the same statements.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import itertools
import keyword
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashrt.bench.trace.syntax import assign, flow_of, has_yield, leaves_early, renamed, renamed_expression

_numbers = itertools.count()
QUIET_CONTEXTS = {"no_grad", "inference_mode", "enable_grad", "autocast", "set_grad_enabled", "nullcontext"}
DEFAULTS = (bool, int, float, str, type(None))
RESERVED = {
    "inputs", "state", "context", "first", "needed", "wanted", "made_ops", "load", "copied", "cell", "FOLDER", "NEEDS",
}  # fmt: skip
"""What an ops file calls its own things."""


@dataclass(eq=False)
class Step:
    """One statement; `writes` names the output of the reference that its value goes to.

    Attributes
    ----------
    contexts
        Expressions of ``with`` blocks that are around it.
    """

    statement: ast.stmt
    place: str
    contexts: tuple[ast.expr, ...] = ()
    writes: str | None = None
    label: str | None = None
    """What it is called, where it is a call that was opened and closed again."""
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def statements(self) -> list[ast.stmt]:
        """What an operation runs for it."""
        made: list[ast.stmt] = [self.statement]
        for context in reversed(self.contexts):
            block = ast.With([ast.withitem(context, None)], made)
            made = [ast.fix_missing_locations(ast.copy_location(block, self.statement))]
        return made


@dataclass(eq=False)
class Loop:
    """A ``for`` whose body is opened; `whole` is the loop as one statement."""

    whole: Step
    target: ast.expr
    iterable: ast.expr
    body: list[Part]
    index: str
    items: str
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(eq=False)
class Call:
    """A call of the application's own function whose body is opened; `whole` is the call as one statement."""

    whole: Step
    name: str
    body: list[Part]
    number: int = field(default_factory=lambda: next(_numbers))


Part = Step | Loop | Call


def steps_of(parts: Sequence[Part]) -> Iterator[Step]:
    """Yield all statements of a plan, in order."""
    for part in parts:
        if isinstance(part, Step):
            yield part
        else:
            yield from steps_of(part.body)


@dataclass(frozen=True)
class Source:
    """A function of the application with its syntax tree, lines as in its file."""

    function: types.FunctionType
    tree: ast.FunctionDef
    path: Path

    def place(self, node: ast.AST) -> str:
        """Return where a piece of it is: ``reference.py:12``."""
        return f"{self.path.name}:{getattr(node, 'lineno', self.tree.lineno)}"


@lru_cache(maxsize=512)
def parse_file(path: Path) -> ast.Module:
    """Return the tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def source_of(function: Any) -> Source | None:
    """Return a function's source, or None where there is none that can be told: built in, decorated, generated."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
    if not isinstance(function, types.FunctionType):
        return None
    path = Path(function.__code__.co_filename)
    if not path.is_file():
        return None
    first = function.__code__.co_firstlineno
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            lines = {node.lineno, *(one.lineno for one in node.decorator_list)}
            if first in lines:
                return Source(function, node, path)
    return None


class Namer:
    """Gives names that nothing else has, and keeps where each name of the draft comes from.

    Attributes
    ----------
    imported
        Name in the draft -> (file of the module, name in it): what has to be imported.
    values
        Name in the draft -> what it is now; shared with what runs the plan.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.taken: set[str] = set(dir(builtins)) | set(keyword.kwlist) | RESERVED
        self.imported: dict[str, tuple[Path, str]] = {}
        self.values = values

    def fresh(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it where it is taken."""
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name

    def of_global(self, source: Source, name: str) -> str | None:
        """Return the draft's name of a global of a function's module; None for built-ins and unknown names."""
        path, values = source.path.resolve(), source.function.__globals__
        if name not in values:
            return None
        for known, (other, original) in self.imported.items():
            if original == name and (other == path or self.values.get(known) is values[name]):
                return known
        made = self.fresh(name)
        self.imported[made] = (path, name)
        self.values[made] = values[name]
        return made

    def renaming(self, source: Source, *, keep: bool) -> dict[str, str]:
        """Return names of a function -> names in the draft; `keep`: its own names stay where they are free."""
        code = source.function.__code__
        own = [*code.co_varnames, *code.co_cellvars]
        found = {}
        for name in dict.fromkeys(own):
            found[name] = self.fresh(name if keep else f"{source.tree.name.lstrip('_')}_{name}")
        read = {one.id for one in ast.walk(source.tree) if isinstance(one, ast.Name)}
        for name in sorted(read - found.keys()):
            known = self.of_global(source, name)
            if known is not None:
                found[name] = known
        return found


def bound_arguments(
    call: ast.Call, callee: Any, source: Source, names: dict[str, str], owner: ast.expr | None
) -> list[ast.stmt] | None:
    """Return ``parameter = argument`` for every parameter of an opened call; None where they cannot be told."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return None
    function = source.function
    signature = inspect.signature(function)
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in signature.parameters.values()):
        return None
    values: list[ast.expr] = list(call.args)
    if owner is not None:
        values.insert(0, owner)
    parameters = list(signature.parameters)
    given = dict(zip(parameters, values, strict=False)) if len(values) <= len(parameters) else None
    if given is None:
        return None
    given |= {str(one.arg): one.value for one in call.keywords}
    made = []
    for name, parameter in signature.parameters.items():
        value = given.get(name)
        if value is None:
            if type(parameter.default) not in DEFAULTS:
                return None
            value = ast.Constant(parameter.default)
        made.append(assign(names[name], value, call))
    return made


def _substituted(binding: list[ast.stmt], names: dict[str, str], rebound: frozenset[str]) -> list[ast.stmt]:
    """Leave out parameters that are another name for an argument; `names` then has the argument's name for them."""
    kept: list[ast.stmt] = []
    parameters = {new: old for old, new in names.items()}
    for statement in binding:
        assert isinstance(statement, ast.Assign), "made as such"
        target = statement.targets[0]
        assert isinstance(target, ast.Name), "made as such"
        parameter = parameters[target.id]
        if isinstance(statement.value, ast.Name) and parameter not in rebound:
            names[parameter] = statement.value.id
        else:
            kept.append(statement)
    return kept


def split_with(statements: Sequence[ast.stmt], contexts: tuple[ast.expr, ...] = ()) -> Iterator[
    tuple[ast.stmt, tuple[ast.expr, ...]]
]:  # fmt: skip
    """Yield statements with the blocks around them, where these only set how torch computes."""
    for statement in statements:
        if isinstance(statement, ast.With) and all(
            item.optional_vars is None and _is_quiet(item.context_expr) for item in statement.items
        ):
            inner = (*contexts, *(item.context_expr for item in statement.items))
            yield from split_with(statement.body, inner)
        else:
            yield statement, contexts


def _is_quiet(expression: ast.expr) -> bool:
    callee = expression.func if isinstance(expression, ast.Call) else expression
    name = callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else ""
    return name in QUIET_CONTEXTS


def quiet_decorators(tree: ast.FunctionDef) -> tuple[ast.expr, ...] | None:
    """Return the decorators of a function as blocks around its body; None where one of them does more."""
    found: list[ast.expr] = []
    for decorator in tree.decorator_list:
        if not _is_quiet(decorator):
            if isinstance(decorator, ast.Name) and decorator.id in {"staticmethod"}:
                continue
            return None
        found.append(decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], []))
    return tuple(ast.fix_missing_locations(ast.copy_location(one, tree)) for one in found)


class Planner:
    """Opens calls of the application's own functions.

    Parameters
    ----------
    is_own
        Whether a function or method is the application's own.
    """

    def __init__(self, namer: Namer, is_own: Callable[[Any], bool]) -> None:
        self.namer = namer
        self.is_own = is_own
        self.closed: set[int] = set()
        """Numbers of statements that were looked at and stay closed."""

    def parts(self, statements: Sequence[ast.stmt], source: Source, contexts: tuple[ast.expr, ...] = ()) -> list[Part]:
        """Return the plan of statements as they are: loops folded, no call opened."""
        found: list[Part] = []
        for statement, around in split_with(statements, contexts):
            if isinstance(statement, ast.Pass) or _is_text(statement):
                continue
            step = Step(statement, source.place(statement), around)
            if isinstance(statement, ast.For) and not statement.orelse and not leaves_early(statement.body):
                index = self.namer.fresh(f"{_word(statement.target)}_index")
                found.append(
                    Loop(step, statement.target, statement.iter, self.parts(statement.body, source, around), index,
                         self.namer.fresh(f"{_word(statement.target)}_items"))
                )  # fmt: skip
            else:
                found.append(step)
        return found

    def open(self, step: Step, call: ast.Call, callee: Any, targets: list[ast.expr] | None) -> Call | None:
        """Return an opened call, or None where it stays closed: no source, a generator, several ways out.

        Parameters
        ----------
        targets
            What its value is assigned to; None: it is dropped, or written to the step's output.
        """
        owner: ast.expr | None = None
        function = callee
        if isinstance(callee, types.MethodType):
            if not isinstance(call.func, ast.Attribute) or isinstance(callee.__self__, type):
                return None
            owner = call.func.value
        elif not isinstance(callee, types.FunctionType):
            function = getattr(type(callee), "forward", None)
            owner = call.func
            hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            if function is None or any(getattr(callee, one, None) for one in hooks) or "forward" in vars(callee):
                return None
        source = source_of(function)
        if source is None or not self.is_own(function) or source.function.__closure__ or has_yield(source.tree):
            return None
        contexts = quiet_decorators(source.tree)
        if contexts is None or any(isinstance(one, ast.Global | ast.Nonlocal) for one in ast.walk(source.tree)):
            return None
        body = list(source.tree.body)
        returned = body.pop() if body and isinstance(body[-1], ast.Return) else None
        if leaves_early(body):
            return None
        names = self.namer.renaming(source, keep=False)
        binding = bound_arguments(call, callee, source, names, owner)
        if binding is None:
            return None
        binding = _substituted(binding, names, flow_of(source.tree.body).binds)
        inside = [renamed(one, names) for one in body]
        contexts = tuple(renamed_expression(one, names) for one in contexts)
        parts: list[Part] = [Step(one, step.place, step.contexts) for one in binding]
        parts += self.parts(inside, source, (*step.contexts, *contexts))
        value = ast.Constant(None)
        place: ast.AST = step.statement
        if isinstance(returned, ast.Return) and returned.value is not None:
            value = renamed_expression(returned.value, names)  # type: ignore[assignment]
            place = returned
        last = self.namer.fresh(f"{source.tree.name.lstrip('_')}_result")
        parts.append(Step(assign(last, value, place), source.place(place), (*step.contexts, *contexts)))
        if targets is not None:
            given = ast.Assign(copy.deepcopy(targets), ast.Name(last, ast.Load()))
            parts.append(Step(ast.fix_missing_locations(ast.copy_location(given, step.statement)), step.place,
                              step.contexts, step.writes))  # fmt: skip
        name = source.tree.name.lstrip("_")
        if name == "forward":
            name = type(callee).__name__.lower()
        return Call(step, name, parts)

    def open_step(self, step: Step, callees: dict[int, Any]) -> list[Part] | None:
        """Return what a statement opens to: nested calls on lines of their own, its own call opened; None: closed.

        Parameters
        ----------
        callees
            Position of a call in `calls_of(statement)` -> the function of the application that it called.
        """
        statement = step.statement
        found = list(calls_of(statement))
        made: list[Part] = []
        whole = outer_call(statement)
        if len(callees) > 1 or (callees and (whole is None or found.index(whole) not in callees)):
            lifted = self._lift(step, found, callees, whole)
            if lifted is not None:
                return lifted
        if whole is None or found.index(whole) not in callees:
            return None
        targets: Any = statement.targets if isinstance(statement, ast.Assign) else (
            [statement.target] if isinstance(statement, ast.AnnAssign) else None
        )  # fmt: skip
        opened = self.open(step, whole, callees[found.index(whole)], targets)
        if opened is None:
            return None
        made.append(opened)
        return made

    def _lift(
        self, step: Step, found: list[ast.Call], callees: dict[int, Any], whole: ast.Call | None
    ) -> list[Part] | None:
        """Put nested calls of the application's functions on lines of their own, in the order in which they run."""
        indices = [index for index in sorted(callees) if found[index] is not whole]
        if not indices:
            return None
        # A copy: the statement is also part of a loop that may be closed again.
        copied = copy.deepcopy(step.statement)
        calls = list(calls_of(copied))
        wanted = [calls[index] for index in indices]
        names = {id(one): self.namer.fresh(_call_name(one)) for one in wanted}
        lines: list[Part] = []

        class Lifter(ast.NodeTransformer):
            def visit_Call(self, node: ast.Call) -> ast.expr:
                self.generic_visit(node)
                name = names.get(id(node))
                if name is None:
                    return node
                lines.append(Step(assign(name, node, node), step.place, step.contexts))
                return ast.copy_location(ast.Name(name, ast.Load()), node)

            def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
                return node

        statement = Lifter().visit(copied)
        return [*lines, Step(ast.fix_missing_locations(statement), step.place, step.contexts, step.writes)]


def calls_of(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls that a statement makes on every way through it, in the order in which they begin to be made."""
    if isinstance(statement, ast.For | ast.While | ast.If | ast.Try | ast.With | ast.Match):
        return
    pending: list[ast.AST] = list(reversed(list(ast.iter_child_nodes(statement))))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.ClassDef | ast.BoolOp | ast.IfExp | ast.ListComp
                      | ast.SetComp | ast.DictComp | ast.GeneratorExp):  # fmt: skip
            continue
        if isinstance(node, ast.Call):
            yield node
        pending += reversed(list(ast.iter_child_nodes(node)))


def outer_call(statement: ast.stmt) -> ast.Call | None:
    """Return the call that is all of a statement's value."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) and isinstance(
        statement.value, ast.Call
    ):
        return statement.value
    return None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _word(target: ast.expr) -> str:
    names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
    return names[0] if names else "loop"


def _call_name(call: ast.Call) -> str:
    callee = call.func
    if isinstance(callee, ast.Subscript) and isinstance(callee.slice, ast.Constant):
        key = str(callee.slice.value)
        if key.isidentifier():
            return f"{key}_value"
    while isinstance(callee, ast.Subscript):
        callee = callee.value
    name = callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else "call"
    return f"{textwrap.shorten(name, 40, placeholder='').lstrip('_')}_value"
