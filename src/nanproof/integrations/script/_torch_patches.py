"""What `nanproof run` changes in torch while a script runs, and takes back afterwards.

A hook of torch can look at an optimizer's step but not refuse it, so `Optimizer.profile_hook_step`, which wraps the `step` of
every optimizer class when the first of its kind is made, is wrapped itself. Clipping is in `_clipping`. A GradScaler goes
on unscaling, looking and adjusting its scale itself; the guard judges what it lets through, and hears of what it leaves out.
"""

from __future__ import annotations

import functools
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanproof._errors import TrainingHalted
from nanproof.core.support._hooks import without_hooks
from nanproof.integrations._groups import finite_gradients, has_gradient
from nanproof.integrations._patches import Patches
from nanproof.integrations.script._clipping import Clipping
from nanproof.integrations.script._runs import ScriptRuns
from nanproof.integrations.script._session import Session, covers


def install(session: Session) -> Patches:
    """Change torch; what is returned changes it back."""
    patches = Patches()
    session.runs = ScriptRuns(session)
    _optimizers(session, session.runs, patches)
    for place, name, made in (
        (torch.autograd, "backward", _backward),
        (torch.amp.GradScaler, "scale", _scale),
        (torch.amp.GradScaler, "step", _scaler_step),
        (torch, "compile", _compile),
        (torch, "save", _save),
        (Optimizer, "zero_grad", _zero_grad),
    ):
        patches.set(place, name, made(session, session.runs, getattr(place, name)))
    Clipping(session, session.runs).install(patches)
    return patches


def _optimizers(session: Session, runs: ScriptRuns, patches: Patches) -> None:
    hook, patch = Optimizer.profile_hook_step, Optimizer._patch_step_function

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        return _guarded_step(session, runs, hook(step))

    def patch_step_function(self: Optimizer) -> None:
        patch(self)
        runs.see(self)

    patches.set(Optimizer, "profile_hook_step", staticmethod(profile_hook_step))
    patches.set(Optimizer, "_patch_step_function", patch_step_function)
    for kind in _classes(Optimizer):  # of which there are objects already
        step = vars(kind).get("step")
        if getattr(step, "hooked", False):
            guarded: Any = _guarded_step(session, runs, step)
            guarded.hooked = True
            patches.set(kind, "step", guarded)


def _classes(kind: type[Any]) -> Iterable[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _classes(below)


def _guarded_step(session: Session, runs: ScriptRuns, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded_step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if session.taking is not None and session.taking.covers(self):
            return session.taking.really(step, self)
        if runs.watched(self) is None:
            return step(self, *args, **kwargs)
        began = time.perf_counter()
        taking = Taking(self, args, kwargs)
        taking.evaluate()
        starting = time.perf_counter()
        watched = runs.at_step(self)
        taking.others += time.perf_counter() - starting
        skips = watched.refused and watched.goes_on(self, runs.backwards)
        if watched.guard is None or watched.left_alone or not (skips or has_gradient(self)):
            return taking.really(step, self)
        others = [other for other in runs.guarded() if other is not watched]
        taking.members, session.taking = watched.members, taking
        counts = [other.pause() for other in others]
        try:
            watched.take(self, runs.backwards)
        finally:
            for other, count in zip(others, counts, strict=True):
                other.go_on(count)
            session.taking = None
            runs.mark()
            watched.reached = runs.backwards
            watched.timed(began, taking.others)
        return taking.result

    return guarded_step


class Taking:
    """A step on its way from the script to the optimizer, past the guard."""

    def __init__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], void: bool = False) -> None:
        """`void`: it is known already that the optimizer must not be called."""
        self.optimizer, self._void = optimizer, void
        self.members = [optimizer]
        """Optimizers that the guard may step meanwhile: those of the same run."""
        self._args, self._kwargs = args, kwargs
        self._closure: Any = kwargs.get("closure", args[0] if args else None)
        self.result: Any = None
        self.others = 0.0
        """Seconds in the closure, in the optimizer, and in looking for the model."""
        self._seen: list[tuple[Any, int]] = []
        self._stepped = False
        """Once it has: what comes then are steps that were held, whose gradients are there."""

    def evaluate(self) -> None:
        """Run the closure, so that there are gradients to judge."""
        if not callable(self._closure):
            return
        began = time.perf_counter()
        with torch.enable_grad():
            self.result = self._closure()
        self._seen = self._versions()
        self.others += time.perf_counter() - began

    def covers(self, optimizer: Optimizer) -> bool:
        return covers(self.members, optimizer)

    def really(self, step: Callable[..., Any], optimizer: Optimizer) -> Any:
        """The optimizer's own step, with what the script passed to it."""
        if self._void:
            return None
        if optimizer is not self.optimizer:
            return step(optimizer)
        began = time.perf_counter()
        args, kwargs = self._args, self._kwargs
        if callable(self._closure):
            args = (self._again, *args[1:]) if args else args
            kwargs = {**kwargs, "closure": self._again} if "closure" in kwargs else kwargs
        try:
            self.result = step(optimizer, *args, **kwargs)
        finally:
            self._stepped = True
            self.others += time.perf_counter() - began
        return self.result

    def _again(self) -> Any:
        """What the optimizer calls as its closure: evaluated already, unless weights have moved since, as in SAM."""
        return self.result if self._stepped or self._versions() == self._seen else self._closure()

    def _versions(self) -> list[tuple[Any, int]]:
        p = self.optimizer.param_groups[0]["params"][0]
        return [(id(x), x._version) for x in (p, p.grad) if x is not None]


