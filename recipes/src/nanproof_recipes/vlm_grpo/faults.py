"""A fault put into a session on purpose, once, and eyes for what a session meets: through hooks of the model, and in between the
trainer and its rewards. No other code of the recipe knows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanproof import UsageError
from nanproof_recipes.arms import check_choice
from nanproof_recipes.library import Patches, rehearsing
from nanproof_recipes.vlm_grpo.train import grpo_loop

NONE, LOGITS, GRADIENT, REWARD = "none", "logits", "gradient", "reward"
FAULTS = (NONE, LOGITS, GRADIENT, REWARD)
AT = 1
"""The step that is met, counted from 0: something has gone well before it."""
TOKEN = 2
"""The token of a reply whose logits are met."""


def known(fault: str, steps: int) -> str:
    """The fault, if there is one of that name and a session of so many steps comes to it."""
    check_choice("fault", fault, FAULTS)
    if fault != NONE and steps < AT + 2:
        raise UsageError(
            f"--steps {steps}: a fault is put into the second step, and one has to come after it. Give at least {AT + 2}"
        )
    return fault


class Session:
    """Counts what a session meets, and puts the fault into it. `undo` takes everything out again."""

    def __init__(self, model: Any, *, batch: int, trainer: str, fault: str = NONE) -> None:
        self.fault, self.fired = fault, False
        self.rows = self.bad_rows = 0
        """Rows of logits that were sampled from, and those of them with a NaN or +Inf."""
        self.first_bad_row: str | None = None
        self.rewards = self.bad_rewards = 0
        self._batch = batch
        self._generations = self._tokens = self._steps = 0
        self._patches = Patches()
        handle = model.register_forward_hook(self._sampled, with_kwargs=True)
        self._patches.later(handle.remove)
        if fault == GRADIENT:
            layer = model.get_decoder().layers[0]
            self._patches.later(layer.register_forward_hook(self._trained).remove)
        self._watch_rewards(trainer)
        self.undo = self._patches.undo

    # -- logits ----------------------------------------------------------------------------------------------------------------

    def _sampled(self, model: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """A forward of sampling: no gradient, and logits of one position alone. The first of a generation has the prompt. One
        that is run again to find out where a row went bad is none."""
        logits = getattr(out, "logits", None)
        if rehearsing() or torch.is_grad_enabled() or not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[1] != 1:
            return None
        self._tokens += 1
        if _length(kwargs) > 1:
            self._generations, self._tokens = self._generations + 1, 0
        if self.fault == LOGITS and not self.fired and self._generations == AT + 1 and self._tokens == TOKEN:
            self.fired = True
            logits = out.logits = logits.clone()
            logits[0, 0, 0] = math.nan
        bad = (logits.isnan() | (logits == math.inf)).any(-1).view(-1).nonzero().view(-1).tolist()
        if bad and self.first_bad_row is None:
            self.first_bad_row = f"in generation {self._generations - 1}, row {bad[0]}, token {self._tokens}"
        self.rows += len(logits)
        self.bad_rows += len(bad)
        return out

    # -- gradients -------------------------------------------------------------------------------------------------------------

    def _trained(self, layer: Any, args: Any, out: Any) -> None:
        """A forward of training: its output gets a gradient, and that gradient an Inf."""
        hidden = out[0] if isinstance(out, tuple) else out
        if rehearsing() or not torch.is_grad_enabled() or not hidden.requires_grad:
            return
        if self._steps == AT and not self.fired:
            self.fired = True
            hidden.register_hook(_with_inf)
        self._steps += 1

    # -- rewards ---------------------------------------------------------------------------------------------------------------

    def _watch_rewards(self, trainer: str) -> None:
        if trainer == "loop":
            self._patches.wrap(grpo_loop, "reward", self._rewarded())
            return
        from nanproof_recipes.vlm_grpo.train import grpo_trl

        for name in ("caption_reward", "place_reward"):  # TRL leaves out a reply that no function has a reward for
            self._patches.wrap(grpo_trl, name, self._rewarded())

    def _rewarded(self) -> Callable[..., float]:
        calls = 0

        def rewarded(original: Callable[..., float], text: str, scene: Any) -> float:
            nonlocal calls
            found = original(text, scene)
            if self.fault == REWARD and calls == AT * self._batch:
                self.fired, found = True, math.nan
            calls += 1
            self.rewards += 1
            self.bad_rewards += not math.isfinite(found)
            return found

        return rewarded


def _length(kwargs: dict[str, Any]) -> int:
    """Positions that a forward was given."""
    given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    return 0 if given is None else int(given.shape[1])


def _with_inf(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[0] = math.inf
    return gradient
