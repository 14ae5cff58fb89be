"""Place: where in the source a frame is at the moment, as syntax."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class NoSource(Exception):
    """The source of a frame cannot be read, or is not what is running."""


@dataclass(frozen=True, slots=True)
class Level:
    """One list of statements on the way down to a statement."""

    statements: list[ast.stmt]
    index: int
    """The statement that the way goes on through."""
    owner: ast.AST
    """The statement or function that the list is a part of."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a frame is doing."""

    filename: str
    function: Function
    node: ast.expr | ast.stmt
    """The call that it is in; where it is in none, the statement."""
    levels: tuple[Level, ...]
    """Outermost first."""
    private: str
    """The class around the function, whose name is part of private names."""

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def statement(self) -> ast.stmt:
        return self.levels[-1].statements[self.levels[-1].index]

    @property
    def call(self) -> ast.Call:
        if not isinstance(self.node, ast.Call):
            raise NoSource(f"line {self.line} of {self.filename} is not a call")
        return self.node


def place_of(frame: FrameType, lasti: int | None = None, line: int | None = None) -> Place:
    """Return what a frame is doing; with `lasti` and `line`, what it was doing there."""
    code, filename = frame.f_code, frame.f_code.co_filename
    lines = linecache.getlines(filename, frame.f_globals)
    if not lines:
        raise NoSource(f"the source of {filename} cannot be read")
    tree, parents = _parsed(filename, "".join(lines))
    where = position(code, frame.f_lasti if lasti is None else lasti)
    node = _call_at(tree, where, frame.f_lineno if line is None else line) or _statement_at(tree, where)
    if node is None:
        raise NoSource(f"{filename} has changed since it was loaded")
    return _place(filename, node, parents)


def position(code: CodeType, lasti: int) -> tuple[int | None, int | None, int | None, int | None]:
    """Return (first line, last line, first column, last column) of an instruction, as far as this Python knows."""
    if not hasattr(code, "co_positions"):  # Python 3.10
        return None, None, None, None
    return next(islice(code.co_positions(), lasti // 2, None))


@lru_cache(maxsize=64)
def _parsed(filename: str, text: str) -> tuple[ast.Module, dict[ast.AST, ast.AST]]:
    try:
        tree = ast.parse(text, filename)
    except (SyntaxError, ValueError) as error:
        raise NoSource(f"{filename} is not Python as it stands: {error}") from error
    return tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _call_at(tree: ast.Module, where: tuple[Any, ...], line: int) -> ast.Call | None:
    """The call that ends where the instruction does: a call over several lines may begin elsewhere."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    _, end, _, column = where
    if end is not None and column is not None:
        exact = [c for c in calls if (c.end_lineno, c.end_col_offset) == (end, column)]
        return exact[0] if exact else None
    here = [c for c in calls if c.lineno <= line <= (c.end_lineno or c.lineno)]
    named = [c for c in here if isinstance(c.func, ast.Attribute) and c.func.attr in ("backward", "step")]
    return named[0] if len(named) == 1 else here[0] if len(here) == 1 else None


def _statement_at(tree: ast.Module, where: tuple[Any, ...]) -> ast.stmt | None:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and holds(node, where)]
    return min(found, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def _place(filename: str, at: ast.expr | ast.stmt, parents: dict[ast.AST, ast.AST]) -> Place:
    levels: list[Level] = []
    node: ast.AST = at
    while not isinstance(node, _FUNCTIONS) or node is at:
        above = parents[node]
        if isinstance(node, ast.stmt):
            holder = next(h for h in _lists(above) if any(each is node for each in h))
            levels.append(Level(holder, next(i for i, each in enumerate(holder) if each is node), above))
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            raise NoSource("the call is inside a comprehension")
        node = above
    function = node
    while node in parents and not isinstance(node, ast.ClassDef):
        node = parents[node]
    private = node.name.lstrip("_") if isinstance(node, ast.ClassDef) else ""
    return Place(filename, function, at, tuple(reversed(levels)), private)


def _lists(node: ast.AST) -> Iterator[list[Any]]:
    for name in _BODIES:
        value = getattr(node, name, None)
        if isinstance(value, list):
            yield value


def holds(node: Any, where: tuple[int | None, int | None, int | None, int | None]) -> bool:
    """Whether an instruction at this position belongs to a statement or expression."""
    _, line, _, column = where
    if line is None or column is None or not hasattr(node, "lineno"):
        return False
    return (node.lineno, node.col_offset) < (line, column) <= (node.end_lineno, node.end_col_offset)
