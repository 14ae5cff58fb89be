"""Accelerate: a loop over an `Accelerator`, guarded as it stands. `_accelerator` does it."""
