"""Nothing that a stranger prepared hangs, exhausts, crashes or deceives a reader. Ten seconds and 512 MiB for each file."""

import shutil
from pathlib import Path

import pytest

from fuzz.hostile import CASES
from fuzz.seeds import made

SECONDS, MEBIBYTES = 10, 512
QUICK = {
    "good json is nested",
    "nul in a name of the manifest",
    "escapes in a name of the manifest",
    "manifest without the tensors",
    "host part without numbers",
    "host part is a bomb",
    "host part of deep tuples as a key",
    "host part with a text as parts",
    "good.json is a pipe",
    "host-0.pt never ends",
    "metadata with a huge memo",
    "metadata that claims terabytes",
    "an unharmed folder",
    "zip with lists nested deep",
    "zip with a class with an escape in its name",
    "legacy file with memory asked for",
    "lists shared sixty deep",
    "a file name that steers the terminal",
    "an archive with two pickles of one name",
    "one storage seen ten thousand times",
    "a quantized a sparse and a meta tensor",
    "model.safetensors.index.json is a pipe",
    "model.safetensors.index.json never ends",
    "safetensors with a header of 2 to the 64 bytes",
    "a tensor that only half is there",
    "dcp entry that asks for memory",
    "guard quarantine.jsonl is a pipe",
    "guard quarantine.jsonl never ends",
    "report steps.jsonl is a pipe",
    "watch steps.jsonl never ends",
    "records incidents.jsonl is a pipe",
    "records norms.bin is a pipe",
    "watch blocks of odd columns",
    "report blocks that begin everywhere",
    "watch a part that is a bomb",
    "broken lines hide no record",
    "bundle manifest.json is a pipe",
    "bundle with threads of text",
    "log with a cell of spaces",
    "log with 400000 short columns and a long one",
    "log with max steps beyond any number",
    "doctor steps.jsonl is a pipe",
}
"""What was reported, and one of each kind. The rest is slow."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    made(folder / "seeds")
    return folder / "seeds"


def parameters():
    for case in CASES:
        quick = case.name in QUICK
        yield pytest.param(case, id=f"{case.reader}: {case.name}", marks=() if quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")  # torch warns of some of what is made here
@pytest.mark.parametrize("case", list(parameters()))
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


def test_the_quick_cases_are_there():
    assert {case.name for case in CASES} >= QUICK
