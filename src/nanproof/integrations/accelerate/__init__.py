"""Accelerate: a loop over an `Accelerator`, guarded as it stands.

- `_accelerator` protects one; `_states` looks after the folders of `save_state`.
"""
