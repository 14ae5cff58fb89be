"""What the tests of diagnoses share."""

import pytest


@pytest.fixture
def checked():
    """Weights and state are copied before every step, and put back if it broke one of them."""
    return {"copy": True}
