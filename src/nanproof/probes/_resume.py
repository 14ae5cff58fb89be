"""Save and resume, on copies: does the next step come out the same?

Two copies are made of model and optimizer. One takes a step; its `state_dict`s are loaded into the
other, as a new process would do. Then both take the next step with the same batch and random
numbers. A third copy, of the first one after its step, is the control: it must agree.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._text import one_line
from nanproof._wording import listed
from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.core.support._context import RandomState, rehearsal
from nanproof.core.support._tree import map_tensors
from nanproof.explain.locate._locate import batch_shape
from nanproof.explain.replay._replay import OutOfTime, eager
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import COPIED, DoesNotApply, Probing

_TORCHS = frozenset(nn.Module().__dict__)
NAME = "state-not-saved"


def state_not_saved(probing: Probing) -> Iterator[ProbeResult]:
    """Do save and resume give the same next step?"""
    if sum(p.numel() for p in probing.replay.parameters.values()) > COPIED:
        return
    hidden = _hidden(probing.model)
    first = _Copy.of(probing.model, probing.optimizer)
    start = copy.deepcopy(first)
    trained = first.step(probing, 0)
    if trained is None:
        return
    yield from _unregistered(probing, first, hidden)
    control = copy.deepcopy(first)
    resumed = start
    try:
        resumed.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    except RuntimeError as error:
        did = "took a step, saved, and loaded into a fresh copy"
        saw = f"load_state_dict refuses the model's own state_dict: {one_line(error, 200)}"
        yield finding(NAME, did, saw, "Save in state_dict what load_state_dict asks for.", phase="forward")
        return
    try:
        resumed.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    except Exception as error:
        raise DoesNotApply(f"loading the optimizer fails: {error}") from error
    lost = _differences(first.model, resumed.model)
    patched = copy.deepcopy(resumed)
    a, b, c = first.step(probing, 1), resumed.step(probing, 1), control.step(probing, 1)
    if a is None or b is None or c is None or not _same(a, c):
        return  # not even the same step twice
    did = "took a step, saved, loaded into a fresh copy, and took the next step in both"
    if _same(a, b):
        yield ProbeResult(NAME, did, f"the next loss is {a.loss:.6g} in both, and so are the weights after it")
        return
    if a.loss == b.loss and _same_gradients(a, b):
        saw = "the next loss is the same, but the optimizer moves the weights elsewhere"
        fix = "Keep everything that the optimizer's step needs in optimizer.state or in the parameter groups."
        where = type(probing.optimizer).__name__
        yield finding(NAME, did, saw, fix, phase="optimizer", where=where)
        return
    carried = {name for name, value in lost.items() if _carried(value, probing.batch)}
    for name, value in lost.items():
        if name not in carried:
            _put(patched.model, name, value)
    again = patched.step(probing, 1)
    cured = again is not None and again.loss == a.loss
    if not cured:
        return  # a state that a loop carries from batch to batch, or one that cannot be named
    names = _guilty(lost.keys() - carried, lost)
    saw = f"the next loss is {b.loss:.6g}, not {a.loss:.6g}; with {listed(names)} carried over it is the same"
    fix = "Register it: register_buffer(...) (persistent), nn.Parameter, nn.ModuleList, or get_extra_state and set_extra_state."
    yield finding(NAME, did, saw, fix, phase="forward", where=names[0])


@dataclass(frozen=True)
class _Taken:
    """What a step came to."""

    loss: float
    gradients: list[Tensor]
    weights: list[Tensor]


@dataclass
class _Copy:
    """A model with its optimizer, apart from the run."""

    model: nn.Module
    optimizer: Any

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any) -> _Copy:
        memo: dict[int, Any] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twin = copy.deepcopy(model, memo)
                other = copy.deepcopy(optimizer, memo)
                for name, value in vars(optimizer).items():  # torch's optimizers copy only what they save
                    if name not in vars(other) and not callable(value) and not name.startswith("_optimizer_"):
                        setattr(other, name, copy.deepcopy(value, memo))
        except Exception as error:
            raise DoesNotApply(f"the model cannot be copied: {error}") from error
        for p in twin.parameters():
            p.grad = None
        return cls(twin, other)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copy:
        for p in self.model.parameters():
            p.grad = None
        return _Copy.of(self.model, self.optimizer)

    def step(self, probing: Probing, number: int) -> _Taken | None:
        """Take a step with the batch; None if it fails or does not train this copy."""
        replay = probing.replay
        if replay.deadline.passed:
            raise OutOfTime
        before = RandomState.now(replay.devices)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        try:
            replay.random.restore()
            torch.rand(number + 1)
            modules = list(self.model.modules())
            if len(modules) != len(replay.mode.training):
                return None
            with rehearsal, eager(), warnings.catch_warnings(), replay.mode.again(modules, replay.device):
                warnings.simplefilter("ignore")
                loss = replay.loss_fn(self.model, map_tensors(probing.batch, lambda t: t.detach().clone()))
                value = float(loss.detach())
                loss.reshape(()).backward()
            gradients = [torch.zeros(()) if p.grad is None else p.grad.detach().clone() for p in parameters]
            if all(p.grad is None for p in parameters):
                return None
            self.optimizer.step()
            self.optimizer.zero_grad()
            for p in parameters:
                p.grad = None
        except Exception as error:
            raise DoesNotApply(f"a copy cannot be trained: {error}") from error
        finally:
            before.restore()
        return _Taken(value, gradients, [p.detach().clone() for p in parameters])


def _same_gradients(a: _Taken, b: _Taken) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.gradients, b.gradients, strict=True))


def _same(a: _Taken, b: _Taken) -> bool:
    weights = all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
    return a.loss == b.loss and weights and _same_gradients(a, b)


def _differences(model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """What the two models keep, outside of what was loaded, that is not equal: by name, as the first has it."""
    found: dict[str, Any] = {}
    twins = dict(unwrap(other).named_modules())
    for path, module in unwrap(model).named_modules():
        twin = twins.get(path)
        if twin is None:
            continue
        prefix = f"{clean_name(path)}." if path else ""
        for name, value in module._buffers.items():
            if not _equal(value, twin._buffers.get(name)):
                found[f"{prefix}{name}"] = _copied(value)
        for name, value in vars(module).items():
            if name not in _TORCHS and not _equal(value, vars(twin).get(name)):
                found[f"{prefix}{name}"] = _copied(value)
    return found


def _copied(value: Any) -> Any:
    """A copy: the next step may write into the original."""
    return map_tensors(value, lambda t: t.detach().clone())


def _equal(a: Any, b: Any) -> bool:
    """Whether two attributes hold the same. What is not data (functions, modules, configurations) counts as equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
    if isinstance(a, (list, tuple)) or type(a).__name__ == "deque":
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (bool, int, float, complex, str, bytes, type(None))):
        return type(a) is type(b) and (a == b or a != a)
    return True


