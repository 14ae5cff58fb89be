"""A test that ends while waits of the host are errors must not take the others with it, nor the first one be stopped by it."""

import warnings

import pytest
import torch


def _allow_waits() -> None:
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _waits_are_allowed():
    """Before a test too: the first call in a process warns that the mode is a prototype, which would be an error in a test that
    runs alone, and one more wait in a test that counts them."""
    _allow_waits()
    yield
    _allow_waits()
