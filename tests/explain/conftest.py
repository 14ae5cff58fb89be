"""What the tests of diagnoses share."""

import pytest
import torch

from nanproof.core.judge import _keepers


@pytest.fixture
def checked(monkeypatch):
    """The judge looks at weights of every dtype after a step, and puts them back."""
    halves = (torch.float16, torch.bfloat16, torch.float32)
    monkeypatch.setattr(_keepers, "_HALF", halves, raising=False)
    return {"half_weights": "restore"}
