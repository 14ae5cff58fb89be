"""What the documents did, done as they did it, so that its effect is measured. Nobody should copy this.

Document 000: a callback that zeroes NaN gradients at `on_step_end`, where the Trainer has none left, and a loss that is replaced
when it is 0 or NaN. Document 002: two arguments that have these values anyway. (Document 001, fp32 weights, is a setting.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from nanproof_recipes.units_sft.data.samples import IGNORED

INVENTED = 1e-6
"""The loss that document 000 puts in the place of one that is 0 or NaN."""


class ZeroingCallback(TrainerCallback):
    """Document 000's monitor: NaN gradients are to be zeroed and infinite ones clipped, after the step."""

    def __init__(self) -> None:
        self.seen = 0
        """Gradients that were there to be looked at."""
        self.mended = 0
        self.warnings = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        norm, loss = logs.get("grad_norm"), logs.get("loss")
        if norm is not None and not torch.isfinite(torch.tensor(float(norm))):
            self.warnings += 1
        if loss is not None and (float(loss) == 0.0 or not torch.isfinite(torch.tensor(float(loss)))):
            self.warnings += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for p in kwargs["model"].parameters():
            if p.grad is None:
                continue
            self.seen += 1
            if torch.isnan(p.grad).any():
                p.grad = torch.zeros_like(p.grad)
                self.mended += 1
            elif torch.isinf(p.grad).any():
                p.grad = p.grad.clamp(-1.0, 1.0)
                self.mended += 1


class InventingLoss:
    """Document 000's loss: 1e-6 where nothing is supervised, and where the loss is None, NaN or 0."""

    def __init__(self, trainer: Trainer) -> None:
        self._original = trainer.compute_loss
        self.invented = 0
        self.asked = 0

    def __call__(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.asked += 1
        labels = inputs.get("labels")
        if labels is not None and not bool((labels != IGNORED).any()):
            return self._out(self._number(labels.device), None, return_outputs)
        loss, outputs = self._original(model, inputs, return_outputs=True, **kwargs)
        if loss is None or bool(torch.isnan(loss)) or bool(loss == 0):
            loss = self._number(next(model.parameters()).device)
        return self._out(loss, outputs, return_outputs)

    def _number(self, device: torch.device) -> Tensor:
        self.invented += 1
        return torch.tensor(INVENTED, device=device, requires_grad=True)

    @staticmethod
    def _out(loss: Tensor, outputs: Any, return_outputs: bool) -> Any:
        return (loss, outputs) if return_outputs else loss


def own_checks(log: list[dict[str, Any]]) -> dict[str, bool]:
    """What document 000 says to look for in the log after its fix."""
    norms = [float(line["grad_norm"]) for line in log if "grad_norm" in line]
    losses = [float(line["loss"]) for line in log if "loss" in line]
    finite = torch.tensor(norms).isfinite()
    return {
        "every gradient norm is finite": bool(finite.all()) and bool(norms),
        "every loss is positive": all(loss > 0 for loss in losses) and bool(losses),
    }
