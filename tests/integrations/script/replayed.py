"""Imported before a script runs under `nanproof run`: runs every step again before it is taken, and prints whether the losses are
the same bits."""

from __future__ import annotations

import json
import sys

from nanproof.core._engine import Engine
from nanproof.explain.replay._recorder import Moment

take = Engine._take


def compared(self, attempt, loss, norms, **how):
    losses = [float(noted.detach()) for noted, _ in self.judge.noted]
    for number, (again, then) in enumerate(zip(attempt.again, losses, strict=False)):
        line = {"step": attempt.step, "part": number, "whole": again.whole, "why": again.why_not, "then": then}
        if again.whole and attempt.random is not None and attempt.mode is not None:
            random = getattr(again.batch, "random", None) or attempt.random
            moment = Moment(attempt.step, (again.batch,), (), random, attempt.mode)
            self.explainer._find_random_numbers(moment)
            outcome = self.explainer._replay(moment, self.loss_fn).run(backward=False)
            line |= {"now": outcome.loss, "error": repr(outcome.error) if outcome.error else ""}
            line["anew"] = getattr(again.batch, "draws_anew", False)
        print("replayed", json.dumps(line), file=sys.stderr)
    return take(self, attempt, loss, norms, **how)


Engine._take = compared
