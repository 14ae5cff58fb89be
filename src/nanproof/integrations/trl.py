"""What TRL's trainers need on top of the adapter for transformers' Trainer.

All of them: their losses keep books while they are computed (metrics, tokens seen, the entropy coefficient); a step that the
guard runs again must not be booked twice. `GRPOTrainer`: its loss takes exp of log-ratios of every token and masks afterwards, so
a token that does not count (a tool's output, padding in older versions) can overflow it; here such tokens are equal in all
policies before exp. And the signals of policy-gradient training are gathered on the device, and read when the trainer logs.

Private names of TRL that are used are listed in `NEEDED` and `BOOKS`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanproof.errors import UnsupportedError
from nanproof.numerics.rl import Signals, read_together

log = logging.getLogger("nanproof")

TESTED = ((1, 0), (1, 16))
"""The versions of TRL that the tests have run on, first and last."""

NEEDED = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
}
"""Methods of GRPOTrainer that are wrapped, and the parameters they must begin with."""

BOOKS = ("_metrics", "_total_train_tokens", "_entropy_window_stats", "entropy_coef", "_last_world_entropy")
"""What TRL's losses write to while they are computed."""

LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
"""Log-probabilities in a prepared batch of GRPOTrainer, beside those the loss computes itself."""

_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_std_min": torch.fmin,
    "reward_nonfinite": torch.add,
    "ratio_max": torch.fmax,
    "ratio_min": torch.fmin,
    "sampler_ratio_max": torch.fmax,
    "sampler_ratio_min": torch.fmin,
    "sampler_nonfinite": torch.add,
    "kl_max": torch.fmax,
}
"""How a signal is carried from one batch to the next; the others are averaged. fmax and fmin pass over NaN, but keep Inf."""


def is_trl(trainer: Any) -> bool:
    """Whether it is one of TRL's trainers, without importing TRL."""
    return "trl" in sys.modules and any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


class Extension:
    """What is added to a trainer of TRL. Made once, before the adapter wraps the trainer's methods."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._replaying = False
        self.grpo = GRPO(trainer, self) if _is_grpo(trainer) else None

    @property
    def replaying(self) -> bool:
        """A step that was already booked is being run again."""
        return self._replaying

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a loss that is computed again: the trainer's books stay as they are."""
        trainer, before = self._trainer, self._replaying
        books = {name: _copied(getattr(trainer, name)) for name in BOOKS if hasattr(trainer, name)}
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = before
            for name, value in books.items():
                setattr(trainer, name, value)


