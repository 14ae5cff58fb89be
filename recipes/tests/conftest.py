"""What the tests of the recipes share: the tiny model, taught once, and folders in which every arm is trained once."""

from __future__ import annotations

import gc
import logging
import shutil
from importlib.util import find_spec

import pytest
import torch

from latent_small import small_comparison
from vlm_small import vlm

__all__ = ["small_comparison", "vlm"]

if any(find_spec(name) is None for name in ("transformers", "peft", "accelerate")):
    collect_ignore_glob = ["units_sft/*", "vlm_grpo/*", "commands/*"]


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_quick(taught):
    """transformers tells of every loading, and every `train()` collects garbage, which takes longer than these trainings."""
    from transformers.utils import logging as own

    before = own.get_verbosity(), logging.getLogger("accelerate").level
    own.set_verbosity_error()
    gc.freeze()
    yield
    gc.unfreeze()
    own.set_verbosity(before[0])
    logging.getLogger("accelerate").setLevel(before[1])


@pytest.fixture(scope="session")
def language():
    """The tiny model. A test that changes it works on a copy."""
    from nanproof_recipes.units_sft.models import tiny

    torch.set_num_threads(1)
    return tiny()


@pytest.fixture(scope="session")
def units_comparison(taught, tmp_path_factory):
    """What `units-sft compare` made of all arms, trained once a test run."""
    from units_small import compared

    return compared(tmp_path_factory)


@pytest.fixture(scope="session")
def shop(language, units_comparison, tmp_path_factory):
    """A workshop in which all arms are done: `shop.arm(setting)` reads the result that `compare` left."""
    from nanproof_recipes.units_sft.workshop import Workshop
    from units_small import TRAIN, VALID

    folder = tmp_path_factory.mktemp("units-sft")
    shutil.copytree(units_comparison.out, folder, dirs_exist_ok=True)
    return Workshop(folder, "tiny", train=TRAIN, valid=VALID)
