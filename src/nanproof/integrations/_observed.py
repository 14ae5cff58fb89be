"""ObservedRun: a run that a trainer leads and nanproof only records.

It reads the loss of every backward and the norm of every gradient before clipping, and writes the same records as a guard. It
has no engine: nothing of the run is changed, so nothing can be refused, restored or run again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof import _wording as wording
from nanproof._errors import NanproofError
from nanproof._policy import Policy
from nanproof._records import Incident
from nanproof.core._evidence import Witness, from_finding, make_incident
from nanproof.core._telemetry import Courier, Journal
from nanproof.core._tell import Account, Face, Teller
from nanproof.core.judge._optimizers import bare_optimizer
from nanproof.core.judge._parameters import Parameters, unwrap
from nanproof.core.judge._stats import RunningStats, SpikeWatch
from nanproof.core.judge._verdict import Reading, Verdict, judge
from nanproof.core.support._context import learning_rates
from nanproof.core.support._environment import about
from nanproof.core.support._ranks import Ranks
from nanproof.integrations._groups import parameters_of

log = logging.getLogger("nanproof")

PATH = "observe only"


@dataclass(frozen=True, slots=True)
class _Look:
    """What was read from one step, on its way to the host."""

    step: int
    names: tuple[str, ...]
    present: list[int]
    lr: tuple[float | Tensor, ...]
    losses: list[Tensor]
    read: Callable[[], list[float]]


class ObservedRun(Face):
    """The records of a run that is only observed. `history` and `incidents` fill as it goes on.

    The first of several bad steps in a row is an incident, with the action "recorded". It is not diagnosed, and no bundle is
    written: the optimizer steps on, so the state that a replay needs is gone.
    """

    path = PATH
    observe = None
    """It looks at losses and gradients only."""

    def __init__(self, run_dir: str | Path | None = None, incidents: list[Incident] | None = None) -> None:
        """`incidents`: a list that several runs share."""
        self.run_dir = run_dir
        self.account = Account.of(Policy(), incidents)
        self.next_step = 0
        self.norm: Tensor | None = None
        """The norm of all gradients of the last step, before clipping, on the device."""
        self._losses: list[Tensor] = []
        self._looked = False
        """Whether the gradients of the step under way were read."""
        self._pending: deque[_Look] = deque()
        self._bad = False
        """Whether the last step was bad."""
        self._open = False

    def start(
        self, model: nn.Module, optimizer: Optimizer, *, max_norm: float | None = None, scaler: Any = None, step: int = 0
    ) -> bool:
        """The loop begins, at this step. Return whether it is observed. `max_norm`: what the trainer clips to."""
        try:
            self.close()
            self._start(model, bare_optimizer(optimizer), max_norm, scaler, step)
        except Exception as error:  # a folder that cannot be written, say
            why = str(error) if isinstance(error, NanproofError) else repr(error)  # text: an exception holds the model
            log.warning("nanproof: this run is not observed: %s", why)
        return self._open

    def _start(self, model: nn.Module, optimizer: Optimizer, max_norm: float | None, scaler: Any, step: int) -> None:
        policy = Policy()
        self.next_step, self._bad, self._losses, self._looked = step, False, [], False
        self.account.forget_since(step)
        self._max_norm, self._scaler = max_norm, scaler if scaler is not None and scaler.is_enabled() else None
        parameters, trained = Parameters(model, optimizer), parameters_of(optimizer)
        device, dtype = parameters.device, parameters.dtype
        ranks, self._courier, self._watch = Ranks(model, device), Courier(device), SpikeWatch()
        self._stats = RunningStats(device, dtype, policy.warmup_steps, policy.spike_sensitivity)
        self._lag = 2 if device.type == "cuda" else 0

        def facts() -> dict[str, Any]:
            known = about(
                unwrap(model), optimizer, policy, path=PATH, max_norm=max_norm, ranks=ranks.world, scaled=self._scaler is not None
            )
            return {name: value for name, value in known.items() if name != "policy"}

        self._journal = Journal(self.run_dir if ranks.rank == 0 else None, facts)
        self._tell = Teller(self.account, self._journal, ranks.rank == 0)
        # Last, so that a start that fails keeps nothing of the model.
        self._model, self._optimizer, self._parameters, self._ranks = model, optimizer, parameters, ranks
        self._trained, self._open = trained, True

    def loss(self, loss: Tensor) -> None:
        """Just before a backward, with the loss it starts from, not scaled."""
        if self._open:
            self._losses.append(loss.detach().sum())

    def look(self, *, unscaled: bool = False) -> None:
        """Read the gradients of the step, once. Call it before clipping. `unscaled`: without the loss scale already."""
        if self._open and not self._looked:
            self._looked = True
            self._safely(lambda: self._look(unscaled))

    def end(self) -> None:
        """The optimizer has stepped: take in the records that are due."""
        if not self._looked:
            return
        self._looked, self._losses = False, []
        self.next_step += 1
        self._safely(lambda: self._catch_up(self._lag))

    def sync(self) -> None:
        """Wait for the records still under way."""
        if self._open:
            self._safely(lambda: self._catch_up(0))

    def close(self) -> None:
        """Take in the last records and let go of the model."""
        self.sync()
        if self._open:
            self._let_go()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.account.accepted} steps, {len(self.incidents)} incidents>"

    def _safely(self, act: Callable[[], None]) -> None:
        """Switch the observer off if it fails: it must never stop a run."""
        try:
            act()
        except Exception as error:
            log.warning(
                "nanproof: cannot observe step %d: %s. Observation is off for the rest of this run", self.next_step, repr(error)
            )
            self._let_go()

    def _let_go(self) -> None:
        self._open = self._looked = False
        self._pending.clear()
        del self._model, self._optimizer, self._parameters, self._ranks, self._trained
        self._journal.close()

    @torch.no_grad()
    def _look(self, unscaled: bool) -> None:
        trained = parameters_of(self._optimizer)
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            self._parameters, self._trained = Parameters(self._model, self._optimizer), trained
        parameters = self._parameters
        present = parameters.present()
        # Not `parameters.gradients`, which may lay a gradient out anew.
        norms = parameters.norms([g for i in present if (g := parameters.tensors[i].grad) is not None])
        scale = None
        if self._scaler is not None and not unscaled:
            scale = self._scaler.scale(torch.ones((), device=parameters.device))
        losses = [loss.to(parameters.device, parameters.dtype, non_blocking=True) for loss in self._losses]
        verdict = judge(
            torch.stack(losses).sum() if losses else torch.zeros((), device=parameters.device, dtype=parameters.dtype),
            norms,
            also_finite=None,
            bad_buffer=None,
            loss_decides=not self._ranks.several,
            scale=scale,
            max_norm=self._max_norm,
            stats=self._stats,
            skip_spikes=False,
            held=None,
        )
        learned = verdict.learned
        assert learned is not None
        self._stats.take(learned.point, learned.loss, learned.spike, verdict.skip == 0)
        self.norm = verdict.packed[Verdict.TOTAL]
        parcel = self._courier.send(verdict.packed)
        rates = learning_rates(self._optimizer)
        self._pending.append(_Look(self.next_step, parameters.names, present, rates, losses, parcel))

    def _catch_up(self, lag: int) -> None:
        while len(self._pending) > lag:
            self._consume(self._pending.popleft())

    def _consume(self, look: _Look) -> None:
        reading = Reading.of(look.read(), self._scaler is not None)
        left_out = self._scaler is not None and not math.isfinite(reading.total)  # torch's GradScaler does not step then
        lr = tuple(float(x) for x in look.lr)
        record = replace(reading, bad=False).record(look.step, look.names, look.present, lr, checked=False)
        record = replace(record, action="skipped") if left_out else record
        self.account.accepted += not left_out
        self.account.history.append(record)
        self._journal.step(record)
        if left_out and math.isfinite(reading.loss) and (not reading.scale or reading.scale >= 1):
            return  # the loss scale is finding its level
        before, self._bad = self._bad, reading.bad
        finding = self._watch.cut_short() if reading.bad else self._watch.see(record, self._ranks.several)
        if finding is not None:
            self._tell.incident(from_finding(finding, self.account.history))
        if reading.bad and not before:
            self._tell.incident(self._incident(look, reading))

    def _incident(self, look: _Look, reading: Reading) -> Incident:
        bad = [i for i, loss in enumerate(look.losses) if not bool(torch.isfinite(loss))]
        loss_bad = bool(bad) or not math.isfinite(reading.loss)
        part = bad[0] if bad and len(look.losses) > 1 else None
        witness = Witness(loss_bad, buffers_bad=False, weights_bad=False, rank=None, micro_batch=part, guilty=0)
        norms = [(look.names[i], norm) for i, norm in zip(look.present, reading.norms, strict=True)]
        incident = make_incident(look.step, reading, norms, witness, None, [])
        taken = "" if self._scaler is not None and not math.isfinite(reading.total) else wording.TAKEN
        return replace(incident, action="recorded", message="; ".join(filter(None, (incident.message, taken))))
