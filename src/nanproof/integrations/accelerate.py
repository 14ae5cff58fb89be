"""Accelerate: a raw loop over an `Accelerator` is guarded as it stands, between `prepare` and its first step.

    accelerator = Accelerator(...)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = nanproof.protect(accelerator)

Four calls of that loop are taken over, on these objects alone. `accelerator.backward` tells of the loss. `clip_grad_norm_` says
what the norm is and leaves the clipping to the guard, because clipping by a NaN makes every gradient NaN. `optimizer.step`
judges and steps, or refuses. `scheduler.step` does not advance after a refused step. The batch is taken from the model's call
(`RootRecorder`): where the loss is not the model's own output, a bad step is refused and named, but cannot be run again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.parameters import NormKernels, Parameters
from nanproof.errors import UnsupportedError, UsageError
from nanproof.integrations.loop import UNKNOWN, LoopGuard
from nanproof.integrations.recorded import RecordedLoopGuard, RootRecorder
from nanproof.integrations.versions import check_version
from nanproof.policy import Policy

_WRAPPERS = ("DistributedDataParallel", "OptimizedModule")


def protect_accelerator(
    accelerator: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Any = None,
    observe: Any = None,
) -> LoopGuard:
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
        from nanproof.integrations.deepspeed import protect_engine

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
        raise UsageError("protect(accelerator): its backward is replaced already; protect an accelerator once")
    guard = RecordedLoopGuard(policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe)
    _Loop(accelerator, guard)
    return guard


class _Loop:
    """Stands between a loop and its accelerator, optimizer and schedulers. After `guard.close()` it only passes on."""

    def __init__(self, accelerator: Any, guard: RecordedLoopGuard) -> None:
        self._accelerator, self._guard = accelerator, guard
        self._optimizer = accelerator._optimizers[0]
        trained = _trained(accelerator._models, self._optimizer)
        self._recorder = RootRecorder(trained[0], self._begin) if len(trained) == 1 else None
        self._backward = accelerator.backward
        self._limit: float | None = None
        """What the loop asked to clip this step to."""
        self._norms = _NormsOnce()
        guard.start(
            trained[0] if len(trained) == 1 else nn.ModuleList(trained),
            self._optimizer,
            loss_fn=None if self._recorder is None else self._recorder.loss_fn,
            max_norm=None,
            scaler=accelerator.scaler,
        )
        for name in ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients"):
            self._replace(accelerator, name, getattr(self, name))
        self._replace(self._optimizer, "step", self.step)
        for scheduler in accelerator._schedulers:
            self._replace(scheduler, "step", self._advancing(scheduler))
        for name in ("save_state", "load_state", "end_training"):
            self._replace(accelerator, name, self._settled(getattr(accelerator, name), close=name == "end_training"))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        original, guard = getattr(owner, name), self._guard

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return (original if guard._closed else function)(*args, **kwargs)

        setattr(owner, name, MethodType(call, owner))  # a method: a schedule made later looks for the function in it

    def _begin(self, batch: Any) -> None:
        if not self._guard._closed:
            self._guard.micro_batch(batch)

    # -- what the loop calls ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        guard, parts = self._guard, float(self._accelerator.gradient_accumulation_steps)
        self._norms.forget()
        known = self._recorder is not None and self._recorder.recognise(loss, then=[("/", parts)])
        if not known or not guard.open:
            guard.micro_batch(UNKNOWN)
        seed = guard.note_loss(loss / parts, () if self._recorder is None else self._recorder.calls)
        if seed is not None and kwargs.get("gradient") is None:
            kwargs["gradient"] = seed.reshape(loss.shape)
        try:
            self._backward(loss, **kwargs)
        except Exception as error:
            guard.raised(error)
            raise
        guard.went_back()

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        stepper = self._guard._stepper
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = stepper.parameters
        present = ours.present()
        all_of_them = {id(ours.tensors[i]) for i in present} == {id(p) for p in asked if p.grad is not None}
        scale = 1.0 if stepper.scale is None else stepper.scale.value()
        if all_of_them and norm_type == 2 and max_norm > 0:
            self._limit = float(max_norm)
            norms = self._norms.of(ours, ours.gradients(present), stepper._kernels)
            total: Tensor = torch.linalg.vector_norm(norms) / scale
            return total
        gradients = [p.grad for p in asked if p.grad is not None]
        return _clip_some(gradients, max_norm, norm_type, scale)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        stepper = self._guard._stepper
        limit = clip_value * (1.0 if stepper.scale is None else stepper.scale.value())
        for p in [parameters] if isinstance(parameters, Tensor) else parameters:
            if p.grad is not None:
                # An Inf must not pass for the largest number allowed: it is what gives the step away.
                g = p.grad.detach()
                g.copy_(torch.where(torch.isfinite(g), torch.minimum(torch.maximum(g, _like(-limit, g)), _like(limit, g)), g))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        if self._accelerator.scaler is not None:
            raise UnsupportedError(
                "accelerator.unscale_gradients(): the guard unscales in optimizer.step; clip with accelerator.clip_grad_norm_"
            )

    def step(self, closure: Any = None) -> None:
        guard, accelerator = self._guard, self._accelerator
        if not accelerator.sync_gradients:
            return
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): the guard cannot judge gradients that the optimizer makes itself")
        if not guard.open:
            raise UsageError(
                "optimizer.step(): no backward since the last step; call accelerator.backward(loss), not loss.backward()"
            )
        guard.clip_to(self._limit)
        self._limit = None
        number = guard.next_step - 1
        guard.take()
        guard.finish()
        last = guard._history[-1] if guard._history else None
        self._optimizer._is_overflow = last is not None and last.step == number and last.action == "skipped"

    def _advancing(self, scheduler: Any) -> Callable[..., Any]:
        advance, guard = scheduler.step, self._guard
        dropped = 0

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal dropped
            # Where verdicts come late, the schedule has gone on after a refused step: it stands still once that is known.
            if guard._stepper.lag and self._accelerator.sync_gradients and dropped < guard.refused_so_far:
                dropped += 1
                return None
            return advance(*args, **kwargs)

        return step

    def _settled(self, call: Callable[..., Any], close: bool) -> Callable[..., Any]:
        def settled(*args: Any, **kwargs: Any) -> Any:
            if close:
                self._guard.close()
            else:
                self._guard.sync()
            return call(*args, **kwargs)

        return settled


class _NormsOnce:
    """The loop asks for the norm, then the guard does: one pass over the gradients, unless they were written in between."""

    def __init__(self) -> None:
        self._known: tuple[list[Tensor], list[int], Tensor] | None = None

    def of(self, parameters: Parameters, gradients: list[Tensor], kernels: NormKernels | None) -> Tensor:
        if "norms" not in parameters.__dict__:
            self._serve(parameters)
        norms = parameters.norms(gradients, kernels)
        self._known = (gradients, [g._version for g in gradients], norms)
        return norms

    def forget(self) -> None:
        self._known = None

    def _serve(self, parameters: Parameters) -> None:
        compute, own = type(parameters).norms, weakref.ref(parameters)

        def norms(gradients: list[Tensor], kernels: NormKernels | None = None) -> Tensor:
            known, self._known = self._known, None
            if known is not None and len(known[0]) == len(gradients):
                pairs = zip(gradients, known[0], known[1], strict=True)
                if all(g is k and g._version == version for g, k, version in pairs):
                    return known[2]
            held = own()
            assert held is not None
            return compute(held, gradients, kernels)

        parameters.norms = norms  # type: ignore[method-assign]


def _trained(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The prepared models that this optimizer has parameters of."""
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [_wrapped(model) for model in models if any(id(p) in theirs for p in model.parameters())]
    if not trained:
        raise UsageError("protect(accelerator): the optimizer has no parameter of a prepared model; prepare both in one call")
    return trained


def _wrapped(model: nn.Module) -> nn.Module:
    """The module that the loop calls. Accelerate remembers what it was given, not the wrapper it put around it, so that one is
    looked for among all objects: once, before training."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and type(o).__name__ in _WRAPPERS]
    while True:
        around = next((m for m in modules if any(child is model for child in m._modules.values())), None)
        if around is None:
            return model
        model = around


def _clip_some(gradients: list[Tensor], max_norm: float, norm_type: float, scale: Any) -> Tensor:
    """Clip a part of the gradients in place, or by another norm. What is not finite stays as it is, and what is with it: else the
    step could not be told from a good one, or its culprit not from the others."""
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
