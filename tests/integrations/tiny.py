"""Models and data of a second's size for the trainers' tests: made from configs, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64


def llama(dropout: float = 0.1, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=dropout,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def token_rows(count: int, unsupervised: range | tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens. Those in `unsupervised` have no label: a batch of them has the loss 0/0."""
    ids = torch.randint(3, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    for i in unsupervised:
        rows[i]["labels"] = torch.full((12,), -100)
    return rows


class Regression(nn.Module):
    """A model that returns its loss, with dropout and a buffer that every forward writes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(self.body(x)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def feature_rows(count: int, bad: dict[int, float] | None = None) -> list[dict[str, torch.Tensor]]:
    """Rows of features with a target; `bad` puts a value into the features of a row."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(2))
    y = x.sum(1) * 0.3
    for row, value in (bad or {}).items():
        x[row, 3] = value
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def make_trainer(
    folder: Any,
    model: nn.Module,
    rows: Any,
    cls: type[Trainer] = Trainer,
    callbacks: Any = None,
    args: Any = None,
    eval_rows: Any = None,
    **settings: Any,
) -> Trainer:
    """A trainer that takes the rows in order, on the CPU, and says nothing."""
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    arguments = (args or TrainingArguments)(output_dir=str(folder), **{**defaults, **settings})
    return cls(model=model, args=arguments, train_dataset=rows, eval_dataset=eval_rows, callbacks=callbacks)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def all_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.state_dict().values() if p.is_floating_point())
