"""`nanproof run`: a training script, unchanged, protected.

- `_autorun` runs the script; `_session` knows its optimizers; `_script_run` guards each of them.
- `_torch_patches` changes torch while the script runs; `_trainers` protects trainers as their loop begins;
  `_imports` waits for modules; `_owners` finds the module that an optimizer's parameters belong to.
- `_summary` reports what happened.
"""
