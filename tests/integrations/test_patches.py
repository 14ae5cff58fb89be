"""Methods that were replaced are put back, whatever happens while they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nanproof.integrations._patches import Patches


def test_one_thing_that_cannot_be_put_back_leaves_nothing_else_replaced():
    """A disk that is full at the last word of a run is such a thing. The error is raised, after the rest is as it was."""
    owner, told = SimpleNamespace(own=len), []
    patches = Patches()
    patches.set(owner, "own", max)
    patches.later(lambda: told.append("earlier"))

    def fails():
        raise OSError("No space left on device")

    patches.later(fails)
    patches.set(owner, "new", min)
    with pytest.raises(OSError, match="No space left"):
        patches.undo()
    assert vars(owner) == {"own": len} and told == ["earlier"]
    patches.undo()
    assert told == ["earlier"], "a second time there is nothing to do"
