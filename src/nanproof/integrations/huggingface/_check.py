"""What a Trainer would train on, for `nanproof check`: its model, loss, optimizer and first batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from nanproof.core.support._tree import map_tensors
from nanproof.explain.locate._locate import batch_shape
from nanproof.integrations.huggingface._replay import BESIDES, micro_batch, replay_loss


def parts_of(trainer: Trainer, batch: Any = None) -> dict[str, Any]:
    """Return what `nanproof check` needs. A batch that is not given is the first of the training data."""
    given = next(iter(trainer.get_train_dataloader())) if batch is None else batch
    given = trainer._prepare_inputs(given)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as its loop sets it
    loss_fn = TrainersLoss(trainer)
    optimizer = trainer.optimizer if trainer.optimizer is not None else trainer.create_optimizer()
    return {
        "model": trainer.model,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "batch": loss_fn.whole(given),
        "accumulate": trainer.args.gradient_accumulation_steps,
    }


class TrainersLoss:
    """What the trainer calls backward on for a micro-batch, with the number of items that it counts."""

    weighted = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loss = trainer, replay_loss(trainer)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss(model, batch)

    def whole(self, given: Any) -> dict[str, Any]:
        """The batch as a step of its own."""
        return self._micro_batch(given, self._items([given]), 1)

    def micro_batches(self, batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        """The batch as so many micro-batches of one step."""
        given = {key: value for key, value in batch.items() if key != BESIDES}
        samples, _ = batch_shape(given)
        size = samples // parts

        def cut(i: int) -> Any:
            return map_tensors(given, lambda t: t[i * size : (i + 1) * size] if t.dim() and t.shape[0] == samples else t)

        cuts = [cut(i) for i in range(parts)]
        items = self._items(cuts)
        return [self._micro_batch(each, items, parts) for each in cuts]

    def _items(self, batches: list[Any]) -> Any:
        count = getattr(self._trainer, "_get_num_items_in_batch", None)
        return None if count is None else count(batches, self._trainer.args.device)

    def _micro_batch(self, given: Any, items: Any, parts: int) -> dict[str, Any]:
        made = micro_batch(self._trainer, given, items)
        made[BESIDES] |= {"accumulation": parts}
        return made
