"""Every test starts from the same random numbers, on one thread, and leaves no trace."""

import random

import pytest
import torch

from latent_small import small_comparison
from taught import taught

__all__ = ["small_comparison", "taught"]


@pytest.fixture(autouse=True)
def _same_start():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
