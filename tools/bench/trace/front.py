"""Finding the batch loop of a reference: its set-up, where it reads its inputs, and what it does with each batch."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashrt.bench.io import InputBuffer
from flashrt.bench.trace.plan import Planner, Source, bound_arguments, quiet_decorators, source_of, split_with
from flashrt.bench.trace.run import Runner
from flashrt.bench.trace.syntax import assign, base_name, leaves_early, renamed, renamed_expression
from flashrt.errors import InputError, input_error

EXAMPLE = "def serve(io): set up; io.ready(); for x in io.inputs['x']: …; io.outputs['y'].write(y)"


@dataclass(eq=False)
class Front:
    """A reference cut open at its batch loop.

    Attributes
    ----------
    inputs
        Input of the reference -> the name that its value has in the body.
    body
        The statements of a batch, names as in the draft.
    counters
        Names that count batches: the body begins with adding one to each.
    """

    source: Source
    inputs: dict[str, str] = field(default_factory=dict)
    body: list[ast.stmt] = field(default_factory=list)
    contexts: tuple[ast.expr, ...] = ()
    counters: list[str] = field(default_factory=list)
    io_name: str = "io"


def find_front(function: Any, runner: Runner, planner: Planner) -> Front:
    """Run a reference up to its first read and return what it does with a batch.

    Raises
    ------
    InputError
        It is no plain function, it does not read its inputs in a loop, or leaves that in the middle of a batch.
    """
    source = source_of(function)
    if source is None:
        raise input_error(
            "argument 'system'", f"a plain Python function: {EXAMPLE}", repr(function)[:120],
            "write the reference as such a function and call ir_trace again", rule="no-source",
        )  # fmt: skip
    contexts = quiet_decorators(source.tree)
    parameters = [one.arg for one in (*source.tree.args.posonlyargs, *source.tree.args.args)]
    if contexts is None or len(parameters) != 1:
        raise _no_loop(source, source.tree, "a decorated function, or one with other parameters")
    names = planner.namer.renaming(source, keep=True)
    io_name = names[parameters[0]]
    runner.values[io_name] = runner.io
    front = _search(source, source.tree.body, names, contexts, runner, planner, io_name)
    if front is None:
        raise _no_loop(source, source.tree, "no loop that reads an input")
    front.io_name = io_name
    return front


def _no_loop(source: Source, node: ast.AST, got: str) -> InputError:
    return input_error(
        f"system '{source.path.name}:{source.tree.name}' at {source.place(node)}",
        f"a loop over the inputs, one batch a turn: {EXAMPLE}", got, "correct the reference and call ir_trace again",
        rule="no-batch-loop",
    )  # fmt: skip


def _search(
    source: Source, statements: Sequence[ast.stmt], names: Mapping[str, str], contexts: tuple[ast.expr, ...],
    runner: Runner, planner: Planner, io_name: str,
) -> Front | None:  # fmt: skip
    """Run statements one by one until the batch loop is reached, following calls that lead to it."""
    for statement, around in split_with(statements, contexts):
        if isinstance(statement, ast.For | ast.While) and (front := _loop(source, statement, names, around, runner)):
            return front
        if isinstance(statement, ast.Try) and any(isinstance(one, ast.For | ast.While) for one in statement.body):
            front = _search(source, statement.body, names, around, runner, planner, io_name)
            if front is not None:
                return front
            continue
        call = statement.value if isinstance(statement, ast.Expr | ast.Assign | ast.Return) else None
        if isinstance(call, ast.Call):
            front = _followed(source, call, names, around, runner, planner, io_name)
            if front is not None:
                return front
        if isinstance(statement, ast.Return):
            return None
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        runner.set_up(renamed(statement, dict(names)), source.place(statement), around)
    return None


def _followed(
    source: Source, call: ast.Call, names: Mapping[str, str], contexts: tuple[ast.expr, ...], runner: Runner,
    planner: Planner, io_name: str,
) -> Front | None:  # fmt: skip
    """Follow a call into a function of the application that has the batch loop."""
    made = renamed_expression(call, dict(names))
    assert isinstance(made, ast.Call), "a call stays one"
    owner: ast.expr | None = None
    if isinstance(made.func, ast.Attribute) and isinstance(made.func.value, ast.Call):
        # ``App(io).run()``: the object first.
        reads = _class_reads(runner.peek(made.func.value.func), made.func.attr)
        if not reads:
            return None
        name = planner.namer.fresh(ast.unparse(made.func.value.func).rpartition(".")[2].lower())
        runner.set_up(assign(name, made.func.value, call), source.place(call), contexts)
        made.func.value = ast.copy_location(ast.Name(name, ast.Load()), call)
    callee = runner.peek(made.func)
    if isinstance(callee, types.MethodType):
        owner = made.func.value if isinstance(made.func, ast.Attribute) else None
        if owner is None:
            return None
    target = source_of(callee)
    if target is None or not planner.is_own(callee) or not _reads_inputs(target.tree):
        return None
    inner = planner.namer.renaming(target, keep=True)
    binding = bound_arguments(made, callee, target, inner, owner)
    around = quiet_decorators(target.tree)
    if binding is None or around is None or target.function.__closure__:
        raise _no_loop(source, call, "a call with arguments that cannot be followed")
    for statement in binding:
        runner.set_up(statement, source.place(call), contexts)
    return _search(target, target.tree.body, inner, (*contexts, *around), runner, planner, io_name)


def _class_reads(kind: Any, method: str) -> bool:
    found = source_of(getattr(kind, method, None)) if isinstance(kind, type) else None
    return found is not None and _reads_inputs(found.tree)


def _reads_inputs(tree: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "inputs" for one in ast.walk(tree)) and any(
        isinstance(one, ast.For | ast.While) for one in ast.walk(tree)
    )


def _buffer(expression: ast.expr, runner: Runner) -> str | None:
    """Return the input whose buffer an expression is, or None."""
    if not isinstance(expression, ast.Name | ast.Subscript | ast.Attribute):
        return None
    if base_name(expression) not in runner.values:
        return None
    try:
        found = runner.peek(expression)
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, it is no buffer
        return None
    return found.name if isinstance(found, InputBuffer) else None


def _loop(
    source: Source, loop: ast.For | ast.While, names: Mapping[str, str], contexts: tuple[ast.expr, ...], runner: Runner
) -> Front | None:
    made = renamed(loop, dict(names))
    front = Front(source, contexts=contexts)
    if isinstance(made, ast.For):
        head = _head(front, made.target, made.iter, runner)
        if head is None:
            return None
        body = [*head, *made.body]
    else:
        assert isinstance(made, ast.While), "one of the two"
        found = _reads(front, made.body, runner)
        if found is None:
            return None
        body = found
    front.body = [one for one in body if not _is_only_for_the_harness(one, runner)]
    early = leaves_early(front.body)
    if early is not None:
        raise input_error(
            f"batch loop at {source.place(loop)}", "batches that all run to the end of the loop's body",
            f"'{ast.unparse(early)[:40]}' at {source.place(early)}",
            "let every batch write its outputs (an empty value, or the last one), and call ir_trace again",
            rule="batch-left-early",
        )  # fmt: skip
    return front


def _head(front: Front, target: ast.expr, iterable: ast.expr, runner: Runner) -> list[ast.stmt] | None:
    """Return the statements that give a batch's items their names; None where the loop reads no input."""
    name = _buffer(iterable, runner)
    if name is not None:
        return _named(front, name, target)
    if not (isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name)):
        return None
    if iterable.func.id == "enumerate" and iterable.args and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        inner = _head(front, target.elts[1], iterable.args[0], runner)
        counter = target.elts[0]
        if inner is None or not isinstance(counter, ast.Name):
            return None
        first = iterable.args[1] if len(iterable.args) > 1 else next((k.value for k in iterable.keywords), None)
        before = ast.BinOp(first or ast.Constant(0), ast.Sub(), ast.Constant(1))
        runner.set_up(assign(counter.id, before, target), front.source.place(target), front.contexts)
        front.counters.append(counter.id)
        more = ast.BinOp(ast.Name(counter.id, ast.Load()), ast.Add(), ast.Constant(1))
        return [assign(counter.id, more, target), *inner]
    if iterable.func.id == "zip":
        buffers = [_buffer(one, runner) for one in iterable.args]
        if not buffers or not all(buffers):
            return None
        if isinstance(target, ast.Tuple) and len(target.elts) == len(buffers):
            made: list[ast.stmt] = []
            for one, part in zip(buffers, target.elts, strict=True):
                made += _named(front, str(one), part)
            return made
        made = []
        for one in buffers:
            made += _named(front, str(one), ast.Name(f"{one}_item", ast.Store()))
        items = ast.Tuple([ast.Name(front.inputs[str(one)], ast.Load()) for one in buffers], ast.Load())
        given = ast.Assign([target], items)
        return [*made, ast.fix_missing_locations(ast.copy_location(given, target))]
    return None


