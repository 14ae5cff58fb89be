"""Every Trainer of these tests is protected; what a test then sees has to be what an unprotected Trainer shows.

The tests are a selection of the Trainer tests of huggingface/transformers (tests/trainer, Apache-2.0), written anew for
pytest and for a machine without a network or a GPU. Each names the test whose behaviour it pins. The source distribution
of transformers leaves that folder out, so they cannot be taken from there.

    NANPROOF_HF_UNPROTECTED=1 python -m pytest tests/integrations/huggingface/trainer  # the same tests, nobody protected
    NANPROOF_HF_LAG=2 python -m pytest tests/integrations/huggingface/trainer  # verdicts come two steps late, as on CUDA
"""

from __future__ import annotations

import functools
import gc
from importlib.util import find_spec

import pytest

from integrations.huggingface.trainer import protection

if any(getattr(find_spec(name), "loader", None) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "incidents: this Trainer is meant to get into trouble; reports are allowed")


@pytest.fixture(scope="session", autouse=True)
def _quick_collections():
    """Every `train()` collects garbage, which takes longer than these trainings: what is imported by now is left out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def guards(monkeypatch, request):
    """Calls `nanproof.protect` before the first `train()` of every Trainer, and checks afterwards that it was at work.

    A healthy run has to stay quiet: an incident fails the test unless it is marked `incidents`.
    """
    if protection.UNPROTECTED:
        yield []
        return
    import transformers

    plain_train = transformers.Trainer.train
    runs: list[protection.Run] = []

    @functools.wraps(plain_train)
    def train(trainer, *args, **kwargs):
        if protection.is_off() or hasattr(trainer, "nanproof"):
            return plain_train(trainer, *args, **kwargs)
        protection.protect(trainer, runs)
        return trainer.train(*args, **kwargs)  # through what `protect` put in its place, and back here

    monkeypatch.setattr(transformers.Trainer, "train", train)
    yield runs
    if request.node.get_closest_marker("incidents") is None:
        assert [str(incident) for run in runs for incident in run.guard.incidents] == []
