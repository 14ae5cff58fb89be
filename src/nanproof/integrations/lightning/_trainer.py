"""Lightning: protect a Trainer, by `protect_trainer` or by `NanproofCallback` among its callbacks.

Both names of the package are taken, `lightning` and `pytorch_lightning`. Which one is in use shows in the classes of the objects
that are given and in what is loaded; neither is imported from here.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanproof._errors import AlreadyGuarded, TrainingHalted, UnsupportedError, UsageError
from nanproof._policy import Policy
from nanproof.integrations._observed import ObservedRun
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.lightning._checkpoints import CheckpointChoice
from nanproof.integrations.lightning._observed import FitObserver
from nanproof.integrations.lightning._seam import ManualSeam, Seam, check_package, refuse_value_clipping
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints

log = logging.getLogger("nanproof")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def protect_trainer(
    trainer: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    max_norm: Any = ...,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard the fits of a Lightning Trainer. Call it before `fit`; returns the guard, whose `incidents` and `history` fill.

    Args:
        trainer: the Trainer of `lightning.pytorch` or `pytorch_lightning`.
        policy: what to do when; see `Policy`.
        run_dir: folder for records, incidents and bundles; "auto" is `nanproof` in the trainer's log folder.
        checkpoints: `Checkpoints(folder)`, to go back to. With one optimizer only.
        max_norm: clip to this norm; if it is not given, `Trainer(gradient_clip_val=...)` counts.
        observe: True or `Observe(...)`; of several guards, the first one observes.
    """
    refuse_value_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    settings: dict[str, Any] = {"policy": policy, "checkpoints": checkpoints, "max_norm": max_norm, "observe": observe}
    callback = _first_of(trainer)
    if callback is None:
        callback = NanproofCallback(run_dir=run_dir, **settings)
        callback.by_protect = True
        trainer.callbacks.insert(0, callback)  # before those that save
    elif callback.observe_only:
        callback.guard_with(run_dir=run_dir, **settings)
    elif callback.by_protect or settings != _DEFAULTS or run_dir not in (None, "auto"):
        raise AlreadyGuarded("protect: this trainer has a NanproofCallback already; use its `guard`")
    assert isinstance(callback.guard, ProtectedRun)
    return callback.guard


_DEFAULTS = {"policy": None, "checkpoints": None, "max_norm": ..., "observe": None}


