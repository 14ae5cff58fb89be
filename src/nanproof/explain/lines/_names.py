"""What a statement reads, binds and changes in place, by name. Pure syntax: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "appendleft", "extendleft"}
"""Methods that change the container they are called on."""


def reads(node: ast.AST) -> set[str]:
    """Return the names that a statement or expression takes from around it."""
    found: set[str] = set()
    _read(node, frozenset(), found)
    return found


def _read(node: ast.AST, local: frozenset[str], found: set[str]) -> None:
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in local:
            found.add(node.id)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    if isinstance(node, _COMPREHENSIONS):
        inner = local | {name for part in node.generators for name in _targets(part.target)}
        for part in node.generators:
            _read(part.iter, inner if part is not node.generators[0] else local, found)
            for test in part.ifs:
                _read(test, inner, found)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            _read(value, inner, found)
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        given = node.args
        for default in (*given.defaults, *(d for d in given.kw_defaults if d is not None)):
            _read(default, local, found)
        names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a is not None]
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        inner = local | set(names) | {name for statement in body for name in binds(statement)}
        for statement in body:
            _read(statement, inner, found)
        return
    for child in ast.iter_child_nodes(node):
        _read(child, local, found)


def _targets(target: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del)))


def binds(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, in its own scope."""
    found: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        each = todo.pop()
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
            continue
        if isinstance(each, ast.Lambda):
            continue
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.add(each.id)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in each.names}
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
        if isinstance(each, _COMPREHENSIONS):  # only a walrus in it binds a name out here
            found |= {n.target.id for n in ast.walk(each) if isinstance(n, ast.NamedExpr) and isinstance(n.target, ast.Name)}
            continue
        todo += ast.iter_child_nodes(each)
    return found


def changes(node: ast.AST) -> dict[str, ast.stmt]:
    """Return the names whose values a statement changes in place, each with the innermost statement that does it: `y[mask] = 0`,
    `losses.append(loss)`, `logits.mul_(2)`."""
    found: dict[str, ast.stmt] = {}
    for statement in statements_in(node):
        for target in _written(statement):
            name = root(target)
            if name is not None:
                found.setdefault(name, statement)
    return found


def _written(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
        targets = statement.targets if isinstance(statement, (ast.Assign, ast.Delete)) else [statement.target]
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, (ast.Subscript, ast.Attribute)) and isinstance(each.ctx, (ast.Store, ast.Del)):
                    yield each.value
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        if isinstance(called, ast.Attribute):
            in_place = called.attr.endswith("_") and not called.attr.startswith("_")
            if in_place or called.attr in _CHANGES:
                yield called.value


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield a statement and those inside it, but not those of functions it defines."""
    if isinstance(node, ast.stmt):
        yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from statements_in(child)


def root(expression: ast.AST) -> str | None:
    """Return the name that a chain of attributes, items and calls begins with."""
    while isinstance(expression, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def dotted(expression: ast.AST) -> str | None:
    """Return "self.loss" for that expression; None where it is anything but names joined by dots."""
    parts: list[str] = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    return ".".join([expression.id, *reversed(parts)]) if isinstance(expression, ast.Name) else None


def chains(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the attributes that are read, by their longest dotted form: "batch.x", "self.net.weight"."""
    found: set[str] = set()
    todo: list[ast.AST] = list(nodes)
    while todo:
        each = todo.pop()
        name = dotted(each) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load) else None
        if name is not None:
            found.add(name)
        else:
            todo += ast.iter_child_nodes(each)
    return found
