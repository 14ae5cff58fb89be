"""Lightning's Fabric: a loop of one's own with `fabric.backward`, `fabric.clip_gradients` and `optimizer.step()`, guarded.

The loop stays as it is. Four methods of the Fabric object and its strategy are stood in for: `setup` (to learn of model and
optimizer), `backward` (the loss), `clip_gradients` (the norm to clip to) and the strategy's `optimizer_step`.

A step can be run again where the loss is the model's own output `.loss` (as models of transformers return it), unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.errors import UnsupportedError, UsageError
from nanproof.integrations.lightning_replay import without_trace
from nanproof.integrations.lightning_seam import StandIns, check_version, no_arguments, refuse_value_clipping
from nanproof.integrations.loop import UNKNOWN, LoopGuard
from nanproof.policy import Policy

_KNOWN_STEPS = {"Precision.optimizer_step", "MixedPrecision.optimizer_step"}


def protect_fabric(
    fabric: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Any = None,
    max_norm: Any = ...,
) -> LoopGuard:
    """Guard a loop that uses Fabric. Call `guard.close()` when it is over: Fabric gets its methods back.

    Args:
        fabric: the Fabric.
        model, optimizer: as `fabric.setup` returned them. Without them, the next call of `fabric.setup(model, optimizer)` counts.
        policy: what to do when; see `Policy`.
        run_dir: folder for records, incidents and bundles; "auto" is `nanproof` in the folder of Fabric's logger, if it has one.
        checkpoints: `Checkpoints(folder)`, to go back to.
        max_norm: clip to this norm; if it is not given, what `fabric.clip_gradients(max_norm=...)` is called with counts.
    """
    check_version(fabric)
    if run_dir == "auto":
        folder = getattr(next(iter(fabric.loggers), None), "log_dir", None)
        run_dir = None if folder is None else Path(folder) / "nanproof"
    guard = FabricGuard(fabric, max_norm, policy=policy, run_dir=run_dir, checkpoints=checkpoints)
    if (model is None) != (optimizer is None):
        raise UsageError(
            "protect_fabric: give both model and optimizer, as fabric.setup(model, optimizer) returned them, or none"
        )
    if model is not None:
        guard.begin(model, optimizer)
    else:
        guard.await_setup()
    return guard


@dataclass(frozen=True)
class Call:
    """A forward: what the model was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FabricGuard(LoopGuard):
    """A guard that is told of everything by one Fabric."""

    def __init__(self, fabric: Any, max_norm: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self._fabric, self._asked_norm = fabric, max_norm
        self._stand_ins = StandIns()
        self._watched: Any = None
        self._bare: Any = None
        self._forwards = 0
        self._output_loss: Tensor | None = None
        self._rerunning = False

    def await_setup(self) -> None:
        """Begin with the next model and optimizer that Fabric sets up, in one call or in two."""

        def setup(module: nn.Module, *optimizers: Any, **kwargs: Any) -> Any:
            ready = real_setup(module, *optimizers, **kwargs)
            if optimizers:
                learn(ready[0], ready[1 : 1 + len(optimizers)])
            return ready

        def setup_module(*args: Any, **kwargs: Any) -> Any:
            self._watched = real_setup_module(*args, **kwargs)
            return self._watched

        def setup_optimizers(*optimizers: Any) -> Any:
            ready = real_setup_optimizers(*optimizers)
            if self._watched is not None:
                learn(self._watched, (ready,) if len(optimizers) == 1 else ready)
            return ready

        def learn(model: Any, optimizers: tuple[Any, ...]) -> None:
            if self.started:
                return
            if len(optimizers) > 1:
                raise UnsupportedError(
                    "protect(fabric): one optimizer is guarded; for several, leave protect(fabric) out and call "
                    "protect_fabric(fabric, model, optimizer) for each"
                )
            self.begin(model, optimizers[0])

        put = self._stand_ins.put
        real_setup = put(self._fabric, "setup", setup)
        real_setup_module = put(self._fabric, "setup_module", setup_module)
        real_setup_optimizers = put(self._fabric, "setup_optimizers", setup_optimizers)

    def begin(self, model: Any, optimizer: Any) -> None:
        """Start, with model and optimizer as Fabric made them."""
        if not (hasattr(model, "_forward_module") and hasattr(optimizer, "optimizer")):
            raise UsageError("protect_fabric: give model and optimizer as fabric.setup(model, optimizer) returned them")
        strategy = self._fabric.strategy
        plugin = strategy.precision
        if type(plugin).optimizer_step.__qualname__ not in _KNOWN_STEPS or type(strategy).__name__ == "DeepSpeedStrategy":
            raise UnsupportedError(
                f"nanproof cannot guard {type(strategy).__name__} with {type(plugin).__name__}: it steps the optimizer in its "
                "own way. Use a single device or ddp, with 32-true, bf16-mixed, 16-mixed or bf16-true"
            )
        self._watched, self._bare = model, optimizer.optimizer
        self.start(
            model._forward_module,
            self._bare,
            loss_fn=self._again,
            max_norm=None if self._asked_norm is ... else self._asked_norm,
            scaler=getattr(plugin, "scaler", None),
        )
        put = self._stand_ins.put
        for hook in (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ):
            self._stand_ins.callback(hook.remove)
        self._real_backward = put(self._fabric, "backward", self._stand_in_backward)
        self._real_clip = put(self._fabric, "clip_gradients", self._clip)
        self._real_step = put(strategy, "optimizer_step", self._step)

    def _close(self, alone: bool) -> None:
        self._stand_ins.close()
        super()._close(alone)

    # -- what stands in --------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._closed or self._rerunning or not torch.is_grad_enabled() or not module.training:
            return
        self._forwards += 1
        # A second forward before the backward: the loss is made of both, and how is not known.
        self.micro_batch(Call(args, dict(kwargs)) if self._forwards == 1 else UNKNOWN)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._rerunning:
            return
        loss = _loss_of(output)
        self._output_loss = loss if isinstance(loss, Tensor) else None

    def _stand_in_backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        if self._closed or (model is not None and model is not self._watched):
            self._real_backward(tensor, *args, model=model, **kwargs)
            return
        if not self.open or tensor is not self._output_loss:
            self.micro_batch(UNKNOWN)
        self._forwards, self._output_loss = 0, None
        seed = self.note_loss(tensor)
        self._real_backward(tensor if seed is None else tensor * seed, *args, model=model, **kwargs)

    def _clip(
        self,
        module: Any,
        optimizer: Any,
        clip_val: Any = None,
        max_norm: Any = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Notes the norm to clip to, and returns the norm of the gradients; the step clips."""
        if self._closed or getattr(optimizer, "optimizer", optimizer) is not self._bare:
            return self._real_clip(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)  # type: ignore[no-any-return]
        refuse_value_clipping(clip_val, "value")
        if float(norm_type) != 2.0:
            raise UnsupportedError(f"nanproof clips to a norm of type 2, not {norm_type}: leave norm_type out")
        if self._asked_norm is ...:
            self.max_norm = float(max_norm)
        return self._norm_now()

    def _norm_now(self) -> Tensor:
        """The norm of the gradients as they are. The step uses the same norms: no gradient is read twice."""
        stepper, parameters = self._stepper, self._stepper.parameters
        gradients = parameters.gradients(parameters.present())
        norms = parameters.norms(gradients, stepper._kernels)
        versions = [g._version for g in gradients]

        def known(asked: list[Tensor], kernels: Any = None) -> Tensor:
            del parameters.norms
            same = len(asked) == len(gradients) and all(a is b for a, b in zip(asked, gradients, strict=True))
            if same and versions == [g._version for g in asked]:
                return norms
            return parameters.norms(asked, kernels)

        parameters.norms = known  # type: ignore[method-assign, assignment]
        total: Tensor = torch.linalg.vector_norm(norms)
        return total if stepper.scale is None else total / stepper.scale.value()

    def _step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self._closed or optimizer is not self._bare:
            return self._real_step(optimizer, **kwargs)
        closure = kwargs.pop("closure", None)
        no_arguments(kwargs)
        result = closure() if closure is not None else None
        self.take()
        self.finish()
        self._forwards, self._output_loss = 0, None
        return result

    def _again(self, model: nn.Module, call: Call) -> Tensor:
        """The loss function: the forward, through Fabric's own wrapper where there is one."""
        whole = self._watched if model is self._watched._forward_module else model
        self._rerunning = True
        try:
            with without_trace(model):
                loss = _loss_of(whole(*call.args, **call.kwargs))
        finally:
            self._rerunning = False
        assert isinstance(loss, Tensor)
        return loss


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
