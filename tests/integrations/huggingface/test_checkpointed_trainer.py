"""A protected Trainer with gradient checkpointing, TRL's default: the diagnosis is as good as without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanproof
from integrations.tiny import llama, make_trainer, token_rows

BAD_ROW, BAD_TOKEN, ZERO = 14, 5, 63


class Counted(nn.Module):
    """An mlp whose output is divided by how often a token counts: 0 for one of them."""

    def __init__(self, inner: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.inner, self.ids = inner, None
        embedding.register_forward_hook(lambda _module, args, _out: setattr(self, "ids", args[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / (self.ids != ZERO).to(x.dtype).unsqueeze(-1)


def diagnosed(folder, **settings):
    model = llama()
    model.model.layers[1].mlp = Counted(model.model.layers[1].mlp, model.get_input_embeddings())
    rows = token_rows(32)
    for row in rows:
        row["input_ids"][row["input_ids"] == ZERO] = 3
    rows[BAD_ROW]["input_ids"][BAD_TOKEN] = ZERO
    trainer = make_trainer(folder, model, rows, gradient_accumulation_steps=2, **settings)
    guard = nanproof.protect(trainer)
    trainer.train()
    [incident] = guard.incidents
    assert (incident.step, incident.micro_batch) == (1, 1)
    return incident.diagnosis


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_fix_inside_a_checkpointed_layer_is_verified(tmp_path, reentrant):
    """The layer is computed again inside backward: the fix that is tried has to hold there too."""
    plain = diagnosed(tmp_path / "plain")
    kind = {"use_reentrant": reentrant}
    found = diagnosed(tmp_path / "checkpointed", gradient_checkpointing=True, gradient_checkpointing_kwargs=kind)
    assert found.cause == "zero-denominator" and found.verified
    assert (found.where, found.samples, found.tokens) == ("model.layers.1.mlp", (BAD_ROW % 4,), (BAD_TOKEN,))
    assert found == plain
