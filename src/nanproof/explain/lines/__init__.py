"""How a loop computes its loss, from its own source: so that a step can be run again although nobody handed over a loss function.

- `_source` finds the call that a frame is in; `_names` knows what a statement reads and binds.
- `_recorded` notes what a loop calls its model with, and says how the loss of a backward can be computed again.
- `_guarded` does so for a loop that calls `guard.step(loss)`.
- `_slice` takes the statements that lead to a loss; `_lines` does so at every backward, and keeps references to what they read.
"""
