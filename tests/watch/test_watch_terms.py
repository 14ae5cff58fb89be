"""The newest value of each term of a loss, in every view of a run that is watched."""

from __future__ import annotations

import json
import math

import pytest

from nanproof import read_steps
from nanproof.watch import _words as words
from nanproof.watch._charts import Window, drawn
from nanproof.watch._plain import Lines, caught_up, now
from nanproof.watch._plot import ASCII, FINE
from nanproof.watch._runs import Watched
from nanproof.watch._web import Site, report_pages
from report.made import HOSTILE, write_run, write_terms

TERMS = [{"text_loss": 2.0 + i / 10, "latent_loss": math.inf if i in (20, 39) else 1.0} for i in range(40)]


@pytest.fixture
def watched(tmp_path):
    write_terms(tmp_path / "run", TERMS)
    found = Watched([tmp_path / "run"])
    caught_up(found)
    return found


def one(watched):
    (view,) = watched.views.values()
    return view


def test_a_view_has_the_terms_of_the_newest_step_the_bad_ones_first(watched):
    view = one(watched)
    *_, last = read_steps(view.folder)
    assert dict(view.terms) == dict(last.terms) == TERMS[-1]
    assert [name for name, _ in view.terms] == ["latent_loss", "text_loss"]
    assert json.loads(json.dumps(view.to_json(), allow_nan=False))["terms"] == {"latent_loss": "inf", "text_loss": 5.9}
    assert ("terms", "latent_loss Inf, text_loss 5.9") in words.facts(view)
    assert ("terms", "latent_loss Inf, text_loss 5.9") in words.card(view.entries()[0])


def test_lines_and_the_state_now_tell_them(watched):
    assert "terms of the loss: latent_loss Inf, text_loss 5.9" in list(now(watched, 80, FINE))
    said: list[str] = []
    Lines(watched, said.append, FINE).round()
    assert any("loss Inf" in line and line.endswith("latent_loss Inf, text_loss 5.9") for line in said)


def test_the_title_of_the_loss_names_as_many_as_there_is_room_for(watched):
    """It is never wider than the screen, and a term is whole or not there."""
    view = one(watched)
    seen = set()
    for columns in range(24, 120):
        lines = drawn(view, columns, 20, Window(), "auto", None, FINE)
        assert sum(len(text) for text, _ in lines[0]) <= columns
        head = lines[0][2:]
        seen.add("".join(text for text, _ in head))
        assert all(kind == ("cross" if "Inf" in text else "label") for text, kind in head if "_loss" in text)
    assert {text.removeprefix("  log") for text in seen} == {"", "  latent_loss Inf", "  latent_loss Inf  text_loss 5.9"}


def test_a_run_without_terms_says_nothing_of_them(tmp_path):
    write_run(tmp_path / "run", 20, bad=(3,))
    watched = Watched([tmp_path / "run"])
    caught_up(watched)
    view = one(watched)
    assert view.terms == () and words.full_status(view) == words.status(view)
    assert not any("terms" in line for line in now(watched, 80, FINE))
    assert "terms" not in dict(words.facts(view)) and "terms" not in dict(words.card(view.entries()[0]))


def test_of_many_terms_a_line_names_a_few(tmp_path):
    write_terms(tmp_path / "run", [{f"t{i}": float(i) for i in range(24)}])
    watched = Watched([tmp_path / "run"])
    caught_up(watched)
    assert words.told_terms(one(watched).terms)[-2:] == ["t11 11", "and 12 more"]


@pytest.mark.parametrize("marks", [FINE, ASCII], ids=["fine", "ascii"])
def test_hostile_names_do_nothing(tmp_path, marks):
    names = [*HOSTILE, "\x1b[31mred", "\u4f60\u597d" * 30, "[red]markup[/red]"]
    write_terms(tmp_path / "run", [dict.fromkeys(names, x) for x in (1.0, math.nan)])
    watched = Watched([tmp_path / "run"])
    caught_up(watched)
    view = one(watched)
    texts = [*words.full_status(view), *now(watched, 80, marks), *dict(words.facts(view)).values()]
    for columns in (30, 80, 200):
        lines = drawn(view, columns, 20, Window(), "auto", None, marks)
        texts += [text for line in lines for text, _ in line]
        assert not marks.ascii or all(text.isascii() for line in lines for text, _ in line)
    texts += [line for row in words.wrapped(words.card(view.entries()[0]), 40, marks) for line in row]
    assert all(text.isprintable() for text in texts) and max(map(len, texts)) < 1500


def test_the_served_page_has_the_chart_and_the_list_the_values(tmp_path):
    for name in "ab":
        write_terms(tmp_path / name, TERMS)
    site = Site(Watched([tmp_path / "a", tmp_path / "b"]), report_pages())
    answers = [site.answer(path) for path in ("/page", "/run/0/page", "/run/0/data")]
    assert all(answer is not None for answer in answers)
    index, page, data = (answer.body.decode() for answer in answers)
    assert index.count("latent_loss Inf, text_loss 5.9") == 2
    assert "const Terms = " in page
    assert [line["name"] for line in json.loads(data)["terms"]["lines"]] == ["text_loss", "latent_loss"]
