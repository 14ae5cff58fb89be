"""Values of training beside the loss, levels that are absurd by themselves, advice that fits the log: from text to finding."""

# ruff: noqa: E501  # lines of logs are long

from __future__ import annotations

import math

import pytest

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.text._text import TextReader


def found(text):
    story = Story()
    for item in TextReader().read([text.encode()]):
        story.add(item)
    return judge(story)


def kinds(text):
    return [(f.kind, f.severity, f.place.line) for f in found(text)]


def lines(rows, line):
    return "".join(line(i) + "\n" for i in range(rows))


def fall(i):
    return 2.5 * math.exp(-i / 20) + 0.9


CRITIC = "step {i}: loss {loss:.3f}, critic_loss {critic}, approx_kl 0.01"


def critic(value):
    return lambda i: CRITIC.format(i=i, loss=fall(i), critic=value(i))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda i: "nan" if i > 20 else 0.4, [("nan", "failure", 22)]),
        (lambda i: "inf" if i > 20 else 0.4, [("inf", "failure", 22)]),
        (lambda i: "nan" if i == 20 else 0.4, [("nan", "note", 21)]),
        (lambda i: "nan" if 10 < i < 20 else 0.4, [("nan", "warning", 12)]),
        (lambda i: 3e9 if i > 20 else 0.4, [("divergence", "failure", 22)]),
        (lambda i: 3e9 + i, [("divergence", "warning", 1)]),
        (lambda i: 0.4 + 30 * (i % 7), []),
        (lambda i: 0.0, []),
    ],
)
def test_a_part_is_judged_for_what_no_part_may_be(value, expected):
    assert kinds(lines(40, critic(value))) == expected


def test_the_value_is_named_and_its_causes_are_those_of_its_kind():
    (finding,) = found(lines(40, critic(lambda i: "nan" if i > 20 else 0.4)))
    assert (finding.about, finding.headline) == ("critic_loss", "critic_loss is NaN")
    assert "loss is still finite" in finding.said and "critic" in finding.causes[0].reason
    assert finding.to_json()["about"] == "critic_loss"


@pytest.mark.parametrize("name", ["reward", "ep_rew_mean", "reader_cost", "fps", "explained_variance", "val_accuracy", "kl_coef"])
def test_what_is_not_training_may_be_nan(name):
    assert kinds(lines(40, lambda i: f"step {i}: loss {fall(i):.3f}, {name} nan")) == []


def test_a_nan_loss_beside_a_finite_gradient_and_another_loss_is_a_placeholder():
    text = lines(20, lambda i: f"step {i}: loss nan, reduced_train_loss {fall(i):.3f}, gradient_norm 0.8")
    assert kinds(text) == []
    assert kinds(text.replace("gradient_norm 0.8", "gradient_norm nan"))[0][:2] == ("nan", "failure")


def test_a_loss_that_megatron_no_longer_prints():
    row = " iteration {i:8d}/ 8000 | learning rate: 6.6E-06 |{loss} loss scale: 1.0 | grad norm: 0.749 |"
    text = lines(30, lambda i: row.format(i=i, loss=f" lm loss: {fall(i):.6E} |" if i < 20 else ""))
    (finding,) = found(text)
    assert (finding.kind, finding.place.line) == ("nan", 21) and "no longer contains lm loss" in finding.said


def test_parts_that_never_change():
    row = "step {i}: box_loss 0, cls_loss {cls}, dfl_loss 0"
    assert kinds(lines(6, lambda i: row.format(i=i, cls=0.1814))) == [("no-targets", "failure", 1)]
    assert kinds(lines(6, lambda i: row.replace("dfl_loss", "aux_loss").format(i=i, cls=0.1814 - i / 100))) == []


def test_a_detector_whose_boxes_have_no_targets():
    row = "step {i}: box_loss {box}, cls_loss {cls}, dfl_loss 0"
    falling = lines(9, lambda i: row.format(i=i, box=0, cls=0.1814 - i / 100))
    (finding,) = found(falling)
    assert (finding.kind, finding.severity, finding.place.line) == ("no-targets", "warning", 1)
    assert "box_loss" in finding.said and "dfl_loss" in finding.said
    assert kinds(lines(4, lambda i: row.format(i=i, box=0, cls=0.18 - i / 100))) == []  # some batches of background
    assert kinds(lines(10, lambda i: row.format(i=i, box=0.7 if i % 2 else 0, cls=0.18 - i / 100))) == []