def _first_of(trainer: Any) -> NanproofCallback | None:
    """The callback that guards a trainer; others like it only show its guard."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, NanproofCallback)), None)


class NanproofCallback:
    """A Lightning callback that guards the fit: `Trainer(callbacks=[NanproofCallback()])`.

    `nanproof.protect(trainer)` does the same. With both, or with two of these callbacks, there is one guard: the first one's.

    With `observe_only=True` it records losses and gradient norms before clipping, and that is all. A bad step is recorded and
    then taken, as without nanproof: weights may become NaN. Nothing is refused or diagnosed, no checkpoint is passed over, and
    clipping, schedules and epoch averages stay Lightning's own; `nanproof/grad_norm` and `nanproof/incidents` join the log. If
    `protect` or `nanproof run` guards the trainer as well, it is guarded.

    What it makes is a `Callback` of whichever package is loaded by then, of both if both are.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NanproofCallback:
        bases = tuple(sys.modules[name].Callback for name in _PACKAGES if hasattr(sys.modules.get(name), "Callback"))
        if not bases:
            raise UsageError("NanproofCallback: import lightning, or pytorch_lightning, before making one")
        made: NanproofCallback = object.__new__(_callback_class((cls, *bases)))
        return made

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Checkpoints | None = None,
        max_norm: Any = ...,
        observe: Observe | bool | None = None,
        observe_only: bool = False,
    ) -> None:
        settings: dict[str, Any] = {"policy": policy, "checkpoints": checkpoints, "max_norm": max_norm, "observe": observe}
        given = [name for name, value in settings.items() if value is not _DEFAULTS[name]]
        if observe_only and given:
            raise UsageError(f"NanproofCallback(observe_only=True, {given[0]}=...): nothing is guarded, so leave {given[0]} out")
        self.observe_only, self.by_protect = observe_only, False
        """`by_protect`: added by `protect`, not by the user."""
        self.guard: ProtectedRun | ObservedRun = ObservedRun()
        """The first guard; `incidents` holds those of all. With `observe_only`, what was recorded."""
        self.guards: list[Any] = [self.guard]
        """One for all optimizers that one loss feeds."""
        self._settings: dict[str, Any] = {"run_dir": run_dir, "checkpoints": checkpoints}
        self._max_norm = max_norm
        if not observe_only:
            self.guard_with(run_dir=run_dir, **settings)
        self._observer: FitObserver | None = None
        self._seam: Seam | None = None
        self._choice: CheckpointChoice | None = None
        """From the start of a fit until its checkpoint is loaded."""
        self._loaded: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        """The state at the end of the last fit."""
        self._stopping = False
        """A signal asked the run to stop."""
        self._counts: tuple[tuple[int, ...], dict[str, Tensor]] | None = None

    def guard_with(self, *, policy: Any, run_dir: Any, checkpoints: Any, max_norm: Any, observe: Any) -> None:
        """Guard the fits to come with these settings."""
        self.guard = ProtectedRun(policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe)
        self.guards, self.observe_only, self._max_norm = [self.guard], False, max_norm
        self._settings = {"run_dir": run_dir, "checkpoints": checkpoints}

    # -- Lightning's hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._loaded = {}  # a checkpoint that was loaded to validate or test with is not what the next fit goes on from
        self._let_go_of_choice()
        if stage == "fit" and _first_of(trainer) is self and not self.observe_only:
            self._choice = CheckpointChoice(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._let_go_of_choice()
        first = _first_of(trainer)
        if first is not None and first is not self:
            self.guard, self.guards = first.guard, first.guards
            return
        check_package(trainer)
        self.guard.run_dir = self._folder(trainer)
        if isinstance(self.guard, ObservedRun):
            self._start_observing(trainer, self.guard)
            return
        manual = not pl_module.automatic_optimization
        count = len(trainer.optimizers)
        if count > 1 and self._settings["checkpoints"] is not None:
            raise UnsupportedError(
                "nanproof: Checkpoints(...) holds one optimizer, and this module has several: leave `checkpoints` out and use "
                "Lightning's own ModelCheckpoint"
            )
        seam = (ManualSeam if manual else Seam)(trainer, self.guard, self._max_norm)
        self._seam, self._counts = seam, None
        try:
            seam.start(trainer.global_step // max(count, 1))
            if self._loaded:
                seam.load_state_dict(self._loaded)
                self._loaded = {}
        except BaseException:
            seam.let_go()
            self._seam = None
            raise
        self.guards, self._stopping = seam.guards, False
        if _requeues(trainer):
            self.guard.ignore_signals("Lightning's own requeueing")
        if not manual:
            _warn_of_gradient_hooks(pl_module, self.guard)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._observer is not None:
            self._observer.before_backward(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._observer is not None:
            self._observer.before_step(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._observer is not None:
            self._observer.batch_ended()
            self._log(trainer, pl_module, [run.norm for run in self._observer.runs])
        seam = self._seam
        if seam is None or not isinstance(self.guard, ProtectedRun):
            return
        seam.batch_ended()
        if not self._stopping and self.guard.stop_asked():
            self._stopping = True
            trainer._signal_connector.received_sigterm = True  # Lightning ends the fit once this batch is done with
        self._log(trainer, pl_module, seam.norms)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._seam is not None:
            self._seam.sync()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._seam is not None:
            self._seam.sync()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._seam is not None:
            self._seam.sync()
        self._finish(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A signal ends a fit in here. One to a group of processes also ends the data workers, which raises earlier."""
        guard = self.guard
        if self._seam is None or not isinstance(guard, ProtectedRun):
            self._finish(exception)
            return
        alone = isinstance(exception, Exception) and trainer.world_size == 1 and not isinstance(exception, TrainingHalted)
        saves = self._stopping or (alone and bool(guard.preempted))
        path = self._last_path(trainer)
        if saves:
            trainer.save_checkpoint(path)
        self._finish(exception)
        if saves:
            try:
                guard.end_program(path)
            except SystemExit as end:
                if not isinstance(exception, SystemExit):
                    trainer._teardown()
                    raise
                exception.code = end.code  # which Lightning raises again, after its own cleanup

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._finish(None)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs of the guards: into every checkpoint of Lightning's."""
        return self._last if self._seam is None else self._seam.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this before the optimizers are there: what is in it waits for the start."""
        self._loaded = state_dict

    # -- parts -----------------------------------------------------------------------------------------------------------------

    def _start_observing(self, trainer: Any, run: ObservedRun) -> None:
        self._counts = None
        observer = FitObserver(trainer, run)
        if observer.observes:
            self._observer, self.guards = observer, [*observer.runs]

    def _log(self, trainer: Any, pl_module: Any, norms: Iterable[Tensor | None]) -> None:
        if trainer.barebones:
            return
        values = {f"nanproof/grad_norm{f'_{i}' if i else ''}": norm for i, norm in enumerate(norms) if norm is not None}
        values |= self._counted(pl_module.device)
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _folder(self, trainer: Any) -> Path | None:
        folder = self._settings["run_dir"]
        if folder == "auto":
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "nanproof"
        return None if folder is None else Path(folder)

    def _last_path(self, trainer: Any) -> Path:
        """Where `fit(ckpt_path="last")` looks."""
        saver = trainer.checkpoint_callback
        folder = getattr(saver, "dirpath", None) or trainer.default_root_dir
        return Path(folder) / f"{getattr(saver, 'CHECKPOINT_NAME_LAST', 'last')}{getattr(saver, 'FILE_EXTENSION', '.ckpt')}"

    def _counted(self, device: torch.device) -> dict[str, Tensor]:
        """The counts as tensors on the device, made only when they change: making one waits for the device."""
        names: tuple[str, ...] = ("nanproof/incidents",)
        counts: tuple[int, ...] = (len(self.guard.incidents),)
        if isinstance(self.guard, ProtectedRun):
            names, counts = ("nanproof/skipped", *names), (sum(guard.refused_in_all for guard in self.guards), *counts)
        if self.guard.observe is not None:
            names, counts = (*names, "nanproof/forecasts"), (*counts, len(self.guard.forecasts))
        if self._counts is None or self._counts[0] != counts:
            self._counts = counts, {n: torch.tensor(float(c), device=device) for n, c in zip(names, counts, strict=True)}
        return self._counts[1]

    def _let_go_of_choice(self) -> None:
        choice, self._choice = self._choice, None
        if choice is not None:
            choice.let_go()

    def _finish(self, error: BaseException | None) -> None:
        """The fit is over: Lightning gets its methods back, and the guards let go of the model."""
        self._let_go_of_choice()
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        if self._seam is None:
            return
        if error is None:
            self._last = self.state_dict()
        elif self._seam.trainer.world_size == 1:  # other ranks may not be coming
            with suppress(Exception):
                self._last = self.state_dict()
        seam, self._seam = self._seam, None
        seam.let_go()
        for guard in reversed(self.guards):
            guard.leave(error)


@functools.cache
def _callback_class(bases: tuple[type, ...]) -> Any:
    return type(bases[0].__name__, bases, {"__module__": bases[0].__module__, "__qualname__": bases[0].__qualname__})


def _requeues(trainer: Any) -> bool:
    """Whether Lightning saves and requeues a job of Slurm itself when a signal comes."""
    return bool(getattr(trainer._accelerator_connector.cluster_environment, "auto_requeue", False))


def _warn_of_gradient_hooks(module: Any, guard: ProtectedRun) -> None:
    """What the module does to gradients in hooks of its own is not done again where a step is."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    home = next((k for k in type(module).__mro__ if k.__name__ == "LightningModule"), None)
    own = [name for name in hooks if getattr(type(module), name, None) is not getattr(home, name, None)]
    if own and guard.on_device and guard.policy.lag != 0 and module.device.type == "cuda":
        log.warning(
            "nanproof: steps held behind a bad one are run again without %s.%s; if that writes to gradients, use Policy(lag=0)",
            type(module).__name__,
            " and ".join(own),
        )
