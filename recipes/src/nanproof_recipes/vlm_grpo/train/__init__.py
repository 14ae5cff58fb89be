"""Training vlm-grpo: `warm` start, then GRPO on TRL (`grpo_trl`) or in a plain loop (`grpo_loop`).

- `training` chooses; `asking` samples replies; `judge` and `rewards` score them.
"""
