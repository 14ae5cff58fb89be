"""Training latent-dlm, on one device or several.

- `training` runs an arm; `loops` has one loop per arm; `stepping` is one step; `team` the processes.
- `keeping` saves checkpoints; `evaluating` measures on held-out windows.
"""
