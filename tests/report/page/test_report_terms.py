"""The terms of a loss in the report: what the chart is drawn of, what is said of an incident, and that no file makes it fail."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from nanproof import Incident
from nanproof.report import _html as html
from nanproof.report._markdown import markdown
from nanproof.report.folder._run import Run
from nanproof.report.folder._series import MOST_TERMS, Curves
from nanproof.report.folder._tokens import Tokens
from nanproof.report.page import _terms as terms
from nanproof.report.page._contents import contents
from report import made


def told(folder, **kwargs):
    data = contents(Run(folder, **kwargs).read(), Tokens())
    return json.loads(json.dumps(data, allow_nan=False))  # strict JSON, whatever the run holds


def close(x, y):
    return (x is None and not math.isfinite(y)) or (x is not None and math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-4))


def some_steps(count, names=("text_loss", "latent_loss", "sometimes"), seed=0):
    """Terms with a NaN or an Inf here and there, of which the last is not in every step."""
    rng = random.Random(seed)

    def value():
        return rng.choice([math.nan, math.inf, -math.inf]) if rng.random() < 0.02 else rng.gauss(1, 3)

    return [{name: value() for name in names if name != "sometimes" or rng.random() < 0.4} for _ in range(count)]


@pytest.mark.parametrize(("buckets", "room"), [(2000, 8000), (64, 8000), (2000, 300), (64, 100)])
def test_the_chart_holds_what_the_steps_were(buckets, room, tmp_path, monkeypatch):
    """Every point against a slow walk over the steps: lowest, highest, mean, how many were bad; never more points than there is
    room for, and no step is left out."""
    monkeypatch.setattr(terms, "ROOM", room)
    steps = some_steps(500)
    made.write_terms(tmp_path, steps)
    found = told(tmp_path, buckets=buckets)["terms"]
    width = found["width"]
    assert [line["name"] for line in found["lines"]] == ["text_loss", "latent_loss", "sometimes"]
    assert found["steps"] == list(range(0, 500, width)) and 3 * len(found["steps"]) <= room
    assert width == {(2000, 8000): 1, (64, 8000): 8, (2000, 300): 8, (64, 100): 16}[buckets, room]
    for line in found["lines"]:
        assert sum(line["bad"]) == sum(not math.isfinite(step.get(line["name"], 0.0)) for step in steps) > 0
        for i, start in enumerate(found["steps"]):
            values = [step[line["name"]] for step in steps[start : start + width] if line["name"] in step]
            finite = [x for x in values if math.isfinite(x)]
            assert line["bad"][i] == len(values) - len(finite)
            assert close(line["mean"][i], sum(finite) / len(finite) if finite else math.nan)
            if width > 1:
                assert close(line["low"][i], min(finite, default=math.nan))
                assert close(line["high"][i], max(finite, default=math.nan))
    last = [made.number(steps[-1][name]) if name in steps[-1] else None for name in ("text_loss", "latent_loss", "sometimes")]
    assert [line["last"] for line in found["lines"]] == last


def test_steps_around_incidents_are_there_one_by_one(tmp_path, monkeypatch):
    """As many as there is room for, those of the first incidents first."""
    steps = [{"a": float(i), "b": math.nan if i in (700, 2999) else 2.0 * i} for i in range(3000)]
    made.write_terms(tmp_path, steps)
    near = told(tmp_path, buckets=64)["terms"]["near"]
    assert near["steps"] == [*range(650, 751), *range(2949, 3000)]
    assert near["values"][0] == [float(i) for i in near["steps"]]
    assert near["values"][1] == [None if i in (700, 2999) else 2.0 * i for i in near["steps"]]
    assert near["bad"] == [[], [50, len(near["steps"]) - 1]]
    monkeypatch.setattr(terms, "ROOM", 200)
    near = told(tmp_path, buckets=64)["terms"]["near"]
    assert len(near["steps"]) == 100 and set(near["steps"]) < set(range(650, 751))


def test_a_run_without_terms_has_no_chart(tmp_path):
    made.write_run(tmp_path, 30, bad=(3,))
    data = told(tmp_path)
    assert data["terms"] is None and all(card["terms"] == [] for card in data["incidents"])
    assert "Terms" not in markdown(Run(tmp_path).read())


def test_steps_taken_again_replace_those_given_up():
    curves = Curves(100)
    for step in range(30):
        curves.add(step, (1.0, 1.0, None, None), "stepped", [("a", math.nan)])
    curves.go_back(20)
    for step in range(20, 25):
        curves.add(step, (9.0, 1.0, None, None), "stepped", [("a", 9.0)])
    assert [bucket.terms["a"].bad for bucket in curves] == [1] * 20 + [0] * 5
    assert [bucket.terms["a"].high for bucket in curves][20:] == [9.0] * 5


def test_of_very_many_terms_the_first_are_kept(tmp_path):
    """A program that names a term after its step would fill the memory."""
    made.write_terms(tmp_path, [{"always": 1.0, f"step {i}": 2.0} for i in range(200)])
    found = told(tmp_path)["terms"]
    assert [line["name"] for line in found["lines"]] == ["always", *(f"step {i}" for i in range(MOST_TERMS - 1))]
    assert found["more"] is True
    made.write_terms(tmp_path, [{f"term {k}": 1.0 for k in range(5000)}])
    found = told(tmp_path)["terms"]
    assert len(found["lines"]) == MOST_TERMS and found["more"] is True
    made.write_terms(tmp_path, [{f"term {k}": 1.0 for k in range(MOST_TERMS)}])
    assert told(tmp_path)["terms"]["more"] is False


def test_twelve_terms_of_a_long_run_make_a_small_page(tmp_path):
    names = [f"head_{i}_cross_entropy" for i in range(12)]
    steps = some_steps(20_000, names)
    made.write_terms(tmp_path, steps)
    page = html.page(Run(tmp_path).read())
    assert len(page.encode()) < 800_000


def test_an_incident_names_its_terms_the_bad_ones_first(tmp_path):
    values = {"text_loss": 2.31, "latent_loss": math.inf, "prior": -0.5, "kl": math.nan}
    made.write_terms(tmp_path, [{"text_loss": 1.0}, values])
    (card,) = told(tmp_path)["incidents"]
    assert card["terms"] == [["latent_loss", "inf"], ["kl", "nan"], ["text_loss", 2.31], ["prior", -0.5]]
    assert card["more_terms"] == 0
    assert "\nTerms: **latent_loss inf**, **kl nan**, text_loss 2.31, prior -0.5\n" in markdown(Run(tmp_path).read())
    made.write_terms(tmp_path, [{f"t{i}": math.nan if i == 29 else 1.0 for i in range(30)}])
    (card,) = told(tmp_path)["incidents"]
    assert card["terms"][0] == ["t29", "nan"] and len(card["terms"]) == 12 and card["more_terms"] == 18
    assert re.search(r"^Terms: \*\*t29 nan\*\*, t0 1\.0, .* and 18 more$", markdown(Run(tmp_path).read()), re.M)


@pytest.mark.parametrize("found", [[1], "x", 3, {"a": None}, {"a": "much"}, {"a": []}, {"a": {"b": 1}}, [["a", 1], "b"]])
def test_terms_that_are_none_are_a_broken_line(found, tmp_path):
    """Of a step and of an incident; the others are shown."""
    made.write_terms(tmp_path, [{"a": 1.0}, {"a": math.nan}])
    for name in ("steps", "incidents"):
        path = tmp_path / f"{name}.jsonl"
        *before, last = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*before, last, json.dumps({**json.loads(last), "terms": found}) + "\n"]))
    run = Run(tmp_path).read()
    assert run.broken == 2 and run.steps == 2 and len(run.incidents) == 1
    json.dumps(contents(run, Tokens()), allow_nan=False)


def test_hostile_names_are_only_text(tmp_path):
    nasty = [*made.HOSTILE, "| a | b |", "```", "@someone #12", "![x](http://x)", "a\nb"]
    made.write_terms(tmp_path, [dict.fromkeys(nasty, 1.0), dict.fromkeys(nasty, math.nan)])
    run = Run(tmp_path).read()
    page = html.page(run)
    assert len(page) < 300_000 and "<script>window" not in page and "\u202e" not in page and "\x1b" not in page
    line = next(line for line in markdown(run).splitlines() if line.startswith("Terms: "))
    assert not any(c in line for c in "\x1b\x07\0\u202e\u2028\n") and "<script" not in line
    assert not re.search(r"[@#]\w", line) and not re.search(r"(?<!\\)[`|]", line) and len(line) < 3000


def test_a_real_guard_writes_what_is_shown(tmp_path):
    """From the loss function to the page and the text."""
    import logging

    import torch

    import nanproof
    from nanproof.numerics.losses import weighted_sum
    from toys import batches, net

    def loss_fn(model, batch):
        out = model(batch[0]).squeeze(-1)
        return weighted_sum({"text_loss": (out - batch[1]).square().mean(), "latent_loss": out.square().mean() / batch[2]},
                            {"latent_loss": 0.1})  # fmt: skip

    torch.manual_seed(0)
    model = net(dropout=0.0, batch_norm=False)
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=loss_fn, run_dir=tmp_path / "run")
    level = logging.getLogger("nanproof").level
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    try:
        for step, batch in enumerate(batches(12)):
            guard.train_step([*batch, torch.tensor(0.0 if step == 7 else 1.0)])
        guard.sync()
    finally:
        logging.getLogger("nanproof").setLevel(level)
        guard.close()
    data = told(tmp_path / "run")
    assert [line["name"] for line in data["terms"]["lines"]] == ["text_loss", "latent_loss"]
    assert [line["bad"] for line in data["terms"]["lines"]] == [[], [0] * 7 + [1] + [0] * 4]
    both = zip(*(line["mean"] for line in data["terms"]["lines"]), data["curves"]["loss"]["mean"], strict=True)
    for step, (text, latent, loss) in enumerate(both):
        assert step == 7 or math.isclose(text + 0.1 * latent, loss, rel_tol=1e-3)
    (card,) = data["incidents"]
    assert [name for name, _ in card["terms"]] == ["latent_loss", "text_loss"] and card["terms"][0][1] == "inf"
    assert "Terms: **latent_loss inf**, text_loss " in markdown(Run(tmp_path / "run").read())


def test_terms_of_an_incident_survive_the_file():
    incident = Incident(step=1, kind="nonfinite-loss", action="skipped", terms=(("a", 1.5), ("b", -math.inf)))
    assert Incident.from_json(json.loads(json.dumps(incident.to_json()))).terms == incident.terms