def test_losses_that_are_all_exactly_0():
    zeros = lines(3, lambda i: f"{i}     0.000     0.000     40.000")
    learning = lines(3, lambda i: f"{i}     0.000     0.{9 - i}00     40.000")
    assert kinds("Itn.  Dep Loss  NER Loss  NER F.\n" + zeros) == [("no-targets", "failure", 2)]
    assert kinds("Itn.  Dep Loss  NER Loss  NER F.\n" + learning) == []
    several = "epoch {i} loss: 0.0000 loss_ce: 0.0000 loss_bbox: 0.0000 loss_giou: 0.0000"
    assert kinds(lines(2, lambda i: several.format(i=i))) == [("no-targets", "failure", 1)]
    assert kinds(lines(2, lambda i: f"epoch {i} loss: 0.0000")) == []
    policy = lines(8, lambda i: f"{{'loss': 0.0, 'reward': 1.{i}, 'epoch': 0.{i}}}")
    assert kinds(policy) == []


def test_of_two_networks_one_has_won():
    row = "Epoch: [ 2/20] [{i:4d}/  40] time: 1.2, d_loss: {d}, g_loss: {g}"
    assert kinds(lines(30, lambda i: row.format(i=i, d=70 + i % 3, g=0.0))) == [("divergence", "failure", 1)]
    assert kinds(lines(30, lambda i: row.format(i=i, d=1.3, g=0.0 if i % 3 else 0.7))) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (lambda i: f"step {i}: loss {4e8 + 1e7 * (i % 5):.1f}", ("divergence", "warning", 1)),
        (lambda i: f"step {i}: loss {4e9 * math.exp(-i):.1f}", None),
        (lambda i: f"step {i}: mse_loss {4e8 + 1e7 * (i % 5):.1f}", None),
        (lambda i: f"Step {i}/900; acc: 0.1; ppl: 9.9e40; xent: {6600 + i % 5}", ("divergence", "failure", 1)),
        (lambda i: f"Step {i}/900; acc: 0.1; ppl: 12000; xent: {9.4 - i / 100}", None),
        (lambda i: f"step {i}: loss 1.{9 - i}, grad_norm {2e9 + i}", ("exploding-gradient", "warning", 1)),
    ],
)
@pytest.mark.parametrize("count", [2, 9])
def test_a_level_that_is_absurd_by_itself(row, expected, count):
    assert kinds(lines(count, row))[:1] == ([] if expected is None else [expected])


TWO = "(epoch: {i}, iters: 100, time: 0.391, data: 0.002) D_A: {a} G_A: {b}"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.21, 0.18, 0.24, 41.0, 38.5], [0.36, 0.41, 0.33, 52.1, 60.7], [("divergence", "failure", 4)]),
        ([0.21, 0.18, 0.24, 41.0, 0.2], [0.36, 0.41, 0.33, 52.1, 0.4], []),  # they come back
        ([0.21, 0.18, 0.24, 41.0, 38.5], [0.36, 0.41, 0.33, 0.35, 0.39], []),  # one player alone
    ],
)
def test_parts_that_all_jump_at_one_line_have_exploded(a, b, expected):
    assert kinds(lines(5, lambda i: TWO.format(i=i, a=a[i], b=b[i]))) == expected


def test_a_part_of_0_beside_the_worst_score_has_nothing_to_learn_from():
    row = "step {i}: loss {loss:.3f} ctc_loss {ctc} cer {cer}"
    assert kinds(lines(8, lambda i: row.format(i=i, loss=fall(i), ctc=0.0, cer=1.0))) == [("no-targets", "warning", 1)]
    assert kinds(lines(8, lambda i: row.format(i=i, loss=fall(i), ctc=0.0, cer=0.9 - i / 20))) == []
    assert kinds(lines(8, lambda i: row.format(i=i, loss=fall(i), ctc=2.1 - i / 9, cer=1.0))) == []


def test_a_policys_tiny_loss_may_grow_a_hundredfold():
    row = "{{'loss': {loss}, 'reward': 0.3, 'epoch': {i}.0}}"
    assert kinds(lines(30, lambda i: row.format(i=i, loss=1e-6 * 1.4**i if i < 25 else 4e-3))) == []
    assert [kind for kind, *_ in kinds(lines(30, lambda i: row.format(i=i, loss=1e-3 if i < 20 else 40.0)))] == ["divergence"]


def test_loss_and_gradient_that_vanish_within_a_line():
    values = [(12.07, 229.6), (1.8e-6, 2e-4), (0.0, 7.7e-8), (0.0, 6e-8)]
    row = "step {i}: loss {loss:.3g}, grad_norm {norm:.3g}"
    assert kinds(lines(4, lambda i: row.format(i=i, loss=values[i][0], norm=values[i][1])))[0][:2] == ("no-targets", "failure")
    back = [(2.3, 1.1), (1.8e-6, 2e-7), (2.2, 1.0), (2.1, 1.0)]
    assert kinds(lines(4, lambda i: row.format(i=i, loss=back[i][0], norm=back[i][1]))) == []
    learned = lines(60, lambda i: row.format(i=i, loss=3 * 0.8**i, norm=0.9**i))
    assert kinds(learned) == []


