"""What the latents of a text are: a sketch of the bytes in each stretch of a window, made without any network, so that both
directions between text and latents can be learned and checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanproof import UsageError

MATRIX_SEED = 20_011
"""Of the matrix that sketches bytes; it is the same for every run."""
FLOOR = 1e-3
"""Least standard deviation that is divided by: a channel that never changes stays small."""
_AT_ONCE = 256
"""Windows whose bytes are looked up at the same time."""


def matrix(width: int) -> Tensor:
    """[256, width]: a fixed random vector for each byte. The global generator is neither read nor moved."""
    return torch.randn(256, width, generator=torch.Generator().manual_seed(MATRIX_SEED), device="cpu", dtype=torch.float32)


def encode(ids: Tensor, length: int, width: int) -> Tensor:
    """[N, L] to [N, length, width], float32: of each stretch of a window the sum of its bytes' vectors over the root of their
    number, which is histogram times matrix. Ids that are no bytes do not count; a stretch without bytes is zero."""
    if ids.dim() != 2 or length < 1 or width < 1:
        raise UsageError(f"ids of shape {tuple(ids.shape)}, length {length}, width {width}: windows [N, L] and sizes >= 1 needed")
    vectors = torch.cat([matrix(width), torch.zeros(1, width)]).to(ids.device)
    columns = ids.shape[1]
    stretch = torch.empty(columns, dtype=torch.int64, device=ids.device)
    for i in range(length):
        stretch[i * columns // length : (i + 1) * columns // length] = i
    parts = [_sums(part, vectors, stretch, length) for part in ids.split(_AT_ONCE)]
    return torch.cat(parts) if parts else torch.zeros(0, length, width, device=ids.device)


def _sums(ids: Tensor, vectors: Tensor, stretch: Tensor, length: int) -> Tensor:
    looked_up = vectors[ids.clamp(max=256)]
    sums = looked_up.new_zeros(ids.shape[0], length, vectors.shape[1]).index_add_(1, stretch, looked_up)
    counts = looked_up.new_zeros(ids.shape[0], length).index_add_(1, stretch, (ids < 256).to(looked_up.dtype))
    return sums / counts.clamp(min=1).sqrt().unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of every channel of the latents."""

    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def fit(cls, latents: Tensor) -> Scale:
        """Over windows and stretches, in fp64, of finite latents only."""
        rows = latents.reshape(-1, latents.shape[-1]).double()
        if not rows.shape[0]:
            raise UsageError("there are no latents to take a mean of")
        if not bool(rows.isfinite().all()):
            raise UsageError("the latents are not all finite: their mean and variance would not be either")
        std = rows.std(dim=0, correction=0).clamp(min=FLOOR)
        return cls(rows.mean(dim=0).tolist(), std.tolist())

    def to(self, latents: Tensor) -> Tensor:
        """Mean 0 and variance 1 in every channel."""
        return (latents - latents.new_tensor(self.mean)) / latents.new_tensor(self.std)

    def back(self, latents: Tensor) -> Tensor:
        """The opposite of `to`."""
        return latents * latents.new_tensor(self.std) + latents.new_tensor(self.mean)

    def state(self) -> dict[str, list[float]]:
        """Plain lists, for JSON."""
        return {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Scale:
        """Back from `state`."""
        mean, std = [float(v) for v in state["mean"]], [float(v) for v in state["std"]]
        if len(mean) != len(std) or not all(v >= FLOOR for v in std):
            raise UsageError(f"no scale of latents: {len(mean)} means and {len(std)} deviations, or one below {FLOOR}")
        return cls(mean, std)
