"""transformers' Trainer, and everything built on it. `nanproof.integrations.transformers` has the public names.

- `_trainer` protects a Trainer; `_replay` runs its steps again; `_losses` keeps its averages free of refused steps.
- `_checkpoints` chooses among the Trainer's checkpoints; `_resume` resumes a healed run.
- `_callbacks` are the monitors that people know by name; `_attach` gives their trainer its guard, or an
  observer, which is in `_observed`.
- `_loss_checks` looks at one loss and its terms.
- `_check` is what `nanproof check` needs of a Trainer.
- `_tokenizer` keeps the tokenizer beside the run's records.
"""
