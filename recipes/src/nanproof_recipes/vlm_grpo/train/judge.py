"""The judge: it looks at the place in a reply and writes behind it how well that meets the mask, in tokens that do not count.

The reply's author is kept from writing the judge's token, or a model could learn to praise itself. There are two ways to do it.
Where tokens are drawn it is exact: policy and reference keep the same log-probabilities. In the head of the policy alone it makes
them differ by 120 at a token that does not count, and exp of that is Inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanproof_recipes.vlm_grpo.data.scenes import Scene
from nanproof_recipes.vlm_grpo.models import VERDICT, Seeing
from nanproof_recipes.vlm_grpo.train.rewards import place_reward


def verdict(seeing: Seeing, text: str, scene: Scene) -> list[int]:
    """The judge's tokens: its mark, and tenths of the place's reward."""
    tenths = str(round(10 * place_reward(text, scene)))
    return [seeing.token(VERDICT), *seeing.tokenizer(tenths, add_special_tokens=False)["input_ids"]]


def readable(seeing: Seeing, reply: list[int]) -> list[int]:
    """The place of an image in a reply would be taken for one more image. It is banned, so only a sampler that lifts bans draws
    it; then an unknown word stands there instead."""
    image = seeing.image_token
    other = seeing.tokenizer.unk_token_id
    other = seeing.tokenizer.pad_token_id if other is None else other
    return [other if token == image else token for token in reply]


class LoweredHead(nn.Module):
    """A head that has one token's logit lowered while the adapters are in use: in the policy, and not in the reference."""

    def __init__(self, head: nn.Linear, adapter: Any, token: int, by: float) -> None:
        super().__init__()
        self.weight, self.own = head.weight, head.bias
        self._adapter = [adapter]  # not a part of this module
        lowered = torch.zeros(head.weight.shape[0], device=head.weight.device)
        lowered[token] = -by
        self.register_buffer("lowered", lowered, persistent=False)

    @property
    def bias(self) -> Tensor | None:
        """TRL computes log-probabilities from weight and bias of the head, without calling it."""
        adapter = self._adapter[0]
        if adapter.disable_adapters or "ref" in adapter.active_adapters:
            return self.own
        lowered = self.get_buffer("lowered").to(self.weight.dtype)
        return lowered if self.own is None else self.own + lowered

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


def lower(model: Any, token: int, by: float) -> None:
    """Put such a head into a model with adapters."""
    adapter = next(module for module in model.modules() if hasattr(module, "lora_A"))
    base = model.get_base_model()
    base.set_output_embeddings(LoweredHead(base.get_output_embeddings(), adapter, token, by))
