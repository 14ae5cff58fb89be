"""GRPO by TRL's GRPOTrainer. Its sampling is its own; behind each reply the judge writes its verdict, which does not count.

That takes two of TRL's private methods, because a rollout of one's own has to do all that TRL does to a prompt. Their signatures
are looked at before anything is begun: another TRL is refused with a clear word.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanproof import Policy, TrainingHalted, UnsupportedError, protect
from nanproof_recipes.folders import RECORDS
from nanproof_recipes.library import Patches, check_version
from nanproof_recipes.machine import device, needs, nonfinite_tensors
from nanproof_recipes.progress import Advance as Tick
from nanproof_recipes.vlm_grpo.arms import LOWERED, Setting
from nanproof_recipes.vlm_grpo.data.scenes import Scene
from nanproof_recipes.vlm_grpo.models import VERDICT, Seeing, adapters
from nanproof_recipes.vlm_grpo.patches import DocumentProcessor, document_callback
from nanproof_recipes.vlm_grpo.train.asking import longest, never
from nanproof_recipes.vlm_grpo.train.judge import lower, readable, verdict
from nanproof_recipes.vlm_grpo.train.rewards import caption_reward, place_reward
from nanproof_recipes.vlm_grpo.train.training import (
    LOGGED,
    Trained,
    chosen_precision,
    died,
    died_of_sampling,
    said,
)

NEEDED = {
    "_tokenize_prompts": ("prompts",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
}
"""Private methods of GRPOTrainer that the rollout calls, and the parameters they must begin with."""


def usable() -> None:
    """TRL is there, and is one that this was written for."""
    needs("trl", "datasets", "transformers", "peft", "accelerate")
    import trl as found_trl

    trl: Any = found_trl
    check_version("trl")
    for name, parameters in NEEDED.items():
        method = getattr(trl.GRPOTrainer, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if callable(method) else None
        if found is None or found[: len(parameters)] != parameters:
            raise UnsupportedError(
                f"TRL {trl.__version__}: GRPOTrainer.{name}({', '.join(parameters)}) is needed and not there. Use TRL 1.15 "
                "or later, or --trainer loop, which needs no TRL"
            )


def train(seeing: Seeing, scenes: Sequence[Scene], setting: Setting, folder: Path, tick: Tick) -> Trained:
    """Train one arm. That it dies of its own setting is a result too: the ending says so."""
    usable()
    import trl as found_trl
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers.trainer_callback import PrinterCallback

    trl: Any = found_trl  # what it exports is not typed
    notes: list[str] = []
    banned = [t for t in never(seeing) if setting.ban == "sampling" or t != seeing.token(VERDICT)]
    switches: dict[str, Any] = _precision(seeing.model, setting, notes)
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=setting.batch,
        num_generations=setting.group,
        max_completion_length=longest(seeing),
        generation_kwargs={"suppress_tokens": banned},
        temperature=setting.temperature,
        beta=setting.beta,
        learning_rate=setting.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(setting.warmup, setting.steps // 2),
        max_grad_norm=setting.max_norm,
        max_steps=setting.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device().type == "cpu",
        disable_tqdm=True,
        seed=setting.seed,
        data_seed=setting.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        gradient_checkpointing=False,
        **switches,
    )

    def caption(said: list[str], scene: list[int], **rest: Any) -> list[float | None]:
        return [caption_reward(text, scenes[i]) for text, i in zip(said, scene, strict=True)]

    def place(said: list[str], scene: list[int], **rest: Any) -> list[float | None]:
        return [place_reward(text, scenes[i]) for text, i in zip(said, scene, strict=True)]

    torch.manual_seed(setting.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rollout_func.*")  # that it is experimental is what `usable` is for
        trainer = trl.GRPOTrainer(
            seeing.model,
            reward_funcs=[caption, place],
            args=arguments,
            train_dataset=Dataset.from_list([_row(i, scene) for i, scene in enumerate(scenes)]),
            processing_class=seeing.processor,
            peft_config=adapters(setting.rank, setting.alpha),
            rollout_func=_rollout(seeing, scenes),
        )
    trained = Trained(trainer.model, setting, notes=notes)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_eyes(trained, tick))
    if setting.ban == "policy":
        lower(trainer.model, seeing.token(VERDICT), LOWERED)
    patch = _Document(trainer) if setting.patched else None
    guard = protect(trainer, policy=Policy(heal=setting.heal), run_dir=folder / RECORDS) if setting.protect else None
    begun = time.perf_counter()
    try:
        trainer.train()
    except TrainingHalted as error:
        trained.ending = f"halted: {error}"
    except RuntimeError as error:
        if not died_of_sampling(error):
            raise
        died(trained, error)
    finally:
        if patch is not None:
            patch.undo()
    trained.seconds = time.perf_counter() - begun
    trained.steps = trainer.state.global_step
    trained.log = [_line(found) for found in trainer.state.log_history if "loss" in found]
    if guard is not None:
        trained.incidents = list(guard.incidents)
        trained.refused = guard.refused_in_all
        trained.skipped = trained.steps - guard.accepted_so_far
        trained.rolled_back = sum(i.restored_from not in (None, "memory") for i in guard.incidents)
        # Not from the log: a generation that ends the run is in no line of it.
        bad = [i.diagnosis for i in guard.incidents if i.kind == "generation"]
        trained.bad_rows = sum(len(found.samples) for found in bad if found is not None)
    if patch is not None:
        trained.bad_rows = patch.processor.nan_rows
        trained.notes += [*patch.processor.notes(), *patch.callback.notes()]
    return trained


def _row(index: int, scene: Scene) -> dict[str, Any]:
    """The message carries the number of its scene, for the judge."""
    asked = {"role": "user", "content": scene.question, "scene": index}
    return {"prompt": [asked], "image": scene.picture(), "scene": index}


def _rollout(seeing: Seeing, scenes: Sequence[Scene]) -> Any:
    """TRL's own sampling, with the judge's verdict behind each reply. Rewards are of the reply alone: `said`."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        replies, log_probs = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
        replies = [readable(seeing, reply) for reply in replies]
        texts = seeing.tokenizer.batch_decode(replies, skip_special_tokens=True)
        asked = [scenes[prompt[0]["scene"]] for prompt in prompts]
        judged = [verdict(seeing, text, scene) for text, scene in zip(texts, asked, strict=True)]
        ids = [[*reply, *told] for reply, told in zip(replies, judged, strict=True)]
        counts = [[1] * len(reply) + [0] * len(told) for reply, told in zip(replies, judged, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs, "env_mask": counts, "said": texts}

    return rollout


class _Document:
    """The document's processor and callback on one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.processor, self.callback = DocumentProcessor(), document_callback()
        trainer.add_callback(self.callback)
        self._patches = Patches()
        self._patches.wrap(trainer.accelerator.unwrap_model(trainer.model), "generate", self._generate)
        self.undo = self._patches.undo

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, logits_processor=[self.processor], **kwargs)


def _precision(model: Any, setting: Setting, notes: list[str]) -> dict[str, bool]:
    """The Trainer's switches. The document's bf16 is one of a GPU."""
    if setting.precision == "as-loaded":
        return {"bf16": setting.patched and torch.cuda.is_available() and torch.cuda.is_bf16_supported(), "fp16": False}
    chosen = chosen_precision(model, setting.precision)
    notes.append(f"precision: {chosen.name}. {chosen.reason}")
    return chosen.trainer_arguments()


def _line(found: dict[str, Any]) -> dict[str, float]:
    """TRL logs a NaN as None."""
    told = {name: found[name] for name in LOGGED if name in found}
    return {"step": found["step"] - 1, **{name: math.nan if x is None else float(x) for name, x in told.items()}}


def _eyes(trained: Trained, tick: Tick) -> Any:
    """After every step: a word for the bar, and after one that was not finite how many weights are. Where the next sampling loses
    the device, they cannot be looked at any more."""
    from transformers import TrainerCallback

    class Eyes(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                line = _line({**logs, "step": state.global_step})
                tick(state.global_step, said(line))
                if not all(map(math.isfinite, line.values())):
                    trained.nonfinite = nonfinite_tensors(trained.model)[0]

    return Eyes()
