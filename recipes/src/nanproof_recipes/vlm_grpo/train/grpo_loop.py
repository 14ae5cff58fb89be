"""GRPO in a loop of the recipe's own: sample groups of replies, judge them, and step. It takes a group of one, and needs no TRL.

The steps are those of the published method: advantages relative to the group, a clipped ratio, and the k3 estimate of the
divergence from the reference, which is the model without its adapters. Which scenes a step asks about depends on seed and step
alone, so that a run that went back, or was stopped, meets the same ones again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanproof import Guard, GuardedSampling, Incident, Policy, TrainingHalted
from nanproof.numerics.rl import group_advantages, kl, masked_mean, ratio
from nanproof_recipes.folders import RECORDS
from nanproof_recipes.machine import device, nonfinite_tensors
from nanproof_recipes.progress import Advance as Tick
from nanproof_recipes.vlm_grpo.arms import LOWERED, Setting
from nanproof_recipes.vlm_grpo.data.scenes import Scene
from nanproof_recipes.vlm_grpo.models import VERDICT, Seeing, with_adapters
from nanproof_recipes.vlm_grpo.patches import DocumentProcessor
from nanproof_recipes.vlm_grpo.train.asking import Prepared, Replies, never, prompts, reply
from nanproof_recipes.vlm_grpo.train.judge import lower, readable, verdict
from nanproof_recipes.vlm_grpo.train.rewards import reward
from nanproof_recipes.vlm_grpo.train.training import (
    Trained,
    chosen_precision,
    died,
    died_of_sampling,
    said,
)

CLIP = 0.2
"""How far a ratio may go from 1 before it teaches nothing more."""
REFUSED = ("skipped", "salvaged", "healed", "rewound", "rolled-back", "halted")
TAKEN = ("generation", "spike", "divergence", "no-learning")
"""Kinds of incidents about steps that were taken, unless their action says that one was skipped."""
OURS = frozenset({"ids", "seen", "counts", "rewards", "valid", "old", "ref"})
"""What of a batch is for the loss; the rest goes to the model."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a batch of groups. An instance is the `loss_fn` of a guard: all it takes comes with the batch."""

    group: int
    beta: float
    plain: bool = False
    """As people write it: the deviation of a group of one is NaN, and tokens that do not count go through exp."""
    autocast: Callable[[], Any] = nullcontext
    temperature: float = 1.0
    """What the replies were sampled with: their log-probabilities are those of the distribution they came from."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        with self.autocast():
            new = scored(model, batch, self.temperature)[0]
        if self.plain:
            return self._as_written(new, batch)
        counts = batch["counts"]
        advantages = group_advantages(batch["rewards"], self.group, valid=batch["valid"]).value.unsqueeze(1)
        change = ratio(new, batch["old"], counts).value
        gain = torch.minimum(change * advantages, change.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return masked_mean(self.beta * kl(new, batch["ref"], counts) - gain, counts)

    def _as_written(self, new: Tensor, batch: dict[str, Tensor]) -> Tensor:
        counts, rewards = batch["counts"], batch["rewards"].view(-1, self.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)
        change = torch.exp(new - batch["old"])
        gain = torch.minimum(change * advantages, change.clamp(1 - CLIP, 1 + CLIP) * advantages)
        difference = batch["ref"] - new
        divergence = torch.exp(difference) - difference - 1
        return ((self.beta * divergence - gain) * counts).sum() / counts.sum()


def scored(model: Any, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token behind the prompt, and of every token there, in fp32."""
    given = {name: value for name, value in batch.items() if name not in OURS}
    given["input_ids"] = torch.cat((batch["input_ids"], batch["ids"]), 1)
    given["attention_mask"] = torch.cat((batch["attention_mask"], batch["seen"]), 1)
    logits = model(**given, logits_to_keep=batch["ids"].shape[1] + 1).logits[:, :-1].float()
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(-1, batch["ids"].unsqueeze(-1)).squeeze(-1), scores


