"""What TRL's GRPOTrainer needs on top of the adapter for transformers' Trainer, which does the rest for it and for all of TRL.

Its loss takes exp of the log-ratios of every token and masks afterwards. A token that does not count (what a tool answered, or
padding in older versions) can so overflow it: Inf * 0 is NaN. Here such tokens have equal log-probabilities in all policies
before exp; where nothing overflows, loss and gradients are the same bit for bit. And the signals of policy-gradient training are
gathered on the device, and read when the trainer logs: as `nanproof/rl/...`, before anything is clipped or truncated. What would
have overflowed is counted with them, and said once. Sampling has a file of its own.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nanproof._errors import UnsupportedError
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._versions import check_version
from nanproof.integrations.trl._masked import MaskedOverflow
from nanproof.integrations.trl._sampling import SAMPLING, Sampling
from nanproof.numerics.rl import Signals, read_together

log = logging.getLogger("nanproof")

NEEDED = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    **SAMPLING,
}
"""Private methods of GRPOTrainer that are wrapped, and the parameters they must begin with."""

LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
"""Log-probabilities in a prepared batch, beside those that the loss computes itself."""

_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_std_min": torch.fmin,
    "reward_nonfinite": torch.add,
    "ratio_max": torch.fmax,
    "ratio_min": torch.fmin,
    "sampler_ratio_max": torch.fmax,
    "sampler_ratio_min": torch.fmin,
    "sampler_nonfinite": torch.add,
    "kl_max": torch.fmax,
    "masked_overflow": torch.add,
}
"""How a signal is carried from one batch to the next; the others are averaged. fmax and fmin pass over NaN, but keep Inf."""


def extend_grpo(trainer: Any, patches: Patches, replaying: Callable[[], bool], guard: ProtectedRun | None = None) -> None:
    """To be called when training begins, before the adapter replaces methods of its own. Does nothing to a trainer that is not
    a GRPOTrainer. `replaying` says whether a step is being run again, which must not be counted twice. With a guard, sampling is
    guarded too, and what was found is an incident of it."""
    if _is_grpo(trainer):
        check_grpo(trainer)
        _Extension(trainer, patches, replaying, guard)


def check_grpo(trainer: Any) -> None:
    """TRL's private names are where they were; says what will not work."""
    if not _is_grpo(trainer):
        return
    check_version("trl")
    for name, parameters in NEEDED.items():
        method = getattr(trainer, name, None)
        found = tuple(inspect.signature(method).parameters) if callable(method) else None
        if found is None or found[: len(parameters)] != parameters:
            said = "is missing" if found is None else f"takes ({', '.join(found[: len(parameters)])})"
            version = getattr(sys.modules.get("trl"), "__version__", "unknown")
            raise UnsupportedError(
                f"protect(trainer): {type(trainer).__name__}.{name} {said} in TRL {version}; it is needed as "
                f"{name}({', '.join(parameters)}, ...), to guard sampling and keep masked tokens from overflowing the loss. Use "
                "TRL 1.16"
            )
    if getattr(trainer, "compute_liger_loss", None) is not None and getattr(trainer.args, "use_liger_kernel", False):
        log.warning(
            "nanproof: with use_liger_kernel this version of TRL computes the whole loss in one kernel: its masked tokens are "
            "left as they are, and neither ratios nor KL nor entropy are logged"
        )


