"""Guard: the face of the engine for a loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._assembly import assemble
from nanproof._errors import NanproofError, UsageError
from nanproof._policy import Policy
from nanproof._text import shown
from nanproof.core._engine import Loop
from nanproof.core._tell import Account, Face
from nanproof.core.judge._optimizers import Evaluated
from nanproof.core.support._checks import OwnLoop, check_arguments, check_scalar
from nanproof.core.support._context import Schedulers
from nanproof.core.support._signals import shielded
from nanproof.explain.lines._guarded import GuardedLoop
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints


class Guard(Face):
    """Replaces clip_grad_norm_ and optimizer.step() in a training loop, and refuses the steps that
    would do harm.

    In your own loop, `guard.step(loss)` stands where clipping and stepping stood. Or give it
    `loss_fn(model, batch)` and call `guard.train_step(batch)`: then a refused batch leaves no trace
    at all, not even in random numbers or the schedule.
    """

    @shielded
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        max_norm: float | str | Mapping[torch.optim.Optimizer, float | None] | None = 1.0,
        scaler: Any = None,
        scheduler: Any = None,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Checkpoints | None = None,
        observe: Observe | bool | None = None,
    ) -> None:
        """
        Args:
            model: the module that is trained; wrapped in DistributedDataParallel, fully_shard or torch.compile is fine.
            optimizer: any optimizer over the model's parameters; torch's fused ones are guarded without a host read. Several,
                `[muon, adamw]`, are one step: all are taken, or none.
            loss_fn: `loss_fn(model, batch)` returns the scalar loss; needed for `train_step`.
            max_norm: clip the gradients to this norm; "auto" follows what is usual for the run; None does not clip. Of several
                optimizers, `{muon: None, adamw: 1.0}` clips each to a norm of its own.
            scaler: a GradScaler, if the loss is scaled. Do not call its `step`, `update` or `unscale_` yourself.
            scheduler: a learning-rate scheduler that `train_step` advances after every accepted step; or a list of them.
            policy: what to do when; see `Policy`.
            run_dir: folder for `steps.jsonl`, `incidents.jsonl`, the bundles of bad steps and the quarantine.
            checkpoints: `Checkpoints(folder)`: save the run's state now and then, for `resume` and for going back.
            observe: True or `Observe(...)`: activations, weights and attention in every record, and `forecasts`.
        """
        scheduler = Schedulers(scheduler) if isinstance(scheduler, (list, tuple)) else scheduler
        check_arguments(model, max_norm, policy, scheduler, checkpoints)
        self.policy = policy if policy is not None else Policy()
        self.account = Account.of(self.policy)
        self._lines = None if loss_fn is not None or self.policy.diagnose == "never" else GuardedLoop(model)
        try:
            made = assemble(
                model,
                optimizer,
                policy=self.policy,
                account=self.account,
                loss_fn=loss_fn if self._lines is None else self._lines.loss_fn,
                max_norm=max_norm,
                scaler=scaler,
                scheduler=scheduler,
                run_dir=run_dir,
                checkpoints=checkpoints,
                observe=observe,
                loop=Loop(lines=self._lines is not None),
            )
        except BaseException:
            if self._lines is not None:
                self._lines.close()
            raise
        self.model, self.optimizer, self.loss_fn, self.scheduler = model, made.stepper.optimizer, loss_fn, scheduler
        self.parts = made
        """The engine and its parts, for tools built on top; what they offer may change from version
        to version."""
        self.engine, self._own_loop = made.engine, OwnLoop(self.policy, scheduler)
        self.counters = made.stepper.counters
        """Callables that return scalars on the device by name. Every record has their values, and
        no wait is added for them."""

    @property
    def path(self) -> str:
        """ "device", perhaps with a note, or "host: " and why the verdict has to be read on the
        host each step."""
        return shown(self.engine.judge.path)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next. It falls when the run goes back."""
        return self.engine.next_step

    @property
    def preempted(self) -> str:
        """The name of the signal that asked the run to stop, or "". With `Checkpoints(on_signal=True)` only."""
        return self.engine.preempted

    def backward(self, loss: Tensor) -> None:
        """Replaces `loss.backward()`, scaled if there is a scaler. Optional in your own loop; it is
        what names a bad micro-batch by its loss, and what tells the other ranks of a bad loss whose
        gradients are finite."""
        self._check_open("backward")
        check_scalar(loss, "backward")
        if self._lines is not None:
            self._lines.at_backward(loss)
        self.engine.note_graph(loss)
        self.engine.judge.backward(loss)
        self.engine.note_gradients()

    @shielded
    def step(self, loss: Tensor | None = None, *, closure: Callable[[], Tensor] | None = None) -> None:
        """Replaces clip_grad_norm_ and optimizer.step() (and scaler.step/update). Call it after
        backward; zero_grad stays yours.

        Without a loss, the sum of those given to `backward` since the last step is taken. A refused
        step leaves weights, moments and buffers exactly as they were. `closure`: for an optimizer that
        evaluates the loss itself, such as LBFGS; it clears gradients, calls backward and returns the loss.
        """
        self._check_open("step")
        if closure is not None:
            if loss is not None:
                raise UsageError("guard.step(): give the loss or a closure, not both; the closure returns the loss")
            with torch.enable_grad():
                loss = closure()
        if loss is not None:
            check_scalar(loss, "step")
        elif not self.engine.judge.noted:
            raise UsageError("guard.step(): pass the loss, or use guard.backward(loss) instead of loss.backward()")
        self._own_loop.look(self.next_step)
        if self.engine.under_way.trains:
            raise UsageError("guard.step(): a train_step is still under way; call guard.sync() before your own forward")
        again = None if closure is None or loss is None else Evaluated(self.engine.trained, closure, [loss.detach()])
        begun = None
        if self._lines is not None:
            begun = self._lines.at_step(loss if closure is None else None, self.engine, self.parts.stepper.backwards)
        self.engine.step(loss=loss, closure=again, begun=begun)
        self.engine.end()
        if self._lines is not None:
            self._lines.stepped(self.engine.under_way.devices)

    def train_step(self, batch: Any, *micro_batches: Any) -> Tensor:
        """One whole step: zero_grad, forward, backward, guarded optimizer step, scheduler. Returns
        the loss, detached.

        More batches after the first are accumulated with it as micro-batches: the loss is the mean
        of theirs.
        """
        self._check_open("train_step")
        if self.loss_fn is None:
            raise UsageError(
                "guard.train_step() needs a loss function: Guard(model, optimizer, loss_fn=lambda model, batch: ...)"
            )
        return self.engine.train((batch, *micro_batches))

    def wrap(self, data: Any) -> Any:
        """Return a dataset or loader that skips quarantined samples and, if it is a loader, knows
        its position: with it a resumed or rewound run goes on with exactly the batch that comes
        next. Iterate over what this returns, not over the original."""
        return self.parts.recovery.wrap(data)

    @shielded
    def resume(self) -> int:
        """Load the newest good checkpoint, if there is one, and return the step to go on from; 0 if
        there is none.

        Weights, optimizer, schedule, loss scale, random numbers, the guard's own state and the
        position of wrapped loaders are put back. What was passed over, and why, is logged.
        """
        self._check_open("resume")
        if self.engine.is_forked:
            raise UsageError("guard.resume(): this guard belongs to another process; make a Guard in the one that trains")
        if not self.parts.recovery.has_checkpoints:
            raise UsageError("guard.resume(): there are no checkpoints; make the guard with checkpoints=Checkpoints(folder)")
        self.engine.resumed(self.parts.recovery.resume())
        return self.next_step

    def sync(self) -> None:
        """Wait for the verdicts still under way, and train again on batches they held up. Call it
        before saving anything, or before your own loop after `train_step`; it matters on CUDA only,
        where verdicts come two steps late. What is recorded by then is in the files of `run_dir` afterwards."""
        self.engine.sync()
        self.engine.tell.flush()

    def close(self) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of
        the model."""
        self.engine.close()
        if self._lines is not None:
            self._lines.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the guard. Waits for the last verdicts (`sync`): take it
        before the states of model, optimizer and scheduler, so that all of them are of one
        moment."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load model and optimizer first; steps still under way
        are forgotten."""
        self.engine.load_state_dict(state)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raised = isinstance(error, Exception) and not isinstance(error, NanproofError)
        if self._lines is not None and raised and not self.engine.closed:
            with suppress(Exception):  # the loop's own exception is the one to raise
                self._lines.raised(error, self.engine)  # type: ignore[arg-type]
        self.engine.leave(error)
        if self._lines is not None:
            self._lines.close()

    def _check_open(self, call: str) -> None:
        if self.engine.closed:
            raise UsageError(f"guard.{call}(): this guard is closed; make a new one to go on")