class Sampler:
    """Draws what a step learns from."""

    def __init__(
        self,
        seeing: Seeing,
        scenes: Sequence[Scene],
        setting: Setting,
        processors: Sequence[Any],
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        """`autocast`: that of the loss. Scored in another precision, a policy would differ from itself."""
        self._seeing, self._scenes, self._setting, self._processors = seeing, scenes, setting, processors
        self._autocast = autocast
        device = next(seeing.model.parameters()).device
        self._prompts = Prepared(lambda few: prompts(seeing, few), scenes, device)
        mark = seeing.token(VERDICT)
        self._banned = [t for t in never(seeing) if setting.ban == "sampling" or t != mark]
        self.last: dict[str, float] = {}
        """Of the last step: reward, reward_std, kl and entropy."""

    def batch(self, step: int, valid: Callable[[], Tensor | None] = lambda: None) -> dict[str, Tensor]:
        setting, model = self._setting, self._seeing.model
        rng = random.Random(f"{setting.seed} {step}")
        chosen = [rng.randrange(len(self._scenes)) for _ in range(setting.batch // setting.group)]
        rows = [index for index in chosen for _ in range(setting.group)]
        scenes = [self._scenes[index] for index in rows]
        with self._autocast():
            replies = reply(
                self._seeing,
                self._prompts.rows(rows),
                temperature=setting.temperature,
                processors=self._processors,
                banned=self._banned,
            )
        rewards = torch.tensor([reward(text, scene) for text, scene in zip(replies.texts, scenes, strict=True)])
        batch = self._judged(replies, scenes)
        batch["rewards"] = rewards.to(batch["ids"].device)
        ok = valid()
        batch["valid"] = torch.ones_like(batch["rewards"], dtype=torch.bool) if ok is None else ok
        batch["counts"] = batch["counts"] * batch["valid"].unsqueeze(1)
        with torch.no_grad(), self._autocast():
            batch["old"], scores = scored(model, batch, setting.temperature)
            with model.disable_adapter():
                batch["ref"] = scored(model, batch, setting.temperature)[0]
        self._note(batch, scores)
        return batch

    def _judged(self, replies: Replies, scenes: Sequence[Scene]) -> dict[str, Tensor]:
        """Replies with the verdict behind each: seen by the model, and not counted."""
        rows, counts = [], []
        for ids, mask, text, scene in zip(replies.ids.tolist(), replies.mask.tolist(), replies.texts, scenes, strict=True):
            own, told = readable(self._seeing, ids[: sum(mask)]), verdict(self._seeing, text, scene)
            rows.append([*own, *told])
            counts.append([1] * len(own) + [0] * len(told))
        pad, longest = self._seeing.tokenizer.pad_token_id, max(map(len, rows))
        device = replies.ids.device
        return {
            **replies.prompt,
            "ids": torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device),
            "seen": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device),
            "counts": torch.tensor([row + [0] * (longest - len(row)) for row in counts], device=device),
        }

    def _note(self, batch: dict[str, Tensor], scores: Tensor) -> None:
        counts, groups = batch["counts"], batch["rewards"].view(-1, self._setting.group)
        entropy = masked_mean(torch.special.entr(scores.exp()).sum(-1), counts)  # 0 for -inf, and NaN for NaN
        found = {
            "reward": groups.mean(),
            **({"reward_std": groups.std(1).mean()} if self._setting.group > 1 else {}),  # one number has none
            "kl": masked_mean(kl(batch["old"], batch["ref"], counts), counts),
            "entropy": entropy,
        }
        device = groups.device
        values = torch.stack([value.to(device, torch.float32) for value in found.values()]).tolist()
        self.last = dict(zip(found, values, strict=True))


def train(seeing: Seeing, scenes: Sequence[Scene], setting: Setting, folder: Path, tick: Tick) -> Trained:
    """Train one arm. That it dies of its own setting is a result too: the ending says so."""
    notes: list[str] = []
    model = with_adapters(seeing.model, setting.rank, setting.alpha, seed=setting.seed).to(device())
    own = Seeing(model, seeing.processor, seeing.source)
    if setting.ban == "policy":
        lower(model, own.token(VERDICT), LOWERED)
    autocast: Callable[[], Any] = nullcontext
    if setting.precision != "as-loaded":
        chosen = chosen_precision(model, setting.precision)
        autocast = chosen.autocast
        notes.append(f"precision: {chosen.name}. {chosen.reason}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=setting.lr, weight_decay=0.0)
    warmup = max(1, min(setting.warmup, setting.steps // 2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    loss_fn = Loss(setting.group, setting.beta, setting.plain, autocast, setting.temperature)
    trained = Trained(model, setting, notes=notes)
    torch.manual_seed(setting.seed)
    model.train()
    begun = time.perf_counter()
    try:
        if setting.protect:
            _guarded(own, scenes, setting, folder, loss_fn, optimizer, schedule, trained, tick)
        else:
            _bare(own, scenes, setting, loss_fn, optimizer, schedule, trained, tick)
    except TrainingHalted as error:
        trained.ending = f"halted: {error}"
    except RuntimeError as error:
        if not died_of_sampling(error):
            raise
        died(trained, error)
    if torch.cuda.is_available() and not trained.device_lost:
        torch.cuda.synchronize()
    trained.seconds = time.perf_counter() - begun
    return trained


def _bare(
    seeing: Seeing,
    scenes: Sequence[Scene],
    setting: Setting,
    loss_fn: Loss,
    optimizer: Any,
    schedule: Any,
    trained: Trained,
    tick: Tick,
) -> None:
    """As people write it: clip, step, go on."""
    document = DocumentProcessor() if setting.patched else None
    sampler = Sampler(seeing, scenes, setting, [document] if document else [], loss_fn.autocast)
    weights = [p for p in seeing.model.parameters() if p.requires_grad]
    try:
        for step in range(setting.steps):
            batch = sampler.batch(step)
            optimizer.zero_grad()
            loss = loss_fn(seeing.model, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(weights, setting.max_norm)
            optimizer.step()
            schedule.step()
            trained.steps = step + 1
            trained.log.append({"step": step, "loss": float(loss.detach()), **sampler.last, "grad_norm": float(norm)})
            tick(step + 1, said(trained.log[-1]))
            if not math.isfinite(trained.log[-1]["loss"]):
                trained.nonfinite = nonfinite_tensors(seeing.model)[0]
    finally:
        if document is not None:
            trained.bad_rows = document.nan_rows
            trained.notes += document.notes()


def _guarded(
    seeing: Seeing,
    scenes: Sequence[Scene],
    setting: Setting,
    folder: Path,
    loss_fn: Loss,
    optimizer: Any,
    schedule: Any,
    trained: Trained,
    tick: Tick,
) -> None:
    model = seeing.model
    rows: dict[int, dict[str, float]] = {}
    guard = Guard(
        model,
        optimizer,
        loss_fn=loss_fn,
        max_norm=setting.max_norm,
        scheduler=schedule,
        policy=Policy(heal=setting.heal, history=max(1000, setting.steps)),
        run_dir=folder / RECORDS,
    )
    sampling = GuardedSampling(guard, eos_token_id=seeing.tokenizer.eos_token_id)
    sampler = Sampler(seeing, scenes, setting, [sampling.processor], loss_fn.autocast)
    try:
        with guard, sampling:
            while guard.next_step < setting.steps:
                step = guard.next_step
                batch = sampler.batch(step, sampling.settle)
                if sampling.went_back:
                    continue  # the model could not be sampled from
                guard.train_step(batch)
                rows[step] = {"step": step, **sampler.last}
                if guard.next_step >= setting.steps:
                    guard.sync()  # the last verdicts may send the run back
                tick(guard.next_step, said(rows[step]))
    finally:
        found = {record.step: {"loss": record.loss, "grad_norm": record.grad_norm} for record in guard.history}
        trained.log = [{**rows[step], **found.get(step, {})} for step in sorted(rows)]
        trained.steps = len(rows)
        trained.incidents = list(guard.incidents)
        trained.refused = sum(_refused(i) for i in guard.incidents)
        trained.skipped = sum(i.action == "skipped" for i in guard.incidents)
        trained.rolled_back = sum(i.restored_from not in (None, "memory") for i in guard.incidents)
        trained.bad_rows = int(sampling.processor.counters()["bad_rows"])


def _refused(incident: Incident) -> bool:
    """Whether the guard refused an attempt at a step."""
    return incident.action in ("skipped", "salvaged") or (incident.action in REFUSED and incident.kind not in TAKEN)
