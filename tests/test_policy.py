"""A policy that cannot be meant is refused when it is made, with what would be right."""

import dataclasses

import pytest

import nanproof


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"on_spike": "ignore"}, "on_spike='ignore'.*'clip', 'skip', 'record'"),
        ({"at_cap": "stop"}, "at_cap='stop'"),
        ({"half_weights": True}, "half_weights=True"),
        ({"max_consecutive_skips": -1}, "at least 0"),
        ({"max_consecutive_skips": 2.5}, "whole number"),
        ({"max_skip_rate": 1.5}, "share from 0 to 1"),
        ({"skip_window": 0}, "at least 1"),
        ({"spike_sensitivity": 0}, "above 0"),
        ({"lag": -1}, "lag=-1"),
        ({"history": 0}, "history=0"),
    ],
)
def test_wrong_values_are_refused(wrong, says):
    with pytest.raises(nanproof.UsageError, match=says):
        nanproof.Policy(**wrong)


def test_policies_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        nanproof.Policy().on_spike = "skip"
    with pytest.raises(TypeError):
        nanproof.Policy(3)
