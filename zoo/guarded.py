"""Run a case under the guard, as a user would."""

from __future__ import annotations

from dataclasses import dataclass

import nanproof
from nanproof import Incident
from zoo.registry import Training


@dataclass
class Told:
    """What the guard had to say."""

    incidents: list[Incident]
    error: Exception | None
    guard: nanproof.Guard

    @property
    def first(self) -> Incident | None:
        return self.incidents[0] if self.incidents else None


def run(t: Training, **kwargs) -> Told:
    guard = nanproof.Guard(
        t.model, t.optimizer, loss_fn=t.loss_fn, max_norm=t.max_norm, scaler=t.scaler, scheduler=t.scheduler, **kwargs
    )
    error = None
    try:
        for batch in t.batches:
            if t.own_loop:
                loss = t.loss_fn(t.model, batch)
                (t.scaler.scale(loss) if t.scaler else loss).backward()
                guard.step(loss)
            else:
                guard.train_step(batch)
    except Exception as raised:  # some cases end in one; the incident must be there all the same
        error = raised
    finally:
        guard.close()
    return Told(guard.incidents, error, guard)
