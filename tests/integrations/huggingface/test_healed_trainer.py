"""A Trainer whose run was healed: its own forwards and backwards are under the remedy too, not only those that the guard runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import nanproof
from integrations.tiny import Regression, all_finite, feature_rows, llama, make_trainer, same, token_rows, weights
from nanproof import Policy
from nanproof.recover.heal._healer import Treatment
from nanproof.recover.heal._remedies import Remedy


class MaskedMean(nn.Module):
    """The mean over what counts; over nothing it is 0/0 unless it was written with care."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.careful = nn.Linear(8, 1), careful

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        each = self.head(x).squeeze(-1).square() * mask
        count = mask.sum(1)
        return {"loss": (each.sum(1) / (count.where(count != 0, 1) if self.careful else count)).mean()}


def masked_rows(count: int, empty: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(count, 5)
    mask[list(empty)] = 0
    return [{"x": a, "mask": b} for a, b in zip(x, mask, strict=True)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_next_bad_batch_is_none(tmp_path, accumulate):
    """One incident for three bad batches, in the end the weights of the careful code, bit for bit."""
    rows = masked_rows(48 * accumulate, empty=(25 * accumulate, 30 * accumulate, 41 * accumulate))
    settings = {"gradient_accumulation_steps": accumulate, "optim": "adamw_torch"}
    careful = make_trainer(tmp_path / "careful", MaskedMean(True), rows, **settings)
    nanproof.protect(careful)
    careful.train()
    trainer = make_trainer(tmp_path / "healed", MaskedMean(False), rows, **settings)
    guard = nanproof.protect(trainer, policy=Policy(heal=True))
    trainer.train()
    assert [(i.step, i.action) for i in guard.incidents] == [(6, "healed")]
    assert same(weights(trainer.model), weights(careful.model))


def test_the_forward_is_under_autocast(tmp_path):
    """Weights that became fp32 are computed with in fp16, as the fix was verified; nothing of that is left after the run."""
    model = llama(dropout=0.0).half()
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    trainer = make_trainer(tmp_path, model, token_rows(32), optim="adamw_torch", learning_rate=1e-3)
    guard = nanproof.protect(trainer, policy=Policy(heal=True))
    trainer.train()
    assert [t.remedy.name for t in guard.parts.healer.applied] == ["fp32-weights"]
    assert {p.dtype for p in model.parameters()} == {torch.float32} and all_finite(model)
    assert seen[-7:] == [torch.float16] * 7
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_of_two_dtypes_is_evaluated(tmp_path):
    """Only the head is trained: it is fp32 behind an fp16 body, and an evaluation between steps runs under the same autocast."""
    model = llama(dropout=0.0).half()
    for name, p in model.named_parameters():
        p.requires_grad_(name == "lm_head.weight")
    trainer = make_trainer(
        tmp_path, model, token_rows(32), eval_rows=token_rows(8), eval_strategy="steps", eval_steps=4, optim="adamw_torch"
    )
    guard = nanproof.protect(trainer, policy=Policy(heal=True))
    trainer.train()
    assert [t.remedy.name for t in guard.parts.healer.applied] == ["fp32-weights"]
    assert model.lm_head.weight.dtype == torch.float32 and model.model.norm.weight.dtype == torch.float16
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 2 and evaluated[1] < evaluated[0]


class Applies(TrainerCallback):
    """Puts a remedy in force as the training begins."""

    def __init__(self, name: str, **settings: float) -> None:
        self.name, self.settings = name, settings
        self.guard = None

    def on_train_begin(self, args, state, control, **kwargs):
        healer = self.guard.parts.healer
        remedy = Remedy.known[self.name](healer.patient, **self.settings)
        assert healer.treat(Treatment(remedy, "spike", "cause", 0))


@pytest.mark.parametrize(("name", "factor", "rate"), [("gradient-factor", 0.125, 0.125), ("smaller-backward", 2.0**-6, 1.0)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_changed_once_a_step(tmp_path, name, factor, rate, accumulate):
    """However many micro-batches a step has. Factors are powers of two, so a rate times as large gives the same bits."""
    settings = {"gradient_accumulation_steps": accumulate, "optim": "sgd", "max_grad_norm": 0.0, "warmup_steps": 0}
    plain = make_trainer(tmp_path / "plain", Regression(), feature_rows(48), learning_rate=0.125 * rate, **settings)
    nanproof.protect(plain)
    plain.train()
    applies = Applies(name, factor=factor)
    trainer = make_trainer(
        tmp_path / "healed", Regression(), feature_rows(48), learning_rate=0.125, callbacks=[applies], **settings
    )
    applies.guard = nanproof.protect(trainer, policy=Policy(heal=True))
    trainer.train()
    assert applies.guard.incidents == [] and same(weights(trainer.model), weights(plain.model))


class Interrupted(Exception):
    """Raised by a callback in the middle of a step."""


class Interrupts(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise Interrupted


def test_a_run_that_ends_within_a_step_leaves_nothing_open(tmp_path):
    """Autocast opened for a step's first forward is closed though the step was never taken."""
    trainer = make_trainer(
        tmp_path, llama(dropout=0.0).half(), token_rows(64), optim="adamw_torch", learning_rate=1e-3,
        gradient_accumulation_steps=2, callbacks=[Interrupts()],
    )  # fmt: skip
    guard = nanproof.protect(trainer, policy=Policy(heal=True))
    with pytest.raises(Interrupted):
        trainer.train()
    assert [t.remedy.name for t in guard.parts.healer.applied] == ["fp32-weights"]
    assert not torch.is_autocast_enabled("cpu")
