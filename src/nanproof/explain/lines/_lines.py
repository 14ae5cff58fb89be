"""Lines: how a loop computes its loss, from the frame that calls backward, so that a refused step can be run again.

`Lines.at_backward` is asked at every backward. What the source says is worked out once per place and kept. After that, a step
costs a look at a few frames and references to the inputs. Where the function that calls backward got its loss from its caller,
the walk goes on there (`Slice.passed`).
"""

from __future__ import annotations

import ast
import inspect
import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.support._context import RandomState
from nanproof.core.support._tree import tensors_in
from nanproof.explain.lines._slice import MISSING, Slice, Stopped, argument_for, attribute_of, carries_graph, make_slice, plain
from nanproof.explain.lines._source import NoSource, holds, place_of, position
from nanproof.explain.locate._calls import tensors_of
from nanproof.explain.locate._trace import short

log = logging.getLogger("nanproof")

_KEEPS_LOCALS = sys.version_info < (3, 13)
_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_DEEPEST = 12
"""Functions between the one that calls backward and the one that calls the model."""
_LARGEST = 256
"""Items of a container that is a batch; a larger one is a data set."""
_TRIES = 4
"""Times a place is worked out anew, because what it found was of another kind than the last time."""


_CODE = (type, FunctionType, MethodType, ModuleType, Tensor)


class _Wrappers(dict[str, bool]):
    def __missing__(self, filename: str) -> bool:
        self[filename] = found = filename.startswith((_TORCH, _OURS))
        return found


_is_wrapper = _Wrappers().__getitem__
"""Whether a file is one of torch or nanproof: they pass a loss on to backward."""


Op = tuple[str, float]
"""("/", 2.0) or ("*", 0.5)"""


@dataclass(frozen=True, slots=True)
class Chain:
    """The slices that lead from the model to a loss, outermost function first."""

    slices: tuple[Slice, ...]
    names: tuple[dict[str, str], ...]
    """For each slice, the key in `Inputs` of those of its arguments that are data."""
    draws_first: bool = False
    """Whether the lines may draw random numbers before they call the model."""

    def __str__(self) -> str:
        spans = [f"{s.first}" if s.first == s.last else f"{s.first}-{s.last}" for s in self.slices]
        return ", ".join(f"{Path(s.filename).name}:{span}" for s, span in zip(self.slices, spans, strict=True))


