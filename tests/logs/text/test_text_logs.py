"""What training loops print, tool by tool, and what is read from it."""

# ruff: noqa: E501  # lines of logs are long

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logs.formats import TEXT
from nanproof.logs._points import Note, Point, singly
from nanproof.logs.read import _files as files
from nanproof.logs.text._layouts import TRIES
from nanproof.logs.text._text import TextReader

DATA = Path(__file__).parents[1] / "data" / "readers"
NAN = math.nan


def items(text: str) -> list[Point | Note]:
    return list(singly(TextReader().read(files.blocks(files.unpacked(io.BytesIO(text.encode()))))))


def points(text: str) -> list[tuple[dict[str, float], float | None]]:
    found = items(text)
    assert all(isinstance(item, Point) for item in found), found
    return [(item.values, item.step) for item in found]


def same(found, expected):
    assert repr(found) == repr(expected)  # so that NaN is like NaN


ONE_LINE = {
    "transformers 4": (
        "{'loss': 0.61, 'grad_norm': nan, 'learning_rate': 0.00019, 'epoch': 0.31}",
        ({"loss": 0.61, "grad_norm": NAN, "lr": 0.00019}, None),
    ),
    "transformers 5": ("{'loss': '0.61', 'grad_norm': 'nan', 'epoch': '0.31'}", ({"loss": 0.61, "grad_norm": NAN}, None)),
    "evaluation": ("{'eval_loss': 1.2, 'eval_runtime': 3.2, 'eval_steps_per_second': 3.1, 'epoch': 1.0}", ({"eval_loss": 1.2}, None)),
    "behind a logger": ("2024-01-01 10:00:00 - INFO - {'loss': 0.5, 'epoch': 1}", ({"loss": 0.5}, None)),
    "JSON with NaN": ('10:00 {"loss": NaN, "grad_norm": Infinity, "step": 3}', ({"loss": NAN, "grad_norm": math.inf}, 3.0)),
    "DLLogger": (
        "DLL 2020-11-10 06:59:09.107542 - (1, 20) loss : 11.2 mlm_loss : 10.4",
        ({"loss": 11.2}, 20.0),
    ),
    "DLLogger as JSON": (
        'DLLL {"timestamp": "1604991549", "type": "LOG", "step": [0, 20], "data": {"train_loss": NaN}}',
        ({"loss": NAN}, 20.0),
    ),
    "spaCy 2": ("Losses {'ner': 12.5, 'tagger': nan}", ({"loss": 12.5}, None)),
    "spaCy 2, numbered": ("3 {'ner': nan}", ({"loss": NAN}, None)),
    "nanoGPT": ("iter 100: loss 2.4, time 12.20ms, mfu 3.00%", ({"loss": 2.4}, 100.0)),
    "nanoGPT's evaluation": ("step 250: train loss 2.3, val loss 2.5", ({"loss": 2.3, "eval_loss": 2.5}, 250.0)),
    "Megatron's evaluation": (
        " validation loss at iteration 500 | lm loss value: 6.1E+00 | lm loss PPL: 4.5E+02 |",
        ({"eval_loss": 6.1}, 500.0),
    ),
    "Megatron without a loss": (
        " iteration 5426/ 250000 | learning rate: 3.0E-04 | global batch size: 8 | loss scale: 1.0 | grad norm: nan |",
        ({"lr": 3e-4, "scale": 1.0, "grad_norm": NAN}, 5426.0),
    ),
    "DeepSpeed": (
        "[2024-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=3, lr=[0.0001, 0.0002], mom=[(0.9, 0.999)]",
        ({"skipped": 3.0, "lr": 1e-4}, 10.0),
    ),
    "DeepSpeed's scale": ("[2024-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] loss_scale: 65536", ({"scale": 65536.0}, None)),
    "LitGPT": ("Epoch 1 | iter 47 step 1 | loss train: 3.737, val: 3.5 | iter time: 45.53 ms", ({"loss": 3.737, "eval_loss": 3.5}, 47.0)),
    "LitGPT before an evaluation": ("Epoch 1 | iter 46 step 1 | loss train: 3.724, val: n/a | iter time: 45 ms", ({"loss": 3.724}, 46.0)),
    "fairseq": (
        "| epoch 022 | loss 3.882 | nll_loss 2.204 | ppl 4.61 | num_updates 5586 | lr 0.000846 | gnorm 0.309 | loss_scale 1.000",
        ({"loss": 3.882, "lr": 0.000846, "grad_norm": 0.309, "scale": 1.0}, 5586.0),
    ),
    "fairseq's evaluation": (
        "| epoch 022 | valid on 'valid' subset | valid_loss 4.28 | valid_nll_loss 2.5 | num_updates 5586 | best 4.1",
        ({"eval_loss": 4.28}, 5586.0),
    ),
    "Lightning's bar": ("Epoch 1:  12%|█▏  | 12/100 [00:01<00:09, 9.50it/s, v_num=0, train_loss=nan.0]", ({"loss": NAN}, 112.0)),
    "diffusers' bar": ("Steps:  10%|█ | 100/1000 [00:10<01:00, 1.2it/s, lr=1e-5, step_loss=0.3]", ({"lr": 1e-5, "loss": 0.3}, 100.0)),
    "mmengine": ("Iter(train) [ 100/80000]  lr: 1e-3  eta: 1 day  loss: 1.9 grad_norm: 3", ({"lr": 1e-3, "loss": 1.9, "grad_norm": 3.0}, 100.0)),
    "mmcv": (" Epoch [2][100/500]\tlr: 1.000e-03, eta: 6 days, loss_ce: 1.2757, loss: 1.9, grad_norm: nan", ({"lr": 1e-3, "loss": 1.9, "grad_norm": NAN}, 600.0)),
    "timm": ("[03:23:49.95] Epoch: [1]  [480/500]  lr: 0.000026  loss: 1.0800 (1.1317)  grad_norm: 0.49 (1.18)", ({"lr": 2.6e-5, "loss": 1.08, "grad_norm": 0.49}, 980.0)),
    "torchvision": ("Epoch: [0][  10/5005]\tTime  0.5 ( 0.6)\tLoss 6.9e+00 (7.0e+00)\tAcc@1 0.1", ({"loss": 6.9}, 10.0)),
    "PyTorch's MNIST": ("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.305400", ({"loss": 2.3054}, 60640.0)),
    "PyTorch's MNIST, test": ("Test set: Average loss: 0.0534, Accuracy: 9822/10000 (98%)", ({"eval_loss": 0.0534}, None)),
    "verl": ("step:1 - actor/entropy:0.4 - actor/grad_norm:0.3 - actor/lr:1e-6", ({"grad_norm": 0.3, "lr": 1e-6}, 1.0)),
    "PyTorch's tutorial": ("[1,  2000] loss: 2.234", ({"loss": 2.234}, 2000.0)),
    "build-nanogpt": ("step    10 | loss: 6.000000 | lr 1.0000e-04 | norm: 0.5000 | dt: 93.20ms | tok/sec: 5625", ({"loss": 6.0, "lr": 1e-4, "grad_norm": 0.5}, 10.0)),
    "a weight's norm": ("step 10 loss: 6.0 params norm: 93.2", ({"loss": 6.0}, 10.0)),
    "a count": ("[10/100] loss: 2.5, val_loss: 2.7", ({"loss": 2.5, "eval_loss": 2.7}, 10.0)),
    "a bar behind the dictionary": ("{'loss': 1.2, 'epoch': 0.1}  10%|█ | 10/100 [00:10<01:30, 1.0s/it]", ({"loss": 1.2}, 10.0)),
    "a bar before the dictionary": (" 10%|█ | 10/100 [00:10<01:30, 1.0s/it]    {'loss': 1.2, 'epoch': 0.1}", ({"loss": 1.2}, 10.0)),
    "a tensor": ("loss: tensor(nan, device='cuda:0', grad_fn=<NllLossBackward0>)", ({"loss": NAN}, None)),
    "Marian": ("[2026-01-01 10:00:00] Ep. 1 : Up. 500 : Sen. 21,301 : Cost 8.21 : Time 31.20s : 2913.10 words/s", ({"loss": 8.21}, 500.0)),
    "a validation batch": ("CV Batch 3/100 loss 2.25", ({"eval_loss": 2.25}, 3.0)),
    "words that are joined": ("step 3 trainCTCLoss: 2.5 valLoss: 2.75", ({"loss": 2.5, "eval_loss": 2.75}, 3.0)),
    "colours": ("\x1b[31mstep: 14\x1b[0m  \x1b[32mloss:  3.24\x1b[0m", ({"loss": 3.24}, 14.0)),
    "joined in small letters": ("step 3: aeloss_step 0.75", ({"loss": 0.75}, 3.0)),
    "numbers before their names": ("001 epoch, 02000 iter, loss 2.5", ({"loss": 2.5}, 2000.0)),
    "a word before the loss": ("TD loss: 4.75", ({"loss": 4.75}, None)),
    "darknet, quoted": ("> 2677: nan, nan avg, 0.001000 rate, 4.1 seconds, 171328 images", ({"loss": NAN, "lr": 0.001}, 2677.0)),
    "Tacotron, plain": ("Train loss 12002 4.75 Grad Norm inf 1.78s/it", ({"loss": 4.75, "grad_norm": math.inf}, 12002.0)),
    "a NaN over older digits": ("Training step: 4/10800. Loss: nan.08", ({"loss": NAN}, 4.0)),
    "brackets": ("[R0] | E104 iter[ 14/ 15] | [Loss] nan | [step]  1574 | [time] 0.4m", ({"loss": NAN}, 1574.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_LINE)
def test_one_line(name):
    text, expected = ONE_LINE[name]
    same(points(text), [expected])
    same(points(f"other\r\n{text}\r\nother\r\n"), [expected])


def test_caffe_names_the_parts_of_its_loss():
    text = "I0101 10:00:00.000000  7 solver.cpp:243] Iteration 20, loss = 2.5\n"
    text += "I0101 10:00:00.000000  7 solver.cpp:259]     Train net output #0: loss_bbox = nan (* 1 = nan loss)\n"
    text += "I0101 10:00:00.000000  7 solver.cpp:418]     Test net output #0: accuracy = 0.25\n"
    first, part, score = items(text)
    assert (first.values, first.step) == ({"loss": 2.5}, 20.0)
    same([part.terms, score.terms], [{"loss_bbox": NAN}, {"Test accuracy": 0.25}])


def test_columns_behind_a_time_stamp():
    """rlpyt and rllab: one value a line, between columns."""
    block = "".join(
        f"2024-01-01 10:00:0{i},018  | {name:<24}{value}\n"
        for i, (name, value) in enumerate([("Diagnostics/Iteration", 7), ("lossAverage", 0.25), ("gradNorm", "nan")])
    )
    (point,) = items(block)
    same((point.values, point.terms), ({"loss": 0.25, "grad_norm": NAN}, {}))


def test_an_epoch_of_keras_without_their_number():
    """Whether it counts from 0 or from 1 cannot be told, so it counts as it is printed."""
    bar = "12/100 [==>.......] - ETA: 31s - loss: {loss}\n"
    text = "".join(f"Epoch {epoch}\n" + bar.format(loss=loss) for epoch, loss in ((1, 2.5), (2, 2.25)))
    assert [(point.epoch, point.values) for point in items(text)] == [(1.12, {"loss": 2.5}), (2.12, {"loss": 2.25})]


def test_a_step_and_a_loss_without_names():
    """`print(step, loss.item())`: a NaN below finite ones counts. A printed series of pandas does not."""
    text = "...\n76960 2.65\n76970 2.54\n76980 nan\n76990 nan\nSaving the model\n77000 nan\n"
    assert [(point.step, point.line) for point in items(text)] == [(76980.0, 4), (76990.0, 5), (77000.0, 7)]
    assert items("0    2.65\n1     NaN\n2     NaN\nName: loss, dtype: float64\n") == []
    assert items("3 items\n7 nan\n") == []


def test_losses_in_brackets():
    text = "[Epoch 2/30, Batch 3/13] [Losses: x 0.5, conf nan, total 0.75]\n"
    (point,) = items(text)
    same((point.values, point.terms, point.epoch), ({"loss": 0.75}, {"x loss": 0.5, "conf loss": NAN}, 2.0))


def test_a_row_of_all_classes_below_a_row_of_yolo():
    head = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    row = "      {i}/100      5.49G     1.9301     0.1814     0.9120        254        640: 100%|##########| 8/8\n"
    classes = "                   all        412       1812      0.712      0.633      0.681      0.455\n"
    read = [point.values["loss"] for point in items(head + "".join(row.format(i=i) + classes for i in range(3)))]
    assert read == [1.9301] * 3


def test_a_list_of_losses():
    (point,) = items("2026-01-01 10:00:00,018\tbase\tINFO\t[2.5, nan, 2.25, 31.5, 200, 0.0002]\n")
    same((point.values, point.step, point.terms["loss 2"]), ({"lr": 0.0002}, 200.0, NAN))
    assert items("shape [nan, nan, nan]\n") == []


def test_boosting_that_minimises_what_has_no_known_name():
    (first, *_) = items("".join(f"[{i}]\ttrain-gamma-nloglik:nan\n" for i in range(3)))
    same((first.values, first.terms), ({}, {"train gamma-nloglik": NAN}))


def test_a_table_under_a_framed_line_of_names():
    text = "****train_loss,train_acc,val_loss****\n0.693\t0.5\t0.694\n0.612\t0.6\t0.655\n"
    assert [values for values, _ in points(text)] == [{"loss": 0.693, "eval_loss": 0.694}, {"loss": 0.612, "eval_loss": 0.655}]


def test_a_table_with_rewards_is_of_reinforcement_learning():
    text = (
        "| Step | Training Loss | Policy Entropy Over All Tokens In Group | Reward |\n|--|--|--|--|\n| 1 | 0.0 | 0.5 | 0.25 |\n"
    )
    (point,) = items(text)
    assert point.values == {"loss": 0.0} and point.settings == {"rewards": 1.0}


def test_lines_of_a_second_rank_are_not_points_of_the_first():
    text = "".join(f"step {i} loss 2.{i} rank {rank}\n" for i in range(4) for rank in (0, 1))
    assert [step for _, step in points(text)] == [0.0, 1.0, 2.0, 3.0]


NOTHING = [
    "{'train_runtime': 12.3, 'train_samples_per_second': 2.0, 'train_loss': 2.3, 'epoch': 3.0}",
    "learning_rate: 0.0001",
    '    "loss_scale": 0,',
    "    total_loss = 0",
    "max grad norm: 1.0",
    "best val loss: 2.3",
    "The loss 3 times higher than before was a surprise",
    "1. **NaN gradient norms** throughout training (`'grad_norm': nan`)",
    "Namespace(lr=5e-05, clip_grad_norm=1.0, loss_fn='ce')",
    "[2024-01-01 10:00:00] [INFO] [loss_scaler.py:190:update_scale] nothing",
    "loss: n/a",
    "The loss: 4.75",
    "TD loss: 4.75 is what I get",
    "loss_weights: 0.5, 0.5",
]


@pytest.mark.parametrize("text", NOTHING)
def test_lines_that_are_no_step(text):
    """Summaries, settings, source code and prose."""
    assert items(text) == []


def test_the_log_of_a_real_trainer():
    """The text has no steps but in the bar that is drawn again after each dictionary, evaluations among them. The file of the same
    run that has them in full says the same."""
    found = items((DATA / "transformers.log").read_bytes().decode())
    history = [
        entry for entry in json.loads((DATA / "trainer_state.json").read_text())["log_history"] if "train_runtime" not in entry
    ]
    assert [p.step for p in found] == [entry["step"] for entry in history]
    names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "eval_loss": "eval_loss"}
    written = [{names[key]: float(f"{value:.4g}") for key, value in entry.items() if key in names} for entry in history]
    assert [p.values for p in found] == written
    assert all(p.settings == {"steps": 100.0} for p in found)


def test_no_step_where_output_was_buffered():
    """Dictionaries that come in a heap belong to no bar: a wrong step would be worse than none."""
    bar = "\r {0}%|#  | {0}/100 [00:01<00:02, 9it/s]"
    lines = "".join(f"{{'loss': {n}.5, 'epoch': {n}}}\n" for n in range(1, 6))
    assert [step for _, step in points(bar.format(40) + "\r" + lines + bar.format(41) + "\n")] == [None] * 5
    assert [step for _, step in points(bar.format(40) + lines + bar.format(41) + "\n")] == [None] * 5


def test_a_bar_of_something_else_gives_no_step():
    """Data sets are prepared under bars too."""
    text = "Map: 100%|##| 900/900 [00:01<00:02, 9it/s]\n{'loss': 1.5}\n\r 5%|#  | 5/100 [00:01<00:02, 9it/s]\r{'loss': 1.4}\n\r 6%|#  | 10/100 [0:0<0:1, 9it/s]\n"
    assert points(text) == [({"loss": 1.5}, None), ({"loss": 1.4}, 10.0)]


def test_a_bar_before_the_traceback_still_counts():
    text = "\r  0%| | 0/24 [00:00<?, ?it/s]\r    \r{'loss': '1.5'}\n\r  4%|4 | 1/24 [00:00<00:00, 4it/s]Traceback (most recent call last):\n"
    assert points(text) == [({"loss": 1.5}, 1.0)]


def test_a_bar_that_is_drawn_twice_is_one_step():
    """tqdm shows the new count with the old values first."""
    bars = [(0, "2.5"), (1, "2.5"), (1, "2.4"), (2, "2.4"), (2, "nan")]
    text = "".join(f"\r  1%|4  | {n}/80 [00:00<00:00, 3it/s, loss={loss}]" for n, loss in bars)
    same(points(text), [({"loss": 2.5}, 0.0), ({"loss": 2.4}, 1.0), ({"loss": NAN}, 2.0)])


def test_a_bar_for_each_epoch_goes_on_counting():
    named = "".join(f"\rEpoch {e}:  5%| | {n}/4 [0:0<0:1, 3it/s, loss={e}.{n}]" for e in range(2) for n in range(5))
    assert [step for _, step in points(named)] == [1, 2, 3, 4, 5, 6, 7, 8]
    plain = "".join(f"\r  5%| | {n}/4 [0:0<0:1, 3it/s, loss={e}.{n}]" for e in range(2) for n in range(1, 5))
    assert [step for _, step in points(plain)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_steps_that_start_anew_in_each_epoch_go_on():
    """As tutorials print it, with what is planned or without; a step that counts through the epochs stays as it is."""
    planned = "".join(f"Epoch [{e}/3], Step [{n}/600], Loss: 1.{e}\n" for e in (1, 2, 3) for n in (200, 400, 600))
    assert [step for _, step in points(planned)] == [200.0 * n for n in range(1, 10)]
    assert items(planned)[-1].settings == {"epochs": 3.0, "steps": 1800.0}
    plain = "".join(f"Epoch {e} | Step {n} | Loss: 1.{e}\n" for e in (0, 1, 2) for n in (0, 10, 20))
    assert [step for _, step in points(plain)] == [10.0 * n for n in range(9)]
    through = "".join(f"Epoch {n // 3}/3 | Step {n}/9 | Loss: 1.5\n" for n in range(9))
    assert [step for _, step in points(through)] == [float(n) for n in range(9)]


def test_keras_counts_epochs_from_one():
    lines = "Epoch 1/3\n\r 2/4 [==>..] - ETA: 1s - loss: 0.7\x08\x08\x08\r4/4 [====] - 1s 3ms/step - loss: 0.6 - val_loss: 0.5\n"
    lines += "Epoch 2/3\n\x1b[1m2/4\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m0s\x1b[0m 3ms/step - accuracy: 0.5 - loss: nan\n"
    same(points(lines), [({"loss": 0.7}, 2.0), ({"loss": 0.6, "eval_loss": 0.5}, 4.0), ({"loss": NAN}, 6.0)])
    assert items(lines)[0].settings == {"epochs": 3.0, "steps": 12.0}


def test_skips_since_the_last_line_and_in_all():
    megatron = (
        " iteration 5/ 10 | lm loss: 1.0 | loss scale: 8.0 | number of skipped iterations:   2 | number of nan iterations:   0 |"
    )
    (point,) = items(megatron)
    assert point.values["skipped"] == 2 and not point.skipped_in_all and point.settings == {"steps": 10.0}
    point, note = items(megatron.replace("nan iterations:   0", "nan iterations:   1"))
    assert (note.kind, note.step) == ("nan-warning", 5.0)


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "[default{}]:", "[trainer{}]:"])
def test_one_rank_of_several(prefix):
    """The ranks' own losses differ, and only those of the first that has any count; the last one prints in Megatron."""
    lines = [f"{prefix.format(rank)}step: {n} loss: {n}.{rank}\n" for n in range(4) for rank in (3, 1, 2)]
    assert points("[rank0]: hello\n" + "".join(lines)) == [({"loss": n + 0.3}, float(n)) for n in range(4)]


