"""units-sft on the tiny model with few questions: `compare` trains every arm once a test run."""

from __future__ import annotations

import pytest

from compared_once import Compared, compared_once

TRAIN, VALID = 34, 16
"""34 questions are 6 steps of 32 and 2: the reported arms log step 1 and step 5. In batches of 8 they are 15 steps."""
WORDS = ["--train", str(TRAIN), "--valid", str(VALID), "--more", "8"]


def compared(factory: pytest.TempPathFactory) -> Compared:
    import torch

    torch.set_num_threads(1)
    return compared_once(factory, "units-sft", ["units-sft", "compare", "--model", "tiny", *WORDS])
