"""Training latent-dlm, on one device or several.

- `training` trains one arm; `loops` holds the three ways to take a step; `stepping` runs the steps, the log and evaluations.
- `team` is the group of processes that torchrun started, or a single one.
- `evaluating` measures a model on held-out windows; `keeping` saves and loads a trained model.
"""
