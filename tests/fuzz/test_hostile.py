"""Nothing that a stranger prepared hangs, exhausts, crashes or deceives a reader. Ten seconds and 512 MiB for each file."""

import shutil
from pathlib import Path

import pytest

from fuzz.hostile import CASES
from fuzz.seeds import made

SECONDS, MEBIBYTES = 10, 512


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    made(folder / "seeds")
    return folder / "seeds"


@pytest.mark.filterwarnings("ignore")  # torch warns of some of what is made here
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reader}: {case.name}")
def test_a_hostile_file_is_read_or_refused(case, seeds, limits, tmp_path):
    root = tmp_path / "here"
    shutil.copytree(seeds, root, symlinks=True)
    try:
        path = case.make(root)
        outcome = limits.call(f"fuzz.readers:{case.reader}", str(path), seconds=SECONDS, mebibytes=MEBIBYTES)
        assert outcome.error == ""
        assert case.expect(outcome.value), outcome.value
        assert not Path("/nonexistent/x").exists()
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
