"""A slice of the campaign: `make campaign` runs the whole of it."""

import pytest

from zoo.faults import campaign

FAULTS = 90


@pytest.mark.parametrize("seed", [1000, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_faults_are_caught_and_healthy_steps_left_alone(seed):
    tally = campaign(faults=FAULTS, seed=seed)
    assert tally.problems == []
    assert tally.injected >= FAULTS and tally.caught > tally.injected / 2
    assert (tally.reached, tally.false_alarms, tally.hangs) == (0, 0, 0)
    assert tally.healthy > 5 * FAULTS
    assert any(name.startswith("one rank's") for name in tally.by_fault)
