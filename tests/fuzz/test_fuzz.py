"""A slice of `make fuzz`: the same cases for everybody, a few of each seed."""

import pytest

from fuzz.campaign import campaign


@pytest.mark.parametrize(("mutations", "seed"), [(75, 0), pytest.param(1500, 1, marks=pytest.mark.slow)])
def test_no_reader_executes_crashes_hangs_or_takes_all_memory(mutations, seed, tmp_path, limits):
    wrong = []
    tallies = campaign(tmp_path, mutations, seed, say=wrong.append, limits=limits)
    assert wrong == []
    assert len(tallies) == 9 and all(tally.cases for tally in tallies.values())
