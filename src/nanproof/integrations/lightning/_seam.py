"""Where a guard takes hold of Lightning's Trainer: a few methods of one strategy and one precision plugin are stood in for while
a fit lasts, on the objects, never on the classes.

    strategy.on_train_batch_start   the last thing before the forward: a step begins
    strategy.training_step          what it raises is looked into
    strategy.backward               the loss, as backward gets it
    plugin.optimizer_step           Lightning runs forward and backward in a closure in here; then the guard takes the step
    plugin.clip_gradients           the norm to clip to is noted; the guard clips
    trainer.save_checkpoint         waits for the verdicts still under way

Private to Lightning: `plugin._after_closure`, which calls the hooks between backward and step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanproof._errors import NanproofError, UnsupportedError, UsageError
from nanproof.core._under_way import UNKNOWN, WRITES, Again
from nanproof.core.support._tree import gradients_now, map_tensors, own_copy, writes_to_batch
from nanproof.integrations._groups import parameters_of
from nanproof.integrations._loop_groups import LoopGroup, LoopGroups
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._versions import check_version
from nanproof.integrations.lightning._averages import EpochAverages
from nanproof.integrations.lightning._replay import Rerun, StepSchedules, TrainingStep

KNOWN_STEPS = {"Precision.optimizer_step", "MixedPrecision.optimizer_step"}


class Seam:
    """One fit with automatic optimization, while it lasts."""

    def __init__(self, trainer: Any, guard: ProtectedRun, max_norm: Any) -> None:
        """`max_norm`: what the user asked of the guard; `...` where the trainer's own setting counts."""
        self.trainer, self.guards = trainer, [guard]
        self.module: Any = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.plugin: Any = trainer.precision_plugin
        self.norms: list[Tensor | None] = [None]
        """The norm before clipping of every guard's last step, on the device."""
        self._max_norm = max_norm
        self._patches = Patches()
        self.schedules: StepSchedules | None = None
        self._rerun: Rerun | None = None
        self._losses = 0
        """Backwards since the last step."""
        self._forwards = 0
        """Of this batch."""
        self._unknown = False
        """This step cannot be run again: the guard leaves its schedule alone."""
        self._given: Any = None
        self._found: list[int] = []
        """The batch of the last micro-batch, and how often its tensors had been written before the forward."""
        self._writes = False
        """Whether `training_step` writes into its batch."""
        self._left: list[tuple[int, int]] | None = None
        """The gradients as backward and its hooks left them, where verdicts come late."""
        self._refused, self._too_far = guard.refused_for_good, 0
        """Refused steps that were seen to; schedules that moved before it was known that their step was refused."""
        self._steps_before, self._taken = 0, False
        self._averages, self._left_out = EpochAverages(trainer), guard.refused_so_far
        check(trainer)

    def start(self, step: int) -> None:
        """Start the guard, and stand in for the methods above."""
        self.schedules = StepSchedules(self.trainer, self.module)
        self._rerun = Rerun(self.strategy, self.module)
        self.guards[0].start(
            self.strategy.model,
            self.trainer.optimizers[0],
            loss_fn=self._rerun,
            max_norm=self.asked_norm(),
            scaler=getattr(self.plugin, "scaler", None),
            scheduler=self.schedules,
            step=step,
        )
        self.stand_in()

    def asked_norm(self) -> Any:
        if self._max_norm is not ...:
            return self._max_norm
        return self.trainer.gradient_clip_val or None

    def stand_in(self) -> None:
        wrap = self._patches.wrap
        wrap(self.strategy, "on_train_batch_start", self.on_train_batch_start)
        wrap(self.strategy, "training_step", self.training_step)
        wrap(self.strategy, "backward", self.backward)
        wrap(self.plugin, "post_backward", self.post_backward)
        wrap(self.plugin, "optimizer_step", self.optimizer_step)
        wrap(self.plugin, "clip_gradients", self.clip_gradients)
        wrap(self.trainer, "save_checkpoint", self.save_checkpoint)

    def let_go(self) -> None:
        """Everything is Lightning's own again."""
        self._patches.undo()
        if self.schedules is not None:
            self.schedules.give_back()

    def sync(self) -> None:
        """Wait for the verdicts under way."""
        for guard in self.guards:
            guard.sync()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs of the guards."""
        return {"guards": [self.guards[0].state_dict()], "taken": 0 if self.schedules is None else self.schedules.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["guards"]) != 1:
            raise UsageError(f"nanproof: the checkpoint is of a run with {len(state['guards'])} optimizers, and this one has 1")
        self.guards[0].load_state_dict(state["guards"][0])
        if self.schedules is not None:
            self.schedules.taken = state["taken"]

    # -- what stands in --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        answer = original(batch, batch_idx)
        self.note_averages(batch_idx)
        guard, parts = self.guards[0], self.trainer.accumulate_grad_batches
        if guard.open and batch_idx % parts == 0:
            guard.engine.abandon(keep_gradients=True)  # Lightning will clear the gradients: the step was never taken
        if batch_idx == 0 and self.schedules is not None:
            self.schedules.taken = 0
        if not guard.open:
            self._losses, self._unknown = 0, not (self._rerun is not None and self._rerun.possible)
        self._steps_before, self._taken, self._forwards = self.trainer.global_step, False, 0
        self._given = map_tensors(batch, Tensor.clone) if self._writes else own_copy(batch)
        self._found = writes_to_batch(self._given)
        guard.engine.begin(UNKNOWN if self._unknown else TrainingStep(self._given, batch_idx, parts, self._writes))
        return answer

    def note_averages(self, batch_idx: int) -> None:
        lag = max((guard.engine.judge.lag for guard in self.guards if guard.started), default=0)
        self._averages.note(first=batch_idx == 0, keep=(lag + 1) * self.trainer.accumulate_grad_batches)

    def training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._rerun is not None
        self._rerun.takes_index = len(args) > 1
        if self._forwards:  # an `optimizer_step` of the module's own runs the closure twice, and why is not known
            self._cannot_be_run_again()
        self._forwards += 1
        result = self._watched(lambda: original(*args, **kwargs))
        if writes_to_batch(self._given) != self._found:  # it would do so twice; of the batches to come a copy is kept
            self._writes = True
            step = TrainingStep(self._given, args[1] if len(args) > 1 else 0, self.trainer.accumulate_grad_batches)
            self._cannot_be_run_again(Again(step, whole=False, why_not=WRITES, written=True))
        return result

    def _cannot_be_run_again(self, again: Again | None = None) -> None:
        self.guards[0].engine.begin(UNKNOWN, again=again)
        self._unknown = True

    def post_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Hooks may change the gradients in here (`on_after_backward`), which running the step again would not."""
        guard = self.guards[0]
        before = gradients_now(guard.engine.trained) if guard.late else None
        result = original(*args, **kwargs)
        self._left = gradients_now(guard.engine.trained) if guard.late else None
        if self._left != before:
            self._cannot_be_run_again()
        return result

    def backward(self, original: Callable[..., Any], closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._losses += 1
        seed = self.guards[0].engine.loss(closure_loss)
        # Times 1, or times NaN where this rank's loss is bad: unlike `gradient=`, it fits a `backward` of the module's own.
        seeded = closure_loss if seed is None else closure_loss * seed
        return self._watched(lambda: original(seeded, optimizer, *args, **kwargs))

    def optimizer_step(
        self, original: Callable[..., Any], optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        refuse_arguments(kwargs)
        guard = self.guards[0]
        result = closure()
        self.plugin._after_closure(model, optimizer)
        # `training_step` returned None: Lightning steps with what was accumulated before, if anything, but not with a scaler.
        if not self._losses or (result is None and getattr(self.plugin, "scaler", None) is not None):
            guard.engine.abandon(keep_gradients=True, counts=True)
        else:
            if self._left is not None and self._left != gradients_now(
                guard.engine.judge.parameters.tensors
            ):  # in `on_before_optimizer_step`
                self._cannot_be_run_again()
            self.norms[0] = guard.engine.step()
            self._taken = True
            guard.engine.end()
            self._advance_schedules()
        self._losses, self._left = 0, None
        return result

    def _advance_schedules(self) -> None:
        """After a step that the guard cannot run again: unless it was refused. On CUDA that shows later, and then the schedule
        stands still once."""
        refused = self.guards[0].refused_for_good - self._refused
        self._refused += refused
        if self._unknown and self.schedules is not None:
            self._too_far += refused
            if self._too_far:
                self._too_far -= 1
            else:
                self.schedules.step()

    def batch_ended(self) -> None:
        """Lightning counts a step, and advances schedules, also where the module's own code chose not to take one."""
        refused = sum(guard.refused_so_far for guard in self.guards)
        if refused > self._left_out:
            self._averages.leave_out()
        self._left_out = refused
        if self.schedules is not None and self.trainer.global_step > self._steps_before and not self._taken:
            self.guards[0].engine.abandon(keep_gradients=True, counts=True)
            self.schedules.step()

    def clip_gradients(
        self, original: Callable[..., Any], optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Also where the module's own code asks for it."""
        refuse_value_clipping(clip_val, gradient_clip_algorithm)
        if self._max_norm is ...:
            self.guards[0].clip_to(clip_val)

    def save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.sync()
        original(*args, **kwargs)

    def _watched(self, run: Callable[[], Any]) -> Any:
        """Look into what is raised inside of a step."""
        try:
            return run()
        except NanproofError:
            raise
        except Exception as error:
            if self.guards[0].started:
                self.guards[0].engine.raised(error)
            raise


class ManualSeam(Seam):
    """One fit with manual optimization: a guard for all optimizers that one loss feeds. What `training_step` does between its
    steps is its own affair, so none of them can be run again; they are refused and attributed all the same."""

    def __init__(self, trainer: Any, guard: ProtectedRun, max_norm: Any) -> None:
        super().__init__(trainer, guard, max_norm)
        self._groups: LoopGroups
        self._loaded: dict[tuple[int, ...], dict[str, Any]] = {}
        """States from a checkpoint, by the places of their optimizers, until their guard starts."""
        self._fresh: list[Tensor] = []
        """Losses of the backwards since any optimizer's last step."""
        self._stepped_on: list[Tensor] = []
        """Those that the last step was about."""
        self._inside = False

    def start(self, step: int) -> None:
        self._groups = LoopGroups(self.trainer.optimizers, self.guards[0], self._start_group, step)
        self.guards = self._groups.runs
        self.stand_in()

    def _start_group(self, group: LoopGroup, step: int) -> None:
        group.guard.start(
            self.strategy.model,
            group.members,
            max_norm=None if self._max_norm is ... else self._max_norm,
            scaler=getattr(self.plugin, "scaler", None),
            step=step,
        )
        state = self._loaded.pop(self._places(group), None)
        if state is not None:
            group.guard.load_state_dict(state)

    def _places(self, group: LoopGroup) -> tuple[int, ...]:
        ids = {id(member) for member in group.members}
        return tuple(i for i, o in enumerate(self.trainer.optimizers) if id(getattr(o, "optimizer", o)) in ids)

    def state_dict(self) -> dict[str, Any]:
        started = self._groups.started
        return {
            "guards": [g.guard.state_dict() for g in started],
            "optimizers": [[*self._places(g)] for g in started],
            "taken": 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Which optimizers step together shows at the first backward. The states wait for that."""
        places = state.get("optimizers") or [[i] for i in range(len(state["guards"]))]
        count, known = len(self.trainer.optimizers), sum(map(len, places))
        if known > count or any(place >= count for several in places for place in several):
            raise UsageError(f"nanproof: the checkpoint is of a run with {known} optimizers, and this one has {count}")
        self._loaded = {tuple(several): saved for several, saved in zip(places, state["guards"], strict=True)}
        for group in self._groups.started:
            saved = self._loaded.pop(self._places(group), None)
            if saved is not None:
                group.guard.load_state_dict(saved)

    def on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        self.note_averages(batch_idx)
        return original(batch, batch_idx)

    def training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for group in self._groups.started:
            group.begin(UNKNOWN)
        self._inside = True
        try:
            return self._watched(lambda: original(*args, **kwargs))
        finally:
            self._inside = False
            for group in self._groups.started:
                group.guard.engine.abandon(keep_gradients=True)

    def backward(self, original: Callable[..., Any], closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        loss = closure_loss.detach()
        if loss.numel() > 1:
            weights = kwargs.get("gradient", args[0] if args else None)
            loss = (loss if weights is None else loss * weights).sum()
        self._groups.concerned(closure_loss, loss.reshape(()))
        self._fresh.append(loss.reshape(()))
        seeded = closure_loss
        if self.trainer.world_size > 1:
            seeded = closure_loss * torch.where(torch.isfinite(loss), 1.0, torch.nan).to(closure_loss.dtype)
        return original(seeded, optimizer, *args, **kwargs)

    def optimizer_step(
        self, original: Callable[..., Any], optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        refuse_arguments(kwargs)
        result = closure()
        self.plugin._after_closure(model, optimizer)
        # Where there was no backward since another optimizer's step, both step on the same ones.
        if self._fresh:
            self._stepped_on, self._fresh = self._fresh, []
        bare = self._known(optimizer)
        group = self._groups.at_step(bare)
        group.losses = list(self._stepped_on)
        group.step(bare, self._groups.backwards, clips=self._max_norm is ...)
        self.norms = [known.total for known in self._groups.started]
        if self._inside and group.complete:
            group.begin(UNKNOWN)  # here, not at its next backward: the buffers from before the forward have to be kept
        return result

    def post_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def clip_gradients(
        self, original: Callable[..., Any], optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        refuse_value_clipping(clip_val, gradient_clip_algorithm)
        bare = self._known(optimizer)
        group = self._groups.of(bare)
        if self._max_norm is ... and clip_val and group.started:
            group.clip(parameters_of(bare), float(clip_val))

    def _known(self, optimizer: Any) -> Any:
        bare = getattr(optimizer, "optimizer", optimizer)
        if self._groups.has(bare):
            return bare
        raise UnsupportedError(
            f"nanproof: {type(bare).__name__} steps, which configure_optimizers did not return: return every optimizer there"
        )


def check(trainer: Any) -> None:
    """What is known not to work: said before the first step."""
    refuse_value_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    if type(plugin).optimizer_step.__qualname__ not in KNOWN_STEPS or strategy.handles_gradient_accumulation:
        raise UnsupportedError(
            f"nanproof cannot guard {type(strategy).__name__} with {type(plugin).__name__}: it steps the optimizer in its "
            "own way. Use a single device or ddp, with 32-true, bf16-mixed, 16-mixed or bf16-true"
        )
    if not trainer.optimizers:
        raise UnsupportedError("nanproof: configure_optimizers returned None, so there is no step to guard")


def refuse_value_clipping(clip_val: Any, algorithm: Any) -> None:
    """Clipping by value makes a number of every Inf before anybody has looked at it."""
    if clip_val and str(getattr(algorithm, "value", algorithm)).lower() == "value":
        raise UnsupportedError(
            'nanproof cannot guard gradient_clip_algorithm="value": it makes a number of an infinite gradient and trains on '
            'it; use gradient_clip_algorithm="norm", or gradient_clip_val=None'
        )


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise UnsupportedError(f"nanproof: optimizer.step() was given {', '.join(kwargs)}, which a guarded step cannot pass on")


def check_package(thing: Any) -> None:
    """One warning where the version of Lightning is not one that is tested."""
    roots = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    check_version("lightning" if "lightning" in roots else "pytorch-lightning")
