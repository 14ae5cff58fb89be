"""A run's folder, read as far as it is written. Everything in it may be damaged or hostile.

- `_run` reads it, each of its optimizers, and again when there is more; `_tails` reads what was appended to its files;
  `_troubles` groups the incidents; `_series` keeps curves of any length in bounded memory.
- `_beside` finds checkpoints and quarantined samples.
- `_samples`, `_tensors` and `_tokens` show what a bundle holds of the guilty samples.
"""
