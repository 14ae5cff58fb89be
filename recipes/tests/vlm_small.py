"""vlm-grpo at size tiny after a short warm start, made once a session. A test that trains or changes the model gets a copy."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

STEPS = 30


@dataclass(frozen=True)
class Small:
    """A model that has the form of a reply and little of its content, and scenes."""

    warm: Any
    train: list[Any]
    valid: list[Any]
    losses: list[float]

    def seeing(self) -> Any:
        """A copy to be changed. The processor is shared."""
        from nanproof_recipes.vlm_grpo.models import Seeing

        return Seeing(deepcopy(self.warm.model), self.warm.processor, self.warm.source)

    def adapted(self, seed: int = 0, moved: float = 0.0) -> Any:
        """A copy with adapters; `moved`: how far they are from doing nothing."""
        import torch

        from nanproof_recipes.vlm_grpo.models import Seeing, with_adapters

        model = with_adapters(deepcopy(self.warm.model), 4, 8, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            if moved and "lora_B" in name:
                p.data.normal_(std=moved, generator=generator)
        return Seeing(model.eval(), self.warm.processor, self.warm.source)


@pytest.fixture(scope="session")
def vlm():
    for package in ("transformers", "peft", "accelerate", "PIL"):
        pytest.importorskip(package)
    import torch

    from nanproof_recipes.vlm_grpo.data.scenes import make
    from nanproof_recipes.vlm_grpo.models import load
    from nanproof_recipes.vlm_grpo.train.warm import Schooling, school

    torch.set_num_threads(1)
    sets, seeing = make(64, 16), load("tiny")
    made = school(seeing, sets["train"], Schooling(steps=STEPS, batch=16, lr=3e-3, warmup=5))
    return Small(seeing, sets["train"], sets["valid"], made.losses)
