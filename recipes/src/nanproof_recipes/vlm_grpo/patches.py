"""What the document did, done as it did it, so that its effect is measured. Nobody should copy this.

A logits processor that makes NaN a number and goes on, and a callback that looks for gradients where the Trainer has none left.
What the documents' authors wanted is in `nanproof.numerics.generation` and `nanproof.integrations.huggingface._trainer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CLIP, LEAST, INSTEAD = 30.0, 1e-8, -100.0


class DocumentProcessor:
    """NaN becomes -100, everything is clipped to 30, and no token has a probability below 1e-8."""

    def __init__(self) -> None:
        self.calls = 0
        self.nan_calls = 0
        """Steps of sampling at which there was a NaN or Inf to be replaced."""
        self.nan_rows = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        bad = (scores.isnan() | (scores == torch.inf)).any(-1)
        if bool(bad.any()):
            self.nan_calls += 1
            self.nan_rows += int(bad.sum())
            scores = torch.nan_to_num(scores, nan=INSTEAD, posinf=CLIP, neginf=-CLIP)
        scores = scores.clamp(-CLIP, CLIP)
        scores = scores - scores.amax(-1, keepdim=True)
        return scores.softmax(-1).clamp(min=LEAST).log()

    def notes(self) -> list[str]:
        return [f"its processor replaced NaN at {self.nan_calls} of {self.calls} steps of sampling, in {self.nan_rows} rows"]


def document_callback() -> Any:
    """Gradients are looked at in `on_step_end`, after `zero_grad`."""
    from transformers import TrainerCallback

    class LateMonitor(TrainerCallback):
        def __init__(self) -> None:
            self.seen = 0
            self.bad = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for p in kwargs["model"].parameters():
                if p.grad is not None:
                    self.seen += 1
                    self.bad += not bool(torch.isfinite(p.grad).all())

        def notes(self) -> list[str]:
            return [f"its callback found {self.seen} gradients to look at in on_step_end"]

    return LateMonitor()
