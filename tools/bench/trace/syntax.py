"""Names in statements: what a piece of code reads, binds and changes, and renaming them. Pure: trees in, trees out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Bare = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Flow:
    """What a run of statements does to names.

    Attributes
    ----------
    reads
        Names whose value from before is read, where no statement has certainly bound them first.
    binds
        Names that are bound, perhaps only in one branch.
    certain
        Names that are bound on every way through.
    changes
        Names whose value is changed in place by an assignment to an item or attribute.
    """

    reads: frozenset[str]
    binds: frozenset[str]
    certain: frozenset[str]
    changes: frozenset[str]

    @property
    def needs(self) -> frozenset[str]:
        """Names that have to be there before: those read, and those that may pass through unbound or changed."""
        return self.reads | self.changes | (self.binds - self.certain)


def flow_of(statements: Sequence[ast.stmt]) -> Flow:
    """Return what the statements, one after the other, do to names."""
    found = _Names()
    certain = found.block(statements, frozenset())
    return Flow(frozenset(found.reads), frozenset(found.binds), certain, frozenset(found.changes))


def names_read(expression: ast.expr) -> frozenset[str]:
    """Return the names that an expression reads."""
    found = _Names()
    found.expression(expression, frozenset())
    return frozenset(found.reads)


class _Names:
    """Walks statements in the order in which they run, with the names that are certainly bound so far."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.binds: set[str] = set()
        self.changes: set[str] = set()

    def block(self, statements: Sequence[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        for statement in statements:
            bound = self.statement(statement, bound)
        return bound

    def statement(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case ast.If():
                bound = self.expression(node.test, bound)
                return self.block(node.body, bound) & self.block(node.orelse, bound)
            case ast.For():
                bound = self.expression(node.iter, bound)
                inner = self.target(node.target, bound)
                self.block(node.body, inner)
                self.block(node.orelse, bound)
                return bound
            case ast.While():
                bound = self.expression(node.test, bound)
                self.block(node.body, bound)
                self.block(node.orelse, bound)
                return bound
            case ast.With():
                for item in node.items:
                    bound = self.expression(item.context_expr, bound)
                    if item.optional_vars is not None:
                        bound = self.target(item.optional_vars, bound)
                return self.block(node.body, bound)
            case ast.Try():
                after = self.block(node.orelse, self.block(node.body, bound))
                for handler in node.handlers:
                    inner = bound if handler.name is None else bound | {handler.name}
                    after &= self.block(handler.body, inner)
                return self.block(node.finalbody, bound) | after
            case ast.Import() | ast.ImportFrom():
                names = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
                self.binds |= names
                return bound | names
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                self.inner(node, bound)
                self.binds.add(node.name)
                return bound | {node.name}
            case ast.Assign():
                bound = self.expression(node.value, bound)
                for target in node.targets:
                    bound = self.target(target, bound)
                return bound
            case ast.AnnAssign():
                if node.value is None:
                    return bound
                return self.target(node.target, self.expression(node.value, bound))
            case ast.AugAssign():
                bound = self.expression(node.value, bound)
                if isinstance(node.target, ast.Name):
                    self.read(node.target.id, bound)
                return self.target(node.target, bound)
            case ast.Delete():
                for target in node.targets:
                    self.target(target, bound)
                return bound
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                bound = self.expression(child, bound)
        return bound

    def target(self, node: ast.expr, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case ast.Name():
                self.binds.add(node.id)
                return bound | {node.id}
            case ast.Tuple() | ast.List():
                for element in node.elts:
                    bound = self.target(element, bound)
                return bound
            case ast.Starred():
                return self.target(node.value, bound)
            case ast.Attribute() | ast.Subscript():
                bound = self.expression(node.value, bound)
                if isinstance(node, ast.Subscript):
                    bound = self.expression(node.slice, bound)
                base = base_name(node)
                if base is not None:
                    self.changes.add(base)
        return bound

    def expression(self, node: ast.expr, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case ast.Name():
                self.read(node.id, bound)
                return bound
            case ast.NamedExpr():
                bound = self.expression(node.value, bound)
                return self.target(node.target, bound)
            case ast.Lambda():
                self.inner(node, bound)
                return bound
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = bound
                for generator in node.generators:
                    self.expression(generator.iter, inner)
                    inner |= {one.id for one in ast.walk(generator.target) if isinstance(one, ast.Name)}
                    for test in generator.ifs:
                        self.expression(test, inner)
                for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
                    self.expression(part, inner)
                return bound
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                bound = self.expression(child, bound)
            elif isinstance(child, ast.keyword):
                bound = self.expression(child.value, bound)
        return bound

    def inner(self, node: Bare, bound: frozenset[str]) -> None:
        """Take note of what a nested function or class reads of the names around it."""
        own: set[str] = set()
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            own |= {argument.arg for argument in every if argument is not None}
            for default in (*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)):
                self.expression(default, bound)
        found = _Names()
        if isinstance(node, ast.Lambda):
            found.expression(node.body, frozenset(own))
        else:
            found.block(node.body, frozenset(own))
        for name in found.reads | found.changes:
            self.read(name, bound)

    def read(self, name: str, bound: frozenset[str]) -> None:
        if name not in bound:
            self.reads.add(name)


def base_name(node: ast.expr) -> str | None:
    """Return the name that a chain of attributes and items hangs on: ``a`` of ``a.b[0].c``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class _Renamer(ast.NodeTransformer):
    """Renames free names; names that a comprehension or lambda binds for itself stay."""

    def __init__(self, rename: Callable[[str], ast.expr | str | None]) -> None:
        self.rename = rename
        self.own: list[set[str]] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if any(node.id in names for names in self.own):
            return node
        new = self.rename(node.id)
        if new is None:
            return node
        if isinstance(new, str):
            return ast.copy_location(ast.Name(new, node.ctx), node)
        made = copy.deepcopy(new)
        return ast.copy_location(made, node)

    def _scoped(self, node: ast.AST, names: set[str]) -> ast.AST:
        self.own.append(names)
        self.generic_visit(node)
        self.own.pop()
        return node

    def _comprehension(self, node: Comprehension) -> ast.AST:
        return self._scoped(
            node, {one.id for part in node.generators for one in ast.walk(part.target) if isinstance(one, ast.Name)}
        )

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._scoped(node, {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)})


def renamed(statement: ast.stmt, rename: Mapping[str, str]) -> ast.stmt:
    """Return a copy of a statement with other names; what it binds for itself alone keeps its names."""
    made = _Renamer(rename.get).visit(copy.deepcopy(statement))
    assert isinstance(made, ast.stmt), "a statement stays one"
    if isinstance(made, ast.Import | ast.ImportFrom):
        for alias in made.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if bound in rename:
                alias.asname = rename[bound]
    return made


def renamed_expression(expression: ast.expr, rename: Mapping[str, str]) -> ast.expr:
    """Return a copy of an expression with other names."""
    made = _Renamer(rename.get).visit(copy.deepcopy(expression))
    assert isinstance(made, ast.expr), "an expression stays one"
    return made


def replaced(statement: ast.stmt, pattern: str, name: str) -> ast.stmt:
    """Return a copy in which every expression that is spelled `pattern` is the name `name`."""

    class Replacer(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            if ast.unparse(node) == pattern:
                return ast.copy_location(ast.Name(name, node.ctx), node)
            self.generic_visit(node)
            return node

    made = Replacer().visit(copy.deepcopy(statement))
    assert isinstance(made, ast.stmt), "a statement stays one"
    return made


def assign(target: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    """Return ``target = value`` at the place of `like`."""
    made = ast.Assign([ast.Name(target, ast.Store())], copy.deepcopy(value))
    ast.copy_location(made, like)
    return ast.fix_missing_locations(made)


def spelled(statements: Iterable[ast.stmt]) -> str:
    """Return the statements as source text."""
    return "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in statements)


def leaves_early(statements: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return a statement among these that leaves the loop or function that they are in, or None."""
    pending: list[tuple[ast.AST, bool]] = [(statement, False) for statement in statements]
    while pending:
        node, in_loop = pending.pop()
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
            return node
        if isinstance(node, Bare):
            continue
        inside = in_loop or isinstance(node, ast.For | ast.While | ast.AsyncFor)
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]
    return None


def has_yield(node: ast.AST) -> bool:
    """Return whether a function is a generator or coroutine of its own."""
    pending = list(ast.iter_child_nodes(node))
    while pending:
        child = pending.pop()
        if isinstance(child, ast.Yield | ast.YieldFrom | ast.Await):
            return True
        if not isinstance(child, Bare):
            pending += ast.iter_child_nodes(child)
    return False
