"""What all tests share: every test starts from the same random numbers on one thread; a browser for those that need one."""

import gc
import random
import shutil

import pytest
import torch

from limits import Limits
from taught import taught  # the tiny language model of the recipes: documents show it too

__all__ = ["taught"]


@pytest.fixture(autouse=True)
def _same_start():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def limits():
    """A process to run something in that may hang or take all memory."""
    made = Limits()
    yield made
    made.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """Leave what exists before the first test (torch, thousands of tests) out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser installs it")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no chromium: make browser installs it")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()
