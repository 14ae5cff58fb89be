"""Slice: the statements of a function that lead to its loss, so that they can be run again.

    for x, y in loader:
        logits = model(x)                                ┐
        loss = F.cross_entropy(logits.view(-1, V), y)    ┘ the slice; its inputs are model, x, V and y
        print(loss.item())                                 not part of it
        loss.backward()                                    where the walk begins, backwards

The walk needs the loss and asks what made it, statement by statement. A name whose value carries no graph is an input: its value
is taken by reference and the statement that made it is not run again. So data loading, random draws and bookkeeping stay out. A
name whose value carries a graph is made again. Values that later statements overwrote (`x = model(x)`) are inputs too, where the
recorder saw them as the model was called.

Some statements must not run twice. `Stopped` names the line.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanproof.explain.lines._names import binds, chains, changes, dotted, reads, statements_in
from nanproof.explain.lines._source import Place, holds

MISSING: Any = object()
_ALWAYS = {"print", "open", "input", "next", "exec", "eval", "breakpoint"}
_METHODS = {"backward", "step", "zero_grad", "pop", "popleft", "popitem", "write", "writelines", "readline", "sendall", "recv"}
_CLOCKS = {
    "time.time",
    "time.perf_counter",
    "time.monotonic",
    "os.urandom",
    "uuid.uuid4",
    "datetime.now",
    "datetime.datetime.now",
}
_TO_HOST = {"item", "tolist", "any", "all", "equal", "allclose", "isnan", "isinf", "isfinite", "float", "bool", "int"}
_CONTEXTS = {"autocast", "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "sdpa_kernel", "sdp_kernel"}
"""Context managers that change what is computed."""
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_MOST = 64
"""Items of a container that are looked at."""
_OVER_OTHERS = {"zip", "enumerate", "reversed", "sorted", "list", "tuple", "iter", "map", "filter"}
"""Functions that iterate over their arguments."""
_RANDOM = re.compile("rand|normal|bernoulli|multinomial|poisson|dropout|seed|exponential|geometric|uniform|save|load|empty")
_S = TypeVar("_S", bound=ast.AST)


class Stopped(Exception):
    """The statements cannot be run again; it says which line is in the way, and why."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line, why


class _Retry(Exception):
    """Two versions of a name are needed: the statement that makes the later one from the earlier belongs to the slice."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Statements of one function, compiled."""

    filename: str
    first: int
    last: int
    run: Callable[..., tuple[Any, ...]]
    """Called with the inputs by name; returns the values that were asked for."""
    late: tuple[str, ...]
    """Inputs whose values are still there when backward is called."""
    early: tuple[str, ...]
    """Inputs that are overwritten by then: their values are those at the first call of the model."""
    attributes: tuple[str, ...]
    """Inputs that are tensors in attributes: "batch.x"."""
    passed: tuple[str, ...]
    """Arguments that carry a graph: the calling function makes them."""
    branched: bool
    """Whether it holds one branch of several: the one that called the model."""
    loops: bool
    """Whether it calls the model in a loop of its own."""


