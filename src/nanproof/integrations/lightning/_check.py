"""What a LightningModule would train on, for `nanproof check`: its `training_step`, optimizers and
first batch. No fit is started."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof._errors import UsageError
from nanproof.core.judge._parameters import unwrap


def parts_of(module: Any, trainer: Any = None, batch: Any = None, datamodule: Any = None) -> dict[str, Any]:
    """Return what `nanproof check` needs. A batch that is not given is the first of the training data."""
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} steps its optimizers itself (automatic_optimization=False). "
            "Return model, optimizer, loss_fn and batch instead"
        )
    if trainer is not None:
        module.trainer = trainer
    if batch is None:
        batch = next(iter(_loader(module, datamodule)), None)
    accumulate = int(getattr(trainer, "accumulate_grad_batches", 1))
    return {
        "model": module,
        "loss_fn": StepLoss(trainer, accumulate),
        "optimizer": _optimizers(module.configure_optimizers()),
        "batch": batch,
        "accumulate": accumulate,
    }


class StepLoss:
    """What Lightning calls backward on for a batch."""

    divides = True
    """The loss is divided by the number of micro-batches here."""

    def __init__(self, trainer: Any, accumulate: int) -> None:
        self._precision, self._accumulate = getattr(trainer, "precision_plugin", None), accumulate

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        module: Any = unwrap(model)
        indexed = len(inspect.signature(module.training_step).parameters) > 1
        with _silent(module), nullcontext() if self._precision is None else self._precision.train_step_context():
            output = module.training_step(batch, 0) if indexed else module.training_step(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise UsageError(f"{type(module).__name__}.training_step returns {type(loss).__name__}, not a loss")
        return loss / self._accumulate if self._accumulate > 1 else loss


@contextmanager
def _silent(module: nn.Module) -> Iterator[None]:
    """`self.log` and `self.log_dict` do nothing: there is no trainer to log to."""
    modules = [m for m in module.modules() if hasattr(type(m), "log_dict")]
    for each in modules:
        each.__dict__["log"] = each.__dict__["log_dict"] = _nothing
    try:
        yield
    finally:
        for each in modules:
            each.__dict__.pop("log", None)
            each.__dict__.pop("log_dict", None)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _loader(module: Any, datamodule: Any) -> Iterable[Any]:
    source = module if datamodule is None else datamodule
    if datamodule is not None:
        datamodule.prepare_data()
        datamodule.setup("fit")
    found: Iterable[Any] = source.train_dataloader()
    return found


def _optimizers(configured: Any) -> Optimizer | list[Optimizer] | None:
    """The optimizers in what `configure_optimizers` returned, in any of its forms."""
    if isinstance(configured, Mapping):
        configured = configured["optimizer"]
    if configured is None or isinstance(configured, Optimizer):
        return configured
    if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        configured = configured[0]
    found = [each["optimizer"] if isinstance(each, Mapping) else each for each in configured]
    return found[0] if len(found) == 1 else found
