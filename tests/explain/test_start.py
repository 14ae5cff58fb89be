"""What is known of weights and buffers from the start of a run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanproof.core._under_way import UNKNOWN, Again, Attempt
from nanproof.explain._start import WeightsAtStart


def test_a_weight_that_was_replaced_has_no_start():
    model = nn.Linear(2, 1)
    start = WeightsAtStart(model)
    model.weight = nn.Parameter(torch.ones(1, 2))
    assert set(start.largest(model)) == {"bias"}


@pytest.mark.parametrize("now", [math.nan, math.inf])
def test_a_buffer_that_was_infinite_and_got_worse_is_suspected(now):
    model = nn.Linear(2, 1)
    model.register_buffer("bound", torch.tensor([math.inf, 0.0]))
    start = WeightsAtStart(model)
    assert start.unchanged_bounds(model) == {"bound"}
    model.bound[1] = now
    assert start.unchanged_bounds(model) == set()


def test_a_step_is_whole_only_if_each_of_its_losses_can_be_computed_again():
    attempt = Attempt(0, None, again=[Again({}), Again(UNKNOWN, whole=False, why_not="no")])
    assert not attempt.whole and attempt.why_not == "no"
