"""A test that ends while waits of the host are errors must not take the others with it."""

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def _waits_are_allowed_again():
    yield
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("default")
