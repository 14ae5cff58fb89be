"""Lines of tools that the corpus does not run, typed anew in their form: each is read, and at the right place."""

from __future__ import annotations

import json
import math

import pytest

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.read._sources import find, read

BAD = 12


def story(tmp_path, text, name="train.log"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    (source,) = find([tmp_path / name])
    told = Story()
    for item in read(source):
        told.add(item)
    return told


def value(i, bad=BAD):
    return "nan" if i >= bad else f"{4 - i / 20:.4f}"


YOLO = "".join(
    "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    + "".join(f"\r  {i}/24   9.9G   {value(i)}   {value(i)}   1.50   9   640: {k}%|###| {k}/100 [00:01<00:00]" for k in (1, 100))
    + "\n     Class   Images  Instances   Box(P     R    mAP50  mAP50-95): 100%|###| 66/66 [00:34<00:00]\n\n"
    for i in range(1, 25)
)
FASTAI = "epoch     train_loss  valid_loss  accuracy  time    \n" + "".join(
    f"{i}         {value(i)}  {value(i)}  0.997  00:51   \n" for i in range(1, 25)
)
MARKDOWN = "| Step | Training Loss |\n|------|------|\n" + "".join(f"| {i} | {value(i)} |\n" for i in range(1, 25))
NNUNET = "".join(
    f"2024-06-12 18:20:21.6: Epoch {i} \n2024-06-12 18:20:21.7: Current learning rate: 0.01 \n"
    f"2024-06-12 18:26:16.4: train_loss {value(i)} \n2024-06-12 18:26:16.5: val_loss {value(i)} \n"
    "2024-06-12 18:26:16.6: Pseudo dice [0.5, nan] \n"
    for i in range(1, 25)
)
COQUI = "".join(
    f"   --> TIME: 2023-08-24 13:06:39 -- STEP: {i}/406 -- GLOBAL_STEP: {i}\n     | > loss: {value(i)}  ({value(i)})\n"
    for i in range(1, 25)
)
BARE = "".join(f"{i} | loss {value(i)} | lr 3.000000e-04 | 2006.12ms\n" for i in range(1, 25))
XENT = "".join(
    f"[2018-11-26 14:47:26 INFO] Step {i}/500; acc: 5.2; ppl: 8.4; xent: {value(i)}; lr: 0.00066;\n" for i in range(1, 25)
)
SWIN = "".join(
    f"INFO Train: [0/300][{i}/5004]\teta 0:17:06 lr 0.000500\tloss {value(i)} (3.3)\tgrad_norm 1.03 (nan)\n" for i in range(1, 25)
)
STEPS = "".join(f"steps: {i} loss: {value(i)} iter time (s): 3.181\n" for i in range(1, 25))
KOHYA = "".join(f"\rsteps:   {i}%|#   | {i}/100 [00:01<00:09,  2.94s/it, avr_loss={value(i)}]" for i in range(1, 25))


@pytest.mark.parametrize("text", [YOLO, FASTAI, MARKDOWN, NNUNET, COQUI, BARE, XENT, SWIN, STEPS, KOHYA])
def test_a_nan_is_found_at_its_step_or_epoch(tmp_path, text):
    """Every form, and a NaN from the twelfth line on."""
    told = story(tmp_path, text)
    finding = judge(told)[0]
    assert (finding.kind, finding.severity) == ("nan", "failure")
    assert BAD in (finding.place.step, finding.place.epoch)
    assert text.split("\n")[finding.place.line - 1].count("nan") or "\r" in text


@pytest.mark.parametrize("text", [YOLO, FASTAI, MARKDOWN, NNUNET, COQUI, BARE, XENT, SWIN, STEPS, KOHYA])
def test_the_same_without_nan_is_healthy(tmp_path, text):
    """The first eleven lines or epochs only."""
    places = [
        i for i in range(len(text)) if text.startswith("nan", i) and text[i - 2 : i] not in (", ", "3 ") and text[i - 1] != "("
    ]
    cut = max(text.rfind("\n", 0, places[0]), text.rfind("\r", 0, places[0])) + 1
    told = story(tmp_path, text[:cut])
    assert told.points >= 10 and judge(told) == ()


def test_a_table_ends_where_prose_begins(tmp_path):
    """Lines after a table are no rows, and their numbers no losses."""
    told = story(tmp_path, FASTAI.replace("nan", "0.5") + "there were 24 epochs and 3 losses in it\n1  2  3  4 words\n")
    assert told.points == 24


def test_a_rate_with_too_few_decimals_is_not_zero(tmp_path):
    """0.000 may be 1e-6; 0.0 and 0.000000e+00 are 0."""
    line = "step:{i} - actor/pg_loss:{loss:.3f} - actor/grad_norm:0.7 - actor/lr:{lr}\n"
    for lr, kinds in (("0.000", []), ("0.0", ["learning-rate-zero"]), ("0.000000e+00", ["learning-rate-zero"])):
        text = "".join(line.format(i=i, loss=math.sin(i) / 50, lr=lr) for i in range(1, 40))
        assert [f.kind for f in judge(story(tmp_path, text))] == kinds
    ended = "".join(line.format(i=i, loss=0.1 + math.sin(i) / 50, lr=f"{max(0.01 - i / 3000, 0):.3f}") for i in range(1, 60))
    assert judge(story(tmp_path, ended)) == ()


@pytest.mark.parametrize(
    "end", ["FloatingPointError: Loss became infinite or NaN at iteration=556!", "Loss is nan, stopping training"]
)
def test_a_program_that_gave_up_because_of_nan_is_a_failure(tmp_path, end):
    """It ended there: that is more than a warning, and no crash of unknown cause."""
    lines = "".join(
        f"[11/01 20:14:15]: eta: 5:41:49  iter: {i}  total_loss: {1.7 - i / 1e5:.3f}  lr: 0.0038\n" for i in range(0, 560, 20)
    )
    (finding,) = judge(story(tmp_path, f"{lines}Traceback (most recent call last):\n    self.run_step()\n{end}\n"))
    assert (finding.kind, finding.severity) == ("nan-warnings", "failure") and "The run ended there." in finding.said
    if "556" in end:
        assert finding.place.step == 556


def test_a_loss_that_is_the_same_to_the_last_digit_has_not_moved(tmp_path):
    """Also where the log begins in the middle of the run."""
    told = story(tmp_path, "".join(f"iter {i} step {i // 2}: loss 10.8259, iter time: 197.87ms\n" for i in range(76, 200)))
    assert [f.kind for f in judge(told)] == ["plateau"]


def test_a_scaler_that_looks_for_its_scale_at_the_start_is_no_warning(tmp_path):
    """Six of fifty lines, all of them the first."""
    rows = [{"step": i, "loss": 9 - i / 20, "grad_norm": math.inf if i < 6 else 1 + i % 3 / 10} for i in range(50)]
    found = judge(story(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl"))
    assert [(f.kind, f.severity) for f in found] == [("nan-gradient", "note")]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_notebook_is_read_for_what_its_cells_printed(tmp_path, drawn):
    """Printed dictionaries, or the table that a callback drew; the source of the cells is not read."""
    if drawn:
        rows = "".join(f"<tr>\n<td>{i}</td>\n<td>{value(i)}</td>\n</tr>" for i in range(1, 25))
        output = {
            "data": {"text/html": f"<table><thead><tr><th>Step</th><th>Training Loss</th></tr></thead><tbody>{rows}</table>"}
        }
    else:
        output = {"text": [f"{{'loss': {value(i)}, 'learning_rate': 1e-4, 'epoch': {i}.0}}\n" for i in range(1, 25)]}
    cell = {"cell_type": "code", "source": ["print('loss: nan, step: 1')"], "outputs": [output]}
    told = story(tmp_path, json.dumps({"cells": [cell], "nbformat": 4}, indent=1), "a.ipynb")
    (finding,) = judge(told)
    assert told.points == 24 and finding.kind == "nan" and BAD in (finding.place.step, finding.place.epoch)


def test_trainer_log_of_llama_factory_counts_its_steps(tmp_path):
    rows = [
        {"current_steps": i, "total_steps": 900, "loss": 3 - i / 50, "eval_loss": None, "epoch": i / 10} for i in range(1, 30)
    ]
    told = story(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "trainer_log.jsonl")
    assert told.segments[-1].last.step == 29
