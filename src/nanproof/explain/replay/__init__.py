"""Run a step again: exactly as it was, or with one thing changed.

- `_replay` runs forward and backward; `_recorder` keeps what that needs of the last few steps.
- `_copies` takes the optimizer's step on copies; `_rehearse` takes whole steps and undoes them.
- `_interventions` and `_surroundings` are the changes that stand for a fix.
- `_attributes` saves what modules keep in plain attributes.
"""
