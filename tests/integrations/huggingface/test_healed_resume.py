"""A protected Trainer that healed its run, was stopped, and resumes in new objects: it ends as if it had never been stopped."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

import nanproof
from integrations.tiny import all_finite, llama, make_trainer, same, token_rows, weights
from nanproof import Incident, Policy

SAVE_EVERY, STEPS = 4, 12


def fp16_llama() -> nn.Module:
    return llama(dropout=0.0).half()


def fp16_lora() -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(fp16_llama(), config, autocast_adapter_dtype=False)


MODELS = pytest.mark.parametrize("build", [fp16_llama, fp16_lora], ids=["plain", "lora"])


def protected(folder, model, rows=None, heal=True, **settings):
    """A trainer of what is too small for fp16: the first step of Adam divides by a second moment of 0."""
    settings = {"learning_rate": 1e-3, "optim": "adamw_torch", "max_steps": STEPS, **settings}
    rows = token_rows(4 * STEPS) if rows is None else rows
    trainer = make_trainer(folder, model, rows, save_strategy="steps", save_steps=SAVE_EVERY, **settings)
    return trainer, nanproof.protect(trainer, policy=Policy(heal=heal))


def bare(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def moments(trainer):
    """By position: what the optimizer holds of each parameter."""
    state = bare(trainer).state_dict()["state"]
    return {f"{i}.{key}": value for i, values in state.items() for key, value in values.items()}


def losses(trainer):
    """As text: NaN, of a step before it was healed, is unequal to itself."""
    return [repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def killed_at(whole: Path, step: int, folder: Path) -> Path:
    """What a process that died after this step leaves behind."""
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder


def assert_ends_alike(resumed, whole):
    assert losses(resumed) == losses(whole)
    assert {p.dtype for p in resumed.model.parameters()} == {p.dtype for p in whole.model.parameters()}
    assert same(weights(resumed.model), weights(whole.model)) and same(moments(resumed), moments(whole))


@MODELS
@pytest.mark.parametrize("named", [True, False], ids=["path", "newest"])
def test_a_healed_run_resumes_as_if_never_stopped(tmp_path, build, named):
    """fp32 weights and moments come back whole, the remedy is in force before the first step, nothing goes wrong again."""
    whole, its_guard = protected(tmp_path / "whole", build())
    whole.train()
    assert [(i.step, i.action) for i in its_guard.incidents] == [(0, "healed")]
    folder = killed_at(tmp_path / "whole", 4, tmp_path / "cut")
    resumed, guard = protected(folder, build())
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4") if named else True)
    assert guard.incidents == [] and [t.remedy.name for t in guard.parts.healer.applied] == ["fp32-weights"]
    assert guard.parts.healer.applied[0].healthy == its_guard.parts.healer.applied[0].healthy == STEPS
    trained = [p for p in resumed.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {value.dtype for value in moments(resumed).values()} == {torch.float32}
    assert_ends_alike(resumed, whole)
    assert vars(resumed).keys() == vars(whole).keys(), "nothing of the trainer stays replaced"


@MODELS
def test_a_remedy_that_was_resumed_can_be_undone(tmp_path, build):
    """It knows what the weights were: they, the moments and the optimizer's flags are as an unhealed run has them."""
    whole, _ = protected(tmp_path / "whole", build(), max_steps=SAVE_EVERY)
    whole.train()
    folder = killed_at(tmp_path / "whole", 4, tmp_path / "cut")
    model = build()
    wanted = {name: p.dtype for name, p in model.named_parameters()}
    resumed, guard = protected(folder, model, max_steps=SAVE_EVERY + 1)
    resumed.train(resume_from_checkpoint=True)
    (treatment,) = guard.parts.healer.applied
    again = Incident(step=treatment.step, kind=treatment.kind, action="skipped")
    assert guard.parts.healer.undo_failed(again) == (treatment.remedy.description,)
    assert {name: p.dtype for name, p in model.named_parameters()} == wanted
    assert {value.dtype for key, value in moments(resumed).items() if not key.endswith("step")} == {torch.float16}


def test_the_same_trainer_resumes(tmp_path):
    """In one process, after the run: the model is fp32 already, and the remedy knows all the same what it was for."""
    whole, _ = protected(tmp_path / "whole", fp16_lora())
    whole.train()
    once, guard = protected(tmp_path / "once", fp16_lora())
    once.train()
    once.train(resume_from_checkpoint=str(tmp_path / "once" / "checkpoint-4"))
    assert [i.step for i in guard.incidents] == [0]
    assert guard.parts.healer.applied[0].remedy.living() is not None
    assert_ends_alike(once, whole)