def test_a_scale_is_judged_by_its_level():
    warned = "| WARNING: overflow detected, setting loss scale to: {}\n"
    sunk = "".join(warned.format(0.0625 / 2**i) + f"| epoch 001: loss=1{4 - i}.2, num_updates={i}\n" for i in range(4))
    assert kinds(sunk)[0] == ("scale-collapse", "failure", 1)
    gone = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 0.0\n"
    assert kinds(gone)[0] == ("scale-collapse", "failure", 1)
    assert kinds(lines(30, lambda i: f"step {i}: loss {fall(i):.3f}, loss_scale 0.0")) == []
    bf16 = lines(30, lambda i: f"step {i}: loss {fall(i):.3f}, loss_scale 1.0")
    assert kinds(bf16) == []


@pytest.mark.parametrize(("scale", "expected"), [(1, [("scale-collapse", "failure", 2)]), (4096, [])])
def test_one_overflow_at_a_scale_of_1_is_hopeless(scale, expected):
    said = "[2026-01-01 10:00:00] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {0}, reducing to {0}\n"
    assert kinds("step 400: loss 1.5\n" + said.format(scale)) == expected


def test_a_low_scale_that_still_falls_where_the_log_ends():
    bar = "14%|#4  | {i}/2724 [13:58<86:18, 2.4s/it][2026-01-01 10:00:00,018] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step."
    fallen = lines(5, lambda i: f" {bar.format(i=378 + i)} Attempted loss scale: {64 >> i}, reducing to {32 >> i}")
    (finding,) = found(fallen)
    assert (finding.kind, finding.severity, finding.place.step) == ("scale-collapse", "warning", 378)
    search = lines(5, lambda i: f" {bar.format(i=i)} Attempted loss scale: {2**32 >> i}, reducing to {2**31 >> i}")
    assert kinds(search) == []


@pytest.mark.parametrize(("last", "expected"), [(4.3, ["scale-collapse"]), (1.6, [])])
def test_two_halvings_of_a_low_scale_count_where_the_loss_jumps(last, expected):
    said = "[2026-01-01 10:00:00] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
    text = lines(6, lambda i: f"step {400 + i}: loss {1.5 + 0.02 * i:.2f}")
    text += said.format(128, 64) + f"step 406: loss {last}\n" + said.format(64, 32)
    assert [kind for kind, *_ in kinds(text)] == expected


def test_boosting_whose_training_loss_rises():
    row = "[{i}]\ttraining's binary_logloss: {loss:.6f}\tvalid_1's binary_logloss: 0.7"
    assert kinds(lines(5, lambda i: row.format(i=i, loss=0.69 + 0.02 * i)))[0][:2] == ("divergence", "failure")
    assert kinds(lines(5, lambda i: row.format(i=i, loss=0.69 - 0.02 * i))) == []


def test_a_score_that_is_at_its_worst_on_every_line():
    head = "Step | Training Loss | Wer\n-- | -- | --\n"
    stuck = head + lines(3, lambda i: f"{400 * (i + 1)} | {5.04 + 0.03 * i:.4f} | 1.000000")
    assert kinds(stuck) == [("plateau", "warning", 3)]
    assert kinds(head + lines(3, lambda i: f"{400 * (i + 1)} | {5.04 - i:.4f} | 1.000000")) == []


def test_advice_fits_the_log():
    """No labels in reinforcement learning, no "never" after a stop, no bad start after a good one, no loss that is not logged."""
    rewards = lines(20, lambda i: f"{{'loss': 0.0, 'grad_norm': 0.0, 'reward': {0.1 * (i % 3)}, 'epoch': {i}.0}}")
    (finding,) = found(rewards)
    assert finding.causes[0].slug == "zero-advantage" and not any("labels" in command for command in finding.commands)
    stopped = lines(3, lambda i: f"WARNING: Loss is nan at step {i}, stopping training")
    assert "weights are most likely NaN" not in found(stopped)[0].said
    second = "step 0: loss 2.5\n" + lines(5, lambda i: f"step {i + 1}: loss nan")
    assert all("from the first lines" not in cause.reason for cause in found(second)[0].causes)
    norms = lines(12, lambda i: f"step {i}: grad_norm {'nan' if i > 5 else 0.8}")
    assert "the log has no loss" in found(norms)[0].said


