"""What makes a step cheap. Everything here does what plain torch does in `judge/`, which it is tested against.

- `_fused` calls the fused kernels of an optimizer with lists that are made once.
- `_kernels` reads norms and makes the verdict on CUDA in three launches; `_scalars` makes it on a CPU in Python's numbers.
- `_captured` replays norms, verdict and optimizer as one CUDA graph.
"""
