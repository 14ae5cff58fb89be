"""judge: each kind of finding from a few points, the healthy runs that look like them, and what must not change a verdict."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest

from nanproof.logs._points import NOTES, Note, Point
from nanproof.logs._story import Story
from nanproof.logs.judge._finding import KINDS, SEVERITIES
from nanproof.logs.judge._findings import judge

NAN, INF = math.nan, math.inf


def story(rows, notes=(), **settings):
    """Rows of values, a step each; notes are put after the row of their line."""
    made = Story()
    for i, row in enumerate(rows, 1):
        row = {"loss": row} if isinstance(row, (int, float)) else dict(row)
        step, epoch = row.pop("step", i), row.pop("epoch", None)
        made.add(Point(row, step=step, epoch=epoch, line=i, settings=settings if i == 1 else {}))
        for note in notes:
            if note.line == i:
                made.add(note)
    return made


def found(*args, **settings):
    return [(f.kind, f.severity, f.place.step) for f in judge(story(*args, **settings))]


def falling(n, start=3.0, end=1.0, noise=0.03, seed=0, norm=True):
    random.seed(seed)
    rows = []
    for i in range(n):
        loss = end + (start - end) * math.exp(-4 * i / n) + random.gauss(0, noise)
        rows.append({"loss": loss, **({"grad_norm": abs(random.gauss(1, 0.2))} if norm else {})})
    return rows


def bad(n, loss=NAN, norm=NAN):
    return [{"loss": loss, "grad_norm": norm}] * n


LATER = falling(60)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (falling(20) + bad(5), ("nan", "failure", 21)),
        ([*falling(19), {"loss": 1.02, "grad_norm": NAN}, *bad(5)], ("nan", "failure", 20)),
        ([0.0] * 12, ("hidden-nan", "failure", 1)),
        ([{"loss": 0.0 if i == 9 else 2.6 + i % 3 / 9, "grad_norm": 1.4} for i in range(24)], ("hidden-nan", "warning", 10)),
        (falling(20) + bad(1, INF, INF) + bad(5), ("inf", "failure", 21)),
        (falling(20) + bad(1) + falling(20), ("nan", "warning", 21)),
        (falling(20) + bad(1) + falling(5) + bad(9), ("nan", "failure", 27)),
        (falling(20) + bad(5, 0.0), ("hidden-nan", "failure", 21)),
        (bad(2, 0.0), ("hidden-nan", "failure", 1)),
        (falling(20) + bad(1, 0.0) + falling(20), ("hidden-nan", "warning", 21)),
        (falling(20) + bad(1, 0.7) + bad(5, 0.0), ("hidden-nan", "failure", 21)),
        (falling(20, norm=False) + [0.0] * 5, ("hidden-nan", "failure", 21)),
        (falling(20) + bad(5, 0.7), ("nan-gradient", "failure", 21)),
        (falling(40) + bad(1, 0.7) + falling(40), ("nan-gradient", "note", 41)),
        (bad(10, 0.0, 0.0), ("no-targets", "failure", 1)),
        (falling(20) + bad(10, 0.0, 0.0), ("no-targets", "failure", 21)),
        (falling(20) + bad(3, 0.0, 0.0) + falling(20, 1.04), ("no-targets", "warning", 21)),
        (bad(20, 2.3, 0.0), ("zero-gradient", "failure", 1)),
        (falling(20) + bad(20, 2.3, 0.0), ("zero-gradient", "failure", 21)),
        ([{**row, "lr": 0.0, "loss": 2.3 + 0.01 * (i % 5)} for i, row in enumerate(LATER)], ("learning-rate-zero", "failure", 1)),
        ([{**row, "lr": 1e-3 if i < 40 else 0.0} for i, row in enumerate(LATER)], ("learning-rate-zero", "warning", 41)),
        (falling(60) + falling(40, 6, 5), ("divergence", "failure", 61)),
        ([*falling(60), 40.0, 30.0, *falling(60, 1.04, 1.0)], ("spike", "note", 61)),
        ([2.3 + 0.01 * math.sin(7 * i) for i in range(90)], ("plateau", "warning", 1)),
        ([{"loss": 1.0, "eval_loss": v} for v in (NAN, NAN, NAN)], ("eval-nan", "failure", 1)),
        ([{"loss": 2.0 + i % 2, "scale": 2.0 ** (16 - i)} for i in range(20)], ("scale-collapse", "failure", 2)),
        ([{"loss": 2 - i / 90, "skipped": max(0, i - 40)} for i in range(90)], ("scaler-skipping", "failure", 42)),
    ],
)
def test_each_kind_and_where_it_began(rows, expected):
    assert found(rows)[:1] == [expected]


def test_an_exploding_gradient_is_seen_while_the_loss_is_calm():
    rows = falling(60) + [{"loss": 1.0, "grad_norm": 300.0 * (1 + i)} for i in range(10)]
    assert ("exploding-gradient", "warning", 61) in found(rows)


def test_overfitting_needs_a_falling_training_loss():
    random.seed(1)
    evals = [3.0, 2.0, 1.6, 1.5, 1.7, 1.9, 2.2, 2.5, 2.8, 3.1]
    rows = [
        {"loss": 3 * math.exp(-i / 20) + random.gauss(0, 0.01), **({"eval_loss": evals[i // 10]} if i % 10 == 9 else {})}
        for i in range(100)
    ]
    assert found(rows) == [("overfit", "warning", 40)]
    flat = [{**row, "loss": 1.0 + random.gauss(0, 0.1)} for row in rows]
    assert "overfit" not in [kind for kind, *_ in found(flat)]


HEALTHY = {
    "a loss from 11 down to 3": falling(300, 11, 3, 0.1),
    "noise as large as what is learned": falling(200, 2.5, 2.0, 0.3),
    "a handful of lines": falling(4, 2.5, 2.2),
    "a short warm-up": [{**row, "lr": 1e-3 * min(1, i / 50)} for i, row in enumerate(falling(30, 3, 2.9))],
    "rates of 0 at the first and last line": [{**row, "lr": 1e-3 * i * (59 - i)} for i, row in enumerate(LATER)],
    "a rate that the log rounds to 0": [{**row, "lr": 0.0} for row in LATER],
    "a norm that the log rounds to 0": [{**row, "grad_norm": 0.0} for row in LATER],
    "gradient spikes of a factor of 5": [{**row, "grad_norm": 5.0 if i % 17 == 0 else 1.0} for i, row in enumerate(LATER)],
    "a policy's loss about 0": [{"loss": 0.05 * math.sin(i * i), "grad_norm": 1.0} for i in range(200)],
    "GRPO: exactly 0 at first, then a growing KL": [{"loss": 1e-5 * i, "grad_norm": 0.5} for i in range(100)],
    "GRPO: some groups without signal": [
        {"loss": 0.0 if i % 3 == 0 else 0.1 * math.sin(i), "grad_norm": 0.0 if i % 3 == 0 else 0.4} for i in range(90)
    ],
    "GRPO: a loss of 0.0 with a gradient": [{"loss": 0.0, "grad_norm": 0.3 + 0.01 * i} for i in range(30)],
    "DPO from 0.69": falling(100, 0.693, 0.3, 0.02),
    "learned by heart, down to 1e-5": [{"loss": 3 * 0.9**i + 1e-5 * (1 + i % 3)} for i in range(200)],
    "a cosine with restarts": [
        {"loss": 2 - i / 200 + 0.2 * (i % 50 < 5), "lr": 1e-3 * (1 + math.cos(i % 50 / 16))} for i in range(200)
    ],
    "bf16: a scale of 1 throughout": [{**row, "scale": 1.0} for row in LATER],
    "fp16: a scale that finds its place": [{**row, "scale": 2.0 ** max(8, 16 - i)} for i, row in enumerate(LATER)],
    "a few steps left out at the start": [{**row, "skipped": min(i, 6)} for i, row in enumerate(falling(100))],
    "an evaluation that wobbles": [
        {**row, **({"eval_loss": 1.2 + 0.03 * math.sin(i)} if i % 10 == 9 else {})} for i, row in enumerate(falling(120))
    ],
    "a converged run, seen late": [{"loss": 1.1 + 0.005 * math.sin(9 * i), "step": 90_000 + 10 * i} for i in range(100)],
}


@pytest.mark.parametrize("rows", HEALTHY.values(), ids=HEALTHY)
def test_silence_about(rows):
    assert found(rows) == []


def test_an_excerpt_of_a_bug_report_is_decoded_exactly():
    """Base 2e-4, linear over 96 steps, ten a line: the schedule moved 2, 5 and 6 steps of 10, 20 and 30."""
    rates = (0.00019583333333333334, 0.00018958333333333332, 0.0001875)
    rows = [
        {"loss": 0.6, "grad_norm": NAN, "lr": lr, "epoch": e, "step": None}
        for lr, e in zip(rates, (0.31, 0.62, 0.94), strict=True)
    ]
    (finding,) = judge(story(rows))
    assert finding.kind == "scaler-skipping" and finding.severity == "failure"
    assert (
        "24 of 30 optimizer steps" in finding.said and "moved 2, 5, 6 steps" in finding.said and "over 96 steps" in finding.said
    )


def test_a_scaler_that_leaves_out_every_step_is_no_nan_weight():
    """The loss is shown as 0.0 and the gradient is NaN, but the learning rate has stopped."""
    rows = [{"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3 * (1 - i / 100)} for i in range(10)]
    rows += [{"loss": 0.0, "grad_norm": NAN, "lr": 9e-4}] * 10
    (finding,) = judge(story(rows))
    assert finding.kind == "scaler-skipping" and finding.place.step == 11 and "stands still" in finding.said
    moving = [{**row, "lr": 1e-3 * (1 - i / 100)} for i, row in enumerate(rows)]
    assert judge(story(moving))[0].kind == "hidden-nan"


def test_warnings_of_the_runs_own_code_are_counted():
    made = Story()
    for i, step in enumerate(range(92261, 92300), 1):
        made.add(Note("nan-warning", f"Warning: NaN gradient detected at step {step}", i, float(step)))
    (finding,) = judge(made)
    assert (finding.kind, finding.severity, finding.place.step) == ("nan-warnings", "failure", 92261)
    assert (
        "39 times" in finding.said
        and "last at step 92299" in finding.said
        and "everything after step 92261 is lost" in finding.said
    )


def test_one_warning_with_good_losses_after_it_is_a_warning():
    rows = falling(40)
    assert found(rows, [Note("nan-warning", "Loss is nan, skipping", 10, 10.0)]) == [("nan-warnings", "warning", 10.0)]


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        ("bad-probabilities", "bad-probabilities"),
        ("nonpositive-std", "bad-probabilities"),
        ("device-assert", "device-assert"),
        ("unscale-fp16", "unscale-fp16"),
        ("out-of-memory", "out-of-memory"),
        ("error", "crash"),
    ],
)
def test_an_error_at_the_end_is_a_failure_and_one_that_was_survived_is_not(note, kind):
    error = Note(note, "RuntimeError: it failed", 20)
    assert found(falling(20), [error]) == [(kind, "failure", 20)]
    assert found(falling(40), [error]) == [(kind, "warning", 20)]


def test_the_exact_error_is_said_rather_than_any():
    notes = [Note("bad-probabilities", "RuntimeError: probability tensor", 20), Note("error", "RuntimeError: x", 20)]
    assert [kind for kind, *_ in found(falling(20), notes)] == ["bad-probabilities"]


def test_ctrl_c_is_no_failure():
    assert found(falling(20), [Note("error", "KeyboardInterrupt", 20)]) == [("crash", "note", 20)]


def test_a_failure_that_a_later_run_got_past_is_a_warning():
    rows = falling(60) + bad(10)
    steps = [*range(1, 71), *range(41, 141)]
    again = [{**row, "step": step} for row, step in zip([*rows, *falling(100, 1.2, 0.9)], steps, strict=True)]
    (finding,) = judge(story(again))
    assert (finding.kind, finding.severity, finding.place.step) == ("nan", "warning", 61)
    assert "started again from step 41" in finding.said
    short = again[:85]  # not yet at step 61 again
    assert judge(story(short))[0].severity == "failure"


def test_a_resumed_run_that_repeats_steps_is_no_divergence():
    rows = [{**row, "step": i} for i, row in enumerate(falling(200))]
    assert found([*rows[:150], *rows[20:]]) == []


def test_overflows_to_the_end_are_a_collapse_and_a_few_at_the_start_are_none():
    few = [Note("overflow", "OVERFLOW!", i) for i in range(1, 6)]
    assert found(falling(60), few) == []
    many = [Note("overflow", "OVERFLOW!", i) for i in range(30, 61)]
    assert found(falling(60), many) == [("scaler-skipping", "failure", 30)]


KINDS_OF = [
    falling(60) + bad(5),
    falling(60) + bad(5, 0.0),
    falling(60) + falling(40, 6, 5),
    [*falling(60), {"loss": 40.0}, {"loss": 30.0}, *falling(60, 1.04, 1.0)],
    [{"loss": 2.3 + 0.01 * math.sin(7 * i)} for i in range(90)],
    falling(20) + bad(20, 2.3, 0.0),
    *HEALTHY.values(),
]


@pytest.mark.parametrize("factor", [10.0, 0.01])
@pytest.mark.parametrize("rows", KINDS_OF)
def test_the_unit_of_the_loss_changes_nothing(rows, factor):
    rows = [{"loss": row} if isinstance(row, float) else row for row in rows]
    scaled = [{k: v * factor if k in ("loss", "eval_loss") else v for k, v in row.items()} for row in rows]
    assert found(scaled) == found(rows)


@pytest.mark.parametrize("rows", KINDS_OF[:4])
@pytest.mark.parametrize("more", [1, 10, 40])
def test_healthy_points_before_move_the_verdict_and_do_not_change_it(rows, more):
    kind, severity, step = found(rows)[0]
    before = [{**row, "loss": row["loss"] + 0.0} for row in falling(more, 3.3, 3.0)]
    assert found(before + rows)[0] == (kind, severity, step + more)


def test_a_log_longer_than_the_curve_is_judged_alike():
    """20 000 points: the place of a NaN is exact, that of a rise to within a bucket."""
    assert found(falling(20_000) + bad(500)) == [("nan", "failure", 20_001)]
    ((kind, severity, step),) = found(falling(20_000) + falling(10_000, 6, 5))
    assert (kind, severity) == ("divergence", "failure") and 19_950 < step <= 20_050
    assert found(falling(20_000)) == []


def test_the_empty_story_shows_nothing():
    assert judge(Story()) == ()


def test_every_kind_has_a_headline_and_every_cause_is_in_the_catalogue():
    """What is named has a page."""
    catalogue = {page.stem for page in (Path(__file__).parents[3] / "docs/causes").glob("*.md")}
    source = "".join(p.read_text() for p in (Path(__file__).parents[3] / "src/nanproof/logs").rglob("*.py"))
    named = set(re.findall(r'Likely\(\s*"[^"]+",\s*"([a-z0-9-]+)"', source))
    assert len(named) > 15 and named <= catalogue
    for rows in KINDS_OF[:6]:
        for finding in judge(story(rows)):
            assert finding.kind in KINDS and finding.severity in SEVERITIES and finding.headline
            assert finding.said.endswith(".") and finding.causes and finding.commands


STRANGE = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 5e-324, 1e-300, 1e308, -1e308, 1e155, 2e-4)


@pytest.mark.parametrize("seed", range(150))
def test_no_numbers_are_too_strange(seed):
    """Whatever a broken run or a hostile file holds, there is a verdict, and it can be written as JSON."""
    random.seed(seed)
    made, step = Story(), 0.0
    few = random.sample(STRANGE, random.randint(1, 5))
    for line in range(1, random.choice([2, 9, 40, 3000])):
        step = random.choice([step + 1, step + 1, step + 1, random.choice(STRANGE), 0.0])
        names = random.sample(("loss", "eval_loss", "grad_norm", "lr", "scale", "skipped"), random.randint(1, 6))
        values = {name: random.choice(few) if random.random() < 0.7 else abs(random.gauss(2, 1)) for name in names}
        epoch = random.choice([None, line / 50, random.choice(STRANGE)])
        settings = {"steps": random.choice(STRANGE), "lr": random.choice(STRANGE), "epochs": random.choice(STRANGE)}
        made.add(Point(values, step=random.choice([None, step]), epoch=epoch, line=line, settings=settings if seed % 2 else {}))
        if random.random() < 0.01:
            made.add(Note(random.choice(NOTES), "words", line, random.choice([None, *STRANGE])))
    for finding in judge(made):
        assert json.dumps(finding.to_json(), allow_nan=False) and finding.said


def test_a_loss_that_swings_is_not_diverging():
    """Generator and discriminator by turns: it was as high before, and came back; a rise for good is still one."""
    swing = [1.4 + 0.5 * math.sin(2 * math.pi * i / 23) for i in range(60)]
    assert found(swing) == []
    lost = [3 / (1 + i / 5) + 0.5 for i in range(40)] + [0.9 + min(i, 10) / 5 for i in range(30)]
    assert [kind for kind, _, _ in found(lost)] == ["divergence"]