def carries_graph(value: Any, depth: int = 3) -> bool:
    """Whether a value is, or holds, the result of a forward."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if depth == 0 or isinstance(value, (nn.Module, type, str, bytes, int, float)) or value is None:
        return False
    if isinstance(value, Mapping):
        return any(carries_graph(item, depth - 1) for item in _some(value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(carries_graph(item, depth - 1) for item in _some(value))
    if callable(value) or isinstance(value, (torch.optim.Optimizer, torch.device)):
        return False
    inner = getattr(value, "__dict__", None)
    held = list(inner.values()) if type(inner) is dict else []
    held += [found for name in getattr(type(value), "__slots__", ()) if (found := attribute_of(value, str(name))) is not MISSING]
    return any(carries_graph(item, depth - 2 if depth > 1 else 0) for item in _some(held))


def _some(values: Iterable[Any]) -> Iterator[Any]:
    """The first and last items of a container. A large one is not walked through at every step."""
    try:
        if isinstance(values, (list, tuple)) and len(values) > _MOST:
            return iter([*values[: _MOST // 2], *values[-_MOST // 2 :]])
        return iter(list(islice(values, _MOST)))
    except RuntimeError:  # it is being changed by another thread
        return iter(())


def make_slice(
    place: Place,
    wanted: Sequence[ast.expr],
    *,
    values: Mapping[str, Any],
    namespace: dict[str, Any],
    parameters: Iterable[str],
    early: Mapping[str, Any] | None = None,
    called: tuple[Any, ...] | None = None,
) -> Slice:
    """Return the statements that lead to the wanted expressions, which are evaluated where the place is.

    Args:
        values: the local variables there, now.
        namespace: the global variables.
        parameters: the function's parameters.
        early: the local variables when the model was first called, where that was seen.
        called: the position of that call in this function.
    """
    walk = _Walk(place, wanted, values, namespace, set(parameters), early, called)
    while True:
        try:
            return walk.made()
        except _Retry as again:
            walk.forced.add(str(again))
        except Stopped:
            if not walk.goes_further:
                raise
            walk.goes_further = False
            walk.forced.clear()


class _Walk:
    """Goes backwards through the statements that were executed before a place."""

    def __init__(
        self,
        place: Place,
        wanted: Sequence[ast.expr],
        values: Mapping[str, Any],
        namespace: dict[str, Any],
        parameters: set[str],
        seen: Mapping[str, Any] | None,
        called: tuple[Any, ...] | None,
    ) -> None:
        self._place, self._wanted, self._values, self._namespace = place, wanted, values, namespace
        self._parameters, self._seen, self._called = parameters, seen, called
        self.forced: set[str] = set()
        """Names whose last value is made again although it could be taken as it is."""
        self.goes_further = True
        """Whether tensors that were computed from data are computed again: what is bad in them may begin there."""

    def made(self) -> Slice:
        self._needed: set[str] = set().union(*(reads(each) for each in self._wanted))
        self._late: set[str] = set()
        self._early: set[str] = set()
        self._passed: set[str] = set()
        self._after: dict[str, int] = {}
        """Names that are bound between here and the place, and the line."""
        self._stale: set[str] = set()
        """Of those, the ones that were bound again before the model was called."""
        self._fresh: dict[str, int] = {}
        """Names whose values the slice changes in place, so that it has to make them itself, and the line."""
        self._touched: dict[str, int] = {}
        """Names whose values statements outside the slice change in place, and the line."""
        self._read_before: dict[str, int] = {}
        """Names that the slice reads before such a change, and the line of the change."""
        self._maybe: set[str] = set()
        """Names that a statement of the slice binds under a condition: before it they may well be unbound."""
        self._made: set[str] = set()
        """Names that statements of the slice bind."""
        if not self._place.levels:
            raise Stopped(self._place.line, "the call is inside a lambda")
        last = self._place.levels[-1]
        self._branched = False
        self._before_call = self._called is not None and holds(last.statements[last.index], self._called)
        for each in self._wanted:
            self.check_calls(each)
        kept = self._walked()
        for name in sorted(self._needed):
            if name in self._parameters and name in self._after:
                self._passed.add(name)  # the function overwrites what it was given: the caller has it
                self._late.discard(name)
            else:
                self._settle(name, self._place.line)
        self._check_conditions(kept)
        attributes = self._attributes(kept)
        inputs = (self._value(name) for name in self._late)
        trained = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        lines: list[ast.AST] = [*kept, *self._wanted]
        called = self._called is None or any(holds(each, self._called) for each in lines)
        if not (called or self._passed or trained or any(self._runs_module(each) for each in lines)):
            raise Stopped(self._place.line, "the lines that lead to it do not call the model")
        return self._compiled(kept, attributes)

    # -- backwards ---------------------------------------------------------------------------------------------------------------

    def _walked(self) -> list[ast.stmt]:
        kept: list[ast.stmt] = []
        for level in reversed(self._place.levels):
            here: list[ast.stmt] = []
            for statement in reversed(level.statements[: level.index]):
                here[:0] = self._statement(statement)
            kept = here + kept
            owner = level.owner
            if isinstance(owner, (ast.With, ast.AsyncWith)):
                kept = self._in_context(owner, kept)
            elif isinstance(owner, (ast.For, ast.AsyncFor, ast.While)):
                carried = binds(owner)
                for name in sorted(self._needed & carried):
                    self._settle(name, owner.lineno)
                for name in sorted(self._needed):
                    if isinstance(self._value(name), (list, dict)) and self._is_hot(name):
                        self._settle(name, owner.lineno, carried=True)
                self._note_bound(owner, {n for n in carried if isinstance(owner, ast.While) or n not in binds(owner.target)})
        return kept

    def _in_context(self, owner: Any, kept: list[ast.stmt]) -> list[ast.stmt]:
        """Put the statements back under a `with` that changes what is computed."""
        self._take_what_is_bound(set().union(*(binds(item) for item in owner.items)), owner.lineno)
        items = [item for item in owner.items if self._changes_numbers(item.context_expr)] if isinstance(owner, ast.With) else []
        if not items or not kept:
            return kept
        self._needed |= set().union(*(reads(item.context_expr) for item in items))
        return [ast.copy_location(ast.With([ast.withitem(item.context_expr) for item in items], kept), owner)]

    def _changes_numbers(self, context: ast.expr) -> bool:
        name = dotted(context.func if isinstance(context, ast.Call) else context)
        if name is not None and not isinstance(context, ast.Call):
            value = self._value(name)
            return isinstance(value, (torch.autocast, torch.no_grad, torch.enable_grad, torch.set_grad_enabled))
        return name is not None and (name.split(".")[-1] in _CONTEXTS or ".settings." in f".{name}")

    def _take_what_is_bound(self, names: set[str], line: int) -> None:
        for name in sorted(self._needed & names):
            self._settle(name, line)

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        """Go past a statement. Return what of it belongs to the slice."""
        branch = self._branch(statement)
        if branch is not None:
            kept: list[ast.stmt] = []
            for each in reversed(branch):
                kept[:0] = self._statement(each)
            self._note_bound(statement, binds(statement))
            return self._in_context(statement, kept) if isinstance(statement, ast.With) else kept
        bound, changed = binds(statement), changes(statement)
        keep: ast.stmt | None = None
        wanted = {name for name in bound & self._needed if self._must_be_made(name, statement)}
        hot = {name for name in changed if name in self._needed and name not in bound and self._is_hot(name)}
        if wanted or hot:
            keep, self._needed = pruned(statement, self._needed)
            if keep is not None:
                self._maybe |= binds(keep) & self._needed if isinstance(keep, (*_COMPOUND, ast.Match)) else set()
                self._check(keep)
                self._made |= binds(keep)
                self._fresh |= {name: by.lineno for name, by in changes(keep).items() if name not in binds(keep)}
        if keep is None:
            self._touched.update({name: by.lineno for name, by in changed.items() if name not in self._touched})
        else:
            self._read_before |= {name: self._touched[name] for name in reads(keep) & self._touched.keys()}
        self._note_bound(statement, bound)
        if self._called is not None and holds(statement, self._called):
            self._before_call = True
            for name in sorted(self._needed & self._after.keys()):
                self._settle(name, statement.lineno)
        return [] if keep is None else [keep]

    def _branch(self, statement: ast.stmt) -> list[ast.stmt] | None:
        """The statements inside that were executed, where that is known: the body of a `with`, and the branch that called the
        model."""
        if isinstance(statement, ast.With):
            return statement.body
        if isinstance(statement, (ast.If, ast.Try)) and self._called is not None:
            branches = (statement.body, statement.orelse)
            taken = next((b for b in branches if any(holds(each, self._called) for each in b)), None)
            self._branched |= taken is not None
            return taken
        return None

    def _note_bound(self, statement: ast.AST, names: set[str]) -> None:
        for name in names:
            self._after.setdefault(name, getattr(statement, "lineno", 0))
            if self._before_call:
                self._stale.add(name)

    def _must_be_made(self, name: str, statement: ast.stmt) -> bool:
        """Whether a statement that binds a needed name belongs to the slice; if not, its value is an input."""
        if name in self._after:
            if self._before_call and self._seen is not None and name in self._seen and name not in self._stale:
                self._settle(name, self._after[name])
                return False
            unsure = self._called is None or name in self._stale
            if unsure and not (self._only_computes(statement) or self._runs_module(statement)):
                raise Stopped(self._after[name], f"it overwrites {name}, which the lines before it read")
            return True
        if name in self.forced or self._is_hot(name):
            return True
        if self.goes_further and isinstance(self._value(name), Tensor) and self._only_computes(statement):
            return True
        self._settle(name, 0)
        return False

    def _runs_module(self, statement: ast.AST) -> bool:
        """Whether a module is called in a statement, or passed to what is called."""
        for name in chains([statement]) | reads(statement):
            value = self._value(name.split(".")[0])
            for part in name.split(".")[1:]:
                if isinstance(value, nn.Module):
                    break
                value = attribute_of(value, part)
            if isinstance(value, nn.Module):
                return True
        return False

    def _value(self, name: str) -> Any:
        """What a name stands for now."""
        return self._values[name] if name in self._values else self._namespace.get(name, MISSING)

    def _only_computes(self, statement: ast.stmt) -> bool:
        """Whether a statement does nothing but compute a tensor from others, in the same way each time."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or statement.value is None:
            return False
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not all(isinstance(target, ast.Name) for target in targets):
            return False
        if self._touched.keys() & (binds(statement) | reads(statement)):
            return False  # what it computed, or computed it from, is not what it was
        for node in ast.walk(statement.value):
            if isinstance(node, (ast.Lambda, ast.NamedExpr, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
                return False
            if isinstance(node, ast.Call) and not self._is_arithmetic(node.func):
                return False
            if isinstance(node, ast.Subscript) and self._takes_rows(node):
                return False
        literal = isinstance(statement.value, (ast.Constant, ast.List, ast.Dict, ast.Tuple))
        return literal or any(isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)) for node in ast.walk(statement.value))

    def _takes_rows(self, node: ast.Subscript) -> bool:
        """Whether it takes the batch out of the data: samples are counted in the batch."""
        name = dotted(node.value)
        value = MISSING if name is None else self._value(name.split(".")[0])
        for part in name.split(".")[1:] if name is not None else ():
            value = attribute_of(value, part)
        return isinstance(value, Tensor) and value.dim() > 1

    def _is_arithmetic(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return function.id in ("len", "float", "int", "abs", "min", "max", "sum")
        if not isinstance(function, ast.Attribute) or _RANDOM.search(function.attr) or function.attr.endswith("_"):
            return False
        name = dotted(function.value)
        value = MISSING if name is None else self._value(name.split(".")[0])
        if isinstance(value, types.ModuleType):
            return value.__name__.split(".")[0] == "torch"
        return hasattr(Tensor, function.attr) and (name is None or isinstance(value, Tensor))

    def _is_hot(self, name: str) -> bool:
        if name in self._after or name in self._made:
            return True
        return carries_graph(self._value(name))

    def _settle(self, name: str, line: int, carried: bool = False) -> None:
        """A needed name is an input: nothing further back has to make it. `carried`: its value is older than the loop, so what
        it holds of this step was written into it, as a hook of the model does."""
        self._needed.discard(name)
        if name in self._after:
            if self._seen is None or name not in self._seen or name in self._stale:
                if name in self._maybe:
                    return
                raise Stopped(self._after[name], f"it overwrites {name}, which the lines before it read")
            value, names = self._seen[name], self._early
        else:
            value, names = self._value(name), self._late
            if value is MISSING or (name not in self._values and not (isinstance(value, (Tensor, list, dict)))):
                return  # a built-in, or a global variable that the slice reads as any function does
        if name in (self._late if names is self._early else self._early):
            raise _Retry(name)
        if name in self._read_before:
            raise Stopped(self._read_before[name], f"it changes {name}, which the lines before it read")
        if name in self._fresh:
            raise Stopped(self._fresh[name], f"it changes {name} in place, and {name} was there before this step")
        if carries_graph(value) and not (isinstance(value, dict) and carried):
            if name in self._parameters and name not in self._after:
                self._passed.add(name)
                return
            raise Stopped(line or self._place.line, f"{name} holds the result of a forward that ran earlier")
        self._check_value(name, value, line)
        names.add(name)

    # -- what must not run twice -------------------------------------------------------------------------------------------------

    def _check(self, statement: ast.stmt) -> None:
        for each in statements_in(statement):
            targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
            for target in targets:
                for part in ast.walk(target) if target is not None else ():
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                        raise Stopped(each.lineno, f"it writes {dotted(part) or 'an attribute'}")
            if isinstance(each, (ast.Return, ast.Global, ast.Nonlocal)):
                raise Stopped(each.lineno, "it leaves the function, or writes variables outside it")
            if isinstance(each, ast.For):
                self._check_iterable(each.iter)
        self.check_calls(statement)

    def _check_iterable(self, expression: ast.expr) -> None:
        """What a loop of the slice goes through must be the same each time: not a stream that is read on."""
        if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
            for argument in expression.args if expression.func.id in _OVER_OTHERS else ():
                self._check_iterable(argument)
            return
        name = dotted(expression)
        if name is None or name.split(".")[0] in self._made:
            return
        value = self._value(name.split(".")[0])
        for part in name.split(".")[1:]:
            value = attribute_of(value, part)
        numpy = sys.modules.get("numpy")
        array = (numpy.ndarray,) if numpy is not None else ()
        if value is not MISSING and not isinstance(value, (list, tuple, range, Mapping, set, str, Tensor, nn.Module, *array)):
            raise Stopped(expression.lineno, f"it advances the iterator {name}")

    def check_calls(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)):
                raise Stopped(each.lineno, "it waits for other code")
            if not isinstance(each, ast.Call):
                continue
            name = dotted(each.func)
            if isinstance(each.func, ast.Name) and each.func.id in _ALWAYS:
                raise Stopped(each.lineno, f"it calls {each.func.id}()")
            if isinstance(each.func, ast.Name) and each.func.id == "super":
                raise Stopped(each.lineno, "it calls super()")
            if name in _CLOCKS:
                raise Stopped(each.lineno, f"it calls {name}(), which returns something else each time")
            if isinstance(each.func, ast.Attribute) and each.func.attr in _METHODS:
                raise Stopped(each.lineno, f"it calls .{each.func.attr}(), which changes something")

    def _check_value(self, name: str, value: Any, line: int) -> None:
        if isinstance(value, (Tensor, nn.Module)):
            return
        used = line or self._place.line
        if has_own_random_state(value):
            raise Stopped(self._used(name, used), f"{name} draws random numbers from its own state, which is not recorded")
        if hasattr(type(value), "__next__"):
            raise Stopped(self._used(name, used), f"it advances the iterator {name}")

    def _used(self, name: str, line: int) -> int:
        nodes = (n for level in self._place.levels for s in level.statements[: level.index + 1] for n in ast.walk(s))
        lines = [n.lineno for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return max(lines, default=line)

    def _check_conditions(self, kept: Sequence[ast.stmt]) -> None:
        """A condition that depends on numbers of the step may come out otherwise when something is changed in it."""
        made = set().union(*(binds(s) for s in kept)) if kept else set()
        numbers = {name for name in made if isinstance(self._value(name), Tensor)}
        for statement in (s for k in kept for s in statements_in(k)):
            if isinstance(statement, ast.Assign) and _reads_numbers(statement.value, made):
                numbers |= binds(statement)
        for node in (n for k in (*kept, *self._wanted) for n in ast.walk(k)):
            if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not _only_looks_for_none(node.test):
                by_value = reads(node.test) & numbers or _reads_numbers(node.test, made)
                if by_value:
                    raise Stopped(node.test.lineno, "its condition depends on numbers that the step computes")

    # -- attributes --------------------------------------------------------------------------------------------------------------

    def _attributes(self, kept: Sequence[ast.stmt]) -> dict[str, str]:
        """Tensors that inputs hold in attributes, by their dotted name, each with the name it gets in the slice."""
        found: dict[str, str] = {}
        for chain in sorted(chains([*kept, *self._wanted])):
            first, *rest = chain.split(".")
            if first in self._made or first in self._passed:
                continue
            value: Any = self._seen[first] if self._seen is not None and first in self._early else self._value(first)
            name = first
            for part in rest:
                value, name = attribute_of(value, part), f"{name}.{part}"
                if value is MISSING:
                    break
                if has_own_random_state(value):
                    raise Stopped(self._used(first, 0), f"{name} draws random numbers from its own state, which is not recorded")
                if carries_graph(value):
                    raise Stopped(self._stored(name), f"{name} holds the result of a forward: it is written outside these lines")
                if not isinstance(value, nn.Module) and (line := self._written_later(name, chain, kept)):
                    raise Stopped(line, f"it writes {name}, which the lines before it read")
                if isinstance(value, Tensor):
                    if not isinstance(value, nn.Parameter) and value.dim() and first in (self._late | self._early):
                        found[name] = argument_for(name)
                    break
                if isinstance(value, nn.Module):
                    break
        return found

    def _written_later(self, name: str, chain: str, kept: Sequence[ast.stmt]) -> int:
        """The line that writes an attribute after the slice has read it, and before the place; 0 if there is none."""
        first = min((n.lineno for n in self._nodes(kept) if isinstance(n, ast.Attribute) and dotted(n) == chain), default=0)
        line = self._stored(name, 0)
        return line if line >= first > 0 else 0

    def _nodes(self, kept: Sequence[ast.stmt]) -> Iterator[ast.AST]:
        return (node for each in (*kept, *self._wanted) for node in ast.walk(each))

    def _stored(self, name: str, default: int | None = None) -> int:
        """The line that writes an attribute; where none does, the line of the place."""
        for level in reversed(self._place.levels):
            for statement in reversed(level.statements[: level.index]):
                for each in statements_in(statement):
                    for part in ast.walk(each):
                        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and dotted(part) == name:
                            return each.lineno
        return self._place.line if default is None else default

    # -- forwards ----------------------------------------------------------------------------------------------------------------

    def _compiled(self, kept: list[ast.stmt], attributes: dict[str, str]) -> Slice:
        names = [*sorted(self._late), *sorted(self._early), *sorted(self._passed)]
        arguments = [ast.arg(name) for name in (*names, *attributes.values())]
        where = kept[0] if kept else self._wanted[0]
        change = _Renamed(attributes, self._place.private, self._late)
        body: list[Any] = [change.visit(_Outside().visit(copy.deepcopy(s))) for s in kept]
        returned = ast.Tuple([change.visit(copy.deepcopy(w)) for w in self._wanted], ast.Load())
        body.append(ast.copy_location(ast.Return(ast.copy_location(returned, self._wanted[0])), self._wanted[0]))
        name = getattr(self._place.function, "name", "lines")
        function = ast.FunctionDef(name, ast.arguments([], arguments, None, [], [], None, []), body, [], **_TYPE_PARAMETERS)
        tree = ast.Module([ast.copy_location(function, where)], [])
        ast.fix_missing_locations(tree)
        made: dict[str, Any] = {}
        exec(compile(tree, self._place.filename, "exec", dont_inherit=True), self._namespace, made)
        lines = [n.lineno for s in (*kept, *self._wanted) for n in ast.walk(s) if hasattr(n, "lineno")]
        return Slice(
            self._place.filename,
            min(lines),
            max(lines),
            made[name],
            tuple(sorted(self._late)),
            tuple(sorted(self._early)),
            tuple(sorted(attributes)),
            tuple(sorted(self._passed)),
            self._branched,
            any(
                isinstance(n, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp))
                for s in (*kept, *self._wanted)
                for n in ast.walk(s)
            ),
        )


