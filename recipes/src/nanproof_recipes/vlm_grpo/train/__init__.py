"""Training vlm-grpo: a warm start on right answers, then GRPO.

- `warm` is the warm start; `grpo_trl` runs GRPO with TRL's trainer, `grpo_loop` in the recipe's own loop.
- `training` holds what both share: what a training returns, and its log.
- `asking` samples replies; `rewards` scores them; `judge` appends a verdict to each.
"""
