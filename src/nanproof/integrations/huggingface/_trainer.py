"""The Trainer of transformers, and everything built on it: guarded from the outside, one object at a time.

The Trainer's loop stays its own. Between it and the optimizer stand a few methods replaced on this one trainer while it trains:
what it gives to backward is noted, clipping becomes part of the guarded step, the schedule waits for the verdict, and the
log says what happened. What the forward was given is kept by reference, so that a refused step can be run again through the
trainer's own `training_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from nanproof._errors import AlreadyGuarded, TrainingHalted, UnsupportedError
from nanproof._policy import Policy
from nanproof.core._under_way import UNKNOWN
from nanproof.core.support._tree import gradients_now, map_tensors, writes_to_batch
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import TRAINER, ProtectedRun
from nanproof.integrations._versions import check_version
from nanproof.integrations.huggingface._callbacks import (
    ActivationMonitorCallback,
    GuardView,
)
from nanproof.integrations.huggingface._checkpoints import TrainerCheckpoints, choose
from nanproof.integrations.huggingface._losses import HonestLoss
from nanproof.integrations.huggingface._replay import Again, micro_batch
from nanproof.integrations.huggingface._resume import HealedResume
from nanproof.integrations.huggingface._tokenizer import keep_tokenizer
from nanproof.integrations.trl._grpo import check_grpo, extend_grpo
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints

log = logging.getLogger("nanproof")


_LOOP = replace(TRAINER, opens_fixes=True)


def protect_trainer(
    trainer: Trainer,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = "auto",
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard what this trainer trains. Call it before `trainer.train()`; what it returns fills as the run goes on.
    `observe` not given: as an `ActivationMonitorCallback` among the trainer's callbacks asks."""
    return attach(trainer, policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe).guard


def attach(
    trainer: Trainer,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = "auto",
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
) -> _Watch:
    """Put a guard between a trainer and its optimizer. It begins with the trainer's next `train`."""
    check_version("transformers")
    check_version("accelerate")
    if getattr(trainer, "nanproof", None) is not None:
        raise AlreadyGuarded("protect(trainer): this trainer is protected already; its guard is trainer.nanproof")
    if trainer.state.global_step:
        log.warning("nanproof: protect(trainer) comes after %d steps of training: the next train() is protected, they were not",
                    trainer.state.global_step)  # fmt: skip
    missing = [
        name for name in ("_prepare_inputs", "training_step", "callback_handler", "accelerator") if not hasattr(trainer, name)
    ]
    if missing:
        raise UnsupportedError(f"protect(trainer): this version of transformers has no Trainer.{missing[0]}")
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            "protect(trainer): DeepSpeed takes the step itself; protect its engine, nanproof.protect(trainer.model_wrapped), or "
            "train without it"
        )
    check_grpo(trainer)
    if run_dir == "auto":
        run_dir = Path(trainer.args.output_dir) / "nanproof" if trainer.args.output_dir else None
    guard = ProtectedRun(policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe, loop=_LOOP)
    watch = _Watch(trainer, guard, ask_monitor=observe is None)
    trainer.nanproof = guard  # type: ignore[attr-defined]
    return watch


