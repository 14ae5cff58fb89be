"""Looking for NaN and Inf in many small tensors at once agrees with looking at each."""

from __future__ import annotations

import pytest
import torch

from nanproof.core.support._inner import bounds, nonfinite


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tensors_of_one_shape_may_have_any_layout(layout):
    """A network in channels_last has many alike, and a stack of them has no view as rows."""
    tensors = [torch.randn(4, 3, 2, 2).to(memory_format=layout) for _ in range(5)]
    assert bounds(tensors) == [(t.min().item(), t.max().item()) for t in tensors]
    tensors[3][1, 2, 0, 1] = float("nan")
    assert nonfinite((str(i), t) for i, t in enumerate(tensors)) == ["3"]
