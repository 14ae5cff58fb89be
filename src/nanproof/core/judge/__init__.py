"""The device side of a step: from gradients to a verdict, through the optimizer, without a host sync.

- `_judge` is the contract (`Judge`, `Report`, `Norms`); `_stepper` keeps it for torch optimizers.
- `_parameters` names the trainable parameters, finds their gradients and computes their norms.
- `_verdict` decides skip or step and how much to clip; `_stats` knows what is usual for this run.
- `_optimizers` brings the verdict to the optimizer; `_scaling` reads and updates a loss scale.
- `_structure` notices what was added to, replaced in or taken from the model and the optimizers.
- `_keepers` restores what a refused step must not change; `_copies` undoes a step that could not be vetoed.
- `_terms` follows the terms of a loss.
"""
