"""Guilty samples out of real bundles, with and without a tokenizer."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import nanproof
from nanproof import UsageError
from nanproof.report.folder._run import Run
from nanproof.report.folder._samples import samples_of
from nanproof.report.folder._tokens import Tokens, find
from nanproof.report.page._cards import bundle_of, cards

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["<pad>", *(f"w{i}" for i in range(30)), "<script>window.hacked=1</script>\u202e"]


class Toy(nn.Module):
    """Divides by 0 at the last word."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), 8)
        self.head = nn.Linear(8, len(WORDS))

    def forward(self, ids):
        return self.head(self.embed(ids) / (ids != len(WORDS) - 1).float().unsqueeze(-1))


def loss_fn(model, batch):
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0 * batch["x"].float().mean()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose third step has the last word as token 5 of sample 2, and NaN among the features of sample 2."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model = Toy()
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=loss_fn, run_dir=folder)
    for step in range(5):
        ids = torch.randint(1, 30, (4, 300))
        if step == 2:
            ids[2, 205] = len(WORDS) - 1
        batch = {"input_ids": ids, "labels": ids.clone(), "x": torch.randn(4, 6, dtype=torch.bfloat16), "n": 7, "mask": ids > 3}
        guard.train_step(batch)
    guard.close()
    (incident,) = guard.incidents
    assert incident.diagnosis.samples == (2,) and incident.diagnosis.tokens == (205,)
    return Run(folder).read()


def write_tokenizer(path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    return path


def test_the_guilty_row_is_shown_around_the_guilty_token(run, tmp_path):
    """Ids are those of the batch; the window holds the guilty token, which is marked; its text is shown escaped."""
    from nanproof.explain.bundle._bundle import read_bundle

    folder = bundle_of(run, run.incidents[0])
    batch = read_bundle(folder).batches[0]
    (sample,) = samples_of(folder, run.incidents[0], find(run.folder, write_tokenizer(tmp_path)))
    told = {tensor["name"]: tensor for tensor in sample["tensors"]}
    assert sample["sample"] == 2 and set(told) == {"input_ids", "labels", "x", "mask"}
    ids = told["input_ids"]
    start, end = ids["start"], ids["start"] + len(ids["ids"])
    assert ids["ids"] == batch["input_ids"][2, start:end].tolist() and ids["bad"] == [205] and start <= 205 < end
    assert ids["texts"][205 - start] == "<script>window.hacked=1</script>\\u202e" and ids["shape"] == [300]
    assert ids["texts"][0] == WORDS[ids["ids"][0]] and ids["hint"] == ""
    x = batch["x"][2].tolist()
    assert told["x"]["dtype"] == "bfloat16" and told["x"]["nonfinite"] == 0
    assert told["x"]["values"] == pytest.approx(x, rel=1e-5) and told["x"]["mean"] == pytest.approx(sum(x) / 6, rel=1e-4)


def test_without_a_tokenizer_there_are_ids_and_a_hint(run):
    (card,) = cards(run, find(run.folder))
    ids = card["samples"][0]["tensors"][0]
    assert ids["texts"] == [] and "--tokenizer" in ids["hint"]
    assert card["command"].endswith(f"{run.folder.name}/incidents/step-000002-nonfinite-loss --entry train:build")


def test_where_a_tokenizer_is_looked_for(tmp_path):
    """In the run's folder; else in the newest checkpoint beside it. One that is named and is none is an error."""
    run = tmp_path / "out" / "nanproof"
    run.mkdir(parents=True)
    assert find(run).hint
    write_tokenizer(tmp_path / "out" / "checkpoint-20")
    (tmp_path / "out" / "checkpoint-9").mkdir()
    (tmp_path / "out" / "checkpoint-9" / "tokenizer.json").write_text("{}")
    assert find(run).text(1) == "w0"
    (run / "tokenizer.json").write_text("nonsense")
    assert "cannot be read" in find(run).hint
    for named in (tmp_path / "missing", run, run / "tokenizer.json"):
        with pytest.raises(UsageError, match="token"):
            find(run, named)
    assert Tokens().text(3) == "" and find(run, tmp_path / "out" / "checkpoint-20").text(1 << 40) == ""


def test_nonfinite_numbers_are_counted_and_shown(run, tmp_path):
    """The window of values is where the first bad one is."""
    from safetensors.torch import save_file

    row = torch.arange(100.0)
    row[60], row[61] = math.nan, math.inf
    save_file({"x": torch.stack([torch.zeros(100), row])}, tmp_path / "batch.safetensors")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"batches": [{"tuple": [{"tensor": "x"}, {"array": {"tensor": "gone"}}]}]})
    )
    incident = replace(run.incidents[0], diagnosis=replace(run.incidents[0].diagnosis, samples=(1, 9)))
    (sample,) = samples_of(tmp_path, incident, Tokens())
    (x,) = sample["tensors"]
    assert (x["name"], x["nonfinite"], x["count"], x["min"], x["max"], x["start"]) == ("[0]", 2, 100, 0.0, 99.0, 56)
    assert x["values"][4:6] == ["nan", "inf"]


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{", '{"batches": 3}', '{"batches": [3]}', '{"batches": [{"dict": 3}]}', "[" * 9999]
)
def test_a_damaged_bundle_is_no_reason_to_fail(run, manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "batch.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    assert samples_of(tmp_path, run.incidents[0], Tokens()) == []
    assert samples_of(tmp_path / "missing", run.incidents[0], Tokens()) == []


@pytest.mark.parametrize(
    "bundle", ["/etc", "../../etc", "..", ".", "", "C:\\x", "step-000002-nonfinite-loss/..", "x" * 5000, "a\0b"]
)
def test_a_record_cannot_point_outside_the_run(run, bundle):
    assert bundle_of(run, replace(run.incidents[0], bundle=bundle)) is None


def test_a_run_that_was_moved_still_has_its_bundles(run):
    assert bundle_of(run, replace(run.incidents[0], bundle="/elsewhere/run/incidents/step-000002-nonfinite-loss")) is not None
    assert bundle_of(run, replace(run.incidents[0], bundle="C:\\run\\incidents\\step-000002-nonfinite-loss")) is not None
