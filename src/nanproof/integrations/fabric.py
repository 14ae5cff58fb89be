"""Lightning's Fabric: a loop of one's own with `fabric.backward`, `fabric.clip_gradients` and `optimizer.step()`, guarded.

The loop stays as it is. Three methods are replaced on the Fabric object and its strategy: `backward` (the loss is noted),
`clip_gradients` (the norm to clip to is noted) and the strategy's `optimizer_step` (the guard takes the step); and `setup`, where
model and optimizer are still to come. A step can be run again where its loss is the model's own output; see `RootRecorder`.

Private to Fabric: `_FabricModule._forward_module`, the model with the wrapper of the strategy (DDP, say) around it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.errors import UnsupportedError, UsageError
from nanproof.integrations.lightning_replay import without_trace
from nanproof.integrations.lightning_seam import KNOWN_STEPS, check_package, refuse_arguments, refuse_value_clipping
from nanproof.integrations.loop import UNKNOWN, LoopGuard
from nanproof.integrations.patches import Patches
from nanproof.integrations.recorded import RecordedLoopGuard, RootRecorder
from nanproof.policy import Policy


def protect_fabric(
    fabric: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Any = None,
    max_norm: Any = ...,
    observe: Any = None,
) -> LoopGuard:
    """Guard a loop that uses Fabric; for several optimizers, once for each. `guard.close()` gives Fabric its methods back.

    Args:
        fabric: the Fabric.
        model, optimizer: as `fabric.setup` returned them. Without them, what Fabric sets up next counts.
        policy: what to do when; see `Policy`.
        run_dir: folder for records, incidents and bundles; "auto" is `nanproof` in the folder of Fabric's logger, if it has one.
        checkpoints: `Checkpoints(folder)`, to go back to.
        max_norm: clip to this norm; if it is not given, what `fabric.clip_gradients(max_norm=...)` is called with counts.
        observe: True or `Observe(...)`.
    """
    check_package(fabric)
    if (model is None) != (optimizer is None):
        raise UsageError(
            "protect_fabric: give both model and optimizer, as fabric.setup(model, optimizer) returned them, or none"
        )
    if run_dir == "auto":
        folder = getattr(next(iter(fabric.loggers), None), "log_dir", None)
        run_dir = None if folder is None else Path(folder) / "nanproof"
    guard = FabricGuard(fabric, max_norm, policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe)
    if model is not None:
        guard.begin(model, optimizer)
    else:
        guard.await_setup()
    return guard


class FabricGuard(RecordedLoopGuard):
    """A guard that one Fabric tells of everything."""

    def __init__(self, fabric: Any, max_norm: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.fabric, self._asked_norm = fabric, max_norm
        self.fabric_model: Any = None
        """The model as the loop calls it."""
        self._setups = Patches()
        self._recorder: RootRecorder | None = None

    def await_setup(self) -> None:
        """Begin with the next model and optimizer that Fabric sets up, in one call or in two."""
        fabric = self.fabric

        def setup(original: Callable[..., Any], module: nn.Module, *optimizers: Any, **kwargs: Any) -> Any:
            ready = original(module, *optimizers, **kwargs)
            if optimizers:
                self._begin_with_one(ready[0], ready[1 : 1 + len(optimizers)])
            return ready

        def setup_module(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.fabric_model = original(*args, **kwargs)
            return self.fabric_model

        def setup_optimizers(original: Callable[..., Any], *optimizers: Any) -> Any:
            ready = original(*optimizers)
            if self.fabric_model is not None:
                self._begin_with_one(self.fabric_model, (ready,) if len(optimizers) == 1 else ready)
            return ready

        self._setups.wrap(fabric, "setup", setup)
        self._setups.wrap(fabric, "setup_module", setup_module)
        self._setups.wrap(fabric, "setup_optimizers", setup_optimizers)

    def _begin_with_one(self, model: Any, optimizers: tuple[Any, ...]) -> None:
        if len(optimizers) > 1:
            raise UnsupportedError(
                "protect(fabric): one optimizer is guarded; for several, leave protect(fabric) out and call "
                "protect_fabric(fabric, model, optimizer) for each, after fabric.setup"
            )
        if not self.started:
            self.begin(model, optimizers[0])

    def begin(self, model: Any, optimizer: Any) -> None:
        """Start, with model and optimizer as Fabric made them."""
        if not (hasattr(model, "_forward_module") and hasattr(optimizer, "optimizer")):
            raise UsageError("protect_fabric: give model and optimizer as fabric.setup(model, optimizer) returned them")
        strategy = self.fabric.strategy
        plugin = strategy.precision
        if type(plugin).optimizer_step.__qualname__ not in KNOWN_STEPS or type(strategy).__name__ == "DeepSpeedStrategy":
            raise UnsupportedError(
                f"nanproof cannot guard {type(strategy).__name__} with {type(plugin).__name__}: it steps the optimizer in its "
                "own way. Use a single device or ddp, with 32-true, bf16-mixed, 16-mixed or bf16-true"
            )
        self.start(
            model._forward_module,
            optimizer.optimizer,
            loss_fn=self._again,
            max_norm=None if self._asked_norm is ... else self._asked_norm,
            scaler=getattr(plugin, "scaler", None),
        )
        self.fabric_model = model
        self._recorder = RootRecorder(model, self.micro_batch)
        _Desk.of(self.fabric).guards.append(self)

    def _close(self, alone: bool) -> None:
        self._setups.undo()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            _Desk.of(self.fabric).leave(self)
        super()._close(alone)

    def _again(self, model: nn.Module, call: Any) -> Tensor:
        """The loss function: the forward, through Fabric's own wrapper around the model."""
        assert self._recorder is not None
        with without_trace(model):
            return self._recorder.loss_fn(self.fabric_model, call)

    # -- what the desk passes on -----------------------------------------------------------------------------------------------

    def hear_of(self, loss: Tensor) -> Tensor | None:
        """A backward is to begin from this loss. Returns its seed on several ranks."""
        assert self._recorder is not None
        if not self._recorder.recognise(loss):
            self.micro_batch(UNKNOWN)
        return self.note_loss(loss, self._recorder.calls)

    def clip(self, max_norm: float | None) -> Tensor:
        """Notes the norm to clip to, which the step will do. Returns the norm of the gradients as they are; the step uses the
        same norms, so that no gradient is read twice."""
        if self._asked_norm is ...:
            self.clip_to(max_norm)
        stepper, parameters = self._stepper, self._stepper.parameters
        gradients = parameters.gradients(parameters.present())
        norms = parameters.norms(gradients, stepper._kernels)
        versions = [g._version for g in gradients]

        def known(asked: list[Tensor], kernels: Any = None) -> Tensor:
            del parameters.norms
            same = len(asked) == len(gradients) and all(a is b for a, b in zip(asked, gradients, strict=True))
            return norms if same and versions == [g._version for g in asked] else parameters.norms(asked, kernels)

        parameters.norms = known  # type: ignore[method-assign, assignment]
        total: Tensor = torch.linalg.vector_norm(norms)
        return total if stepper.scale is None else total / stepper.scale.value()


