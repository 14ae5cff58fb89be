"""`module:function` of the user's own code, which builds what a command works on."""

from __future__ import annotations

import contextlib
import importlib
import itertools
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


def built(entry: str) -> Made:
    """Import the module, call the function, and take from what it returns, a dictionary or an object, what is there: `model` and
    `loss_fn`, or `trainer`; perhaps `optimizer`, `scaler`, `scheduler`, `batch`, `batches`."""
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
    get = made.get if isinstance(made, dict) else lambda key: getattr(made, key, None)
    model, loss_fn = get("model"), get("loss_fn")
    if (trainer := get("trainer")) is not None:
        model, loss_fn = _of_trainer(entry, trainer)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{entry}: its 'model' is {type(model).__name__}. Return {{'model': module, 'loss_fn': function}}")
    if not callable(loss_fn):
        raise UsageError(f"{entry}: its 'loss_fn' is {type(loss_fn).__name__}. Return a function loss_fn(model, batch)")
    batch, batches = get("batch"), get("batches")
    if batch is None and batches is not None:
        with users_code(f"{entry}: its 'batches' cannot be read", "Return a batch, or a loader of batches"):
            batch = next(itertools.islice(batches, 1), None)
    return Made(model, loss_fn, get("optimizer"), get("scaler"), get("scheduler"), batch)


def _of_trainer(entry: str, trainer: Any) -> tuple[Any, Any]:
    """A Trainer of transformers has a model and knows its loss."""
    if not any(kind.__module__ == "transformers.trainer" for kind in type(trainer).__mro__):
        raise UsageError(
            f"{entry}: its 'trainer' is {type(trainer).__name__}, not a Trainer of transformers. Return model and loss_fn"
        )
    from nanproof.integrations.huggingface._replay import replay_loss

    return trainer.model, replay_loss(trainer)


@contextlib.contextmanager
def users_code(what: str, hint: str) -> Iterator[None]:
    """What the user's code raises is shown whole, then said in a sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stderr)
        raise UsageError(f"{what} ({type(error).__name__}: {error}). {hint}") from error
