"""Asking a model: replies to prompts, greedy or sampled, and the score of what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nanproof.numerics.losses import masked_cross_entropy, supervised_tokens
from nanproof_recipes.units_sft.data.samples import Collator, Example
from nanproof_recipes.units_sft.models import Language

LONGEST = 64
"""Tokens of a reply at the most; a worked answer has about 30."""


@torch.no_grad()
def replies(
    model: nn.Module,
    language: Language,
    prompts: Sequence[str],
    *,
    batch: int = 64,
    longest: int = LONGEST,
    samples: int = 1,
    temperature: float | None = None,
    tick: Callable[[int, str], None] = lambda done, said: None,
) -> list[list[str]]:
    """`samples` replies for each prompt. Without a temperature the likeliest token is taken every time."""
    tokenizer, asked = language.tokenizer, list(prompts)
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]))  # little padding
    found: list[list[str]] = [[] for _ in asked]
    where = next(model.parameters()).device
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    training = model.training
    model.eval()
    try:
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            given = _left_padded(
                [tokenizer(asked[i], add_special_tokens=False)["input_ids"] for i in chosen], tokenizer.pad_token_id
            )
            given = {name: tensor.to(where) for name, tensor in given.items()}
            out: Any = model.generate(  # type: ignore[operator]
                **given,
                max_new_tokens=longest,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=language.ends,
                use_cache=True,
                **sampling,
            )
            texts = tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
            for place, i in enumerate(chosen):
                found[i] = texts[place * samples : (place + 1) * samples]
            tick(begin + len(chosen), "")
    finally:
        model.train(training)
    return found


def _left_padded(rows: Sequence[list[int]], padding: int) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def measured_loss(model: nn.Module, rows: Sequence[Example], padding: int, batch: int = 32) -> float:
    """The loss on answers that were not trained on: the mean over all supervised tokens."""
    collate, where, training = Collator(padding), next(model.parameters()).device, model.training
    total = torch.zeros((), dtype=torch.float64, device=where)
    items = 0
    model.eval()
    try:
        for begin in range(0, len(rows), batch):
            given = {name: tensor.to(where) for name, tensor in collate(rows[begin : begin + batch]).items()}
            labels = given.pop("labels")
            items += int(supervised_tokens(labels).sum())
            total += masked_cross_entropy(model(**given).logits, labels, num_items=1).double()
    finally:
        model.train(training)
    return float(total / items)
