"""Healthy logs that look like failing ones, from a review by somebody who looked for false alarms: at most a note on each."""

# ruff: noqa: E501  # lines of logs are long

from __future__ import annotations

import json
import math
import random

import pytest

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.read._sources import find, read


def lines(rows, line):
    return "".join(line(i) + "\n" for i in rows)


def listed(values, line):
    return "".join(line.format(i=i, v=value) + "\n" for i, value in enumerate(values, 1))


def pairs(values, line):
    return "".join(line.format(i=i, a=a, b=b) + "\n" for i, (a, b) in enumerate(values, 1))


def wave(i, size=0.01):
    return size * math.sin(12.9898 * i * i)


def falls(i, slow=8.0, low=0.3):
    return low + 2 * math.exp(-i / slow)


KNOWN = "step {i} loss {v} reward 0.{i}"
SAC = [
    (0.0021, 0.0024),
    (0.0013, 0.0015),
    (0.0011, 0.0012),
    (0.0016, 0.0017),
    (0.55, 0.61),
    (1.2, 1.25),
    (0.9, 0.91),
    (0.8, 0.85),
]
KL = [(2e-6, 1e-6), (3e-6, 2e-6), (0.001, 0.0005), (0.002, 0.0009), (0.003, 0.002), (0.004, 0.002)]
VAE = [(0.012, 460), (0.02, 420), (1.9, 380), (4.2, 340), (6.3, 300), (7.1, 260), (7.9, 220)]
DQN = [0.0008, 0.0031, 0.012, 0.064, 0.11]
HEALTHY = {
    "a loss on every fifth line": lines(
        range(33), lambda i: f"step {i} lr 0.1 grad_norm 1.0" + (f" loss {1 / (i + 1):.3f}" if i % 5 == 0 else "")
    ),
    "critics when the first reward is found": pairs(
        SAC, "global_step={i}000, qf1_loss={a}, qf2_loss={b}, actor_loss=-0.{i}, alpha=0.2, episodic_return={i}"
    ),
    "a policy leaves its reference": pairs(KL, '{{"step": {i}, "loss": 0.01, "reward": 0.{i}, "kl": {a}, "kl_loss": {b}}}'),
    "a VAE leaves its collapse": pairs(VAE, "epoch {i}: loss {b} recon_loss {b} kl {a} kl_loss {a}"),
    "two small parts on three lines": listed([0.001, 0.001, 0.05], "step {i} loss 1 a_loss {v} b_loss {v}"),
    "a strong discriminator, and a reconstruction that falls": lines(
        range(1, 8),
        lambda i: f"(epoch: {i}, iters: 400, time: 0.391, data: 0.002) G_GAN: 7.21{i} G_L1: 1{8 - i}.212 D_real: 0.00{i % 2} D_fake: 0.001",
    ),
    "a discriminator that has not started": lines(
        range(1, 9), lambda i: f"step {i}00: d_loss: 0.0, g_adv_loss: 0.0, g_mel_loss: {45 - 3 * i:.3f}"
    ),
    "one batch, learned by heart": pairs(
        [(2.31, 5.2), (0.0018, 0.004), (0.0007, 0.0015), (0.0004, 0.0009), (0.0003, 0.0006)], "step {i}00: loss {a}, grad_norm {b}"
    ),
    "a linear regression": pairs(
        [(25.31, 45.2), (0.0108, 0.024), (0.0101, 0.015), (0.0099, 0.009), (0.01, 0.02)], "step {i}00: loss {a}, grad_norm {b}"
    ),
    "a cross-entropy that is a sum": listed([1843.2, 1790.1, 1712.3, 1690.0], "step {i}0: cross_entropy: {v}"),
    "the same, on more lines": lines(range(30), lambda i: f"step {i}0: cross_entropy: {1843 * math.exp(-i / 60):.1f}"),
    "a value network that learns of rewards": "".join(
        f"| rollout/           |          |\n|    ep_rew_mean     | {10 + 15 * i}     |\n|    total_timesteps | {1000 * i} |\n"
        f"|    learning_rate | 0.0001 |\n|    loss            | {value}     |\n|    n_updates       | {20 * i}       |\n---------\n"
        for i, value in enumerate(DQN, 1)
    ),
    "the same in one line each": listed([0.0008, 0.002, 0.004, 0.01, 0.03, 0.05, 0.09], KNOWN),
    "a value network, later": lines(
        range(1, 60), lambda i: f"step {i}000 loss {0.0008 if i < 25 else 0.5 + 0.02 * (i - 24):.4f} episode_reward {10 * i}"
    ),
    "a running sum": lines(
        range(1, 13), lambda i: f"Batch {10 * i}/120, running loss: {sum(0.69 - 0.005 * k for k in range(i)):.3f}"
    ),
    "a sum from 1": lines(range(6), lambda i: f"Epoch 1 step {100 * i} loss: {1 + 229 * i:.3f}"),
    "a queue that fills": listed(
        [0.52, 2.4, 4.2, 5.9, 6.8, 7.5, 8.0, 8.4, 8.7, 8.9], "Epoch: [0][{i}0/5004] Time 0.3 Data 0.0 Loss {v} Acc@1 1.00"
    ),
    "a queue that fills, later": lines(
        range(100),
        lambda i: f"Epoch: [0][{i * 10}/5004] Time 0.3 Loss {11.09 - 9 * math.exp(-i / 8) - 0.004 * i:.4e} Acc@1 1.00",
    ),
    "gradient norms with two digits": lines(
        range(1, 40), lambda i: f"(step={i * 100:07d}) Train Loss: {0.15 + wave(i, 0.004):.4f}, Grad Norm: 0.00, Steps/Sec: 1.2"
    ),
    "gradient norms with two digits, late": lines(
        range(1, 41), lambda i: f"step {i} loss {falls(i) + wave(i):.4f} grad_norm {max(0.3 * math.exp(-i / 6), 0.002):.2f}"
    ),
    "a loss with three digits": listed(["0.693", "0.412", "0.155", "0.000", "0.000", "0.000"], "epoch {i} loss: {v}"),
    "a learning rate that is rounded": lines(
        range(1, 30), lambda i: f"{{'loss': {1.5 - i / 99 + wave(i):.4f}, 'lr': 0.0, 'epoch': {i / 10}}}"
    ),
    "the scale of something else": lines(range(1, 41), lambda i: f"step {i} loss {falls(i):.4f} scale 0.01"),
    "samples that were skipped": lines(range(1, 41), lambda i: f"step {i * 10} | loss {falls(i):.4f} | skipped {i * 4}"),
    "a part that is absent now and then": lines(
        range(1, 41), lambda i: f"step {i} loss {falls(i):.4f} loss_web {falls(i):.4f} loss_code {'nan' if i % 2 else '1.3'}"
    ),
    "a validation that is not run at each step": lines(
        range(1, 30), lambda i: f"epoch {i} loss {2 / (i + 1):.3f} val_loss {'nan' if i % 5 else 0.5}"
    ),
    "rows of training and rows of evaluation": "step,train_loss,val_loss\n"
    + lines(range(1, 30), lambda i: f"{i},nan,{0.5 / i}" if i % 2 == 0 else f"{i},{2 / (i + 1):.3f},nan"),
    "the first lines of preference training": listed([0.6931] * 3, "step {i} loss {v} aux_loss 0.0000"),
    "what a loss was before": listed(["inf", 0.9, 0.8], "step {i} loss 0.{i} prev_loss {v} old_loss {v}"),
    "the lowest so far": listed(["inf"], "step {i} loss 0.5 lowest_loss: {v}"),
    "a change of a loss": listed(["nan"], "step {i} loss 0.5 delta_loss {v} loss_std {v}"),
    "29 of 30": lines(range(1, 9), lambda i: f"epoch {i}: loss {1 / i:.4f} val_loss {1 / (i + 0.2):.4f} val_acc 0.9666666666666667"),
    "the first lines of a thousand classes": listed(
        [7.0148, 7.0631, 7.0245, 6.9913, 6.9966, 6.9866], "Epoch: [0][{i}0/5005]\tTime  0.351\tLoss {v} (6.9)\tAcc@1   0.00 (  0.00)"
    ),
    "a detector in its first epochs": listed([1.1, 1.21, 1.15], "epoch {i} loss {v} mAP 0.0 lr 0.001"),
    "a part that is annealed in": lines(range(1, 5), lambda i: f"epoch {i}: loss {3 - 0.3 * i:.3f} kl_loss 0.0 f1 0.0"),
    "prices": lines(range(1, 12), lambda i: f"step {i}: loss {5.6e10 * 0.8**i:.1f} price_loss {5.5e10 * 0.8**i:.1f}"),
    "prices, slowly": lines(range(1, 20), lambda i: f"step {i}: loss {5.6e10 * 0.97**i:.1f}"),
    "a bar that repeats a validation": lines(
        range(9),
        lambda e: f"Epoch {e}: 100%|████      | 100/100 [00:01<00:02, 45.1it/s, loss={2 * math.exp(-e):.4f}, val_loss=0.6931]",
    ),
    "a triplet loss": lines(range(40), lambda i: f"step {i} triplet_loss {0.0 if i in (20, 30) else 0.5 + wave(i, 0.05):.4f}"),
    "an adapter that starts at 0": lines(
        range(60), lambda i: f"step {i} loss {0.15 + wave(i):.4f} grad_norm {0.002 + abs(wave(i, 2e-4)) if i < 15 else 0.2 + abs(wave(i, 0.05)):.4f}"
    ),
    "a scale that stays below 1": lines(
        range(1, 40), lambda i: f"| epoch 001: {i} / 99 loss={falls(i):.3f}, num_updates={i}, lr=4.8e-06, gnorm=3.{i}, loss_scale=0.250"
    ),
    "boxes that start later": lines(
        range(1, 5), lambda i: f"Epoch(train) [1][{i * 50}/1000]  lr: 1e-4  loss_cls: 1.{9 - i} loss_bbox: 0.0000 loss_iou: 0.0000 loss: 1.{9 - i}"
    ),
}  # fmt: skip


