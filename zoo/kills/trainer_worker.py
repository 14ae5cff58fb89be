"""One life of the Trainer that `trainer.py` kills: a few hundred parameters, dropout, AdamW, a schedule, shuffled data of the
Trainer. It resumes as the examples of transformers do: `resume_from_checkpoint=True` if there is any checkpoint folder.

Told to, it kills itself inside a save, at the n-th file or call to the disk. A file that native code writes is left by half.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as transformers_logging

import nanproof
from zoo.kills.worker import Board, Killer, Plan, Told, quiet, tell

STEP = 12
"""Where on the board the step is that the life has reached, plus 1."""


@dataclass(frozen=True)
class TrainerSpec:
    """A run. Everything in it is decided by these numbers."""

    every: int
    """Steps from one save to the next."""
    seed: int
    steps: int
    limit: int | None = 3
    on_signal: bool = False


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.body(x)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Struck(Trainer):
    """A Trainer whose saves can be told from its other steps."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        plain = super()._maybe_log_save_evaluate
        return self.saves(plain, *args, **kwargs) if self.control.should_save else plain(*args, **kwargs)

    def saves(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Noted(TrainerCallback):
    """Notes where training goes on from, and every step."""

    def __init__(self, first: Callable[[], None], each: Callable[[int], None]) -> None:
        self._first, self._each, self._begun = first, each, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._begun:
            self._begun = True
            self._first()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._each(state.global_step)


def silent() -> Told:
    """A life whose prints go nowhere, and whose log lines are kept."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return quiet()


def build(spec: TrainerSpec, folder: Path, saves: bool) -> Struck:
    transformers_logging.set_verbosity_error()
    torch.manual_seed(spec.seed)
    rows = [{"x": x, "labels": x.sum()} for x in torch.randn(40, 6, generator=torch.Generator().manual_seed(spec.seed))]
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=spec.steps,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        save_strategy="steps" if saves else "no",
        save_steps=spec.every,
        save_total_limit=spec.limit,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=spec.seed,
    )
    return Struck(model=Model(), args=args, train_dataset=rows)


def digest(weights: dict[str, Tensor], optimizer: dict[str, Any], schedule: dict[str, Any]) -> int:
    """One number for a state. The same from memory and from files."""
    number = 0
    for name in sorted(weights):
        number = zlib.crc32(weights[name].detach().contiguous().numpy().tobytes(), number)
    for key in sorted(optimizer["state"]):
        for name, value in sorted(optimizer["state"][key].items()):
            number = zlib.crc32(f"{key} {name}".encode() + torch.as_tensor(value).numpy().tobytes(), number)
    return zlib.crc32(str(schedule["last_epoch"]).encode(), number)


def digest_of(trainer: Trainer) -> int:
    assert trainer.optimizer is not None and trainer.lr_scheduler is not None
    bare = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return digest(trainer.model.state_dict(), bare.state_dict(), trainer.lr_scheduler.state_dict())


def protect(trainer: Trainer, spec: TrainerSpec, folder: Path | None) -> None:
    policy = nanproof.Policy(diagnose="never")
    checkpoints = nanproof.Checkpoints(folder / "own", every=10**6, on_signal=True) if spec.on_signal and folder else None
    nanproof.protect(trainer, policy=policy, run_dir=None, checkpoints=checkpoints)


def reference(pipe: int, spec: TrainerSpec, folder: Path) -> None:
    """The run that nothing happens to: its checksum at every step."""
    silent()
    trainer = build(spec, folder, saves=False)
    protect(trainer, spec, None)
    table: dict[int, int] = {}
    trainer.add_callback(
        Noted(lambda: table.update({0: digest_of(trainer)}), lambda step: table.update({step: digest_of(trainer)}))
    )
    trainer.train()
    tell(pipe, "reference", table=table)


def life(pipe: int, spec: TrainerSpec, folder: Path, board: Board, plan: Plan | None) -> None:
    """Resume, report, train to the end, report."""
    told = silent()
    killer = Killer(board, plan)
    _save, _save_file = torch.save, safetensors.torch.save_file

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        _save(obj, f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)):
            killer.written(f)

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        _save_file(tensors, filename, *args, **kwargs)
        killer.written(filename)

    torch.save = save  # type: ignore[assignment]
    safetensors.torch.save_file = save_file
    killer.install({"saving": (Struck, "saves")})
    trainer = build(spec, folder, saves=True)
    protect(trainer, spec, folder)

    def began() -> None:
        board.write(STEP, trainer.state.global_step + 1)
        tell(pipe, "resumed", step=trainer.state.global_step, digest=digest_of(trainer), said=told.lines)

    trainer.add_callback(Noted(began, lambda step: board.write(STEP, step + 1)))
    there = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
    try:
        trainer.train(resume_from_checkpoint=there or None)
    except SystemExit as left:
        tell(pipe, "left", step=trainer.state.global_step, status=left.code, said=told.lines)
        return
    tell(pipe, "finished", digest=digest_of(trainer), step=trainer.state.global_step, said=told.lines)
