"""Adapters: `nanproof.protect` guards the trainers people already use, with one call.

- `_protected` is what `protect` returns; `_observed` records a run and changes nothing;
  `_patches` replaces methods and puts them back; `_saved` judges the checkpoints that trainers write;
  `_groups` finds out which optimizers step together, `_loop_groups` guards them in a framework's loop; `_versions` knows which
  versions are tested.
- One folder for each framework: `huggingface/`, `trl/`, `lightning/`, `accelerate/`, `deepspeed/`. `script/` is `nanproof run`.
- Public: `transformers` and `lightning`, for the callbacks people know by name.

No framework is imported before it is needed.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanproof._errors import UsageError

if TYPE_CHECKING:
    from nanproof._policy import Policy
    from nanproof.integrations._protected import ProtectedRun
    from nanproof.observe._settings import Observe
    from nanproof.recover._checkpoints import Checkpoints

_ADAPTERS = {
    "transformers.trainer": ("huggingface._trainer", "protect_trainer"),
    "lightning.pytorch.trainer.trainer": ("lightning._trainer", "protect_trainer"),
    "pytorch_lightning.trainer.trainer": ("lightning._trainer", "protect_trainer"),
    "lightning.fabric.fabric": ("lightning._fabric", "protect_fabric"),
    "lightning_fabric.fabric": ("lightning._fabric", "protect_fabric"),
    "accelerate.accelerator": ("accelerate._accelerator", "protect_accelerator"),
    "deepspeed.runtime.engine": ("deepspeed._engine", "protect_engine"),
}
"""The module that defines a class, and who protects its objects."""

automatic: weakref.WeakKeyDictionary[Any, ProtectedRun] = weakref.WeakKeyDictionary()
"""Protected by `nanproof run`, or by a callback, before the script could: if it does so too, it gets that guard."""


def protect(
    trainer: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = "auto",
    checkpoints: Checkpoints | None = None,
    observe: Observe | bool | None = None,
) -> ProtectedRun:
    """Guard a trainer's run. Call it before training begins; returns the guard, whose `incidents` and `history` fill as it runs.

    Args:
        trainer: a Trainer of transformers or TRL, of Lightning, a Fabric, an Accelerator, a DeepSpeed engine.
        policy: what to do when; see `Policy`.
        run_dir: folder for records, incidents and bundles; "auto" is `nanproof` in the trainer's own folder if it has one.
        checkpoints: `Checkpoints(folder)`, to go back to when the trainer's own are not enough.
        observe: True or `Observe(...)`: activations, weights and attention in every record, and `guard.forecasts`.
    """
    with suppress(TypeError):  # what cannot be referred to weakly is no trainer, or none of those
        if trainer in automatic:
            return automatic[trainer]
    for kind in type(trainer).__mro__:
        if kind.__module__ in _ADAPTERS:
            name, function = _ADAPTERS[kind.__module__]
            adapter = import_module(f"nanproof.integrations.{name}")
            guard: ProtectedRun = getattr(adapter, function)(
                trainer, policy=policy, run_dir=run_dir, checkpoints=checkpoints, observe=observe
            )
            return guard
    raise UsageError(
        f"protect({type(trainer).__name__}): not a trainer that nanproof knows (transformers, TRL, Lightning, Fabric, "
        "Accelerate, DeepSpeed). For a loop of your own, use nanproof.Guard(model, optimizer)"
    )
