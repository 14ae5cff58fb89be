"""The models, data and Trainers that the tests of this folder share: a line to fit, and very small language models.

The line is the workhorse of transformers' own Trainer tests: y = a x + b with two scalar weights, 64 noisy points on
y = 2x + 3, batches of 8 and 3 epochs, so 24 steps. What a Trainer made of the two weights says at once whether it took
the right steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from integrations.huggingface.trainer.protection import plain

EPOCHS, BATCH, POINTS = 3, 8, 64
STEPS = EPOCHS * POINTS // BATCH


class Points(Dataset):
    """Noisy points on y = 2x + 3; with `targets` of 2, a second column of labels."""

    def __init__(self, length: int = POINTS, seed: int = 42, targets: int = 1) -> None:
        draw = np.random.RandomState(seed)
        self.x = draw.normal(size=length).astype(np.float32)
        self.ys = [(2 * self.x + 3 + draw.normal(scale=0.1, size=length)).astype(np.float32) for _ in range(targets)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        names = ("labels", "labels_2")
        return {"x": self.x[i], **{name: y[i] for name, y in zip(names, self.ys, strict=False)}}


class Stream(IterableDataset):
    """The same points without a length; with `once`, what was read stays read, as from a socket."""

    def __init__(self, length: int = POINTS, once: bool = False) -> None:
        self.points = Points(length)
        self.once = once
        self.at = 0

    def __iter__(self):
        for i in range(self.at, len(self.points)):
            yield self.points[i]
            self.at = i + 1 if self.once else 0


class Ragged(Dataset):
    """Vectors whose length changes from batch to batch, never within one."""

    def __init__(self, length: int = POINTS, seed: int = 42) -> None:
        draw = np.random.RandomState(seed)
        sizes = draw.randint(1, 20, (length // BATCH,)).repeat(BATCH)
        self.xs = [draw.normal(size=size).astype(np.float32) for size in sizes]
        self.ys = [draw.normal(size=size).astype(np.float32) for size in sizes]

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.xs[i], "labels": self.ys[i]}


class Tokens(Dataset):
    """One random sentence, over and over; with `ragged`, sentences of many lengths, padded with labels that do not count."""

    def __init__(self, length: int = 32, width: int = 16, vocabulary: int = 100, ragged: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        count = length if ragged else 1
        self.rows = torch.randint(1, vocabulary, (count, width), generator=draw)
        self.labels = self.rows.clone()
        if ragged:
            ends = torch.randint(2, width + 1, (count, 1), generator=draw)
            self.labels[torch.arange(width) >= ends] = -100
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = i % len(self.rows)
        return {"input_ids": self.rows[row], "labels": self.labels[row]}


def fit(y: Tensor, labels: Tensor | None, twice: bool) -> tuple[Tensor, ...]:
    outputs = (y, y) if twice else (y,)
    return outputs if labels is None else (F.mse_loss(y, labels), *outputs)


class Line(nn.Module):
    """y = a x + b as a module that knows nothing of transformers."""

    def __init__(self, a: float = 0.0, b: float = 0.0, twice: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(float(a))), nn.Parameter(torch.tensor(float(b)))
        self.twice = twice
        self.config = None

    def forward(self, x, labels=None, **kwargs):
        return fit(x * self.a + self.b, labels, self.twice)


class DictLine(Line):
    """The same, answering with a dict."""

    def forward(self, x, labels=None, **kwargs):
        y = x * self.a + self.b
        return {"y": y} if labels is None else {"loss": F.mse_loss(y, labels), "y": y}


class LineConfig(PretrainedConfig):
    def __init__(self, a=0.0, b=0.0, twice=False, **kwargs):
        super().__init__(**kwargs)
        self.a, self.b, self.twice, self.hidden_size = a, b, twice, 1


class PretrainedLine(PreTrainedModel):
    """The same as a model of transformers, which a Trainer saves and loads in its own way."""

    config_class = LineConfig
    base_model_prefix = "line"

    def __init__(self, config):
        super().__init__(config)
        self.a, self.b = nn.Parameter(torch.tensor(float(config.a))), nn.Parameter(torch.tensor(float(config.b)))
        self.post_init()

    def forward(self, x, labels=None, **kwargs):
        return fit(x * self.a + self.b, labels, self.config.twice)


class NoisyLine(PretrainedLine):
    """Draws from all three random number generators in every forward pass."""

    def forward(self, x, labels=None, **kwargs):
        noise = torch.randn(()) + np.random.rand() + random.random()  # noqa: NPY002  (numpy's global generator is meant)
        return fit(x * self.a + self.b + 0.05 * noise, labels, False)


class DeepLine(PreTrainedModel):
    """Four layers and a head, which can be recomputed in the backward pass."""

    config_class = LineConfig
    base_model_prefix = "deep"
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
        self.head = nn.Linear(1, 1)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, x, labels=None, **kwargs):
        y = x.unsqueeze(-1)
        for layer in self.layers:
            recompute = self.training and self.gradient_checkpointing
            y = 3 * (self._gradient_checkpointing_func(layer.__call__, y) if recompute else layer(y))
        return fit(self.head(y).squeeze(-1), labels, False)


class Near:
    """A metric: the share of predictions within a quarter of the label."""

    def __call__(self, prediction) -> dict[str, float]:
        predictions, labels = prediction
        return {"accuracy": float((np.abs(predictions - labels) <= 0.25).astype(np.float32).mean())}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **{**quiet, **options})


def line_trainer(
    folder: Path,
    *,
    a: float = 0.0,
    b: float = 0.0,
    twice: bool = False,
    points: int = POINTS,
    eval_points: int = POINTS,
    targets: int = 1,
    pretrained: bool = True,
    model: nn.Module | None = None,
    trainer: type[Trainer] = Trainer,
    extras: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer for the line; `options` are TrainingArguments, `extras` go to the Trainer itself."""
    if model is None:
        model = PretrainedLine(LineConfig(a=a, b=b, twice=twice)) if pretrained else Line(a, b, twice)
    names = {"label_names": ["labels", "labels_2"]} if targets == 2 else {}
    made = trainer(
        model,
        arguments(folder, **names, **options),
        train_dataset=Points(points, targets=targets),
        eval_dataset=Points(eval_points, targets=targets),
        **(extras or {}),
    )
    # the loss of the line is a mean and takes no number of items
    made.model_accepts_loss_kwargs = False
    return made


def tiny_gpt2(**changes: Any) -> GPT2LMHeadModel:
    shape = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**{**shape, "bos_token_id": 0, "eos_token_id": 0, **changes}))


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    shape = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same_weights(one: Trainer, other: Trainer, **tolerance: float) -> None:
    for (name, p), (_, q) in zip(weights(one).items(), weights(other).items(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def trained_plain(build: Callable[[], Trainer]) -> Trainer:
    """What `build` makes, trained without protection: the oracle."""
    with plain():
        trainer = build()
        trainer.train()
    return trainer


def trained(build: Callable[[], Trainer]) -> Trainer:
    trainer = build()
    trainer.train()
    return trainer
