"""`module:function` of the user's own code, which builds what a command works on."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanproof._errors import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Made:
    """What the user's function returned."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Any
    scaler: Any
    scheduler: Any
    batch: Any
    """The first batch, where there are some."""
    accumulate: int
    """Micro-batches that the loop splits a batch into, and whose losses it averages."""


def built(entry: str, to_train: bool = False) -> Made:
    """Import the module, call the function, and take from what it returns, a dictionary or an object, what is there: `model` and
    `loss_fn`, or `trainer`; perhaps `optimizer`, `scaler`, `scheduler`, `batch`, `batches`, `accumulate`.

    `to_train`: a Trainer of transformers, or a LightningModule, also gives its optimizer and its first batch.
    """
    from torch import nn

    module_name, colon, name = entry.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{entry!r} names no function. Write module:function, such as train:build")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with users_code(f"{entry}: {module_name} cannot be imported", "Start nanproof in the folder of that module"):
        module = importlib.import_module(module_name)
    build = getattr(module, name, None)
    if not callable(build):
        raise UsageError(f"{entry}: {module_name} has no function {name!r}. Name one that returns model and loss_fn")
    with users_code(f"{entry}: {name}() failed", "It is called without arguments and must build the model"):
        made = build()
    get = _reader(made)
    model, loss_fn, trainer = get("model"), get("loss_fn"), get("trainer")
    batch, batches = get("batch"), get("batches")
    if batch is None and batches is not None:
        with users_code(
            f"{entry}: its 'batches' cannot be read", "Return a batch, or a list, a loader or an iterator of batches"
        ):
            batch = next(iter(batches), None)
    found: dict[str, Any] = {}
    if _is(trainer, "transformers.trainer", "Trainer"):
        model, loss_fn, found = _of_trainer(entry, trainer, batch, to_train)
    elif to_train and loss_fn is None and _is_lightning(model):
        found = _of_lightning(entry, model, trainer, batch, get("datamodule"))
        loss_fn = found["loss_fn"]
    elif trainer is not None and loss_fn is None:
        kind = type(trainer).__name__
        raise UsageError(f"{entry}: its 'trainer' is {kind}, not a Trainer of transformers. Return model and loss_fn")
    if get("optimizer") is not None:
        found["optimizer"] = get("optimizer")
    accumulate = get("accumulate") or found.get("accumulate") or 1
    if not isinstance(model, nn.Module):
        raise UsageError(f"{entry}: its 'model' is {type(model).__name__}. Return {{'model': module, 'loss_fn': function}}")
    if not callable(loss_fn):
        raise UsageError(f"{entry}: its 'loss_fn' is {type(loss_fn).__name__}. Return a function loss_fn(model, batch)")
    batch = found.get("batch", batch)
    return Made(model, loss_fn, found.get("optimizer"), get("scaler"), get("scheduler"), batch, int(accumulate))


def _reader(made: Any) -> Callable[[str], Any]:
    """Read a dictionary, an object with attributes, or a Trainer or LightningModule by itself."""
    if _is(made, "transformers.trainer", "Trainer"):
        made = {"trainer": made}
    elif _is_lightning(made):
        made = {"model": made}
    return made.get if isinstance(made, dict) else lambda key: getattr(made, key, None)


def _is(value: Any, module: str, name: str) -> bool:
    """Whether an object is of a class of a framework, or of one derived from it. Imports nothing."""
    return any(kind.__module__ == module and kind.__name__ == name for kind in type(value).__mro__)


def _is_lightning(value: Any) -> bool:
    packages = ("lightning.pytorch", "pytorch_lightning")
    return any(_is(value, f"{package}.core.module", "LightningModule") for package in packages)


def _of_trainer(entry: str, trainer: Any, batch: Any, to_train: bool) -> tuple[Any, Any, dict[str, Any]]:
    """A Trainer of transformers has a model and knows its loss."""
    if not to_train:
        from nanproof.integrations.huggingface._replay import replay_loss

        return trainer.model, replay_loss(trainer), {}
    from nanproof.integrations.huggingface._check import parts_of

    with users_code(f"{entry}: its 'trainer' gives no first batch", "Give it a train_dataset, or return 'batch' too"):
        found = parts_of(trainer, batch)
    return found["model"], found["loss_fn"], found


def _of_lightning(entry: str, module: Any, trainer: Any, batch: Any, datamodule: Any) -> dict[str, Any]:
    from nanproof.integrations.lightning._check import parts_of

    hint = "Return {'model': module, 'batches': loader}; add 'trainer' if the module asks for it"
    with users_code(f"{entry}: {type(module).__name__} cannot be prepared", hint):
        return parts_of(module, trainer, batch, datamodule)


@contextlib.contextmanager
def users_code(what: str, hint: str) -> Iterator[None]:
    """What the user's code raises is shown whole, then said in a sentence."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stderr)
        raise UsageError(f"{what} ({type(error).__name__}: {error}). {hint}") from error