_TYPE_PARAMETERS: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}


class _Outside(ast.NodeTransformer):
    """A `break` or `continue` of a loop that is not part of the slice: the step that is run again did not take it."""

    def visit_For(self, node: ast.For) -> ast.AST:
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        return node

    def visit_Break(self, node: ast.Break | ast.Continue) -> ast.AST:
        error = ast.Call(ast.Name("RuntimeError", ast.Load()), [ast.Constant("the loop skips this step")], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Raise(error, None), node))

    visit_Continue = visit_Break


class _Renamed(ast.NodeTransformer):
    """Attributes that are inputs become names. Private names get the name of their class, as in the class itself. What a
    statement binds besides what it is kept for (`real, fake = draw(), generator(z)`) does not replace the input of that name."""

    def __init__(self, attributes: Mapping[str, str], private: str, inputs: set[str]) -> None:
        self._attributes, self._private, self._inputs = attributes, private, inputs

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in (part for each in node.targets for part in ast.walk(each)):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store) and target.id in self._inputs:
                target.id = "_nanproof_unused"
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = dotted(node) if isinstance(node.ctx, ast.Load) else None
        if name is not None and name in self._attributes:
            return ast.copy_location(ast.Name(self._attributes[name], ast.Load()), node)
        if self._private and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self._private}{node.attr}"
        return self.generic_visit(node)


