"""Put an engine together: the one place that knows all of its parts, each made with everything it
needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanproof._policy import Policy
from nanproof.core._caps import SkipCaps
from nanproof.core._counters import Counters
from nanproof.core._engine import Engine, Loop
from nanproof.core._stopping import Stopping
from nanproof.core._telemetry import Journal
from nanproof.core._tell import Account
from nanproof.core._under_way import LossFn, UnderWay
from nanproof.core.judge._judge import MaxNorm
from nanproof.core.judge._optimizers import bare_optimizer, check_limits
from nanproof.core.judge._stats import SpikeWatch
from nanproof.core.judge._stepper import Stepper
from nanproof.core.support._signals import Preemption
from nanproof.explain._examiner import Examiner
from nanproof.observe._lookout import Lookout
from nanproof.observe._settings import Observe
from nanproof.recover._checkpoints import Checkpoints
from nanproof.recover._recovery import Recovery
from nanproof.recover.heal._healer import Healer
from nanproof.recover.state._state import Part


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine over an optimizer of torch, and the parts of it that a face speaks to."""

    engine: Engine
    stepper: Stepper
    recovery: Recovery
    examiner: Examiner
    healer: Healer


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    policy: Policy,
    account: Account,
    loss_fn: LossFn | None = None,
    max_norm: MaxNorm = 1.0,
    scaler: Any = None,
    scheduler: Any = None,
    run_dir: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
    counters: list[Counters] | None = None,
    loop: Loop | None = None,
    first: int = 0,
) -> Assembly:
    """Build an engine. Where a part cannot be made (a folder that cannot be written, say), the
    model is left as it was."""
    run_dir = None if run_dir is None else Path(run_dir).absolute()
    with ExitStack() as undo:
        bare = bare_optimizer(optimizer)
        check_limits(bare, max_norm)
        stepper = Stepper(model, bare, max_norm, scaler, policy, counters)
        lookout = Lookout.of(stepper, observe)
        undo.callback(lookout.close)
        journal = Journal(run_dir if stepper.ranks.rank == 0 else None, stepper.about)
        undo.callback(journal.close)
        under_way = UnderWay(stepper, scheduler)
        watch, caps, healer = SpikeWatch(), SkipCaps(policy), Healer.of(stepper, scheduler)
        parts: dict[str, Part] = {"watch": watch, "caps": caps, "heal": healer}
        recovery = Recovery(stepper, under_way, policy, checkpoints, run_dir, parts)
        examiner = Examiner(stepper, loss_fn, scheduler, policy, run_dir, healer.living, recovery.wants_samples)
        stopping = None
        if checkpoints is not None and checkpoints.on_signal:
            stopping = Stopping(Preemption(checkpoints.exit_status), stepper.ranks)
            undo.callback(stopping.preemption.close)
        engine = Engine(
            stepper,
            under_way,
            policy=policy,
            journal=journal,
            account=account,
            watch=watch,
            caps=caps,
            loss_fn=loss_fn,
            loop=loop or Loop(),
            explainer=examiner,
            recovery=recovery,
            healer=healer,
            lookout=lookout,
            stopping=stopping,
            first=first,
        )
        undo.pop_all()
    return Assembly(engine, stepper, recovery, examiner, healer)
