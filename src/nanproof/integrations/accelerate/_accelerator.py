"""Accelerate: a raw loop over an `Accelerator` is guarded as it stands, between `prepare` and its
first step.

    accelerator = Accelerator(...)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = nanproof.protect(accelerator)

Four calls of that loop are taken over, on these objects alone. `accelerator.backward` tells of the
loss. `clip_grad_norm_` says what the norm is and leaves the clipping to the guard, because clipping
by a NaN makes every gradient NaN. `optimizer.step` judges and steps, or refuses. `scheduler.step`
does not advance after a refused step. The batch is taken from the model's call (`RootRecorder`):
where the loss is not the model's own output, a bad step is refused and named, but cannot be run
again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import AlreadyGuarded, UnsupportedError, UsageError
from nanproof._policy import Policy
from nanproof.core.judge._optimizers import bare_optimizer
from nanproof.explain.lines._recorded import RECORDED, RootRecorder
from nanproof.integrations._groups import parameters_of
from nanproof.integrations._loop_groups import LoopGroup, LoopGroups, clip_some
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._versions import check_version
from nanproof.integrations.accelerate._states import StateFolders
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints

_WRAPPERS = ("DistributedDataParallel", "OptimizedModule")


def protect_accelerator(
    accelerator: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard the loop that this accelerator runs. Call it after `accelerator.prepare(...)`.

    Args:
        accelerator: an `accelerate.Accelerator` that has prepared optimizers and the models they train. Optimizers that one
            loss feeds take one step, all or none. The guard is that of the first such step; its `incidents` holds those of all.
        run_dir: "auto" is `nanproof` in the accelerator's project folder, if it has one.
        observe: True or `Observe(...)`.
    """
    check_version("accelerate")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if run_dir == "auto":
        run_dir = Path(accelerator.project_dir) / "nanproof" if accelerator.project_dir else None
    if kind == "DEEPSPEED":
        from nanproof.integrations.deepspeed._engine import protect_engine

        if accelerator.deepspeed_engine_wrapped is None:
            raise UsageError("protect(accelerator): nothing is prepared yet; call it after accelerator.prepare(model, optimizer)")
        engine = accelerator.deepspeed_engine_wrapped.engine
        return protect_engine(engine, policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe)
    if kind in ("MEGATRON_LM", "XLA"):
        raise UnsupportedError(f"protect(accelerator): {kind} steps out of reach of a guard; DDP, FSDP2 and DeepSpeed work")
    if not accelerator._optimizers:
        raise UsageError("protect(accelerator): no optimizer is prepared; call it after accelerator.prepare(model, optimizer)")
    if "backward" in accelerator.__dict__:
        raise AlreadyGuarded("protect(accelerator): its backward is replaced already; protect an accelerator once")
    run = ProtectedRun(policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe, loop=RECORDED)
    _AcceleratorLoop(accelerator, run)
    return run


