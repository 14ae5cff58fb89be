"""A slice of the campaign: `make campaign` runs the whole of it."""

import pytest

from zoo.faults import campaign


@pytest.mark.parametrize(
    ("seed", "faults"), [(1000, 90), *(pytest.param(seed, 160, marks=pytest.mark.slow) for seed in (1000, 2000))]
)
def test_random_faults_are_caught_and_healthy_steps_left_alone(seed, faults):
    tally = campaign(faults=faults, seed=seed)
    assert tally.problems == []
    assert tally.injected >= faults and tally.caught > tally.injected / 2
    assert (tally.reached, tally.false_alarms, tally.hangs) == (0, 0, 0)
    assert tally.healthy > 5 * faults
    assert any(name.startswith("one rank's") for name in tally.by_fault)
