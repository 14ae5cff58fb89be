"""JSON lines, nanproof's own records, CSV, and JSON documents of any size."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import StepRecord, UsageError
from nanproof._records import line
from nanproof.logs._points import Note, Point, singly
from nanproof.logs.read import _documents as documents
from nanproof.logs.read import _files as files
from nanproof.logs.read._documents import json_document
from nanproof.logs.read._sources import find, format_of, read
from nanproof.logs.read._tables import csv_rows, json_lines
from nanproof.logs.text._names import TERM, meaning

DATA = Path(__file__).parents[1] / "data" / "readers"


def lines(text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return files.lines(files.unpacked(io.BytesIO(data)))


def json_points(text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return list(singly(json_lines(files.whole_lines(stream(data)))))


def stream(data: bytes) -> io.BufferedReader:
    return files.unpacked(io.BytesIO(data))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"step": 3, "loss": 2.5}', {"loss": 2.5}),
        ('{"step": 3, "train/loss": "2.5", "train": {"grad_norm": 1}}', {"loss": 2.5, "grad_norm": 1.0}),
        ('{"global_step": 3, "step": 900, "loss": NaN, "lr": [0.1, 0.2]}', {"loss": math.nan, "lr": 0.1}),
        ('{"step": 3, "loss": "NaN", "grad_norm": "Infinity"}', {"loss": math.nan, "grad_norm": math.inf}),
        ('{"step": "3", "val": {"loss": 2.5}, "eval/grad_norm": 1}', {"eval_loss": 2.5}),
        ('{"step": 3, "loss": null, "grad_norm": 1, "done": true}', {"grad_norm": 1.0}),
        ('{"iteration": 3, "loss_scale": 65536, "lr-AdamW/pg1": 1e-4}', {"scale": 65536.0, "lr": 1e-4}),
    ],
)
def test_json_lines(text, values):
    (point,) = json_points(text)
    assert repr(sorted(point.values.items())) == repr(sorted(values.items()))
    assert point.step == 3


@given(
    losses=st.lists(
        st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0])), min_size=1, max_size=40
    ),
    shapes=st.lists(st.sampled_from(["plain", "text", "null", "more", "prose"]), min_size=1, max_size=40),
)
@settings(max_examples=150)
def test_lines_that_are_converted_together_read_like_those_that_are_decoded(losses, shapes):
    """The same points, whatever lines of other shapes stand between them."""
    made = []
    for step, (loss, shape) in enumerate(zip(losses, shapes * len(losses), strict=False)):
        row = {"step": step, "loss": loss, "lr": 1e-4 * (step + 1), "tokens": 512 * step, "note": f"shard-{step} of 12"}
        row |= {"text": {"loss": str(loss)}, "null": {"lr": None}, "more": {"grad_norm": abs(loss)}}.get(shape, {})
        made.append("a line of words\n" * (shape == "prose") + json.dumps(row) + "\n")
    together = json_points("".join(made))
    apart = [replace(p, line=0) for line in made for p in json_points(line)]
    assert repr([replace(p, line=0) for p in together]) == repr(apart)


def test_text_between_lines_of_json_and_a_last_line_cut_short():
    text = '{"step": 1, "loss": 2.5}\nTraceback (most recent call last):\n  File "x"\nValueError: bad\n{"step": 2, "lo'
    assert format_of(text.encode()) == "JSON lines"
    point, note = json_points(text)
    assert point == Point({"loss": 2.5}, 1.0, None, 1)
    assert note == Note("error", "ValueError: bad", 4)


def test_nanproofs_own_steps(tmp_path):
    """What the guard wrote, among thousands of norms; refused steps are marked; incidents beside them are no steps."""
    shared = {
        "clip": 1.0,
        "spike": False,
        "typical": (0.0, 0.0),
        "spread": (1.0, 1.0),
        "loss_size": 1.0,
        "weights_checked": False,
    }
    names = tuple(f"p{n}" for n in range(3000))
    records = [
        StepRecord(
            step=n, loss=math.nan if n == 2 else 2.0, grad_norm=1.5, action="skipped" if n == 2 else "stepped", lr=(1e-3, 1e-4),
            scale=None if n else 8.0, names=names, norms=array("d", [0.5] * 3000), **shared,
        )
        for n in range(4)
    ]  # fmt: skip
    header = line({"v": 1, "kind": "header", "names": names})
    (tmp_path / "steps.jsonl").write_text(header + "".join(record.to_line() for record in records))
    (tmp_path / "incidents.jsonl").write_text(
        line({"v": 1, "kind": "nonfinite-loss", "step": 2, "loss": "nan", "grad_norm": "nan"})
    )
    (source,) = find([tmp_path])
    assert source.format == "nanproof"
    found = list(singly(read(source)))
    assert [(p.step, p.refused) for p in found] == [(0, False), (1, False), (2, True), (3, False)]
    assert found[0].values == {"loss": 2.0, "grad_norm": 1.5, "lr": 1e-3, "scale": 8.0}, "no scaler has skipped a step"
    assert math.isnan(found[2].values["loss"])
    assert list(singly(read(find([tmp_path / "incidents.jsonl"])[0]))) == []


def test_both_versions_of_nanproofs_own_steps(tmp_path):
    """A run that version 1 wrote; the same lines with the number of version 2 are the same points."""
    old = Path(__file__).parents[2] / "version_1"
    (source,) = find([old])
    found = list(singly(read(source)))
    assert source.format == "nanproof" and len(found) == 29 and sum(p.refused for p in found) == 3
    assert [p.step for p in found if not math.isfinite(p.values["loss"])] == [4, 7, 16]
    text = (old / "steps.jsonl").read_text()
    (tmp_path / "steps.jsonl").write_text(text.replace('{"v":1,', '{"v":2,'))
    assert repr(list(singly(read(find([tmp_path])[0])))) == repr(found)


def test_the_table_of_a_real_lightning_run():
    """The loss, the learning rate and the evaluation of one step stand in rows of their own; the mean of an epoch is no step."""
    (source,) = find([DATA / "lightning.csv"])
    found = list(singly(read(source)))
    assert source.format == "CSV"
    assert [p.step for p in found] == [0, 4, 9, 14, 19, 20, 24, 29, 34, 39]
    assert found[4].values == {"lr": 0.001, "loss": 0.3316287696361542, "eval_loss": 0.4020542502403259}
    assert [p.step for p in found if math.isnan(p.values.get("loss", 0))] == [34, 39]


def test_tables_with_quotes_and_odd_cells():
    text = 'step;"train loss";note;lr\n1;2.5;"a;b";\n2;"nan";"say ""x""";0.1\n\n3;;;\n4;oops;;0.1\r\n'
    assert format_of(text.encode()) == "CSV"
    found = list(csv_rows(lines(text)))
    assert [(p.step, p.line) for p in found] == [(1, 2), (2, 3), (4, 6)]
    assert found[0].values == {"loss": 2.5} and found[2].values == {"lr": 0.1}


