"""Lightning's Fabric: your own loop with `fabric.backward`, `fabric.clip_gradients` and
`optimizer.step()`, guarded.

The loop stays as it is. Three methods are replaced on the Fabric object and its strategy:
`backward` (the loss is noted), `clip_gradients` (the norm to clip to is noted) and the strategy's
`optimizer_step` (the guard takes the step); and `setup`, where model and optimizer are still to
come. A step can be run again where its loss is the model's own output; see `RootRecorder`.

Private to Fabric: `_FabricModule._forward_module`, the model with the wrapper of the strategy (DDP,
say) around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nanproof._errors import UnsupportedError, UsageError
from nanproof._policy import Policy
from nanproof.explain.lines._recorded import RECORDED, RootRecorder
from nanproof.integrations._groups import parameters_of
from nanproof.integrations._loop_groups import LoopGroup, LoopGroups
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.lightning._replay import without_trace
from nanproof.integrations.lightning._seam import KNOWN_STEPS, check_package, refuse_arguments, refuse_value_clipping
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints


def protect_fabric(
    fabric: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    max_norm: Any = ...,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard a loop that uses Fabric. Optimizers that one loss feeds take one step, all or none.
    `guard.close()` gives Fabric its methods back.

    Args:
        fabric: the Fabric.
        model, optimizer: as `fabric.setup` returned them; several optimizers as a list. Without them, what Fabric sets up next
            counts. For several models, call this once for each.
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
    run = ProtectedRun(policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe, loop=RECORDED)
    loop = _FabricLoop(fabric, run, max_norm)
    if model is not None:
        loop.begin(model, optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
    else:
        loop.await_setup()
    return run


class _FabricLoop:
    """Tells runs of what one Fabric does with the optimizers of one model."""

    def __init__(self, fabric: Any, run: ProtectedRun, max_norm: Any) -> None:
        self.fabric, self.run, self._asked_norm = fabric, run, max_norm
        self.model: Any = None
        """The model as the loop calls it."""
        self.groups: LoopGroups | None = None
        self._setups = Patches()
        run.on_close(self._let_go)

    def await_setup(self) -> None:
        """Begin with the next model and optimizer that Fabric sets up, in one call or in two."""
        fabric = self.fabric

        def setup(original: Callable[..., Any], module: nn.Module, *optimizers: Any, **kwargs: Any) -> Any:
            ready = original(module, *optimizers, **kwargs)
            if optimizers:
                self._begin_once(ready[0], ready[1 : 1 + len(optimizers)])
            return ready

        def setup_module(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.model = original(*args, **kwargs)
            return self.model

        def setup_optimizers(original: Callable[..., Any], *optimizers: Any) -> Any:
            ready = original(*optimizers)
            if self.model is not None:
                self._begin_once(self.model, (ready,) if len(optimizers) == 1 else ready)
            return ready

        self._setups.wrap(fabric, "setup", setup)
        self._setups.wrap(fabric, "setup_module", setup_module)
        self._setups.wrap(fabric, "setup_optimizers", setup_optimizers)

    def _begin_once(self, model: Any, optimizers: Sequence[Any]) -> None:
        if self.groups is None:
            self.begin(model, optimizers)

    def begin(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Start, with model and optimizers as Fabric made them."""
        if not (hasattr(model, "_forward_module") and all(hasattr(optimizer, "optimizer") for optimizer in optimizers)):
            raise UsageError("protect_fabric: give model and optimizer as fabric.setup(model, optimizer) returned them")
        strategy = self.fabric.strategy
        plugin = strategy.precision
        if type(plugin).optimizer_step.__qualname__ not in KNOWN_STEPS or type(strategy).__name__ == "DeepSpeedStrategy":
            raise UnsupportedError(
                f"nanproof cannot guard {type(strategy).__name__} with {type(plugin).__name__}: it steps the optimizer in its "
                "own way. Use a single device or ddp, with 32-true, bf16-mixed, 16-mixed or bf16-true"
            )
        self.model = model
        self.groups = LoopGroups([optimizer.optimizer for optimizer in optimizers], self.run, self._start)
        _Desk.of(self.fabric).loops.append(self)

    def _start(self, group: LoopGroup, step: int) -> None:
        """Put the guard around a group."""
        if group.recorder is not None:
            group.recorder.close()
        group.recorder = recorder = RootRecorder(self.model, group.begin)

        def again(model: nn.Module, call: Any) -> Tensor:
            """The loss function: the forward, through Fabric's own wrapper around the model."""
            with without_trace(model):
                return recorder.loss_fn(self.model, call)

        group.guard.start(
            self.model._forward_module,
            group.members,
            loss_fn=again,
            max_norm=None if self._asked_norm is ... else self._asked_norm,
            scaler=getattr(self.fabric.strategy.precision, "scaler", None),
            step=step,
        )

    def _let_go(self) -> None:
        self._setups.undo()
        if self.groups is not None:
            _Desk.of(self.fabric).leave(self)

    # -- what the desk passes on -----------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether the next backward may concern it: its model was called, or nothing is guarded yet."""
        assert self.groups is not None
        return not self.run.started or any(group.guard.open for group in self.groups.started)

    def clip(self, optimizer: Any, max_norm: float) -> Tensor:
        """Return the norm of an optimizer's gradients, and see to it that they are clipped."""
        assert self.groups is not None
        return self.groups.of(optimizer).clip(parameters_of(optimizer), max_norm)

    def step(self, optimizer: Any) -> None:
        assert self.groups is not None
        self.groups.at_step(optimizer).step(optimizer, self.groups.backwards, clips=self._asked_norm is ...)


class _Desk:
    """Stands between one Fabric and the runs of its optimizers."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        self.loops: list[_FabricLoop] = []
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

    def leave(self, loop: _FabricLoop) -> None:
        self.loops.remove(loop)
        if not self.loops:
            self._patches.undo()
            del self.fabric._nanproof

    def _loop(self, optimizer: Any) -> tuple[_FabricLoop | None, Any]:
        bare = getattr(optimizer, "optimizer", optimizer)
        return next((loop for loop in self.loops if loop.groups is not None and loop.groups.has(bare)), None), bare

    def _backward(self, original: Callable[..., Any], tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        # Those whose model was called since their last step; all, where none was seen to be.
        loops = [loop for loop in self.loops if (loop.waits if model is None else loop.model is model)]
        loops = loops or (self.loops if model is None else [])
        fed = [group for loop in loops if loop.groups is not None for group in loop.groups.concerned(tensor, tensor.detach())]
        loss = tensor
        for group in fed:
            seed = group.loss(loss, loss)
            tensor = tensor if seed is None else tensor * seed  # times 1, or times NaN where this rank's loss is bad
        original(tensor, *args, model=model, **kwargs)
        for group in fed:
            group.guard.engine.backward_ended()

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
        loop, bare = self._loop(optimizer)
        if loop is None or (clip_val is None) == (max_norm is None):
            found: Tensor | None = original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
            return found
        refuse_value_clipping(clip_val, "value")
        if float(norm_type) != 2.0:
            raise UnsupportedError(f"nanproof clips to a norm of type 2, not {norm_type}: leave norm_type out")
        return loop.clip(bare, max_norm)

    def _optimizer_step(self, original: Callable[..., Any], optimizer: Any, **kwargs: Any) -> Any:
        loop, bare = self._loop(optimizer)
        if loop is None:
            return original(optimizer, **kwargs)
        closure = kwargs.pop("closure", None)
        refuse_arguments(kwargs)
        result = closure() if closure is not None else None
        loop.step(bare)
        return result