def test_a_policy_may_start_at_a_loss_of_0_while_the_scaler_looks_for_its_scale():
    row = "{{'loss': {loss}, 'grad_norm': {norm}, 'reward': 0.3, 'epoch': {i}.0}}"
    text = lines(30, lambda i: row.format(i=i, loss=0.0 if i < 2 else i / 1e4, norm="nan" if i < 2 else 0.3))
    assert all(severity == "note" for _, severity, _ in kinds(text))
    assert ("hidden-nan", "warning", 1) in kinds(text.replace("reward", "margin"))


def test_only_whether_a_printed_tensor_is_finite_counts():
    assert kinds("".join(f"tensor({2.5 * 100**i}, device='cuda:0')\n" for i in range(12))) == []
    assert kinds("tensor(2.5)\ntensor(nan, device='cuda:0')\ntensor(nan)\n")[0] == ("nan", "failure", 2)


def test_a_distribution_with_nan_parameters_is_not_a_multinomial():
    text = "Traceback (most recent call last):\nValueError: Expected parameter loc (Tensor of shape (64, 3)) of distribution "
    text += "Normal(loc: torch.Size([64, 3])) to satisfy the constraint Real(), but found invalid values:\n"
    (finding,) = found(text)
    assert (finding.kind, finding.place.line) == ("bad-probabilities", 2) and "multinomial" not in finding.said


def test_nan_in_the_words_of_an_exception_is_its_cause():
    glued = "step 1: loss 2.5\n    main(args)RuntimeError:  [!] NaN loss with decoder_loss.\n"
    assert kinds(glued) == [("nan-warnings", "failure", 2)]
    bare = lines(9, lambda i: f"step {i}: loss {fall(i):.3f}") + "RuntimeError: mat1 and mat2 shapes cannot be multiplied\n"
    assert kinds(bare) == [("crash", "failure", 10)]
    assert kinds(bare + "step 10: loss 1.9\n") == [], "the program went on"
    (finding,) = found("step 1: loss 2.5\nRuntimeError: normal expects all elements of std >= 0.0\n")
    assert finding.kind == "bad-probabilities" and "nonpositive-std" in [cause.slug for cause in finding.causes]


def commands(text):
    return [command for finding in found(text) for command in finding.commands]


@pytest.mark.parametrize(
    ("row", "some", "none"),
    [
        ("step {i}: loss {v}", "nanproof run", "protect(trainer)"),
        ("{{'loss': {v}, 'grad_norm': 0.8, 'epoch': 0.{i:02d}}}", "protect(trainer)", "nanproof run train.py    #"),
        ("INFO:tensorflow:loss = {v}, step = {i} (9.1 sec)", "enable_check_numerics", "nanproof"),
        ("{i}/40 [===>......] - 9s 20ms/step - loss: {v}", "TerminateOnNaN", "nanproof"),
        (
            "[2026/01/01 10:00:00] ppocr INFO: epoch: [1/9], global_step: {i}, lr: 0.001, loss: {v}",
            "FLAGS_check_nan_inf",
            "nanproof",
        ),
        ("[{i}]\ttrain-rmse:{v}\teval-rmse:{v}", "a tenth of the learning rate", "nanproof"),
        ("2026-01-01 I tensorflow/core/util/port.cc:113] oneDNN error\nstep {i}: loss {v}", "nanproof run", "TerminateOnNaN"),
    ],
)
def test_advice_is_for_the_framework_that_wrote_the_log(row, some, none):
    advised = commands(lines(30, lambda i: row.format(i=i, v="nan" if i > 20 else f"{fall(i):.4f}")))
    assert any(some in command for command in advised) and not any(none in command for command in advised)


def test_boosting_overfits_by_its_rounds():
    text = lines(60, lambda i: f"[{i}]\ttrain-rmse:{1 / (i + 1):.5f}\teval-rmse:{0.5 + abs(i - 10) / 60:.5f}")
    (finding,) = found(text)
    assert finding.kind == "overfit" and "early stopping" in finding.commands[0]
    assert not any("learning rate" in cause.reason for cause in finding.causes)