class GRPO:
    """A GRPOTrainer whose masked tokens cannot overflow its loss, and that logs what its policy does as `nanproof/rl/...`."""

    def __init__(self, trainer: Any, extension: Extension) -> None:
        _check(trainer)
        self._trainer, self._extension = trainer, extension
        self._batch: tuple[dict[str, Any], Tensor] | None = None
        self.window = Window()
        self._compute_loss = trainer._compute_loss
        self._log_probs = trainer._get_per_token_logps_and_entropies
        self._calculate_rewards = trainer._calculate_rewards
        self._log = trainer.log
        trainer._compute_loss = self._with_neutral_tokens
        trainer._get_per_token_logps_and_entropies = self._with_neutral_log_probs
        trainer._calculate_rewards = self._with_reward_signals
        trainer.log = self._with_signals

    def _with_neutral_tokens(self, model: Any, inputs: dict[str, Any]) -> Any:
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        keep = mask.bool()
        neutral = {name: _where(keep, inputs[name]) for name in LOG_PROBS if inputs.get(name) is not None}
        self._batch = inputs, keep
        try:
            return self._compute_loss(model, {**inputs, **neutral})
        finally:
            self._batch = None

    def _with_neutral_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's log-probabilities for the loss. Those of the old policy and of the reference, which TRL computes with the
        same method while it prepares a batch, are left as they are until they come into the loss."""
        found = self._log_probs(*args, **kwargs)
        if self._batch is None:
            return found
        inputs, keep = self._batch
        log_probs, entropies, *rest = found
        if self._trainer.model.training and not self._extension.replaying:
            self._note_tokens(inputs, keep, log_probs, entropies)
        return (_where(keep, log_probs), None if entropies is None else _where(keep, entropies), *rest)

    def _note_tokens(self, inputs: dict[str, Any], keep: Tensor, log_probs: Tensor, entropies: Tensor | None) -> None:
        with torch.no_grad():
            self.window.add(
                Signals.of_tokens(
                    log_probs,
                    keep,
                    old=inputs.get("old_per_token_logps"),
                    ref=inputs.get("ref_per_token_logps"),
                    sampler=inputs.get("sampling_per_token_logps"),
                    entropy=entropies,
                    level="sequence" if getattr(self._trainer, "importance_sampling_level", "token") == "sequence" else "token",
                )
            )

    def _with_reward_signals(self, *args: Any, **kwargs: Any) -> Any:
        """Rewards come per function and of all ranks, whole groups one after the other."""
        rewards = self._calculate_rewards(*args, **kwargs)
        trainer = self._trainer
        if trainer.model.training and trainer.num_generations > 1:
            weighted = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
            # TRL takes NaN for "not scored" and leaves it out; what no function scored has no reward.
            weighted = torch.where(rewards.isnan().all(1), torch.nan, weighted)
            self.window.add(Signals.of_rewards(weighted, trainer.num_generations))
        return rewards

    def _with_signals(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._trainer.model.training:
            logs.update({f"nanproof/rl/{name}": value for name, value in self.window.read().items()})
        return self._log(logs, *args, **kwargs)


class Window:
    """Signals between two logs, on the device: largest of the largest, mean of the means. What is not finite enters no mean; how
    many batches had such a signal is counted."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, signals: Signals) -> None:
        present = {name: value.to(torch.float32) for name, value in signals.present().items()}
        for name, value in present.items():
            combine = _COMBINED.get(name, torch.add)
            if name not in _COMBINED:
                finite = value.isfinite()
                self._counts[name] = self._counts.get(name, 0) + finite
                value = torch.where(finite, value, 0.0)
            before = self._values.get(name)
            self._values[name] = value if before is None else combine(before, value)
        if present:
            bad = ~torch.stack(list(present.values())).isfinite().all()
            self._values["nonfinite_batches"] = self._values.get("nonfinite_batches", 0.0) + bad

    def read(self) -> dict[str, float]:
        """The numbers so far, in one transfer, and a new window. A signal that was never finite is left out."""
        means = {name: self._values[name] / count for name, count in self._counts.items()}
        numbers = read_together({**self._values, **means})
        self._values, self._counts = {}, {}
        return {name: x for name, x in numbers.items() if x == x}


def _where(keep: Tensor, x: Tensor) -> Tensor:
    """0 where the mask says so, in the value and in the gradient."""
    return torch.where(keep, x, 0.0)


def _copied(book: Any) -> Any:
    return copy.deepcopy(book) if isinstance(book, dict) else book


def _is_grpo(trainer: Any) -> bool:
    return any(kind.__name__ == "GRPOTrainer" and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def _check(trainer: Any) -> None:
    """TRL's private names are where they were, and mean what they meant."""
    version = getattr(sys.modules.get("trl"), "__version__", "unknown")
    tested = " to ".join(".".join(map(str, x)) for x in TESTED)
    for name, parameters in NEEDED.items():
        method = getattr(trainer, name, None)
        found = tuple(inspect.signature(method).parameters) if callable(method) else None
        if found is None or found[: len(parameters)] != parameters:
            said = "is missing" if found is None else f"takes ({', '.join(found[: len(parameters)])})"
            raise UnsupportedError(
                f"{type(trainer).__name__}.{name} {said} in TRL {version}; nanproof wraps it as {name}({', '.join(parameters)}) "
                f"and was tested with TRL {tested}. Use one of these"
            )
    if not TESTED[0] <= _numbers(version) <= TESTED[1]:
        log.warning("nanproof: TRL %s was not tested (%s were); its private names look as they should", version, tested)
    if getattr(getattr(trainer, "args", None), "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss"):
        log.warning(
            "nanproof: use_liger_kernel computes GRPO's loss in one kernel: its masked tokens are not neutralised, and no ratio, "
            "KL or entropy is logged"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in version.split(".")[:2])
