"""Losses that stand still or are impossible, each beside a healthy log that looks like it: from text to finding."""

from __future__ import annotations

import math

import pytest

from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.text._text import TextReader


def findings(text):
    story = Story()
    for item in TextReader().read([text.encode()]):
        story.add(item)
    return judge(story)


def kinds(text):
    return [(f.kind, f.severity, f.place.line) for f in findings(text)]


def log(values, line="step {i}: loss {value}", start=0):
    return "".join(line.format(i=i, value=value) + "\n" for i, value in enumerate(values, start))


def falling(n, low=1.0):
    return [round(low + 2 * math.exp(-i / 8) + 0.03 * math.sin(i * i), 5) for i in range(n)]


@pytest.mark.parametrize("smallest", [1e-7, 1e-8, 1e-10, 1e-12, 1.17549435e-38])
def test_a_loss_that_ends_at_the_log_of_the_smallest_probability(smallest):
    stuck = round(-math.log(smallest), 4)
    text = log([*falling(5), 7.3, *[stuck] * 4])
    assert kinds(text) == [("divergence", "failure", 7)]
    assert "probability of every right answer is 0" in findings(text)[0].said
    assert kinds(log([round(stuck * (1 + 1e-3 * math.sin(i * i)), 4) for i in range(12)] + [stuck])) == []  # by chance
    assert kinds(log([*[stuck] * 3, *falling(12)])) == []  # it begins there


def test_a_part_of_the_loss_saturates_too():
    line = "step {i}: loss 3.{i}2 loss_bbox {value}"
    assert kinds(log([0.61, 0.52, *[87.3365] * 4], line)) == [("divergence", "failure", 3)]
    assert kinds(log([0.61, 0.52, 87.3365, 0.47, 0.45, 0.44], line)) == []


def test_a_loss_that_saturates_as_a_multiple_of_its_part():
    """Caffe prints the weighted loss on one line and its part on the next: it begins at the first."""
    line = "Iteration {i}, loss = {weighted}\n    Train net output #0: loss_cls = {part} (* 3 = {weighted} loss)"
    parts = [0.61, 0.52, 87.3365, 87.3365, 87.3365]
    text = "".join(line.format(i=20 * i, part=part, weighted=round(3 * part, 3)) + "\n" for i, part in enumerate(parts))
    assert kinds(text) == [("divergence", "failure", 5)]


def test_losses_that_repeat_those_of_the_epoch_before():
    epoch = [2.3145, 2.2871, 2.3312, 2.3004, 2.2933, 2.3150]
    assert kinds(log(epoch * 2)) == [("plateau", "warning", 7)]
    assert kinds(log([*epoch, *[round(value - 0.0003, 4) for value in epoch]])) == []
    assert kinds(log([*epoch, *epoch[:4]])) == [("plateau", "warning", 7)]  # the second epoch goes on
    learning = [2.9145, 2.7871, 2.6312, 2.5004, 2.3933, 2.3150]
    assert kinds(log(learning * 2)) == []  # the same run, started again
    coarse = [2.3, 2.2, 2.4, 2.1, 2.5, 2.2]
    assert kinds(log(coarse * 2)) == []  # two digits repeat by chance


def test_means_of_epochs_that_only_wobble():
    line = "Epoch {i}: loss {value:.5f}"
    wobble = [0.69315, 0.69320, 0.69309, 0.69318, 0.69311, 0.69317, 0.69312]
    assert kinds(log(wobble, line, start=1)) == [("plateau", "warning", 1)]
    slow = [0.69315 - 0.0002 * i for i in range(7)]
    assert kinds(log(slow, line, start=1)) == []
    assert kinds(log(wobble, line, start=40)) == []  # it may have learned before


def test_an_evaluation_that_never_changes():
    line = "Epoch {i}: loss {value:.4f} val_loss 1.0986"
    assert kinds(log(falling(12), line)) == [("plateau", "warning", 1)]
    assert kinds(log(falling(12), "Epoch {i}: loss {value:.4f} val_loss 0.1")) == []  # one digit
    last = log(falling(12), "step {i}: loss {value:.4f} val_loss 1.0986")
    assert kinds(last) == []  # the last evaluation, shown again at each step


def test_a_score_that_never_changes_to_the_last_digit():
    line = "epoch {i}: loss {value:.4f} val_accuracy: {score}"
    assert kinds("".join(line.format(i=i, value=v, score=0.318376) + "\n" for i, v in enumerate(falling(6)))) == [
        ("plateau", "warning", 1)
    ]
    for score in ("0.5", "{i}"):  # of few samples; moving
        text = "".join(
            line.format(i=i, value=v, score=score.format(i=0.318376 + i / 99)) + "\n" for i, v in enumerate(falling(6))
        )
        assert kinds(text) == []