class _Desk:
    """Stands between one Fabric and the guards of its optimizers."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        self.guards: list[FabricGuard] = []
        self._patches = Patches()
        self._patches.wrap(fabric, "backward", self._backward)
        self._patches.wrap(fabric, "clip_gradients", self._clip_gradients)
        self._patches.wrap(fabric.strategy, "optimizer_step", self._optimizer_step)

    @classmethod
    def of(cls, fabric: Any) -> _Desk:
        desk = vars(fabric).get("_nanproof")
        if desk is None:
            desk = fabric._nanproof = cls(fabric)
        return desk  # type: ignore[no-any-return]

    def leave(self, guard: FabricGuard) -> None:
        self.guards.remove(guard)
        if not self.guards:
            self._patches.undo()
            del self.fabric._nanproof

    def _guard(self, optimizer: Any) -> FabricGuard | None:
        bare = getattr(optimizer, "optimizer", optimizer)
        return next((guard for guard in self.guards if guard.optimizer is bare), None)

    def _backward(self, original: Callable[..., Any], tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        # Those whose model was called since their last step; all, where none was seen to be.
        told = [guard for guard in self.guards if (guard.open if model is None else guard.fabric_model is model)]
        told = told or (self.guards if model is None else [])
        for guard in told:
            seed = guard.hear_of(tensor)
            tensor = tensor if seed is None else tensor * seed  # times 1, or times NaN where this rank's loss is bad
        original(tensor, *args, model=model, **kwargs)
        for guard in told:
            guard.went_back()

    def _clip_gradients(
        self,
        original: Callable[..., Any],
        module: Any,
        optimizer: Any,
        clip_val: Any = None,
        max_norm: Any = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        guard = self._guard(optimizer)
        if guard is None or (clip_val is None) == (max_norm is None):
            found: Tensor | None = original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
            return found
        refuse_value_clipping(clip_val, "value")
        if float(norm_type) != 2.0:
            raise UnsupportedError(f"nanproof clips to a norm of type 2, not {norm_type}: leave norm_type out")
        return guard.clip(max_norm)

    def _optimizer_step(self, original: Callable[..., Any], optimizer: Any, **kwargs: Any) -> Any:
        guard = self._guard(optimizer)
        if guard is None:
            return original(optimizer, **kwargs)
        closure = kwargs.pop("closure", None)
        refuse_arguments(kwargs)
        result = closure() if closure is not None else None
        guard.take()
        guard.finish()
        return result