def _backward(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not session.guarding:
            return original(tensors, grad_tensors, *args, **kwargs)
        runs.at_backward(tensors)
        runs.first_calls.backward()
        watching = runs.guarded()
        scalar = tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None
        loss = _loss(tensors, grad_tensors) if watching else scalar
        runs.last_loss = None if loss is None else loss.detach()
        if loss is None or not watching:
            return original(tensors, grad_tensors, *args, **kwargs)
        began = time.perf_counter()
        active, dormant = runs.sorted_out(watching)
        alone = len(active) == 1
        seed = None
        for watched in active:
            try:
                seed = watched.before_backward(loss, alone, runs.backwards, sys._getframe(1))
            except TrainingHalted:
                raise
            except Exception as error:
                watched.leave_alone(f"{type(error).__name__}: {error}")
        if seed is not None and isinstance(tensors, Tensor):
            seed = seed.to(tensors.dtype).reshape(tensors.shape if grad_tensors is None else ())
            grad_tensors = seed if grad_tensors is None else grad_tensors * seed
        # Not before: noting the loss may show that gradients were cleared, and forget the backwards they came from.
        before = [watched.backwards for watched in (*active, *dormant)]
        middle = time.perf_counter()
        session.enter_backward()
        try:
            original(tensors, grad_tensors, *args, **kwargs)
        finally:
            session.leave_backward()
        began += time.perf_counter() - middle
        for watched, count in zip((*active, *dormant), before, strict=True):
            if watched.backwards != count or watched.feeds:
                watched.reached = watched.fed = runs.backwards
            watched.after_backward(count, loss, alone and watched is active[0], late=watched in dormant)
        for watched in (*active, *dormant):
            began += watched.extraordinary()
        active[0].tally.own += time.perf_counter() - began
        return None

    return backward


def _loss(tensors: Any, gradients: Any) -> Tensor | None:
    """The number that backward starts from; of several, or of a tensor with a gradient given, what they come to."""
    if isinstance(tensors, Tensor) and tensors.numel() == 1 and gradients is None:
        loss = getattr(tensors, "_nanproof_loss", tensors)
        return loss if isinstance(loss, Tensor) else None
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [gradients] * len(several) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    with torch.no_grad():
        parts = [(t if g is None else t * g).sum() for t, g in zip(several, given, strict=True)]
        return sum(parts[1:], parts[0]) if parts else None


def _compile(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        session.compiles = True
        runs.first_calls.stop()
        return original(*args, **kwargs)

    return compile


def _save(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> Any:
        # A model that is saved whole must load where nanproof is not installed, and under torch's list of safe classes.
        return original(obj, f, without_hooks(pickle_module), *args, **kwargs)

    return save


def _zero_grad(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runs.mark()

    return zero_grad


def _scale(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if isinstance(outputs, Tensor) and outputs.requires_grad and scaled is not outputs:
            scaled._nanproof_loss = outputs
        return scaled

    return scale


def _scaler_step(session: Session, runs: ScriptRuns, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(optimizer, Optimizer) and self.is_enabled()) or runs.watched(optimizer) is None:
            return original(self, optimizer, *args, **kwargs)
        watched = runs.at_step(optimizer)
        if watched.guard is None or watched.left_alone:
            return original(self, optimizer, *args, **kwargs)

        def left_out() -> None:
            began, session.taking = time.perf_counter(), Taking(optimizer, (), {}, void=True)
            session.taking.members = watched.members
            try:
                watched.left_out(optimizer, float(self.get_scale()), runs.backwards)
            finally:
                session.taking = None
                watched.timed(began, 0.0)

        alone = len(watched.members) == 1
        if not alone and not watched.goes_on(optimizer, runs.backwards):
            if finite_gradients(watched.members):
                watched.scaled_by(self, optimizer)
            else:  # torch's GradScaler would leave out one of them and step the others
                left_out()
                watched.call_again(optimizer)
        # A fused optimizer would unscale and leave out by itself, behind the guard's back.
        fused = optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        if fused is not None:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        steps = watched.tally.calls
        try:
            out = original(self, optimizer, *args, **kwargs)
        finally:
            if fused is not None:
                optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        if watched.tally.calls == steps:
            if alone:
                left_out()
            else:
                watched.pass_by(optimizer)
        return out

    return step