def argument_for(chain: str) -> str:
    """The name that an attribute gets as an argument: "batch.x" and "batch_x" stay apart."""
    return f"_{chain.replace('_', '__').replace('.', '_dot_')}"


def has_own_random_state(value: Any) -> bool:
    """Whether it is a generator of random numbers other than the global ones, whose states are recorded."""
    numpy = sys.modules.get("numpy")
    own = (random.Random, torch.Generator) + ((numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ())
    return isinstance(value, own)


def attribute_of(value: Any, name: str) -> Any:
    """An attribute that is simply there. Nothing of the script runs to find out: a property may draw random numbers."""
    if value is MISSING:
        return MISSING
    if type(value).__getattribute__ is object.__getattribute__:  # type: ignore[comparison-overlap]
        held = getattr(value, "__dict__", None)
        if type(held) is dict and name in held:
            return held[name]
    for where in ("__dict__", "_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ("__dict__",):
        inside = _plain_attribute(value, where)
        if isinstance(inside, dict) and name in inside:
            return inside[name]
    store = _plain_attribute(_plain_attribute(value, "_store"), "_mapping")  # the data of a graph
    if isinstance(store, dict) and name in store:
        return store[name]
    of_class = inspect.getattr_static(type(value), name, None)
    simple = type(of_class).__name__ in ("member_descriptor", "_tuplegetter")
    return object.__getattribute__(value, name) if simple and _has(value, name) else MISSING


def _plain_attribute(value: Any, name: str) -> Any:
    if name == "__dict__":
        own = type(value).__getattribute__ is not object.__getattribute__  # type: ignore[comparison-overlap]
        return None if own else getattr(value, "__dict__", None)
    inside = getattr(value, "__dict__", None) if value is not None else None
    return inside.get(name) if isinstance(inside, dict) else None


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _reads_numbers(node: ast.AST, made: set[str]) -> bool:
    """Whether it reads numbers of the step on the host: `loss.item()`, `float(loss)`, `torch.isnan(loss).any()`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and reads(each) & made:
            name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            if name in _TO_HOST:
                return True
    return False


def _only_looks_for_none(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return all(_only_looks_for_none(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _only_looks_for_none(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("isinstance", "hasattr", "len")


def pruned(statement: ast.stmt, live: set[str]) -> tuple[ast.stmt | None, set[str]]:
    """Return what of a statement matters to names that are read after it, and the names that are read before."""
    if isinstance(statement, _COMPOUND):
        return _pruned_compound(statement, live)
    bound = binds(statement)
    if bound & live or changes(statement).keys() & live or isinstance(statement, (ast.Break, ast.Continue, ast.Match)):
        return statement, (live - bound if not isinstance(statement, ast.Match) else live) | reads(statement)
    return None, live


def _pruned_list(statements: Sequence[ast.stmt], live: set[str]) -> tuple[list[ast.stmt], set[str]]:
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        keep, live = pruned(statement, live)
        kept[:0] = [] if keep is None else [keep]
    return kept, live


def _matters(statements: Sequence[ast.stmt]) -> bool:
    return any(not isinstance(s, (ast.Break, ast.Continue, ast.Pass)) for s in statements)


def _with(node: _S, **parts: Any) -> _S:
    changed = copy.copy(node)
    for name, value in parts.items():
        setattr(changed, name, value)
    return changed


def _pruned_compound(statement: ast.stmt, live: set[str]) -> tuple[ast.stmt | None, set[str]]:
    nothing: list[ast.stmt] = [ast.copy_location(ast.Pass(), statement)]
    if isinstance(statement, ast.If):
        body, before = _pruned_list(statement.body, live)
        other, before_other = _pruned_list(statement.orelse, live)
        if not (_matters(body) or _matters(other)) and not (body or other):
            return None, live
        return _with(statement, body=body or nothing, orelse=other), before | before_other | reads(statement.test)
    if isinstance(statement, ast.With):
        body, before = _pruned_list(statement.body, live)
        bound = set().union(*(binds(item) for item in statement.items))
        if not _matters(body) and not bound & live:
            return None, live
        return _with(statement, body=body or nothing), (before - bound).union(*(reads(i) for i in statement.items))
    if isinstance(statement, ast.Try):
        body, before = _pruned_list(statement.body, live)
        if not _matters(body):
            return None, live
        for handler in statement.handlers:
            before |= reads(handler)
        other, before_other = _pruned_list(statement.orelse, live)
        if not statement.handlers:
            return ast.copy_location(ast.If(ast.Constant(True), [*body, *other], []), statement), before | before_other
        return _with(statement, body=body, finalbody=[], orelse=other), before | before_other | live
    assert isinstance(statement, (ast.For, ast.While))
    bound = binds(statement.target) if isinstance(statement, ast.For) else binds(statement.test)
    head = reads(statement.iter if isinstance(statement, ast.For) else statement.test)
    body, again = [], set[str]()
    for _ in range(8):  # until what one round reads of the one before is known
        body, before = _pruned_list(statement.body, live | again | (head if isinstance(statement, ast.While) else set()))
        if before - bound == again:
            break
        again = before - bound
    if not _matters(body) and not bound & live:
        return None, live
    other, before_other = _pruned_list(statement.orelse, live)
    return _with(statement, body=body or nothing, orelse=other), live | again | head | before_other


def plain(value: Any) -> bool:
    """Whether a value is data: tensors, or containers of them."""
    return isinstance(value, (Tensor, Mapping, list, tuple)) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