FAILING = {
    "a language model that loses a third of what it learned": (
        lines(400, lambda i: f"iter {i * 50}: loss {3 + 7.9 * math.exp(-i / 25) + (1.6 if i >= 300 else 0) + 0.02 * math.sin(i * i):.4f}"),
        ("divergence", "failure", 301),
    ),
    "null where a loss is NaN": (
        lines(40, lambda i: f'{{"step": {i}, "loss": {"null" if i > 29 else round(fall(i), 4)}, "lr": 0.0001, "grad_norm": 0.8}}'),
        ("nan", "failure", 31),
    ),
    "an empty cell where a loss is NaN": (
        "step,loss,lr\n" + lines(40, lambda i: f"{i},{'' if i > 29 else round(fall(i), 4)},0.0001"),
        ("nan", "failure", 32),
    ),
    "gradients that stay NaN, beside a loss that once rounds to 0": (
        lines(50, lambda i: f"step:{i} - actor/pg_loss:{0.0 if i == 43 else -0.006} - actor/grad_norm:{'nan' if i > 37 else 0.4}"),
        ("nan-gradient", "failure", 39),
    ),
    "a part among other parts": (
        lines(40, lambda i: f"step {i}: loss_cls 0.5 loss_mask {'nan' if i > 29 else 0.4} total_loss {fall(i):.4f}"),
        ("nan", "failure", 31),
    ),
    "NumPy's numbers": (
        lines(40, lambda i: f"step {i}: loss: np.float64({'nan' if i > 29 else round(fall(i), 4)})"),
        ("nan", "failure", 31),
    ),
    "only a squared error": (
        lines(40, lambda i: f"epoch {i} train mse {0.4 if i < 5 else 0.4 * 2.0 ** (i - 5):.4g}"),
        ("divergence", "failure", 7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_failures_that_a_tester_showed_to_be_missed(tmp_path, name):
    """Found from outside, without sight of the code."""
    from nanproof.logs.read._sources import find, read

    text, expected = FAILING[name]
    (tmp_path / "train.log").write_text(text)
    story = Story()
    for item in read(find([tmp_path / "train.log"])[0]):
        story.add(item)
    finding = judge(story)[0]
    assert (finding.kind, finding.severity) == expected[:2] and abs(finding.place.line - expected[2]) <= 2, finding


def test_a_part_that_is_nan_now_and_then_and_a_scaler_that_says_so():
    absent = lines(60, lambda i: f"step {i}: loss {fall(i):.4f} logps/chosen {'nan' if i % 6 == 0 else -12.5}")
    assert [severity for _, severity, _ in kinds(absent)] == ["note"]
    skip = "WARNING: The grad norm is nan. Skipping updating the model.\n"
    steps = [f"step {i}: loss {fall(i):.4f}\n" for i in range(60)]
    assert [severity for _, severity, _ in kinds("".join([*steps[:20], skip, *steps[20:]]))] == ["note"]
    lost = skip.replace("grad norm", "loss")
    assert [severity for _, severity, _ in kinds("".join([*steps[:20], lost, *steps[20:]]))] == ["warning"]


def test_a_part_that_grows_until_it_is_inf_began_to_grow_before():
    values = [0.4, 0.5, 0.4, 0.6, 0.5, 0.4, 0.5, 0.6, *[10.0 ** (3 * k) for k in range(1, 9)], "inf", "inf", "inf"]
    text = lines(len(values), lambda i: f"step {i}: loss 0.{i % 5}1 value_loss {values[i]}")
    (finding,) = found(text)
    assert (finding.kind, finding.place.line) == ("inf", 9) and "It had grown before, from 1000 at step 8, line 9" in finding.said


@pytest.mark.parametrize(("loss", "slug"), [("2.31", "exploding-gradient"), ("nan", "fp16-activation-overflow")])
def test_causes_of_a_collapsed_scale_follow_the_loss(loss, slug):
    text = lines(12, lambda i: f"step {i}: loss {loss} loss_scale {2.0 ** (12 - 2 * i)}")
    assert found(text)[0].causes[0].slug == slug


@pytest.mark.parametrize("start", ["iteration 2137", "Epoch 40", "step 83"])
def test_a_log_that_begins_late_does_not_show_a_bad_start(start):
    name, first = start.split()
    late = found(lines(3, lambda i: f"{name} {int(first) + i}: loss nan"))[0]
    early = found(lines(3, lambda i: f"{name} {i + 1}: loss nan"))[0]
    assert early.causes[0].slug == "nonfinite-weights-at-start" != late.causes[0].slug


def test_steps_were_taken_where_the_rate_still_moves():
    row = "{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': {lr}, 'epoch': {i}.0}}"
    good = lines(3, lambda i: f"{{'loss': 1.{9 - i}, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': {i}.0}}")
    moves = good + lines(5, lambda i: row.format(i=i + 3, lr=f"{9 - i}e-06"))
    stands = good + lines(5, lambda i: row.format(i=i + 3, lr="9e-06" if i == 0 else "8e-06"))
    assert "those steps were most likely taken" in found(moves)[0].said
    assert "those steps were most likely taken" not in found(stands)[0].said