class _Extension:
    """Stands between one GRPOTrainer and its loss."""

    def __init__(self, trainer: Any, patches: Patches, replaying: Callable[[], bool], guard: ProtectedRun | None) -> None:
        self._trainer, self._replaying, self._guard = trainer, replaying, guard
        self._sampling = None if guard is None else Sampling(trainer, patches, guard)
        # These losses clamp exp of the ratio, or never take it: without a KL term nothing of a masked token comes through.
        harmless = getattr(trainer, "loss_type", "") in ("cispo", "vespo") and not getattr(trainer, "beta", 0.0)
        self._overflow = None if guard is None or harmless else MaskedOverflow(guard)
        """None once it was said."""
        self._window: Window | None = Window()
        """None when signals cannot be had; training goes on without."""
        self._batch: tuple[dict[str, Any], Tensor] | None = None
        """The batch whose loss is being computed, and which of its tokens count."""
        patches.wrap(trainer, "_compute_loss", self._loss)
        patches.wrap(trainer, "_get_per_token_logps_and_entropies", self._log_probs)
        patches.wrap(trainer, "_calculate_rewards", self._rewards)
        patches.wrap(trainer, "log", self._log)
        patches.later(self._last_words)

    def _loss(self, original: Callable[..., Any], model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        keep = mask.bool()
        neutral = {name: _neutral(inputs.get(name), keep) for name in LOG_PROBS if name in inputs}
        self._batch = inputs, keep
        try:
            loss = original(model, {**inputs, **neutral}, *args, **kwargs)
        finally:
            self._batch = None
        if self._overflow is not None and self._counts:
            self._overflow.judge(loss)
        return loss

    def _log_probs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The policy's log-probabilities for the loss. Those of the old policy and of the reference, which TRL computes with the
        same method while it prepares a batch, are left as they are until they come into the loss."""
        found = original(*args, **kwargs)
        if self._batch is None:
            return found
        inputs, keep = self._batch
        log_probs, entropies, *rest = found

        def signals() -> Signals:
            # A row without a token that counts was left out as a whole: what it would have done is nobody's loss.
            there = inputs["completion_mask"].bool().any(1, keepdim=True).expand_as(keep)
            new = _neutral(log_probs.detach(), there)
            policies = {name: _neutral(inputs.get(f"{name}_per_token_logps"), there) for name in ("old", "ref")}
            said = Signals.of_tokens(
                new,
                keep,
                **policies,
                sampler=inputs.get("sampling_per_token_logps"),
                entropy=entropies,
                level=getattr(self._trainer, "importance_sampling_level", "token"),
            )
            if self._overflow is not None:
                self._overflow.look(said, new, policies.values(), keep)
            return said

        self._note(signals)
        return (_neutral(log_probs, keep), _neutral(entropies, keep), *rest)

    def _rewards(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One row per completion of all ranks, group after group, and one column per reward function."""
        rewards = original(*args, **kwargs)
        valid: Tensor | None = None
        if self._sampling is not None:
            rewards, valid = self._sampling.unscored(rewards)

        def signals() -> Signals:
            weights = self._trainer.reward_weights.to(rewards.device, non_blocking=True)
            # TRL takes NaN for "not scored" and leaves it out. What no function scored has no reward.
            scored = torch.where(rewards.isnan().all(1), torch.nan, (rewards * weights).nansum(1))
            return Signals.of_rewards(scored, self._trainer.num_generations, valid)

        self._note(signals)
        return rewards

    def _note(self, signals: Callable[[], Signals]) -> None:
        """Of training, once for every batch. Nothing here waits for the device."""
        if self._window is None or not self._counts:
            return
        try:
            self._window.add(signals())
        except Exception as error:
            self._window = self._overflow = None
            log.warning("nanproof: no more nanproof/rl/... in the logs, because they cannot be computed here: %r", error)

    @property
    def _counts(self) -> bool:
        """Whether this is training, for the first time."""
        return bool(self._trainer.model.training) and not self._replaying()

    def _log(self, original: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Everything comes to the host in one transfer. A log between two batches, such as the summary, has nothing to say."""
        if self._window is not None and self._window.some and self._trainer.model.training:
            beside = {} if self._sampling is None else self._sampling.counters()
            found = self._window.read({**beside, **(self._overflow.first if self._overflow is not None else {})})
            if self._overflow is not None and self._overflow.say(found):
                self._overflow = None
            logs.update({f"nanproof/{name if name in beside else f'rl/{name}'}": value for name, value in found.items()})
            if found.get("reward_nonfinite"):
                log.warning(
                    "nanproof: up to step %d: rewards that are NaN or Inf: %d. TRL leaves a reply without a reward out, and an "
                    "infinite one makes its group teach nothing; look at the reward functions",
                    self._trainer.state.global_step - 1, found["reward_nonfinite"],
                )  # fmt: skip
        return original(logs, *args, **kwargs)

    def _last_words(self) -> None:
        """The run is over, perhaps because a device failed: what no log has told yet."""
        with suppress(RuntimeError):
            if self._overflow is not None:
                self._overflow.say(read_together(self._overflow.first))


class Window:
    """Signals between two logs, on the device: the largest of the largest, the mean of the means. What is not finite enters no
    mean; how many batches had such a signal is counted."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._finite: dict[str, Tensor] = {}
        """How many numbers are in a mean."""

    def add(self, signals: Signals) -> None:
        """Nothing here waits for the device."""
        present = {name: value.to(torch.float32) for name, value in signals.present().items()}
        for name, value in present.items():
            if name not in _COMBINED:
                finite = value.isfinite()
                value = torch.where(finite, value, 0.0)
                self._finite[name] = finite + self._finite.get(name, 0.0)
            before = self._values.get(name)
            self._values[name] = value if before is None else _COMBINED.get(name, torch.add)(before, value)
        if present:
            bad = ~torch.stack(list(present.values())).isfinite().all()
            self._values["nonfinite_batches"] = bad + self._values.get("nonfinite_batches", 0.0)

    @property
    def some(self) -> bool:
        return bool(self._values)

    def read(self, beside: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The numbers so far, in one transfer with others, and a new window. A signal that was never a number is left out."""
        means = {name: self._values[name] / count for name, count in self._finite.items()}
        numbers = read_together({**self._values, **means, **(beside or {})})
        self._values, self._finite = {}, {}
        return {name: x for name, x in numbers.items() if x == x}


def _neutral(x: Any, keep: Tensor) -> Any:
    """0 where a token does not count, in the value and in the gradient. What is not one number per token stays as it is."""
    return torch.where(keep, x, 0.0) if isinstance(x, Tensor) and x.shape == keep.shape else x


def _is_grpo(trainer: Any) -> bool:
    return any(kind.__name__ == "GRPOTrainer" and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