class Inputs(dict[str, Any]):
    """The tensors that the lines of a loop read, by name: the batch of a step that can be run again."""

    def __init__(
        self, tensors: Mapping[str, Any], chain: Chain, others: Sequence[dict[str, Any]], then: Sequence[Op] = ()
    ) -> None:
        super().__init__(tensors)
        self.chain, self.others, self.then = chain, others, tuple(then)
        self._objects: list[Any] | None = None
        self.random: RandomState | None = None
        """The random numbers to begin with, where they are not those of the step's beginning."""
        self.earlier: tuple[RandomState, ...] = ()
        """States of the random numbers from before the model was called, latest first: where the lines draw some before that,
        they began with one of these."""
        self.called: Any = None
        """The model's first call, to tell which."""
        self.draws_anew = False
        """Whether they draw random numbers that are not those of the step."""
        self.written = False
        """Whether the step writes into them: these are copies from before that."""
        self.raised = False
        """Whether they raised in the step, so that there is no loss."""

    def __copy__(self) -> Inputs:
        other = Inputs(self, self.chain, self.others, self.then)
        other.random, other.earlier, other.called, other.raised = self.random, self.earlier, self.called, self.raised
        other.written, other.draws_anew = self.written, self.draws_anew
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    @property
    def objects(self) -> list[Any]:
        """What else the lines read that has attributes: modules, and objects of the loop's own classes."""
        if self._objects is None:
            values = [value for others in self.others for value in others.values()]
            self._objects = [value for value in values if not isinstance(value, _CODE) and hasattr(value, "__dict__")]
        return self._objects

    @property
    def callables(self) -> list[Any]:
        """Those of them that the lines may call, other than modules: a loss with a running mean."""
        return [value for value in self.objects if callable(value) and not isinstance(value, nn.Module)]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the lines can reach: those that they read, and those that objects which they read hold."""
        found: dict[int, nn.Module] = {}
        for value in self.objects:
            held = vars(value).values() if not isinstance(value, nn.Module) else ()
            found |= {id(m): m for m in (value, *held) if isinstance(m, nn.Module)}
        return list(found.values())

    def run(self) -> Tensor:
        """Run the lines again and return the loss. What they print is not shown."""
        if self.random is not None:
            self.random.restore()
        returned: tuple[Any, ...] = ()
        with redirect_stdout(io.StringIO()):
            for number, (part, names, others) in enumerate(zip(self.chain.slices, self.chain.names, self.others, strict=True)):
                given = {argument: self[key] for argument, key in names.items()} | others
                passed = zip(self.chain.slices[number].passed, returned, strict=True) if number else ()
                returned = part.run(**given, **dict(passed))
        loss = returned[0]
        if self.raised:
            return finiteness(loss)
        if isinstance(loss, (list, tuple)):  # torch.autograd.backward of several
            loss = sum(part.sum() for part in loss)
        loss = getattr(loss, "_nanproof_loss", loss)
        if not isinstance(loss, Tensor):
            raise TypeError(f"{self.chain} gives {type(loss).__name__}, not a tensor")
        for op, number_ in self.then:
            loss = loss / number_ if op == "/" else loss * number_
        return loss


def finiteness(output: Any) -> Tensor:
    """Return 0 where every number of an output is finite, else NaN; with a graph, so that backward can begin from it."""
    parts = [t for t in tensors_of(output) if t.is_floating_point()]
    if not parts:  # an object that holds them, such as a distribution
        parts = [t for t in tensors_of(list(getattr(output, "__dict__", {}).values())) if t.is_floating_point()]
    sums = [(t.float() - t.float()).sum() for t in parts]
    return torch.stack(sums).sum() if sums else torch.zeros((), requires_grad=True)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why lines cannot be run again."""

    why: str
    where: str = ""
    """file:line"""

    def __str__(self) -> str:
        return f"{self.where} {self.why}" if self.where else self.why


@dataclass(frozen=True, slots=True)
class Worked:
    """What was worked out for a place."""

    result: Chain | Blocked
    called: tuple[int, ...] | None
    """Where the functions called the model, if it holds for that alone."""