def test_a_learning_rate_too_small_for_fp32():
    line = "step {i}: loss 2.{i}1 current_lr {value}"
    assert kinds(log([1e-4, 1e-12, 3e-31, 8e-52, 0.0], line)) == [("learning-rate-zero", "failure", 3)]
    assert kinds(log([1e-4, 1e-12, 3e-20, 1e-24, 1e-28], line)) == []
    assert kinds(log([3e-31, 1e-4, 1e-4, 1e-4, 1e-4], line)) == []  # a warm-up that begins at nearly 0


def test_one_impossible_value_among_ordinary_ones():
    values = falling(30)
    values[12] = "3.1e+33"
    assert [kind for kind in kinds(log(values)) if kind[0] == "spike"] == [("spike", "warning", 13)]
    values[12] = 31.0
    assert all(severity == "note" for _, severity, _ in kinds(log(values)))


def test_a_nan_that_comes_after_an_impossible_value_began_there():
    values = [*falling(10), "2.2e+30", *falling(3, 1.1), *["nan"] * 4]
    assert kinds(log(values)) == [("nan", "failure", 11)]
    assert kinds(log([*falling(10), *falling(3, 1.1), *["nan"] * 4])) == [("nan", "failure", 14)]


def test_a_nan_that_comes_after_a_loss_that_was_blown_up_began_there():
    values = [*falling(10), *[53_000_000.0, 96_000_000.0], *["nan"] * 4]
    assert kinds(log(values)) == [("nan", "failure", 11)]
    large = [97_000_000.0 + i for i in range(10)]  # of squared prices: nothing happened before the NaN
    assert kinds(log([*large, *["nan"] * 4])) == [("nan", "failure", 11)]


def test_nan_that_comes_and_goes_began_at_the_first():
    """Bad batches, not bad weights: after NaN in the weights no loss is finite."""
    values = [*falling(10), *["nan", "nan", 1.1, "nan", 1.0, "nan", "nan"]]
    (finding,) = findings(log(values))
    assert (finding.kind, finding.severity, finding.place.line) == ("nan", "failure", 11)
    assert "some of the batches are bad" in finding.said and "on 5 of the 7 lines" in finding.said
    for_good = [*falling(10), "nan", *falling(4), *["nan"] * 6]
    (finding,) = findings(log(for_good))
    assert finding.place.line == 16 and "every later step is lost" in finding.said


def test_a_steep_rise_in_a_few_lines():
    assert kinds(log([2.1, 3.4, 5.9, 9.8, 14.7])) == [("divergence", "failure", 2)]
    assert kinds(log([2.1, 4.2, 6.2, 8.3, 10.3])) == []  # a sum that is never reset grows by the same each time
    assert kinds(log([2.1, 3.4, 2.9, 9.8, 14.7])) == []
    assert kinds(log([2.5, 1.8, 1.1, 0.9, 1.9, 3.2, 4.8])) == [("divergence", "failure", 5)]  # from the best on, each is worse
    assert kinds(log([2.5, 1.8, 1.1, 0.9, 1.9, 1.7, 4.8])) == []


def test_a_loss_that_jumps_after_the_first_line_and_stays_up():
    assert kinds(log([0.16, 4.82, 5.16, 4.25, 4.41, 8.65, 5.07])) == [("divergence", "failure", 2)]
    assert kinds(log([0.16, 4.82, 4.7, 4.5, 4.4, 4.2, 4.1])) == []  # it learns: the first line was of something else


def test_a_learned_loss_may_wobble_about_0():
    """The last three rise, and the last is ten times the lowest: noise, beside what the run has learned."""
    assert kinds(log([2.5, 0.7, 0.08, 0.004, 0.001, 0.006, 0.031])) == []
    assert kinds(log([2.5, 0.7, 0.08, 0.004, 0.006, 0.9, 1.4])) == [("divergence", "failure", 5)]


def test_the_first_row_of_a_sum_is_small():
    """spaCy adds the losses of the batches since the last row, and the first row has one batch."""
    head = "E    #       LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE\n---  ------  --------  ------  ------  ------  ------\n"
    rows = log([45.1, 984.2, 815.3, 801.1, 790.2, 782.2], "  {i}  {i}00  {value}  62.80  63.00  62.00  0.63")
    assert kinds(head + rows) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.1, 9.2, 2_400.0, 8_100.0], [("divergence", "failure", 3)]),
        ([2.3, 690_000.0], [("divergence", "failure", 2)]),
        ([2.3, 690.0], []),  # two lines: the second may be an outlier
        ([7.1, 9_200.0, 6.8, 8_100.0], []),  # it comes back
        ([0.0004, 0.05, 0.02, 0.06], []),  # small losses rise for many reasons
    ],
)
def test_a_loss_that_leaves_all_bounds_within_a_few_lines(values, expected):
    assert kinds(log(values)) == expected


