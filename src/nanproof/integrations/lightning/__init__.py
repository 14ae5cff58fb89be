"""Lightning: Trainer and Fabric. Public: `NanproofCallback`, for trainers that a configuration file builds.

- `_trainer` protects a Trainer; `_seam` is where it attaches; `_replay` runs `training_step` again.
- `_checkpoints` chooses what a fit resumes from. `_observed` records a fit and changes nothing.
- `_averages` keeps refused steps out of epoch averages. `_fabric` protects a Fabric.
- `_check` is what `nanproof check` needs of a LightningModule.
"""

from __future__ import annotations

from nanproof.integrations.lightning._trainer import NanproofCallback

__all__ = ["NanproofCallback"]