class _AcceleratorLoop:
    """Stands between a loop and its accelerator, optimizer and schedulers, until the run is
    closed."""

    def __init__(self, accelerator: Any, run: ProtectedRun) -> None:
        self._accelerator, self._run = accelerator, run
        for optimizer in accelerator._optimizers:
            _trained(accelerator._models, [optimizer])
        self._groups = LoopGroups(accelerator._optimizers, run, self._start)
        patches = Patches()
        for name in ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients"):
            patches.method(accelerator, name, getattr(self, name))
        for optimizer in accelerator._optimizers:
            patches.method(optimizer, "step", functools.partial(self.step, optimizer))
        for scheduler in accelerator._schedulers:
            patches.method(scheduler, "step", self._advancing())
        folders = StateFolders(accelerator)
        patches.method(accelerator, "save_state", functools.partial(self._settle, folders.save))
        patches.method(accelerator, "load_state", functools.partial(self._settle, folders.load))
        patches.method(accelerator, "end_training", self._close)
        run.on_close(patches.undo)

    def _start(self, group: LoopGroup, step: int) -> None:
        """Put the guard around a group."""
        if group.recorder is not None:
            group.recorder.close()
        trained = _trained(self._accelerator._models, group.members)
        group.recorder = RootRecorder(trained[0], group.begin) if len(trained) == 1 else None
        group.guard.start(
            trained[0] if len(trained) == 1 else nn.ModuleList(trained),
            group.members,
            loss_fn=None if group.recorder is None else group.recorder.loss_fn,
            max_norm=None,
            scaler=self._accelerator.scaler,
            step=step,
        )

    # -- what the loop calls ---------------------------------------------------------------------------------------------------

    def backward(self, original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> None:
        parts = float(self._accelerator.gradient_accumulation_steps)
        noted = loss / parts
        fed = self._groups.concerned(loss, noted.detach())
        for group in fed:
            seed = group.loss(loss, noted, then=[("/", parts)])
            if seed is not None and kwargs.get("gradient") is None:
                kwargs["gradient"] = seed.reshape(loss.shape)
        try:
            original(loss, **kwargs)
        except Exception as error:
            for group in fed[:1]:
                group.guard.engine.raised(error)
            raise
        for group in fed:
            group.guard.engine.backward_ended()

    def _scale(self) -> Any:
        started = self._groups.started
        scale = started[0].stepper.scale if started else None
        return 1.0 if scale is None else scale.value()

    def clip_grad_norm_(
        self, original: Any, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = [g for g in self._groups.started if not {id(p) for p in g.parameters}.isdisjoint(map(id, asked))]
        if len(owners) == 1:
            return owners[0].clip(asked, max_norm, norm_type)
        return clip_some([p.grad for p in asked if p.grad is not None], max_norm, norm_type, self._scale())

    def clip_grad_value_(self, original: Any, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        limit = clip_value * self._scale()
        for p in [parameters] if isinstance(parameters, Tensor) else parameters:
            if p.grad is not None:
                # An Inf must not pass for the largest number allowed: it is what gives the step away.
                g = p.grad.detach()
                g.copy_(torch.where(torch.isfinite(g), torch.minimum(torch.maximum(g, _like(-limit, g)), _like(limit, g)), g))

    def unscale_gradients(self, original: Any, optimizer: Any = None) -> None:
        if self._accelerator.scaler is not None:
            raise UnsupportedError(
                "accelerator.unscale_gradients(): the guard unscales in optimizer.step; clip with accelerator.clip_grad_norm_"
            )

    def step(self, optimizer: Any, original: Any, closure: Any = None) -> None:
        if not self._accelerator.sync_gradients:
            return
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): the guard cannot judge gradients that the optimizer makes itself")
        groups, bare = self._groups, bare_optimizer(optimizer)
        group = groups.at_step(bare)
        goes_on = group.goes_on(bare, groups.backwards)
        if not group.started or not (goes_on or group.guard.open or group.losses):
            raise UsageError(
                "optimizer.step(): no backward since the last step; call accelerator.backward(loss), not loss.backward()"
            )
        run = group.guard
        number = run.next_step - (run.open or goes_on)
        group.step(bare, groups.backwards)
        last = run.account.history[-1] if run.account.history else None
        optimizer._is_overflow = last is not None and last.step == number and last.action == "skipped"

    def _advancing(self) -> Callable[..., Any]:
        runs, dropped = self._groups.runs, 0

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal dropped
            # Where verdicts come late, the schedule has gone on after a refused step: it stands still once that is known.
            if runs[0].late and self._accelerator.sync_gradients and dropped < runs[0].refused_so_far:
                dropped += 1
                return None
            return original(*args, **kwargs)

        return step

    def _settle(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for group in self._groups.started:
            group.guard.sync()
        return then(*args, **kwargs)

    def _close(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.close()
        return original(*args, **kwargs)


def _trained(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Module]:
    """The prepared models that these optimizers have parameters of."""
    theirs = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    trained = [_wrapped(model) for model in models if any(id(p) in theirs for p in model.parameters())]
    if not trained:
        raise UsageError("protect(accelerator): the optimizer has no parameter of a prepared model; prepare both in one call")
    return trained


def _wrapped(model: nn.Module) -> nn.Module:
    """The module that the loop calls. Accelerate remembers what it was given, not the wrapper it
    put around it, so that one is looked for among all objects: once, before training."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and type(o).__name__ in _WRAPPERS]
    while True:
        around = next((m for m in modules if any(child is model for child in m._modules.values())), None)
        if around is None:
            return model
        model = around


def _like(value: Any, tensor: Tensor) -> Tensor:
    return torch.as_tensor(value, device=tensor.device, dtype=tensor.dtype)