def findings(tmp_path, text, name="train.log"):
    name = "train.csv" if text.startswith("step,") else name
    (tmp_path / name).write_text(text, encoding="utf-8")
    story = Story()
    for item in read(find([tmp_path / name])[0]):
        story.add(item)
    assert story.points
    return judge(story)


def loud(found):
    return [(f.kind, f.severity, f.said) for f in found if f.severity != "note"]


@pytest.mark.parametrize("name", HEALTHY)
def test_look_alikes_are_left_in_peace(tmp_path, name):
    assert loud(findings(tmp_path, HEALTHY[name])) == []


HARMLESS = [
    "INFO: no NaN found in loss or gradients at step 12",
    "[INFO] loss: no nan/inf detected in grads at iteration 12",
    "iter 12 grads finite: True nan: 0",
    "WARNING: 0 NaN values in weights at step 12",
    "WARNING best loss so far: inf",
    "INFO New best loss 0.4 (was inf) at step 12",
    "Saving checkpoint at step 12: loss improved from inf to 0.4",
    "2026-01-01 10:00:00 WARNING trainer: gradient clipping by norm disabled (max_norm=inf)",
    "[WARNING] 12 samples have NaN targets; they are ignored in the loss",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_words_about_nan_that_warn_of_none(tmp_path, line):
    steps = lines(range(12), lambda i: f"step {i} loss {2 / (i + 1) + 0.3:.4f}")
    later = lines(range(12, 24), lambda i: f"step {i} loss {2 / (i + 1) + 0.3:.4f}")
    assert loud(findings(tmp_path, f"{steps}{line}\n{later}")) == []


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: NaN loss detected on rank 0",
        "WARNING: rank 0: loss is NaN",
        "WARNING step 0: gradients are nan",
        "WARNING: GPU 0 nan in the gradients",
        "WARNING: best model restored, the loss is nan",
        "WARNING: the loss was inf at step 12",
        "WARNING: the gradient norm became inf in batch 12",
    ],
)
def test_words_about_nan_that_do_warn(tmp_path, line):
    steps = lines(range(12), lambda i: f"step {i} loss {2 / (i + 1) + 0.3:.4f}")
    assert [kind for kind, *_ in loud(findings(tmp_path, f"{steps}{line}\n"))] == ["nan-warnings"]