def views_of(trainer: Trainer) -> list[GuardView]:
    """The callbacks of a trainer that read the records of its run."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, GuardView)]


class _Watch(TrainerCallback):
    """Stands between one trainer and its optimizer."""

    def __init__(self, trainer: Trainer, guard: ProtectedRun, ask_monitor: bool) -> None:
        self.trainer, self.guard = trainer, guard
        self._ask_monitor = ask_monitor
        """Whether a monitor of activations among the callbacks says what the guard observes."""
        self._patches = Patches()
        self._losses = HonestLoss(0, 0)
        self._checkpoints: TrainerCheckpoints | None = None
        self._resumed_from: str | Path | None = None
        self._healed = HealedResume(trainer, guard, self._begin)
        self._norm: Tensor | None = None
        self._again = Again(trainer)
        self._num_items: Any = None
        self._arguments: dict[str, Any] = {}
        """What the user gave where an argument has another value for a while."""
        self._inside = False
        """Within the trainer's `training_step`."""
        self._told = self._noted = False
        """Of the micro-batch under way: what the forward was given, what backward gets."""
        self._prepares = True
        """Whether `training_step` calls `_prepare_inputs`, as the trainer's own does."""
        self._unknown, self._refused = False, 0
        """Whether the step under way cannot be run again; refused steps after which the schedule has waited."""
        self._given, self._found = dict[str, Any](), list[int]()
        """The last micro-batch, and how often its tensors had been written before the forward."""
        self._writes = False
        """Whether the loss writes into its batch."""
        self._stopping = False
        """A signal asked the run to stop, and what it takes is under way."""
        self._written: list[tuple[int, int]] | None = None
        """The gradients as backward left them, where verdicts come late: which, and how often they had been written."""
        # Right behind the callback that decides what is due: everyone else's see a settled state.
        trainer.callback_handler.callbacks.insert(1, self)
        self._plain_train = trainer.train
        # A method of this object, so that a copy of the trainer trains the copy.
        trainer.train = self._train  # type: ignore[method-assign]

    # -- the run ---------------------------------------------------------------------------------------------------------------

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        return self.train(self._plain_train, *args, **kwargs)

    def train(self, plain: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, guarded. `plain`: the trainer's own `train`."""
        self._stopping = False
        resume_from_checkpoint = choose(self.trainer, resume_from_checkpoint)
        self._resumed_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, (str, Path)) else None
        try:
            with self._healed.remedies_first(self._resumed_from):
                result = plain(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self._save_if_asked(error)
            self._end(error)
            if self._stopping:
                self.guard.end_program(self._folder(None).name)
            raise
        self._end(None)
        if self._stopping:
            self.guard.end_program(self._folder(None).name)
        if isinstance(result, TrainOutput) and "train_loss" in result.metrics:
            result = result._replace(training_loss=result.metrics["train_loss"])
        return result

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model, optimizer and schedule are there: begin."""
        self._patches.undo()  # a run that was begun again with a smaller batch
        self._arguments = {}
        self._unknown, self._refused, self._written = False, self.guard.refused_for_good, None
        trainer, guard, accelerator = self.trainer, self.guard, self.trainer.accelerator
        if not self._healed.begun():
            self._begin()
        if guard.scheduler is not None:
            waits = _Waits(guard.scheduler, self._schedule_is_due)
            self._patches.set(trainer, "lr_scheduler", waits)
            self._patches.set(trainer.callback_handler, "lr_scheduler", waits)
        keep_tokenizer(trainer, guard.run_dir)
        if self._resumed_from is not None:
            TrainerCheckpoints.load_guard(guard, self._resumed_from)
        if getattr(args, "enable_jit_checkpoint", False):
            guard.ignore_signals("TrainingArguments(enable_jit_checkpoint=True)")
        self._losses = HonestLoss(state.global_step, guard.refused_so_far)
        self._checkpoints = TrainerCheckpoints(guard, args.save_total_limit)
        wrap = self._patches.wrap
        extend_grpo(trainer, self._patches, replaying=lambda: self._again.running, guard=guard)
        self._again.training_step = wrap(trainer, "training_step", self._step)
        wrap(trainer, "_prepare_inputs", self._prepared)
        wrap(trainer, "log", self._log)
        wrap(trainer, "save_model", self._save_model)
        wrap(trainer, "_save_checkpoint", self._save_checkpoint)
        wrap(trainer, "evaluate", self._settled)
        wrap(accelerator, "backward", self._backward)
        wrap(accelerator, "clip_grad_norm_", self._clip)
        wrap(trainer.optimizer, "step", self._optimizer_step)
        for view in views_of(self.trainer):
            view.guard = guard

    def _begin(self) -> None:
        """The guard begins: with the training, or where a healed run resumes, before the optimizer's state is loaded."""
        trainer, guard, limit = self.trainer, self.guard, self.trainer.args.max_grad_norm
        assert trainer.optimizer is not None
        self._refuse_what_cannot_be_guarded()
        if self._ask_monitor:
            monitors = (view for view in views_of(self.trainer) if isinstance(view, ActivationMonitorCallback))
            guard.observe = next((monitor.settings for monitor in monitors), None)
        guard.start(
            trainer.model_wrapped,
            trainer.optimizer,
            loss_fn=self._again.loss_fn,
            max_norm=limit if limit and limit > 0 else None,
            scaler=getattr(trainer.accelerator, "scaler", None),
            scheduler=self._schedule(),
            step=trainer.state.global_step,
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The filter of the log waits for the device at every loss, and hides what is wrong; rotation asks what proved good.
        Done only now: those who report the arguments have read them when the training began."""
        self._set_argument("logging_nan_inf_filter", False)
        self._set_argument("save_total_limit", None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has done its part of the step."""
        self.guard.engine.end()
        assert self._checkpoints is not None
        self._checkpoints.look()
        if not self._stopping and self.guard.stop_asked():
            self._stopping = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # a scheduler gives seconds
            self._set_argument("load_best_model_at_end", False)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What may follow (the last log, the best model) is of a settled state."""
        if self._stopping:
            control.should_evaluate = control.should_save = False
        if control.should_training_stop:
            self.guard.engine.abandon(keep_gradients=True)
        self.guard.sync()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._checkpoints is not None
        if args.should_save:
            self._checkpoints.rotate(state.best_model_checkpoint)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Here too, for who calls `Trainer.train(trainer)` past the method that was replaced."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Nothing stays replaced; the guard's last records are in."""
        self._patches.undo()
        self._arguments, self._given = {}, dict[str, Any]()
        state, limit = self.trainer.state, self._checkpoints.limit if self._checkpoints is not None else None
        last = limit == 1 and error is None and not self._stopping
        if self._checkpoints is not None and last and self.trainer.args.should_save:
            self._checkpoints.rotate(state.best_model_checkpoint, only_best=True)
        guard, already = self.guard, self.guard.closed
        guard.leave(error)
        if not already and guard.refused_so_far and self.trainer.is_world_process_zero():
            counts = guard.accepted_so_far, guard.refused_so_far, len(guard.incidents)
            log.warning("nanproof: %d steps taken, %d refused, %d incidents", *counts)

    def _refuse_what_cannot_be_guarded(self) -> None:
        trainer = self.trainer
        optimizer = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__
        if optimizer in ("Lomo", "AdaLomo"):
            raise UnsupportedError(
                f"protect(trainer): {optimizer} moves weights inside backward, without a step; in a loop of your own, "
                "Guard(..., policy=Policy(copy=True)) guards it"
            )

    def _schedule(self) -> Any:
        """The schedule, which advances with accepted steps. None for one that goes by a metric: it stays the trainer's."""
        schedule = self.trainer.lr_scheduler
        by_metric = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return None if schedule is None or by_metric or not _steps_alone(schedule) else schedule

    def _schedule_is_due(self) -> None:
        """The trainer would advance its schedule now. The guard does, but not after a step that cannot be run again."""
        unknown, self._unknown = self._unknown, False
        self.guard.engine.end()
        if unknown and self.guard.refused_for_good > self._refused:
            self._refused += 1
        elif unknown:
            self.guard.scheduler.step()

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def _step(
        self,
        original: Callable[..., Tensor],
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        self._inside, self._num_items, self._told, self._noted = True, num_items_in_batch, False, False
        try:
            if not self._prepares:
                self._tell(inputs)
            loss = original(model, inputs, num_items_in_batch, *args, **kwargs)
            if not self._noted:  # a training_step that calls loss.backward() itself, which cannot be kept from doing it again
                self._note(loss)
                self._cannot_be_run_again()
            elif writes_to_batch(self._given) != self._found:
                # A loss that writes into its batch would do so twice: this micro-batch is lost, of the next ones a copy is kept.
                self._writes = True
                self._cannot_be_run_again()
            if self.guard.late and any(map(_sees_gradients, self.trainer.callback_handler.callbacks)):
                self._written = gradients_now(self.guard.engine.trained)
        except torch.OutOfMemoryError:
            self.guard.engine.abandon()
            raise
        except BaseException as error:
            self.guard.engine.raised(error)
            raise
        finally:
            self._inside = False
        return self._losses.of(loss)

    def _prepared(self, original: Callable[..., Any], inputs: Any) -> Any:
        if self._again.running:
            return inputs
        prepared = original(inputs)
        if self._inside and not self._told:
            self._tell(prepared)
        return prepared

    def _tell(self, given: Any) -> None:
        """The guard learns what the forward gets, once a micro-batch."""
        batch = micro_batch(self.trainer, given, self._num_items)
        if self._writes:
            batch = map_tensors(batch, Tensor.clone)
        self._given, self._found = batch, writes_to_batch(batch)
        self.guard.engine.begin(batch)
        self._told = True

    def _note(self, loss: Tensor) -> Tensor | None:
        if not self._told:
            # A training_step that does not call _prepare_inputs: this micro-batch is lost, the next ones are told before it.
            self._prepares = False
            self._cannot_be_run_again()
            self._told = True
        self._noted = True
        return self.guard.engine.loss(loss)

    def _cannot_be_run_again(self) -> None:
        self.guard.engine.begin(UNKNOWN)
        self._unknown = True

    def _backward(self, original: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        if self._again.running:
            self._again.take(loss)
            return
        if self._inside:
            seed = self._note(loss)
            if seed is not None:
                kwargs["gradient"] = seed
        original(loss, **kwargs)

    def _clip(self, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not self.guard.open or norm_type != 2:
            return original(parameters, max_norm, norm_type)
        self.guard.clip_to(max_norm)
        # Filled when the step is taken; the trainer reads it when it logs.
        self._norm = torch.empty((), device=self.trainer.args.device)
        return self._norm

    def _optimizer_step(self, original: Callable[..., Any], closure: Any = None) -> None:
        if not self.guard.open:
            original(closure)
            return
        if not self.trainer.accelerator.sync_gradients:
            return
        if self._written is not None and self._written != gradients_now(self.guard.engine.trained):
            self._cannot_be_run_again()  # a callback has changed the gradients, which nobody can ask for a second time
        self._written = None
        total = self.guard.engine.step()
        # What the schedule looks for, to see that steps and it come in turn.
        self.trainer.optimizer._opt_called = True  # type: ignore[union-attr]
        if self._norm is not None:
            self._norm.copy_(total)
            self._norm = None

    # -- what is said, what is saved -------------------------------------------------------------------------------------------

    def _log(self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and "learning_rate" in logs:
            self.guard.sync()  # the trainer has just waited for the device
            self._losses.correct(logs, self.trainer, self.guard)
            logs["nanproof/skipped"] = self.guard.refused_in_all
            logs["nanproof/incidents"] = len(self.guard.incidents)
            if self.guard.observe is not None:
                logs["nanproof/forecasts"] = len(self.guard.forecasts)
            for view in views_of(self.trainer):
                logs.update(view.metrics())
        elif "train_loss" in logs:
            self.guard.sync()
            self._losses.correct_total(logs, self.trainer, self.guard)
        original(logs, *args, **kwargs)

    def _settled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.guard.sync()
        with self.guard.engine.evaluating():
            return original(*args, **kwargs)

    def _save_model(self, original: Callable[..., Any], output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        self.guard.sync()
        with self._own_arguments():
            return original(output_dir, *args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Also where a callback asks for it. The folder's mark says that it is being saved to until all of it is there."""
        trainer = self.trainer
        assert self._checkpoints is not None
        facts: dict[str, Any] = {"ranks": trainer.args.world_size} | ({"preempted": True} if self._stopping else {})
        with self._checkpoints.saving(self._folder(trial), trainer.args.should_save, **facts):
            return original(model, trial, *args, **kwargs)

    def _folder(self, trial: Any) -> Path:
        """The checkpoint of this step."""
        return Path(self.trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"

    def _save_if_asked(self, error: BaseException) -> None:
        """A signal to a group of processes ends the data workers too, which raises in this one: what was reached is saved
        before the program ends. Not where other ranks may not be coming."""
        trainer, guard = self.trainer, self.guard
        ended = isinstance(error, Exception) and not isinstance(error, TrainingHalted) and not guard.closed
        if not ended or not guard.preempted or self._checkpoints is None or trainer.args.world_size > 1:
            return
        guard.engine.abandon()
        self._stopping = True
        if trainer.state.global_step and self._checkpoints.last != self._folder(None):
            log.warning("nanproof: %s asked the run to stop, and then %r was raised", guard.preempted, error)
            trainer._save_checkpoint(guard.model, None)

    def _set_argument(self, name: str, value: Any) -> None:
        """Give an argument of the trainer another value while it trains."""
        args = self.trainer.args
        if name not in self._arguments:
            self._arguments[name] = getattr(args, name)
            self._patches.set(args, name, value)

    @contextmanager
    def _own_arguments(self) -> Iterator[None]:
        """The arguments as the user gave them: a checkpoint has them in it."""
        args = self.trainer.args
        changed = {name: getattr(args, name) for name in self._arguments}
        vars(args).update(self._arguments)
        try:
            yield
        finally:
            vars(args).update(changed)


class _Waits:
    """A schedule that the trainer may ask anything, but does not advance: the guard does, with accepted steps.

    It does so when the trainer would, while the gradients are still there: AdafactorSchedule looks for them.
    """

    def __init__(self, schedule: Any, advance: Callable[[], None]) -> None:
        self._schedule, self._advance = schedule, advance

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._advance()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._schedule)


def _steps_alone(schedule: Any) -> bool:
    """Whether it advances without being given a metric."""
    return type(schedule).__name__ != "GreedyLR"


def _sees_gradients(callback: Any) -> bool:
    """Whether it is called between backward and the step, where it may change them."""
    return type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
