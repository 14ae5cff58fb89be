"""Back to a healthy run: good states, the position in the data, salvaged batches, and fixes applied to the run.

- `_recovery` decides when to keep a state, when it counts as good, and how to return to it.
- `_checkpoints` is what the user asks for (`Checkpoints`).
- `_salvage` trains on the good rows of a bad batch; `_rewarm` raises the learning rate again after a rollback.
- `state/` keeps states in memory and on disk; `data/` knows loaders, positions and quarantined samples;
  `heal/` applies verified fixes.

A checkpoint may come from anywhere. Nothing here executes what it reads.
"""