def _put(model: nn.Module, name: str, value: Any) -> None:
    path, _, attribute = name.rpartition(".")
    for own, module in unwrap(model).named_modules():
        if clean_name(own) == path:
            setattr(module, attribute, _copied(value))


def _carried(value: Any, batch: Any) -> bool:
    """Whether this is a state for each sample, as of a recurrent network over consecutive batches."""
    samples, _ = batch_shape(batch)
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(v, Tensor) and samples > 1 and samples in v.shape[:2] and v.dim() >= 2 for v in values) and bool(values)


def _guilty(names: Any, lost: dict[str, Any]) -> list[str]:
    """Tensors first, then numbers, each in alphabetical order."""
    return sorted(names, key=lambda name: (not isinstance(lost[name], Tensor), name))


def _hidden(model: nn.Module) -> dict[str, Any]:
    """Modules and parameters in lists, dictionaries and plain attributes of a module, where `state_dict` does not see them."""
    known = {id(m) for m in model.modules()} | {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    found: dict[str, Any] = {}

    def look(name: str, value: Any, depth: int) -> None:
        if id(value) in known or depth > 3:
            return
        if isinstance(value, nn.Module):
            if any(p.requires_grad for p in value.parameters()) and value.training:
                found[name] = value
        elif isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                found[name] = value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                look(f"{name}[{i}]", item, depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                look(f"{name}[{key!r}]", item, depth + 1)

    for path, module in unwrap(model).named_modules():
        for name, value in vars(module).items():
            if name not in _TORCHS and not name.startswith("_"):
                look(f"{clean_name(path)}.{name}" if path else name, value, 0)
    return found


def _unregistered(probing: Probing, trained: _Copy, hidden: dict[str, Any]) -> Iterator[ProbeResult]:
    """Hidden weights that the loss has a gradient for."""
    if not hidden:
        return
    reached: list[str] = []
    owned = {id(p): name for name, value in hidden.items() for p in _weights(value)}

    def look(_recorder: Any, loss: Tensor) -> None:
        weights = [p for value in hidden.values() for p in _weights(value)]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
        names = [owned[id(p)] for p, g in zip(weights, gradients, strict=True) if g is not None and bool((g != 0).any())]
        reached.extend(dict.fromkeys(names))

    probing.run(look=look)
    if reached:
        did = "looked for weights that the loss depends on and that model.state_dict() does not hold"
        saw = f"{listed(reached)}: a checkpoint does not hold them, and model.parameters() does not either"
        fix = "Use nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter instead of a list, a dictionary or a tensor."
        yield finding(NAME, did, saw, fix, phase="forward", where=reached[0])


def _weights(value: Any) -> list[Tensor]:
    return [p for p in value.parameters() if p.requires_grad] if isinstance(value, nn.Module) else [value]