def _named(front: Front, buffer: str, target: ast.expr) -> list[ast.stmt]:
    if isinstance(target, ast.Name):
        front.inputs[buffer] = target.id
        return []
    name = f"{buffer}_item"
    front.inputs[buffer] = name
    given = ast.Assign([target], ast.Name(name, ast.Load()))
    return [ast.fix_missing_locations(ast.copy_location(given, target))]


def _reads(front: Front, statements: Sequence[ast.stmt], runner: Runner) -> list[ast.stmt] | None:
    """Return a ``while`` loop's body without its reads; None where it has none."""
    found: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.Try) and _reads(Front(front.source), statement.body, runner) is not None:
            found += _reads(front, statement.body, runner) or []
            found += statement.orelse
            continue
        value = statement.value if isinstance(statement, ast.Assign) else None
        if (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "read"
            and isinstance(statement, ast.Assign) and (name := _buffer(value.func.value, runner)) is not None
        ):  # fmt: skip
            found += _named(front, name, statement.targets[0])
            continue
        if (
            isinstance(value, ast.DictComp) and isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name) and ".read(" in ast.unparse(value)
        ):  # fmt: skip
            # ``{name: io.inputs[name].read() for name in …}``: all inputs as one mapping.
            for one in runner.input_names:
                front.inputs[one] = f"{one}_item"
            keys: list[ast.expr | None] = [ast.Constant(one) for one in runner.input_names]
            items = ast.Dict(keys, [ast.Name(f"{one}_item", ast.Load()) for one in runner.input_names])
            given = ast.Assign(statement.targets, items)
            found.append(ast.fix_missing_locations(ast.copy_location(given, statement)))
            continue
        found.append(statement)
    return found if front.inputs else None


def _is_only_for_the_harness(statement: ast.stmt, runner: Runner) -> bool:
    """Return whether a statement only tells the harness something: ``io.batch_done(n)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in {"batch_done", "note"} and runner.is_io(call.func.value)
