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

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import AlreadyGuarded, UnsupportedError, UsageError
from nanproof._policy import Policy
from nanproof.core._under_way import UNKNOWN
from nanproof.core.judge._judge import Norms
from nanproof.core.judge._stepper import Stepper
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._recorded import RECORDED, RootRecorder
from nanproof.integrations._versions import check_version
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
        accelerator: an `accelerate.Accelerator` that has prepared one optimizer and the model it trains.
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
    if len(accelerator._optimizers) != 1:
        found = len(accelerator._optimizers)
        raise UsageError(
            f"protect(accelerator): one prepared optimizer is needed, and there are {found}; "
            + ("use nanproof.Guard for each" if found else "call it after accelerator.prepare(model, optimizer)")
        )
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
        self._optimizer = accelerator._optimizers[0]
        trained = _trained(accelerator._models, self._optimizer)
        self._recorder = RootRecorder(trained[0], lambda batch: run.engine.begin(batch)) if len(trained) == 1 else None
        self._limit: float | None = None
        """What the loop asked to clip this step to."""
        self._norms: Norms | None = None
        """Those of the gradients, where the loop asked for them."""
        run.start(
            trained[0] if len(trained) == 1 else nn.ModuleList(trained),
            self._optimizer,
            loss_fn=None if self._recorder is None else self._recorder.loss_fn,
            max_norm=None,
            scaler=accelerator.scaler,
        )
        patches = Patches()
        for name in ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients"):
            patches.method(accelerator, name, getattr(self, name))
        patches.method(self._optimizer, "step", self.step)
        for scheduler in accelerator._schedulers:
            patches.method(scheduler, "step", self._advancing())
        for name in ("save_state", "load_state", "end_training"):
            patches.method(accelerator, name, self._close if name == "end_training" else self._settle)
        if self._recorder is not None:
            patches.later(self._recorder.close)
        run.on_close(patches.undo)

    # -- what the loop calls ---------------------------------------------------------------------------------------------------

    def backward(self, original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> None:
        run, parts = self._run, float(self._accelerator.gradient_accumulation_steps)
        self._norms = None
        known = self._recorder is not None and self._recorder.recognise(loss, then=[("/", parts)])
        if not known or not run.open:
            run.engine.begin(UNKNOWN)
        seed = run.engine.loss(loss / parts, () if self._recorder is None else self._recorder.calls)
        if seed is not None and kwargs.get("gradient") is None:
            kwargs["gradient"] = seed.reshape(loss.shape)
        try:
            original(loss, **kwargs)
        except Exception as error:
            run.engine.raised(error)
            raise
        run.engine.backward_ended()

    @property
    def _stepper(self) -> Stepper:
        assert self._run.parts is not None
        return self._run.parts.stepper

    def clip_grad_norm_(
        self, original: Any, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        stepper = self._stepper
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = stepper.parameters
        present = ours.present()
        all_of_them = {id(ours.tensors[i]) for i in present} == {id(p) for p in asked if p.grad is not None}
        scale = 1.0 if stepper.scale is None else stepper.scale.value()
        if all_of_them and norm_type == 2 and max_norm > 0:
            self._limit = float(max_norm)
            self._norms = stepper.norms()
            return stepper.unscaled(self._norms.total)
        gradients = [p.grad for p in asked if p.grad is not None]
        return _clip_some(gradients, max_norm, norm_type, scale)

    def clip_grad_value_(self, original: Any, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        stepper = self._stepper
        limit = clip_value * (1.0 if stepper.scale is None else stepper.scale.value())
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

    def step(self, original: Any, closure: Any = None) -> None:
        run, accelerator = self._run, self._accelerator
        if not accelerator.sync_gradients:
            return
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): the guard cannot judge gradients that the optimizer makes itself")
        if not run.open:
            raise UsageError(
                "optimizer.step(): no backward since the last step; call accelerator.backward(loss), not loss.backward()"
            )
        run.clip_to(self._limit)
        norms, self._norms, self._limit = self._norms, None, None
        number = run.next_step - 1
        run.engine.step(norms)
        run.engine.end()
        last = run.account.history[-1] if run.account.history else None
        self._optimizer._is_overflow = last is not None and last.step == number and last.action == "skipped"

    def _advancing(self) -> Callable[..., Any]:
        run, dropped = self._run, 0

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal dropped
            # Where verdicts come late, the schedule has gone on after a refused step: it stands still once that is known.
            if run.late and self._accelerator.sync_gradients and dropped < run.refused_so_far:
                dropped += 1
                return None
            return original(*args, **kwargs)

        return step

    def _settle(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.sync()
        return original(*args, **kwargs)

    def _close(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.close()
        return original(*args, **kwargs)


def _trained(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The prepared models that this optimizer has parameters of."""
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
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


def _clip_some(gradients: list[Tensor], max_norm: float, norm_type: float, scale: Any) -> Tensor:
    """Clip a part of the gradients in place, or by another norm. What is not finite stays as it is,
    and what is with it: else the step could not be told from a good one, or its culprit not from
    the others."""
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g.detach().float(), norm_type) for g in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type) / scale
    factor = torch.where(torch.isfinite(total), (max_norm / (total + 1e-6)).clamp(max=1.0), 1.0)
    for g in gradients:
        g.detach().mul_(factor.to(g.device, g.dtype))
    return total


def _like(value: Any, tensor: Tensor) -> Tensor:
    return torch.as_tensor(value, device=tensor.device, dtype=tensor.dtype)
