"""The weights of units-sft's tiny model, taught once for all processes of a test run: teaching takes longer than most tests."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    """A folder that the workers share; `share(folder)` in another process takes the weights from it too."""
    from nanproof_recipes.units_sft import models

    own, teach = tmp_path_factory.getbasetemp(), models._tiny_weights
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    share(folder)
    yield folder
    models._tiny_weights = teach


def share(folder: Path) -> None:
    """Whoever needs them first in this run teaches them. Two at once do the same work and write the same file."""
    from nanproof_recipes.units_sft import models

    teach = models._tiny_weights

    @cache
    def weights(seed: int, steps: int = 200):
        path = folder / f"tiny-{seed}-{steps}.pt"
        if not path.exists():
            torch.save(teach(seed, steps), f"{path}.{os.getpid()}")
            os.replace(f"{path}.{os.getpid()}", path)
        return torch.load(path, weights_only=True)

    models._tiny_weights = weights
