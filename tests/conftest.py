"""Tests that draw their cases draw the same ones every time."""

from hypothesis import settings

settings.register_profile("the same every time", derandomize=True, deadline=None)
settings.load_profile("the same every time")
