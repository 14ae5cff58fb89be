"""`nanproof run`: a training script, unchanged, protected.

- `_autorun` runs the script; `_session` knows when to keep hands off; `_runs` has the script's optimizers, and `_script_run`
  guards those that one loss feeds.
- `_torch_patches` changes torch while the script runs, and `_clipping` what clips gradients;
  `_trainers` protects trainers as their loop begins; `_imports` waits for modules.
- `_first_calls` sees what is called before the first backward; `_owners` finds the module that the parameters belong to.
- `_summary` reports what happened.
"""
