"""The result of one arm of vlm-grpo, measured on held-out scenes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nanproof_recipes.results import BaseResult, few, gibibytes


@dataclass(frozen=True, slots=True)
class Result(BaseResult):
    """The measured end of one arm, or of the warm start."""

    NUMBERS: ClassVar[tuple[str, ...]] = ("loss", "train_reward", "reward_std", "kl", "entropy", "grad_norm")

    reward: float | None = None
    """Caption and place of replies sampled to held-out scenes: 2 at the most. None: the model cannot be sampled from."""
    caption: float | None = None
    place: float | None = None
    greedy: float | None = None
    """Reward of the likeliest replies."""
    chance: float | None = None
    """Reward of replies that know nothing; of the warm start alone."""
    scenes: int = 0
    loss: float | None = None
    """The last that was logged; the Trainer logs a NaN as 0. The next four are means over the last logged steps."""
    train_reward: float | None = None
    reward_std: float | None = None
    kl: float | None = None
    entropy: float | None = None
    nonfinite_steps: int = 0
    """Steps whose logged loss or gradient norm was NaN or Inf."""
    bad_rows: int | None = None
    """Rows of logits with a NaN or Inf while replies were sampled. Under nanproof a reply ends with the first, so it has one."""
    refused: int = 0
    """Attempts at a step that the guard refused."""
    memory: int | None = None
    """Bytes that torch took of the device at most; None on a CPU."""

    def measure_lines(self) -> list[str]:
        told = ["  its model cannot be sampled from"]
        if self.reward is not None:
            told = [
                f"  held-out reward {self.reward:.3f} of 2 (caption {few(self.caption)}, place {few(self.place)}), likeliest "
                f"replies {few(self.greedy)}, on {self.scenes} scenes"
            ]
        if self.train_reward is not None:
            told.append(
                f"  last steps: reward {few(self.train_reward)}, its deviation {few(self.reward_std)}, KL {few(self.kl)}, "
                f"entropy {few(self.entropy)}, grad_norm {few(self.grad_norm)}, loss {few(self.loss)}"
            )
        if self.tensors is not None:
            counted = "" if self.bad_rows is None else f"{self.bad_rows} bad rows of logits, "
            told.append(
                f"  {self.nonfinite} of {self.tensors} trainable tensors not finite, {self.nonfinite_steps} steps with a NaN or "
                f"Inf, {counted}{self.refused} attempts refused, {self.skipped} steps skipped"
            )
        return [*told, f"  {self.steps} steps in {self.seconds or 0:.1f} s{gibibytes(self.memory)}"]
