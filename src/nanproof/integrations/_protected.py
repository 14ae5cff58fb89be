"""ProtectedRun: the face of the engine for a loop that somebody else runs. It is what `protect`
returns.

A trainer does forward and backward itself, in its own order, with its own contexts. Its adapter
tells the run of every micro-batch (`begin`) and every loss (`loss`), and lets it take the
optimizer's step (`step`, `end`). Given a loss function that does again what the trainer did with a
micro-batch, a refused step can be run again: it is explained, and steps held behind it are taken
later, as with `Guard.train_step`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nanproof import _wording as wording
from nanproof._assembly import Assembly, assemble
from nanproof._errors import UsageError
from nanproof._policy import Policy
from nanproof._records import Incident
from nanproof._text import shown
from nanproof.core._counters import Counters
from nanproof.core._engine import Engine, Loop
from nanproof.core._tell import Account, Face
from nanproof.core._under_way import UNKNOWN, LossFn
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints

__all__ = ["UNKNOWN", "ProtectedRun"]

log = logging.getLogger("nanproof")

TRAINER = Loop(begins=True, goes_back=False, leaves=False)
"""A loop that says when its steps begin, and whose count of steps goes on when the state goes
back."""


class ProtectedRun(Face):
    """A run that a trainer leads and nanproof guards. It begins with the trainer's loop; until then
    it has seen nothing."""

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Checkpoints | None = None,
        observe: Observe | bool | None = None,
        loop: Loop = TRAINER,
        incidents: list[Incident] | None = None,
    ) -> None:
        """`incidents`: a list that several runs share."""
        if policy is not None and not isinstance(policy, Policy):
            raise UsageError(f"protect(policy=...): a nanproof.Policy is needed, not {type(policy).__name__}")
        self.policy = policy if policy is not None else Policy()
        self.observe = Observe.of(observe)
        """What is looked at besides loss and gradients, from the next `start` on; None is
        nothing."""
        self.run_dir = run_dir
        """Folder for the records, from the next `start` on."""
        self.loop = loop
        self.counters: list[Counters] = []
        """Callables that return scalars on the device by name. Every record has their values, and
        no wait is added for them."""
        self.parts: Assembly | None = None
        """The engine and its parts since the last `start`, for tools built on top; what they offer
        may change."""
        self.refused_before = 0
        """Refused steps of the run before it was resumed."""
        self._checkpoints = checkpoints
        self.account = Account.of(self.policy, incidents)
        self._engine: Engine | None = None
        self._detach: list[Callable[[], object]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ProtectedRun:
        """For a copy of the trainer: one that has not begun, and knows what this one has seen."""
        other = type(self)(
            policy=self.policy, run_dir=self.run_dir, checkpoints=self._checkpoints, observe=self.observe, loop=self.loop
        )
        memo[id(self)] = other
        mine = self.account
        other.account = replace(
            mine,
            history=deque(mine.history, mine.history.maxlen),
            incidents=list(mine.incidents),
            forecasts=list(mine.forecasts),
            spoiled=deque(maxlen=mine.spoiled.maxlen),
        )
        other.refused_before = self.refused_before
        return other

    # -- what users see --------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """ "device", perhaps with a note, or "host: " and why the verdict has to be read on the
        host each step; "not started" before the loop begins."""
        return "not started" if self._engine is None else shown(self._engine.judge.path)

    @property
    def verdicts(self) -> str:
        """Where verdicts are read, in words."""
        judge = None if self._engine is None else self._engine.judge
        return self.path if judge is None else wording.verdicts(judge.on_device, judge.path_note)

    @property
    def on_device(self) -> bool:
        """Whether verdicts stay on the device."""
        return self._engine is not None and self._engine.judge.on_device

    @property
    def next_step(self) -> int:
        """The number of the step that comes next."""
        return 0 if self._engine is None else self._engine.next_step

    @property
    def accepted_so_far(self) -> int:
        """Steps that were taken, of those that the host knows of: on CUDA it learns of one two
        steps later."""
        return self.account.accepted

    @property
    def refused_so_far(self) -> int:
        """Refused steps that the host knows of."""
        return self.account.refused

    @property
    def refused_for_good(self) -> int:
        """Refused steps that could not be run again: after them no schedule went back."""
        return self.account.refused_for_good

    @property
    def refused_in_all(self) -> int:
        """Refused steps of the run, also those from before it was resumed."""
        return self.refused_before + self.account.refused

    @property
    def started(self) -> bool:
        return self._engine is not None

    @property
    def closed(self) -> bool:
        """The loop has not begun, or is over."""
        return self._engine is None or self._engine.closed

    @property
    def preempted(self) -> str:
        """The name of the signal that asked the run to stop, or "". With `Checkpoints(on_signal=True)` only."""
        return "" if self._engine is None else self._engine.preempted

    @property
    def model(self) -> nn.Module:
        return self.engine.judge.model

    @property
    def optimizer(self) -> Any:
        return self.engine.judge.optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule that advances with accepted steps, if there is one."""
        return None if self._engine is None else self._engine.under_way.scheduler

    def sync(self) -> None:
        """Wait for the verdicts still under way, and train again on batches they held up; not
        between micro-batches."""
        if self._engine is not None:
            self._engine.sync()

    def close(self, alone: bool = False) -> None:
        """Take in the last records, look at weights and optimizer state once more, and let go of
        the model. `alone`: other ranks may not be coming, so nothing that needs them is done."""
        self._let_go()
        if self._engine is not None:
            self._engine.close(alone)

    def leave(self, error: BaseException | None) -> None:
        """Close at the end of a loop that may have raised."""
        self._let_go()
        if self._engine is not None:
            self._engine.leave(error)

    def _let_go(self) -> None:
        while self._detach:
            self._detach.pop()()

    def __enter__(self) -> ProtectedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave(error)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; a step that has begun does not count. Waits for the last
        verdicts."""
        return {**self._started("state_dict").state_dict(), "refused": self.refused_in_all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load model and optimizer first."""
        self._started("load_state_dict").load_state_dict(state)
        # Apart from what this loop counts itself: by that schedules and averages are put right.
        self.refused_before = int(state.get("refused", 0)) - self.account.refused

    def __repr__(self) -> str:
        counts = f"{self.accepted_so_far} steps taken, {self.refused_so_far} refused, {len(self.incidents)} incidents"
        return f"<{type(self).__name__} ({self.path}): {counts}>"

    # -- what adapters call ----------------------------------------------------------------------------

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss_fn: LossFn | None = None,
        max_norm: float | str | None = 1.0,
        scaler: Any = None,
        scheduler: Any = None,
        step: int = 0,
    ) -> None:
        """The loop begins, at this step; a second time, if need be.

        Args:
            loss_fn: the loss of one micro-batch as backward gets it: divided for accumulation, not scaled. None: no step can
                be run again.
            scheduler: one that the engine advances after accepted steps; None where the loop does that.
        """
        if self._engine is not None:
            self._engine.close()
        self.account.forget_since(step)
        self.parts = assemble(
            model,
            optimizer,
            policy=self.policy,
            account=self.account,
            loss_fn=None if loss_fn is None else _Weighted(loss_fn),
            max_norm=max_norm,
            scaler=scaler,
            scheduler=scheduler,
            run_dir=self.run_dir,
            checkpoints=self._checkpoints,
            observe=self.observe,
            counters=self.counters,
            loop=self.loop,
            first=step,
        )
        self.adopt(self.parts.engine)

    def adopt(self, engine: Engine) -> None:
        """Serve this engine from now on: for an adapter that puts together its own."""
        self._engine = engine

    def on_close(self, detach: Callable[[], object]) -> None:
        """Call this when the run is closed, before anything else: an adapter lets go of its
        trainer."""
        self._detach.append(detach)

    @property
    def engine(self) -> Engine:
        """The engine since the last `start`."""
        return self._engine if self._engine is not None else self._started("engine")

    @property
    def open(self) -> bool:
        """A step has begun and was not taken."""
        return self._engine is not None and self._engine.open

    @property
    def late(self) -> bool:
        """Verdicts come later than their steps: one behind a bad one is held, and run again."""
        return self._engine is not None and self._engine.judge.lag > 0

    def stop_asked(self) -> bool:
        """Whether a signal asked the run to stop. Asked after a step; with several ranks by all of them, which get the same
        answer."""
        engine = self._engine
        return engine is not None and engine.stopping is not None and engine.stopping.asked(engine.next_step)

    def ignore_signals(self, why: str) -> None:
        """Leave signals to the trainer, which handles them itself."""
        stopping = None if self._engine is None else self._engine.stopping
        if stopping is not None:
            stopping.preemption.close()
            log.info("nanproof: Checkpoints(on_signal=True) leaves signals to %s", why)

    def end_program(self, where: str | Path) -> NoReturn:
        """End the program as the signal asked, with the status that the user chose. `where`: what was saved."""
        stopping = self.engine.stopping
        assert stopping is not None
        signal, status = stopping.requested or "a signal to another rank", stopping.preemption.status
        log.warning("nanproof: stopped by %s: saved %s, the program ends with exit status %d", signal, where, status)
        stopping.preemption.leave()

    def clip_to(self, max_norm: float | None) -> None:
        """The norm to clip to from now on; None or infinity does not clip."""
        judge = self.engine.judge
        if judge.max_norm != "auto":
            judge.max_norm = max_norm if max_norm is not None and 0 < max_norm < math.inf else None

    def _started(self, call: str) -> Engine:
        if self._engine is None:
            raise _not_started(call)
        return self._engine


def _not_started(call: str) -> UsageError:
    return UsageError(
        f"guard.{call}(): this run begins with the trainer's loop, which has not begun; to resume, use the trainer's own way"
    )


class _Weighted:
    """A loss function that returns what a micro-batch adds to its step, not the mean over it."""

    weighted = True

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss_fn(model, batch)