class MaskedMean(nn.Module):
    """The mean over what counts; over nothing it is 0/0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        each = self.head(x).squeeze(-1).square() * mask
        return {"loss": (each.sum(1) / mask.sum(1)).mean()}


def masked_rows(count: int, empty: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(count, 5)
    mask[empty] = 0
    return [{"x": a, "mask": b} for a, b in zip(x, mask, strict=True)]


@pytest.mark.parametrize("at", [4, 8], ids=["before", "after"])
def test_a_checkpoint_of_before_and_after_the_healing(tmp_path, at):
    """From before it, the run meets the same trouble and heals it again; from after it, the remedy is in force."""
    rows = masked_rows(4 * STEPS, empty=4 * 6 + 1)
    whole, its_guard = protected(tmp_path / "whole", MaskedMean(), rows)
    whole.train()
    assert [(i.step, i.action) for i in its_guard.incidents] == [(6, "healed")]
    folder = killed_at(tmp_path / "whole", at, tmp_path / "cut")
    resumed, guard = protected(folder, MaskedMean(), rows)
    resumed.train(resume_from_checkpoint=True)
    assert [i.step for i in guard.incidents] == ([6] if at == 4 else [])
    assert [t.remedy.name for t in guard.parts.healer.applied] == ["interventions"]
    assert_ends_alike(resumed, whole)


class LateBranch(nn.Module):
    """fp16. A branch that is used late has gradients whose squares are 0 in fp16; those of the rest are large enough."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.late = nn.Linear(8, 1), nn.Linear(8, 1)
        self.half()

    def forward(self, x: torch.Tensor, late: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (4 * self.head(x)).square().mean()
        if late.any():
            loss = loss + 1e-3 * self.late(x).mean()
        return {"loss": loss}


@pytest.mark.parametrize("at", [4, 8], ids=["before", "after"])
def test_weights_that_become_fp32_in_the_middle(tmp_path, at):
    """A checkpoint of before holds fp16 weights and no remedy: they come back as they are, and become fp32 at the same step."""
    x = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(3)).half()
    rows = [{"x": row, "late": torch.tensor(i >= 4 * 6)} for i, row in enumerate(x)]
    whole, its_guard = protected(tmp_path / "whole", LateBranch(), rows)
    whole.train()
    assert [(i.step, i.kind, i.action) for i in its_guard.incidents] == [(6, "nonfinite-weight", "healed")]
    folder = killed_at(tmp_path / "whole", at, tmp_path / "cut")
    resumed, guard = protected(folder, LateBranch(), rows)
    resumed.train(resume_from_checkpoint=True)
    assert [i.step for i in guard.incidents] == ([6] if at == 4 else [])
    assert {p.dtype for p in resumed.model.parameters()} == {torch.float32}
    assert_ends_alike(resumed, whole)


def with_a_stale_optimizer(folder):
    """The optimizer was made before the model got another head."""
    model = llama(dropout=0.0)
    trainer, guard = protected(folder, model)
    trainer.optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(2)
    model.lm_head = nn.Linear(32, model.config.vocab_size, bias=False)
    return trainer, guard


def test_parameters_that_joined_the_optimizer(tmp_path):
    """The checkpoint's optimizer holds more than the new one: they join it before its state is loaded."""
    whole, its_guard = with_a_stale_optimizer(tmp_path / "whole")
    whole.train()
    [treatment] = its_guard.parts.healer.applied
    assert treatment.remedy.name == "own-parameters" and treatment.step < 8
    folder = killed_at(tmp_path / "whole", 8, tmp_path / "cut")
    resumed, guard = with_a_stale_optimizer(folder)
    resumed.train(resume_from_checkpoint=True)
    assert guard.incidents == []
    assert_ends_alike(resumed, whole)


class AtBegin(TrainerCallback):
    """The weights as the training begins."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights = weights(model)


def test_a_model_that_is_built_in_fp32_now(tmp_path):
    """The user has mended it: the checkpoint is loaded as it is, and no autocast is forced on the forward."""
    whole, _ = protected(tmp_path / "whole", fp16_llama(), max_steps=SAVE_EVERY)
    whole.train()
    folder = killed_at(tmp_path / "whole", 4, tmp_path / "cut")
    mended, guard = protected(folder, llama(dropout=0.0), max_steps=SAVE_EVERY + 2, callbacks=[begin := AtBegin()])
    mended.train(resume_from_checkpoint=True)
    assert same(begin.weights, weights(whole.model)) and guard.incidents == []
    assert all(t.remedy.living() is None for t in guard.parts.healer.applied) and all_finite(mended.model)


@MODELS
def test_without_healing_it_says_what_is_lost(tmp_path, build, caplog):
    """Switching it off was a choice: a warning says that fp32 state is rounded, and no remedy is in force."""
    whole, _ = protected(tmp_path / "whole", build(), max_steps=SAVE_EVERY)
    whole.train()
    folder = killed_at(tmp_path / "whole", 4, tmp_path / "cut")
    resumed, guard = protected(folder, build(), heal=False, max_steps=SAVE_EVERY + 1)
    with caplog.at_level(logging.WARNING, "nanproof"):
        resumed.train(resume_from_checkpoint=True)
    [said] = [r.getMessage() for r in caplog.records if "was healed" in r.getMessage()]
    assert "(fp32-weights)" in said and "rounded" in said and "Policy(heal=True)" in said
    assert guard.parts.healer.applied == [] and all_finite(resumed.model)