@dataclass(slots=True)
class Sight:
    """The functions that were running when the model was first called since the last backward."""

    frames: dict[int, tuple[CodeType, int, Mapping[str, Any]]] = field(default_factory=dict)
    """By frame: its code, where it was, and the local variables that are of interest. Innermost first."""

    first: tuple[int, int] | None = None
    """The function of the loop that called it, and where."""
    repeated: bool = False
    """Whether the same line has called it once more since."""
    stack: list[int] = field(default_factory=list)
    """All functions of the loop that were running, innermost first."""

    def lasti(self, frames: Sequence[FrameType]) -> tuple[int, ...]:
        """Where functions were."""
        return tuple(self.frames.get(id(frame), (None, -1, {}))[1] for frame in frames)

    def where(self, frame: FrameType) -> tuple[Any, ...] | None:
        """Return where in its source a function was, if it was running."""
        code, lasti, _ = self.frames.get(id(frame), (None, 0, {}))
        return position(frame.f_code, lasti) if code is frame.f_code else None

    def values(self, frame: FrameType) -> Mapping[str, Any] | None:
        """Return the variables of interest that a function had."""
        code, _, values = self.frames.get(id(frame), (None, 0, {}))
        return values if code is frame.f_code else None


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Code that reads somebody's code never fails it: what goes wrong in here is a reason not to run the lines again."""

    @wraps(method)
    def tried(self: Lines, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            log.debug("nanproof: %s failed", method.__name__, exc_info=True)
            return Blocked(f"the lines could not be followed: {type(error).__name__}: {error}"[:200])

    return tried


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, in a dictionary of their own. Before Python 3.13 a function's frame keeps the one that it
    hands out, with everything in it, until somebody asks again; it is emptied, unless the script holds it too."""
    values = frame.f_locals
    mine = dict(values)
    kept = _KEEPS_LOCALS and frame.f_code.co_flags & inspect.CO_NEWLOCALS
    if kept and sys.getrefcount(values) <= 3:
        values.clear()
    return mine


class Lines:
    """The places of one loop where it calls backward: what leads to the loss there, and what to note as the model is called."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        """The functions that are known, by id. To hash one, Python hashes all that is in it."""
        self._known: dict[tuple[tuple[int, int], ...], list[Worked]] = {}
        """By the functions that are running, and where they are."""
        self._depth: dict[tuple[int, int], int] = {}
        self._early: dict[int, set[str]] = {}
        """Variables to note as the model is called, by function."""
        self._learning = 2
        """Steps in which all variables are noted."""
        self._tries: dict[tuple[int, int], int] = {}
        self._sight = Sight()
        self._seen = False
        self._earlier: list[RandomState] = []
        self.gave_up = False
        """Whether the loop seems to have given up a step between the last two backwards."""
        self.draws_first = False
        """Whether some lines may draw random numbers before they call the model."""

    @property
    def called(self) -> bool:
        """Whether the model was called since the last backward."""
        return self._seen

    def runs(self, error: BaseException) -> bool:
        """Whether an exception came out of a function that calls backward."""
        codes = {code for code, _ in self._depth}
        trace = error.__traceback__
        while trace is not None and id(trace.tb_frame.f_code) not in codes:
            trace = trace.tb_next
        return trace is not None

    def mark(self, devices: Iterable[torch.device]) -> None:
        """Between two steps: random numbers may be drawn from here on."""
        if self.draws_first:
            self._earlier = [RandomState.now(devices), *self._earlier[:3]]

    # -- the model is called -----------------------------------------------------------------------------------------------------

    @_harmless
    def model_called(self, frame: FrameType | None) -> None:
        """Note the variables that the loop is going to overwrite. Only the first call since a backward counts."""
        sight = self._sight
        if self._seen:
            if not sight.repeated:
                sight.repeated = sight.first == _user(frame)
            return
        self._seen, sight.first = True, _user(frame)
        frames, stack, early, learning = sight.frames, sight.stack, self._early, self._learning
        while frame is not None:
            code = frame.f_code
            if not _is_wrapper(code.co_filename):
                stack.append(id(frame))
                if learning:
                    frames[id(frame)] = code, frame.f_lasti, variables(frame)
                elif early and (wanted := early.get(id(code))) is not None:
                    values = variables(frame)
                    frames[id(frame)] = code, frame.f_lasti, {name: values[name] for name in wanted if name in values}
            frame = frame.f_back

    # -- backward is called ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """A backward needs no lines."""
        if self._seen:
            self._sight, self._seen = Sight(), False

    @_harmless
    def at_backward(self, frame: FrameType | None, argument: str = "", then: Sequence[Op] = ()) -> Inputs | Blocked:
        """Return how to run again what leads to the loss that a function passes to backward.

        Args:
            frame: of whoever calls; frames of torch and nanproof are passed over.
            argument: the name of the parameter that takes the loss, where it is not `loss.backward()`.
            then: what a framework does to that loss before backward.
        """
        found = self._at_backward(frame, argument)
        if isinstance(found, Inputs):
            found.then = tuple(then)
            if found.chain.draws_first:
                found.earlier, self.draws_first = tuple(self._earlier), True
        self._earlier.clear()
        return found

    def _at_backward(self, frame: FrameType | None, argument: str) -> Inputs | Blocked:
        sight, self._sight, self._seen = self._sight, Sight(), False
        self.gave_up = False
        receiver = not argument
        while frame is not None and _is_wrapper(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return Blocked("the caller of backward() was not found")
        key = id(frame.f_code), frame.f_lasti
        depth = self._depth.get(key)
        if depth is not None:
            frames = _up(frame, depth) if depth > 1 else [frame]
            several = self._known.get(tuple([(id(f.f_code), f.f_lasti) for f in frames]), ())
            known = None
            for worked in several:
                if worked.called is None or worked.called == sight.lasti(frames):
                    known = worked.result
                    break
            if isinstance(known, Blocked):
                return known
            if known is not None and _is_stale(known, sight):
                self.gave_up = True
                return Blocked("the model was called before, in a step that ended without a backward", _short(frame))
            if known is not None:
                inputs = _captured(known, frames, sight)
                if inputs is not None:
                    self._learning = max(0, self._learning - 1)
                    return inputs
        if self._tries.get(key, 0) >= _TRIES:
            return Blocked("what leads to the loss changes from step to step", f"{_short(frame)}")
        self._tries[key] = self._tries.get(key, 0) + 1
        return self._worked_out(frame, receiver, argument, sight)

    @_harmless
    def at_error(self, error: BaseException) -> Inputs | Blocked:
        """Return how to run again what raised: the lines from the model's call to the statement that raised, in the function that
        called the model."""
        sight, self._sight, self._seen = self._sight, Sight(), False
        trace, traces = error.__traceback__, list[TracebackType]()
        while trace is not None:
            traces.append(trace)
            trace = trace.tb_next
        trace = next((trace for trace in reversed(traces) if id(trace.tb_frame) in sight.stack), None)
        if trace is None:
            return Blocked("the model was not called in this step")
        frame = trace.tb_frame
        called, early = sight.where(frame), sight.values(frame)
        try:
            place = place_of(frame, trace.tb_lasti, trace.tb_lineno)
            value = getattr(place.statement, "value", None)
            if not isinstance(value, ast.expr):
                raise Stopped(place.line, "it is not an expression or an assignment")
            part = make_slice(
                place,
                [value],
                values=variables(frame),
                namespace=frame.f_globals,
                parameters=(),
                early=early,
                called=called or position(frame.f_code, trace.tb_lasti),
            )
        except Stopped as stopped:
            return Blocked(stopped.why, _short(frame, stopped.line))
        except NoSource as why:
            return Blocked(str(why))
        chain = Chain((part,), _named([part], [frame], sight))
        inputs = _captured(chain, [frame], sight)
        if inputs is None:
            return Blocked("the lines read what carries a graph", _short(frame))
        inputs.earlier, inputs.raised = tuple(self._earlier), True
        return inputs

    def _worked_out(self, frame: FrameType, receiver: bool, argument: str, sight: Sight) -> Inputs | Blocked:
        frames, slices = [frame], list[Slice]()
        here = frame
        blocked: Blocked | None = None
        try:
            place = place_of(here)
            wanted = _loss_of(place.call, receiver, argument)
            while True:
                called, early = sight.where(here), sight.values(here)
                code = here.f_code
                arguments = inspect.getargs(code)
                named = [*arguments.args, *filter(None, (arguments.varargs, arguments.varkw))]
                part = make_slice(
                    place,
                    wanted,
                    values=variables(here),
                    namespace=here.f_globals,
                    parameters=named,
                    early=early,
                    called=called,
                )
                slices.insert(0, part)
                if not part.passed:
                    break
                above = here.f_back
                while above is not None and _is_wrapper(above.f_code.co_filename):
                    above = above.f_back
                if above is None or len(frames) >= _DEEPEST:
                    raise Stopped(here.f_lineno, f"{part.passed[0]} was made in a function that nanproof does not see")
                place = place_of(above)
                wanted = [_argument(place.call, arguments, name, here) for name in part.passed]
                here = above
                frames.append(above)
        except Stopped as stopped:
            blocked = Blocked(stopped.why, f"{_short(here, stopped.line)}")
        except NoSource as why:
            blocked = Blocked(str(why))
        except RecursionError:
            blocked = Blocked("the code is nested too deeply", _short(here))
        key = tuple((id(f.f_code), f.f_lasti) for f in frames)
        self._codes.update((id(f.f_code), f.f_code) for f in frames)
        self._depth[id(frame.f_code), frame.f_lasti] = len(frames)
        if blocked is not None:
            self._learning = max(0, self._learning - 1)
            if not self._learning or sight.frames:  # without sight of the model's call, the next step may tell more
                self._known.setdefault(key, []).append(Worked(blocked, None))
            return blocked
        for part, at in zip(slices, reversed(frames), strict=True):
            if part.early or part.branched:
                self._early.setdefault(id(at.f_code), set()).update(part.early)
        chain = Chain(tuple(slices), _named(slices, list(reversed(frames)), sight), _draws_first(frames, sight))
        if sight.frames or not self._learning:
            branched = any(part.branched for part in slices)
            self._known.setdefault(key, []).append(Worked(chain, sight.lasti(frames) if branched else None))
        self._learning = max(0, self._learning - 1)
        inputs = _captured(chain, frames, sight)
        return Blocked("the lines read what carries a graph", _short(frame)) if inputs is None else inputs


def _draws_first(frames: Sequence[FrameType], sight: Sight) -> bool:
    """Whether something other than the model's own call runs in the statement that calls the model: a function that does so, or
    one that makes its arguments."""
    users = [(key, code, lasti) for key, (code, lasti, _) in sight.frames.items() if not _is_wrapper(code.co_filename)]
    if not users or users[0][0] not in {id(frame) for frame in frames}:
        return True
    frame = next(frame for frame in frames if id(frame) == users[0][0])
    try:
        place = place_of(frame)
    except NoSource:
        return True
    where = position(frame.f_code, users[0][2])
    body = getattr(place.function, "body", [])
    calls = [
        n for s in (body if isinstance(body, list) else [body]) if holds(s, where) for n in ast.walk(s) if isinstance(n, ast.Call)
    ]
    own = [call for call in calls if (call.end_lineno, call.end_col_offset) == (where[1], where[3])]
    inside = [n for call in own for a in (*call.args, *(k.value for k in call.keywords)) for n in ast.walk(a)]
    return not own or any(isinstance(n, ast.Call) for n in inside)


def _user(frame: FrameType | None) -> tuple[int, int] | None:
    while frame is not None and _is_wrapper(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)


def _up(frame: FrameType, depth: int) -> list[FrameType]:
    frames = [frame]
    here: FrameType | None = frame.f_back
    while len(frames) < depth and here is not None:
        if not _is_wrapper(here.f_code.co_filename):
            frames.append(here)
        here = here.f_back
    return frames


def _loss_of(call: ast.Call, receiver: bool, argument: str) -> list[ast.expr]:
    """The expression that becomes the loss in a call that leads to backward."""
    if receiver and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        owner = ast.unparse(call.func.value)
        if not owner.endswith("autograd"):
            return [call.func.value]
    named = [k.value for k in call.keywords if k.arg in (argument, "loss", "tensor", "tensors")]
    given = [a for a in call.args if not isinstance(a, ast.Starred)][:1]
    if not (given or named):
        raise Stopped(call.lineno, "it does not say which argument is the loss")
    return (given or named)[:1]


def _argument(call: ast.Call, arguments: Any, name: str, frame: FrameType) -> ast.expr:
    """The expression that a call passes for a parameter."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = list(arguments.args)
    starred = next((i for i, a in enumerate(call.args) if isinstance(a, ast.Starred)), len(call.args))
    bound = _is_method_call(call, names, frame)
    if name in names:
        place = names.index(name) - bound
        if 0 <= place < starred:
            return call.args[place]
        if bound and names.index(name) == 0 and isinstance(call.func, ast.Attribute):
            return call.func.value
        if place >= starred < len(call.args):
            star = call.args[starred]
            assert isinstance(star, ast.Starred)
            index = ast.Constant(place - starred)
            return ast.fix_missing_locations(ast.copy_location(ast.Subscript(star.value, index, ast.Load()), star))
    if name == arguments.varargs:
        rest = call.args[max(len(names) - bound, 0) :]
        return ast.fix_missing_locations(ast.copy_location(ast.Tuple(list(rest), ast.Load()), call))
    if name == arguments.varkw:
        pairs = [k for k in call.keywords if k.arg not in names]
        keys: list[ast.expr | None] = [None if k.arg is None else ast.Constant(k.arg) for k in pairs]
        return ast.fix_missing_locations(ast.copy_location(ast.Dict(keys, [k.value for k in pairs]), call))
    raise Stopped(call.lineno, f"it does not show what becomes {name} in {frame.f_code.co_name}")


def _is_method_call(call: ast.Call, names: Sequence[str], frame: FrameType) -> int:
    """1 if the first parameter is the object whose method is called."""
    if not names or not isinstance(call.func, (ast.Attribute, ast.Name)):
        return 0
    if names[0] in ("self", "cls"):
        return 1
    first = frame.f_locals.get(names[0])
    return int(isinstance(call.func, ast.Attribute) and len(call.args) + len(call.keywords) < len(names) and first is not None)


def _is_stale(chain: Chain, sight: Sight) -> bool:
    """Whether the variables noted at the model's first call may be those of a step that the loop gave up."""
    if not sight.repeated:
        return False
    return any(part.early for part in chain.slices) and not any(part.loops for part in chain.slices)


def _values_of(part: Slice, frame: FrameType, early: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The inputs of a slice, by the name of its argument; None where one is not there."""
    now = frame.f_locals
    values = _picked(part, now, frame.f_globals, early)
    if _KEEPS_LOCALS and frame.f_code.co_flags & inspect.CO_NEWLOCALS and sys.getrefcount(now) <= 3:
        now.clear()  # see `variables`
    return values


def _picked(
    part: Slice, now: Mapping[str, Any], namespace: Mapping[str, Any], early: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for name in part.late:
        value = values[name] = now[name] if name in now else namespace.get(name, MISSING)
        if value is MISSING:
            return None
    for name in part.early:
        value = values[name] = MISSING if early is None else early.get(name, MISSING)
        if value is MISSING:
            return None
    for chain in part.attributes:
        first, rest, argument = _path(chain)
        value = values.get(first, now.get(first, MISSING))
        for attribute in rest:
            value = attribute_of(value, attribute)
        if value is MISSING:
            return None
        values[argument] = value
    return values


@cache
def _path(chain: str) -> tuple[str, tuple[str, ...], str]:
    """The name that a chain of attributes begins with, the attributes, and the name of its argument."""
    first, *rest = chain.split(".")
    return first, tuple(rest), argument_for(chain)


def _shown(part: Slice, argument: str) -> str:
    """An input as the source writes it."""
    return next((chain for chain in part.attributes if argument_for(chain) == argument), argument)


def _named(slices: Sequence[Slice], frames: Sequence[FrameType], sight: Sight) -> tuple[dict[str, str], ...]:
    """Which inputs are data, and under which key."""
    keys: set[str] = set()
    named: list[dict[str, str]] = []
    for part, frame in zip(slices, frames, strict=True):
        mine: dict[str, str] = {}
        values = _values_of(part, frame, sight.values(frame)) or {}
        for argument, value in values.items():
            small = plain(value) and (isinstance(value, Tensor) or not hasattr(value, "__len__") or len(value) <= _LARGEST)
            tensors = [t for _, t in tensors_in(value)] if small else []
            if any(not isinstance(t, nn.Parameter) for t in tensors) and not any(t.grad_fn is not None for t in tensors):
                key = _shown(part, argument)
                key = key if key not in keys else f"{frame.f_code.co_name}.{key}"
                keys.add(key)
                mine[argument] = key
        named.append(mine)
    return tuple(named)


def _captured(chain: Chain, frames: Sequence[FrameType], sight: Sight) -> Inputs | None:
    """The inputs of this step. None if they are not of the kind that they were when the lines were worked out."""
    tensors: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    for part, names, frame in zip(chain.slices, chain.names, reversed(frames), strict=True):
        values = _values_of(part, frame, sight.values(frame) if part.early else None)
        if values is None:
            return None
        for argument, key in names.items():
            value = tensors[key] = values.pop(argument)
            if value.grad_fn is not None if isinstance(value, Tensor) else carries_graph(value, 2):
                return None
        for value in values.values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return None
        others.append(values)
    return Inputs(tensors, chain, others)


def _short(frame: FrameType, line: int | None = None) -> str:
    return f"{short(frame.f_code.co_filename)}:{line or frame.f_lineno}"