@pytest.mark.parametrize(
    "text", ["step 1, loss 2.5\nstep 2, loss 2.4\n", "a | loss | b\nx | y | z\n", "{'loss': 1, 'lr': 2}\n" * 2]
)
def test_text_with_delimiters_is_no_table(text):
    assert format_of(text.encode()) == "text"


def test_a_trainer_state():
    """All that was logged, but the summary, and what was planned."""
    (source,) = find([DATA / "trainer_state.json"])
    assert source.format == "transformers trainer_state"
    found = list(singly(read(source)))
    history = json.loads((DATA / "trainer_state.json").read_text())["log_history"]
    assert [p.step for p in found] == [entry["step"] for entry in history if "train_runtime" not in entry]
    assert [p.values["loss"] for p in found if "loss" in p.values] == [entry["loss"] for entry in history if "loss" in entry]
    assert all(p.settings == {"steps": 100.0, "logging_steps": 5.0, "epochs": 2.0} for p in found)


def test_a_large_document_reads_like_a_small_one(tmp_path, monkeypatch):
    """Piece by piece, with the same points, and memory for one piece only."""
    history = [{"step": n, "loss": 2.0 if n % 7 else math.nan, "epoch": n / 100, "note": "x" * 600} for n in range(15_000)]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 5, "log_history": history, "max_steps": 20_000, "num_train_epochs": 3}, indent=2))
    whole = list(singly(read(find([path])[0])))
    monkeypatch.setattr(documents, "SMALL", 1 << 16)
    (source,) = find([path])
    tracemalloc.start()
    count = sum(1 for _ in singly(read(source)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(whole) == 15_000
    assert repr(list(singly(read(source)))) == repr(whole)
    assert whole[0].settings == {"steps": 20_000.0, "epochs": 3.0}
    assert peak < 8 << 20 < path.stat().st_size


def test_a_document_that_is_cut_short_gives_what_is_whole():
    text = json.dumps({"log_history": [{"step": n, "loss": 1.0} for n in range(9)], "max_steps": 3}).encode()
    assert [p.step for p in singly(json_document(stream(text[:150])))] == [0, 1, 2, 3, 4]


def test_lists_of_dictionaries_and_dictionaries_of_lists():
    rows = [{"step": n, "loss": 1.0 - n} for n in range(3)]
    for text in (json.dumps(rows), json.dumps(rows, indent=1)):
        assert format_of(text.encode()) == "JSON"
        assert [(p.step, p.values) for p in json_document(stream(text.encode()))] == [(n, {"loss": 1.0 - n}) for n in range(3)]
    columns = json.dumps({"loss": [3, 2, math.nan], "val_loss": [4]}, indent=1).encode()
    assert (
        repr([p.values for p in json_document(stream(columns))])
        == "[{'loss': 3.0, 'eval_loss': 4.0}, {'loss': 2.0}, {'loss': nan}]"
    )


def test_a_document_without_records_is_refused():
    with pytest.raises(UsageError, match="no list of records"):
        list(json_document(stream(b'{"model_type": "llama", ')))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *(
            (name, "loss")
            for name in ("loss", "train_loss", "training_loss", "train/loss", "Train Loss", "lm loss", "train/CE loss")
        ),
        *(
            (name, "eval_loss")
            for name in ("val_loss", "eval/loss", "valid/loss", "validation loss", "loss/val", "eval_math_loss")
        ),
        *(
            (name, "grad_norm")
            for name in ("grad norm", "gnorm", "train/grad_norm", "gradient_norm", "optim/total_grad_norm", "GradNorm")
        ),
        *((name, "lr") for name in ("learning_rate", "lr", "lr-AdamW", "optim/LR (group 0)", "learning rate", "actor/lr")),
        *((name, "scale") for name in ("loss_scale", "loss scale", "scale", "amp_scale", "train/loss_scale")),
        *(
            (name, "step")
            for name in ("step", "_step", "train/global_step", "trainer/global_step", "num_updates", "iter", "iteration")
        ),
        *(
            (name, None)
            for name in ("max_grad_norm", "min_lr", "best_loss", "loss_fn", "eval_steps", "val/lr", "kl_coef", "loss_weight")
        ),
        *((name, TERM + name) for name in ("aux_loss", "load_balancing_loss", "critic/kl", "value_loss", "entropy")),
        *((name, "loss") for name in ("perplexity", "ppl", "train-rmse", "train-logloss")),
        *((name, None) for name in ("lr_scheduler", "samples_per_second", "train_steps_per_second", "", "_")),
    ],
)
def test_names(name, role):
    found = meaning(name)
    assert (found.role if found else None) == role
