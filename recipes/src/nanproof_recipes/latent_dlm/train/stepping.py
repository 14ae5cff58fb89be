"""The steps of a run, and what is done between them: log, validation, copies of the weights."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nanproof import TrainingHalted
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.train.evaluating import Measured
from nanproof_recipes.latent_dlm.train.loops import Batch, GuardedLoop, Loop
from nanproof_recipes.latent_dlm.train.team import Team
from nanproof_recipes.library import encode, write_whole

LOG = "training_log.jsonl"
Tick = Callable[[int, str], None]
"""Steps done, and a word about the last."""


class Run:
    """The steps, and what is done between them: log, validation, copies of the weights."""

    def __init__(
        self,
        config: Config,
        team: Team,
        folder: Path,
        loop: Loop,
        batches: Iterator[Batch],
        look: Callable[[], Measured],
        tick: Tick,
    ) -> None:
        self._training, self._team, self._loop, self._batches, self._look = config.training, team, loop, batches, look
        self._path, self._tick, self._said = folder / LOG, tick, ""
        self._tokens_a_step = config.model.text_length + config.model.latent_length
        self._tokens_a_step *= config.training.train_batch_size * config.training.gradient_accumulation_steps
        self.tokens = 0
        self._last = time.perf_counter(), 0
        self.keep: Callable[[int], None] = lambda step: None
        """Called where a checkpoint is due and no guard sees to it."""

    def until_the_end(self, start: int) -> str:
        training, loop = self._training, self._loop
        if self._team.leads:
            self._forget_since(start)
        try:
            while loop.next_step < training.steps:
                loop.step([next(self._batches) for _ in range(training.gradient_accumulation_steps)])
                self.tokens += self._tokens_a_step
                done = loop.next_step
                if done >= training.steps and isinstance(loop, GuardedLoop):
                    loop.guard.sync()  # the last verdicts may send the run back
                    done = loop.next_step
                if done % training.log_every == 0 or done >= training.steps:
                    self.log()
                if done % training.eval_every == 0 and done < training.steps:
                    self.evaluate(done)
                if done % training.checkpoint_every == 0:
                    self.keep(done)
                self._tick(done, self._said)
        except TrainingHalted as error:
            return f"halted: {error}"
        return "finished"

    def _forget_since(self, start: int) -> None:
        """The log as it was when step `start` began: steps from there on are taken again. Within a run nothing is removed: one
        that goes back writes its steps twice, and the later line holds."""
        kept = []
        for text in self._path.read_text(encoding="utf-8").splitlines() if start and self._path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off by the end of its process
                line = json.loads(text)
                # Weights that step `start` begins with were measured before it.
                measured = start < self._training.steps and "eval_text_loss" in line
                if line["step"] < start or (measured and line["step"] == start):
                    kept.append(text + "\n")
        if kept:
            write_whole(self._path, "".join(kept))
        else:
            self._path.unlink(missing_ok=True)

    def log(self) -> None:
        window = self._loop.window()
        if window is None:
            return
        now, (then, tokens) = time.perf_counter(), self._last
        self._last = now, self.tokens
        speed = (self.tokens - tokens) * self._team.world / max(now - then, 1e-9)
        more: dict[str, Any] = {"skipped": self._loop.skipped, "rolled_back": self._loop.back, "tokens_per_second": speed}
        if self._team.place.type == "cuda":
            more["memory_gib"] = torch.cuda.max_memory_allocated(self._team.place) / 2**30
        self._write({"step": window.step, **window.values, **more})
        self._said = ", ".join(f"{name} {value:.3g}" for name, value in window.values.items() if name != "learning_rate")

    def evaluate(self, step: int) -> Measured:
        """Of the weights that step `step` begins with."""
        found = self._look()
        self._write({"step": step, **{f"eval_{name}": value for name, value in found.to_json().items()}})
        self._last = time.perf_counter(), self.tokens  # it is no time of training
        return found

    def _write(self, line: dict[str, Any]) -> None:
        if self._team.leads:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({k: encode(v) if isinstance(v, float) else v for k, v in line.items()}, allow_nan=False) + "\n"
                )


def rate(config: Config) -> Callable[[int], float]:
    """Up from near 0 over the warm-up, then down along a cosine."""
    warmup, steps = config.training.warmup_steps, config.training.steps

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1)))

    return at


def forever(loader: Any) -> Iterator[Batch]:
    """Epoch after epoch, from epoch 0 on; one that a stopped run was in is gone on with."""
    for epoch in itertools.count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(getattr(loader, "epoch", epoch))
        yield from loader
