"""The warm start: the model learns the form of a reply, and some of its content, from right answers. Reinforcement learning has
nothing to choose from in a model that never says anything right.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanproof import Guard, Policy
from nanproof_recipes.progress import Advance as Tick
from nanproof_recipes.vlm_grpo.data.scenes import Scene
from nanproof_recipes.vlm_grpo.models import Seeing
from nanproof_recipes.vlm_grpo.train.asking import Prepared, prompts

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Schooling:
    """How the warm start is made."""

    steps: int = 250
    batch: int = 32
    lr: float = 2e-3
    warmup: int = 50
    seed: int = 0


BY_SIZE = {"tiny": Schooling(), "base": Schooling(steps=130, batch=64, lr=5e-4, warmup=100)}


def schooling_for(model: str, steps: int | None = None) -> Schooling:
    """What suits a model: a folder's is taken for one as large as "base"."""
    found = BY_SIZE.get(model, BY_SIZE["base"])
    return found if steps is None else replace(found, steps=steps)


@dataclass
class Schooled:
    """What came of it."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    incidents: list[Any] = field(default_factory=list)


def examples(seeing: Seeing, scenes: Sequence[Scene]) -> dict[str, Tensor]:
    """Questions with their answers; what is not answer is not supervised."""
    asked = prompts(seeing, scenes)
    answers = seeing.tokenizer([scene.answer for scene in scenes], add_special_tokens=False)["input_ids"]
    answers = [[*answer, seeing.tokenizer.eos_token_id] for answer in answers]  # as text, its end may be more than one token
    longest, pad = max(map(len, answers)), seeing.tokenizer.pad_token_id
    told = torch.tensor([answer + [pad] * (longest - len(answer)) for answer in answers])
    seen = torch.tensor([[1] * len(answer) + [0] * (longest - len(answer)) for answer in answers])
    ids = torch.cat((asked["input_ids"], told), 1)
    mask = torch.cat((asked["attention_mask"], seen), 1)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, : asked["input_ids"].shape[1]] = IGNORED
    rest = {name: value for name, value in asked.items() if name not in ("input_ids", "attention_mask")}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **rest}


def school(
    seeing: Seeing,
    scenes: Sequence[Scene],
    how: Schooling,
    run_dir: Path | None = None,
    *,
    autocast: Callable[[], Any] = nullcontext,
    tick: Tick = lambda done, said: None,
) -> Schooled:
    """Train the model itself, every weight of it, under a guard."""
    model = seeing.model
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, how.warmup)))

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with autocast():
            return model(**batch).loss  # type: ignore[no-any-return]

    every = Prepared(lambda few: examples(seeing, few), scenes, device)
    made = Schooled()
    begun = time.perf_counter()
    model.train()
    policy = Policy(history=max(1000, how.steps))
    with Guard(model, optimizer, loss_fn=loss_fn, scheduler=schedule, policy=policy, run_dir=run_dir) as guard:
        for step in range(how.steps):
            rng = random.Random(f"warm start {how.seed} {step}")
            guard.train_step(every.rows([rng.randrange(len(scenes)) for _ in range(how.batch)]))
            tick(step + 1, "")
        guard.sync()
        made.losses = [record.loss for record in guard.history]
        made.incidents = list(guard.incidents)
        made.seconds = time.perf_counter() - begun
    model.eval()
    return made