def test_a_history_on_one_line_is_read_whole(tmp_path):
    """Keras' history, dumped without indent, and a notebook that Kaggle saved."""
    losses = [2 / (i + 1) if i < 6 else math.nan for i in range(12)]
    (finding,) = findings(tmp_path, json.dumps({"loss": losses, "val_loss": [2.0] * 12}), "history.json")
    assert (finding.kind, finding.severity) == ("nan", "failure")
    cell = {"cell_type": "code", "outputs": [{"text": [f"step {i} loss {loss}\n" for i, loss in enumerate(losses)]}]}
    (finding,) = findings(tmp_path, json.dumps({"metadata": {}, "cells": [cell]}), "run.ipynb")
    assert (finding.kind, finding.place.step) == ("nan", 6.0)


@pytest.mark.parametrize("name", ["ac_loss", "heat_map_loss"])
def test_a_loss_whose_name_holds_that_of_a_score(tmp_path, name):
    text = lines(range(12), lambda i: f"step {i} loss {1 / (i + 1):.3f} {name} {'nan' if i > 6 else 0.5}")
    assert [(f.kind, f.about) for f in findings(tmp_path, text)] == [("nan", name)]


def test_inf_once_and_nan_later_are_two_things(tmp_path):
    text = lines(range(41), lambda i: f"step {i} loss {'inf' if i == 3 else 'nan' if i > 30 else 1 / (i + 1)}")
    (finding,) = findings(tmp_path, text)
    assert (finding.kind, finding.place.step) == ("nan", 31.0) and "The loss is nan at step 31" in finding.said


def test_nan_now_and_then_loses_nothing(tmp_path):
    text = lines(range(41), lambda i: f"step {i} loss {'nan' if i % 5 in (1, 2) else round(1 / (i + 1), 3)}")
    (finding,) = findings(tmp_path, text)
    assert "every later step is lost" not in finding.said


def test_an_impossible_last_loss_has_not_gone_away(tmp_path):
    text = lines(range(21), lambda i: f"step {i} loss {1e13 if i == 20 else 1 - 0.001 * i}")
    (finding,) = findings(tmp_path, text)
    assert finding.kind != "spike"


def test_one_nan_beside_a_scale_that_collapses_is_not_called_lasting(tmp_path):
    rng = random.Random(0)
    text = lines(
        range(30), lambda i: f"step {i} loss {'nan' if i == 2 else round(2 + rng.gauss(0, 0.1), 3)} loss_scale {65536 / 2**i:g}"
    )
    found = findings(tmp_path, text)
    assert found[0].kind == "scale-collapse" and "it is the forward" not in found[0].said