def test_the_same_line_from_all_ranks_is_one_point():
    assert points("".join(f"step: {n} loss: 1.{n}\n" * 8 for n in range(3))) == [
        ({"loss": 1 + n / 10}, float(n)) for n in range(3)
    ]


def test_names_are_not_mixed():
    """An epoch's mean is not one more step, and of several losses of a line there is one."""
    text = "step 1 loss=2.5 ce_loss=2.0 aux_loss=0.5\nstep 2 loss=2.4 ce_loss=2.0 aux_loss=0.4\nepoch 1 epoch_loss=2.45\n"
    assert points(text) == [({"loss": 2.5}, 1.0), ({"loss": 2.4}, 2.0)]
    assert points("step 1 ce_loss=2.0 aux_loss=0.5\n") == [({"loss": 2.0}, 1.0)]


def test_lines_are_counted():
    text = "a\n\nstep 1 loss=2.5\r\nb\rc\nstep 2 loss=2.4\nstep 3 loss=2.3\nWARNING: the loss is nan\n"
    assert [item.line for item in items(text)] == [3, 5, 6, 7]


def test_an_overlong_line_is_cut():
    """10 MB without an end: the start counts, what follows it is read, and nothing of it is kept."""
    text = b"step 1 loss=2.5 " + b"x" * (10 << 20) + b" step 9 loss=9\nstep 2 loss=2.4\n"
    found = list(singly(TextReader().read(files.blocks(files.unpacked(io.BytesIO(text))))))
    assert [(p.values, p.step) for p in found] == [({"loss": 2.5}, 1.0), ({"loss": 2.4}, 2.0)]
    assert max(map(len, files.blocks(files.unpacked(io.BytesIO(text))))) <= files.LONGEST + files.BLOCK


@given(
    seen=st.lists(st.tuples(st.sampled_from(sorted(TEXT)), st.floats(-1e3, 1e3), st.booleans()), min_size=2, max_size=20),
    nans=st.integers(0, 1),
)
@settings(max_examples=150)
def test_the_short_way_reads_like_the_long_way(seen, nans):
    """Patterns made from lines find what looking at each name finds, however lines of different tools follow each other."""
    lines = []
    for step, (name, value, bad) in enumerate(seen, 1):
        point = Point({"loss": NAN if bad else value, "grad_norm": abs(value), "lr": 1e-4}, float(step))
        lines.append(TEXT[name][0](point).replace("nan iterations:   0", f"nan iterations:   {nans * (step % 2)}"))
    text = ("\n".join(lines) + "\n").encode()
    long = TextReader()
    long._tries = TRIES
    assert repr(list(singly(TextReader().read([text])))) == repr(list(singly(long.read([text]))))
