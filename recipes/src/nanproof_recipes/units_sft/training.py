"""One arm, trained: the Trainer with the arm's settings, resumable, and a result that says how it ended."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from nanproof import Policy, TrainingHalted, UsageError, protect, read_incidents
from nanproof.integrations.transformers import GradientMonitorCallback, LossCheckCallback
from nanproof.numerics.losses import check_supervised
from nanproof.numerics.precision import Ask, cast_trainable, choose
from nanproof_recipes.folders import RECORDS
from nanproof_recipes.machine import device
from nanproof_recipes.results import BaseTrained
from nanproof_recipes.units_sft.arms import Setting
from nanproof_recipes.units_sft.data.samples import Collator, Example
from nanproof_recipes.units_sft.models import Language, with_adapters
from nanproof_recipes.units_sft.patches import InventingLoss, ZeroingCallback, own_checks

LOG_EVERY = 5
Tick = Callable[[int, str], None]
"""Steps done, and a word about the last."""


@dataclass
class Trained(BaseTrained):
    """A model after its training. Its log has the lines of the Trainer."""

    setting: Setting


def prepare(language: Language, setting: Setting, notes: list[str], start: Path | None = None) -> tuple[Any, dict[str, bool]]:
    """The model with adapters, new ones or those in `start`, in the arm's precision, and the Trainer's switches for it."""
    half = setting.weights == "fp16"
    model = language.model.half() if half else language.model.float()
    if start is not None:
        model = PeftModel.from_pretrained(model, start, is_trainable=True)
    else:
        model = with_adapters(model, setting.rank, setting.alpha, own_dtype=half, seed=setting.seed)
    where = device()
    if setting.precision == "as-loaded":
        return model, {"fp16": False, "bf16": False}
    if setting.precision == "fp16-flag":
        return model, {"fp16": True, "bf16": False}
    if setting.precision == "bf16-flag":
        able = where.type == "cuda" and torch.cuda.is_bf16_supported()
        return model, {"fp16": where.type == "cuda" and not able, "bf16": able}
    chosen = choose(model, where, cast(Ask, setting.precision))
    cast_trainable(model)
    notes.append(f"precision: {chosen.name}. {chosen.reason}")
    return model, chosen.trainer_arguments()


def train(
    language: Language,
    rows: Sequence[Example],
    setting: Setting,
    folder: Path,
    *,
    start: Path | None = None,
    tick: Tick = lambda done, said: None,
    logging_steps: int = LOG_EVERY,
    save_every: int | None = None,
) -> Trained:
    """Train one arm in its folder. A run that was stopped goes on from its last checkpoint. That an arm is halted, or raises an
    error that its setting is known for, is a result too: its ending says so."""
    notes: list[str] = []
    counted = check_supervised(rows)
    notes.append(
        f"data: {counted.samples} samples, every one with supervised tokens (least {counted.least}, most {counted.most})"
    )
    model, switches = prepare(language, setting, notes, start)
    steps = math.ceil(len(rows) / setting.batch) * setting.epochs
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=setting.batch,
        num_train_epochs=setting.epochs,
        learning_rate=setting.lr,
        warmup_steps=min(setting.warmup, steps // 2),
        optim=setting.optim,
        gradient_checkpointing=setting.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if setting.gradient_checkpointing else None,
        logging_steps=logging_steps,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=save_every or logging_steps * max(1, steps // 4 // logging_steps),  # where a logged mean ends
        save_total_limit=1,
        report_to=[],
        use_cpu=device().type == "cpu",
        disable_tqdm=True,
        seed=setting.seed,
        data_seed=setting.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        **_arguments_of(setting, switches),
    )
    trainer = Trainer(model, arguments, train_dataset=list(rows), data_collator=Collator(language.tokenizer.pad_token_id))
    trainer.remove_callback(PrinterCallback)
    trained = Trained(model, setting, notes=notes)
    trainer.add_callback(_Bar(tick))
    patch = _apply_patch(trainer, setting)
    guard = None
    if setting.protect:
        trainer.add_callback(GradientMonitorCallback())
        trainer.add_callback(LossCheckCallback())
        guard = protect(trainer, policy=Policy(heal=setting.heal), run_dir=folder / RECORDS)
    begun = time.perf_counter()
    last = last_whole(folder / "trainer")
    begun_at = 0
    if last is not None:
        begun_at = int(last.name.rpartition("-")[2])
        notes.append(f"went on from {last.name}; seconds are counted from there")
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except TrainingHalted as error:
        trained.ending = f"halted: {error}"
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{setting.name}: out of memory at batches of {setting.batch}. A smaller --batch needs less") from error
    except ValueError as error:
        if setting.precision != "fp16-flag":
            raise
        trained.ending = f"raised {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    trained.seconds = time.perf_counter() - begun
    trained.steps, trained.log = trainer.state.global_step, [line for line in trainer.state.log_history if "loss" in line]
    if guard is not None:
        told = folder / RECORDS / "incidents.jsonl"  # those of before a stop too
        trained.incidents = list(read_incidents(told)) if told.exists() else []
        trained.refused = guard.refused_in_all
        trained.skipped = trained.steps - begun_at - guard.accepted_so_far
        trained.rolled_back = sum(i.restored_from not in (None, "memory") for i in guard.incidents)
    if patch is not None:
        trained.notes += patch.notes(trained.log)
    return trained


def last_whole(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the Trainer's own state is what it writes last. NaN weights are no
    reason to pass one over, for some arms have no others."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    for path in sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda p: int(steps[p]), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return path
    return None


def _arguments_of(setting: Setting, switches: dict[str, bool]) -> dict[str, Any]:
    """What document 002 wrote out is left out elsewhere: the same values are the Trainer's defaults."""
    return {**switches, "max_grad_norm": 1.0, "label_names": ["labels"]} if setting.patch == "002" else dict(switches)


class _Document000:
    """Its callback and its loss on one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.callback, self.loss = ZeroingCallback(), InventingLoss(trainer)
        trainer.add_callback(self.callback)
        trainer.compute_loss = self.loss  # type: ignore[method-assign, assignment]

    def notes(self, log: list[dict[str, Any]]) -> list[str]:
        passed = all(own_checks(log[1:]).values())
        return [
            f"the loss was replaced by 1e-6 in {self.loss.invented} of {self.loss.asked} steps",
            f"its callback found {self.callback.seen} gradients to look at in on_step_end",
            f"the checks that document 000 names {'pass' if passed else 'do not pass'} after the first step",
        ]


def _apply_patch(trainer: Trainer, setting: Setting) -> _Document000 | None:
    return _Document000(trainer) if setting.patch == "000" else None


class _Bar(TrainerCallback):
    """Tells how far the training is."""

    def __init__(self, tick: Tick) -> None:
        self._tick, self._said = tick, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._said = f"loss {float(logs['loss']):.3g}, grad_norm {float(logs.get('grad_norm', math.nan)):.3g}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tick(state.global_step, self._said)
