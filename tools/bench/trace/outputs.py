"""Where a reference writes its outputs, as assignments: what is written then has a name, and can be a port."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Sequence

from flashrt.bench.trace.plan import Namer
from flashrt.bench.trace.run import Runner
from flashrt.bench.trace.syntax import assign
from flashrt.errors import input_error

JOIN = "join_chunks"


def written_output(call: ast.AST, runner: Runner) -> str | None:
    """Return the output that a call writes to, ``io.outputs["frames"].write(…)``; None where it writes none."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "write"):
        return None
    buffer = call.func.value
    if not (isinstance(buffer, ast.Subscript) and isinstance(buffer.value, ast.Attribute)):
        return None
    if buffer.value.attr != "outputs" or not runner.is_io(buffer.value.value):
        return None
    if not (isinstance(buffer.slice, ast.Constant) and isinstance(buffer.slice.value, str)):
        raise input_error(
            f"reference, '{ast.unparse(call)[:60]}'", "outputs that are named by a string", ast.unparse(buffer.slice),
            "write io.outputs['name'].write(value) once for each output, and call ir_trace again", rule="output-name",
        )  # fmt: skip
    return buffer.slice.value


def name_outputs(body: Sequence[ast.stmt], runner: Runner, namer: Namer) -> tuple[list[ast.stmt], dict[str, str]]:
    """Return a batch's statements with writes turned into assignments, and output -> the name that has its value.

    One write of an output in plain sight is ``name = value``. Several, or some inside of a loop or branch, are gathered
    and joined at the end, as a player would see them.
    """
    direct = Counter(
        name for one in body if isinstance(one, ast.Expr) and (name := written_output(one.value, runner)) is not None
    )
    every = Counter(
        name for one in body for node in ast.walk(one) if (name := written_output(node, runner)) is not None
    )
    single = {name for name, count in every.items() if count == 1 and direct[name] == 1}
    found = {name: namer.fresh(f"{name}_written") for name in every}
    parts = {name: namer.fresh(f"{name}_parts") for name in every if name not in single}
    made: list[ast.stmt] = [assign(name, ast.List([], ast.Load()), body[0]) for name in parts.values()]

    class Gatherer(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            name = written_output(node, runner)
            self.generic_visit(node)
            if name is None:
                return node
            append = ast.Attribute(ast.Name(parts[name], ast.Load()), "append", ast.Load())
            return ast.copy_location(ast.Call(append, node.args[:1], []), node)

    for statement in body:
        name = written_output(statement.value, runner) if isinstance(statement, ast.Expr) else None
        if name in single:
            assert isinstance(statement, ast.Expr), "it writes"
            assert isinstance(statement.value, ast.Call), "it writes"
            made.append(assign(found[str(name)], statement.value.args[0], statement))
        else:
            gathered = Gatherer().visit(copy.deepcopy(statement))
            made.append(ast.fix_missing_locations(gathered))
    for name, parts_name in parts.items():
        joined = ast.Call(ast.Name(JOIN, ast.Load()), [ast.Name(parts_name, ast.Load())], [])
        made.append(assign(found[name], joined, body[-1]))
    return made, found
