"""What one arm came to: measured on held-out scenes, written beside its model, and read again instead of training twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanproof import Incident
from nanproof_recipes.results import Saved, few


@dataclass(frozen=True, slots=True)
class Result(Saved):
    """The measured end of one arm, or of the warm start."""

    NUMBERS: ClassVar[tuple[str, ...]] = ("loss", "train_reward", "reward_std", "kl", "entropy", "grad_norm")

    name: str
    setting: Mapping[str, Any]
    """All that decided it: a folder with another setting is another run."""
    ending: str = "finished"
    steps: int = 0
    seconds: float | None = None
    """Training alone."""
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
    """This and the next five: as logged, the mean over the last steps but for loss and grad_norm, which are the last. The Trainer
    logs a NaN loss as 0."""
    train_reward: float | None = None
    reward_std: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    nonfinite: int | None = None
    """Trainable tensors with a value that is not finite, of `tensors`."""
    tensors: int | None = None
    nonfinite_steps: int = 0
    """Steps whose logged loss or gradient norm was NaN or Inf."""
    bad_rows: int | None = None
    """Rows of logits with a NaN or Inf while replies were sampled. Under nanproof a reply ends with the first, so it has one."""
    refused: int = 0
    """Attempts at a step that the guard refused."""
    skipped: int = 0
    """Steps that were not taken in the end."""
    rolled_back: int = 0
    memory: int | None = None
    """Bytes that torch took of the device at most; None on a CPU."""
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()
    incidents: Sequence[Mapping[str, Any]] = ()

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{self.name}: {self.ending}"]
        if self.reward is None:
            told.append("  its model cannot be sampled from")
        else:
            told.append(
                f"  held-out reward {self.reward:.3f} of 2 (caption {few(self.caption)}, place {few(self.place)}), likeliest "
                f"replies {few(self.greedy)}, on {self.scenes} scenes"
            )
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
        memory = f", {self.memory / 2**30:.2f} GiB" if self.memory is not None else ""
        told.append(f"  {self.steps} steps in {self.seconds or 0:.1f} s{memory}")
        told += [f"  {Incident.from_json(dict(incident))}" for incident in self.incidents[:3]]
        return told + [f"  {note}" for note in self.notes]