def test_a_policys_loss_has_no_bounds():
    values = [0.2, 31.0, 29.0, 42.0]
    assert kinds(log(values, "step {i}: loss {value}")) == [("divergence", "failure", 2)]
    assert kinds(log(values, "step {i}: loss {value} reward 1.0")) == []


def test_a_loss_that_vanishes_beside_a_gradient_norm_that_is_always_the_same():
    """A norm that is logged as the limit it is clipped to says nothing."""
    line = "step {i}: loss {value}, grad_norm 1.0"
    assert kinds(log([1.93, 1.87, 1.79, 1.81, 0.0, 0.0], line)) == [("hidden-nan", "failure", 5)]
    moving = "".join(f"step {i}: loss {v}, grad_norm {1 + i / 9}\n" for i, v in enumerate([1.93, 1.87, 1.79, 1.81, 0.0, 0.0]))
    assert kinds(moving) == []


def test_a_classification_loss_has_a_level():
    line = "Epoch {i}: cls_loss {value:.1f}"
    assert kinds(log([5e6, 4.8e6, 5.1e6], line)) == [("divergence", "failure", 1)]
    assert kinds(log([5e6, 4.8e6, 5.1e6], "Epoch {i}: loss {value:.1f}")) == []  # of squared prices, say


def test_a_loss_that_is_the_same_up_to_its_last_digits():
    still = [0.693147, 0.693148, 0.693147, 0.693149, 0.693148, 0.693147, 0.693148, 0.693148, 0.693147, 0.693149]
    assert kinds(log(still)) == [("plateau", "warning", 1)]
    assert kinds(log([round(0.6935 - 0.0001 * i, 6) for i in range(10)])) == []  # slow, but it falls


def test_a_loss_that_freezes_at_chance():
    moving = [0.657, 2.3849, 5.1752, 0.9927, 10.3694, 1.9302, 3.4642]
    assert ("plateau", "warning", 8) in kinds(log([*moving, *[0.6931] * 14]))
    assert "plateau" not in [kind for kind, *_ in kinds(log([2.657, *moving[1:], *[0.6931] * 14]))]  # better than at the start


def test_a_gradient_that_is_0_wherever_it_is_finite():
    line = "step {i}: loss 1.2{i}, grad_norm {value}"
    assert kinds(log(["nan", 0.0, 0.0, 0.0], line))[0] == ("zero-gradient", "failure", 2)
    assert [kind for kind, *_ in kinds(log(["nan", 0.0, 0.8, 0.7], line))] == ["nan-gradient"]


SCALED = "step {i}: loss 2.{i} loss_scale {value}"


def test_a_scale_below_one_that_recovers_now_and_then():
    assert kinds(log([0.5, 0.25, 0.5, 0.5], SCALED)) == []
    assert kinds(log([0.5, 0.25, 0.25, 0.25], SCALED)) == [("scale-collapse", "warning", 1)]


ICEFALL = "2024-01-01 10:00:0{i},018 WARNING [optim.py:487] (0/2) Grad scale is small: {value}"
GIVES_UP = "RuntimeError: grad_scale is too small, exiting: 8.470329472543003e-22"


def test_a_scale_that_shrinks_in_warnings_until_the_program_gives_up():
    text = log(falling(8)) + log([0.0078125, 0.00048828125, 3.0517578125e-05], ICEFALL)
    assert kinds(text) == [("scale-collapse", "failure", 9)]
    (first, *_) = findings(text + "Traceback (most recent call last):\n" + GIVES_UP + "\n")
    assert (first.kind, first.severity, first.place.line) == ("scale-collapse", "failure", 9)


@pytest.mark.parametrize(("first", "expected"), [(60_000, []), (800, ["plateau"])])
def test_a_flat_loss_early_in_a_long_run_has_not_converged(first, expected):
    steps = range(first, first + 900, 10)
    bar = " {share}%|#  | {step}/100000 [00:31<03:48,  2.6it/s, loss={loss:.4f}]\n"
    text = "".join(bar.format(share=step // 1000, step=step, loss=2.303 + 0.002 * math.sin(0.7 * step)) for step in steps)
    assert [kind for kind, *_ in kinds(text)] == expected
