"""The screen of `nanproof watch`: every key, every size, and runs that change while they are looked at."""

from __future__ import annotations

import shutil
import time

import pytest

pytest.importorskip("textual")

from nanproof.watch._app import HELP, KEYS, WatchApp
from nanproof.watch._plot import ASCII, FINE
from nanproof.watch._runs import Watched
from nanproof.watch._widgets import Card, Curves, Drawn, Listed
from report.made import incident_line, write_gan
from watch.made import drive, guard_in, lines, run, shown, train
from watch.test_watched import hostile


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "one", 12)
    run(folder / "two", 40)
    return folder


def made(*paths, marks=FINE) -> WatchApp:
    """In a hurry: folders are searched fifty times as often."""
    return WatchApp(Watched(paths, clock=lambda: 50 * time.monotonic()), marks, every=0.02)


def ready(app):
    return lambda: any(view.step is not None for view in app.views)


@pytest.mark.parametrize("marks", [FINE, ASCII], ids=["fine", "ascii"])
@pytest.mark.parametrize("size", [(80, 24), (40, 15), (200, 60), (20, 6), (10, 3)])
def test_every_size_shows_what_fits(runs, size, marks):
    """Nothing is outside the screen; where there is room there are the curve, its marks and the incidents."""
    app = made(runs, marks=marks)

    async def act(pilot, wait):
        await wait(ready(app))
        for widget in app.screen.query(Drawn):
            assert widget.region.right <= size[0] and widget.region.bottom <= size[1]
        text = shown(app)
        if size[0] >= 40:
            assert "loss" in text and "step 39" in text and marks.events["refused"] in text and marks.cross in text
            assert "two" in text and "one" in text
        assert not marks.ascii or text.isascii()
        app.export_screenshot()

    drive(app, act, size)


def test_keys_zoom_pan_follow_and_scale(runs):
    app = made(runs / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        curves = app.query_one(Curves)
        spans = []
        for key in ("plus", "plus", "left", "right", "minus", "minus", "plus", "f", "left", "0"):
            await pilot.press(key)
            spans.append(curves.window.span(app.view))
        assert spans == [(20, 40), (30, 40), (27.5, 37.5), (30, 40), (20, 40), (0, 40), (20, 40), (20, 40), (15, 35), (0, 40)]
        hows = []
        for _ in range(3):
            await pilot.press("l")
            hows.append(curves.how)
        assert hows == ["log", "linear", "auto"]
        only = []
        for _ in range(4):
            await pilot.press("m")
            only.append(curves.only)
        assert only == ["loss", "grad_norm", "lr", None]

    drive(app, act)


def test_one_curve_alone_gets_the_room(runs):
    app = made(runs / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        curves = app.query_one(Curves)
        text = "\n".join(lines(curves))
        assert "loss  " in text and "gradient norm  " in text and "learning rate  " in text
        await pilot.press("m", "m")
        await pilot.pause()
        text = "\n".join(lines(curves))
        assert "gradient norm  " in text and "loss  " not in text and "learning rate  " not in text

    drive(app, act, (80, 30))


def test_up_and_down_choose_a_run_and_enter_tells_about_it(runs):
    app = made(runs)

    async def act(pilot, wait):
        await wait(ready(app))
        assert app.view.name == "two" and app.focused.id == "runs"
        await pilot.press("down")
        await wait(lambda: "gradient norm" in shown(app) and app.view.name == "one")
        assert lines(app.query_one("#head"))[0].startswith("one  ended  step 11")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Card)
        assert str(runs / "one") in shown(app).replace("\n", "").replace(" ", "") and "AdamW" in shown(app)
        await pilot.press("escape")
        await pilot.press("up")
        await wait(lambda: app.view.name == "two")

    drive(app, act, (90, 45))


def test_enter_opens_the_whole_card_of_an_incident(runs):
    app = made(runs / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        assert app.focused.id == "events"
        await pilot.press("end", "enter")
        await pilot.pause()
        text = shown(app)
        assert text.startswith("step 7: nonfinite-loss, skipped")
        diagnosis = app.view.incidents[0].event.diagnosis
        assert f"{diagnosis.cause} (confidence {diagnosis.confidence:.2f})" in text
        assert diagnosis.fix.split(".")[0][:40] in " ".join(text.split())
        await pilot.press("q")
        await pilot.pause()
        assert not isinstance(app.screen, Card)

    drive(app, act, (100, 40))


def test_a_card_that_is_too_long_scrolls(runs):
    app = made(runs / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        await pilot.press("end", "enter")
        await pilot.pause()
        first = shown(app)
        assert "more lines: down" in first and "step 7:" in first
        await pilot.press("end")
        await pilot.pause()
        assert "more lines" not in shown(app) and "step 7:" not in shown(app)

    drive(app, act, (50, 12))


def test_help_names_every_key_and_the_last_line_the_first_ones(runs):
    app = made(runs)

    async def act(pilot, wait):
        await wait(ready(app))
        assert lines(app.query_one("#keys"))[0].startswith("q quit  ? help")
        await pilot.press("question_mark")
        await pilot.pause()
        assert all(what in shown(app) for _, what in HELP)
        assert {key for key, _ in KEYS} <= {key for key, _ in HELP} | {"?"}

    drive(app, act, (100, 30))


def test_tab_goes_from_the_runs_to_what_happened(runs):
    app = made(runs)

    async def act(pilot, wait):
        await wait(ready(app))
        seen = []
        for _ in range(3):
            ruled = [listed.id for listed in app.query(Listed) if FINE.heavy in lines(listed)[0]]
            seen.append((app.focused.id, ruled))
            await pilot.press("tab")
        assert seen == [(name, [name]) for name in ("runs", "events", "runs")], "seen without colours too"

    drive(app, act)


def test_a_run_under_way_is_drawn_as_it_grows_and_the_cursor_stays(tmp_path):
    """Steps and incidents appear; the cursor stays on its incident when a newer one comes in above it."""
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 10)
    app = made(tmp_path / "run")

    def happen(step, kind):
        """Of another kind, so that it has its own entry."""
        with open(tmp_path / "run" / "incidents.jsonl", "a") as file:
            file.write(incident_line(step, kind))

    async def act(pilot, wait):
        await wait(lambda: "step 9" in shown(app))
        assert "running" in shown(app) and "1 incident" in shown(app)
        train(guard, 10, 30, bad=())
        happen(20, "spike")
        await wait(lambda: "step 29" in shown(app) and "2 incidents" in shown(app))
        events = app.query_one("#events", Listed)
        assert events.cursor == 0
        await pilot.press("down")
        key = events.key
        happen(33, "divergence")
        await wait(lambda: "3 incidents" in shown(app))
        assert events.key == key and events.cursor == 2
        guard.close()
        await wait(lambda: "ended" in shown(app))

    drive(app, act)


def test_waiting_for_a_run_then_for_another(tmp_path):
    app = made(tmp_path / "runs")

    async def act(pilot, wait):
        await wait(lambda: "waiting for" in shown(app))
        run(tmp_path / "runs" / "first", 5)
        await wait(lambda: "step 4" in shown(app))
        assert not app.query_one("#runs").display
        run(tmp_path / "runs" / "second", 6)
        await wait(lambda: app.query_one("#runs").display and "second" in shown(app))
        assert app.view.name == "first", "a run that joins does not take the place of the one that is looked at"

    drive(app, act)


def test_a_folder_that_goes_away_ends_nothing(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    app = made(tmp_path / "runs")

    async def act(pilot, wait):
        await wait(ready(app))
        shutil.rmtree(tmp_path / "runs")
        await pilot.pause(0.3)
        await pilot.press("down", "plus", "enter", "escape")
        assert "step" in shown(app)

    drive(app, act)


def test_hostile_texts_are_only_text(runs, tmp_path):
    app = made(hostile(runs / "two", tmp_path / "[bold]run"))

    async def act(pilot, wait):
        await wait(ready(app))
        assert "[bold]run" in shown(app)
        texts = []
        for _ in range(len(app.view.incidents)):
            texts.append(shown(app))
            await pilot.press("enter")
            await pilot.pause()
            texts.append(shown(app))
            await pilot.press("escape", "down")
        assert any("[red]\\x1b[31m" in text for text in texts) and len(texts) > 4
        assert all(line.isprintable() for text in texts for line in text.splitlines())

    drive(app, act, (100, 30))


def test_the_screen_follows_the_size_of_the_window(runs):
    app = made(runs)

    async def act(pilot, wait):
        await wait(ready(app))
        for size in ((200, 40), (60, 20), (40, 12), (100, 30)):
            await pilot.resize_terminal(*size)
            await wait(lambda size=size: app.query_one("#head").size.width == size[0] - 2)
            wide = size[0] >= 190
            assert (app.query_one("#curves").region.x > 0) == wide
            assert all(len(line) <= size[0] for line in shown(app).splitlines())

    drive(app, act)


def test_light_and_dark(runs):
    app = made(runs)

    async def act(pilot, wait):
        await wait(ready(app))
        dark = app.screen.styles.background
        await pilot.press("t")
        await pilot.pause()
        assert app.screen.styles.background.brightness > 0.8 > 0.2 > dark.brightness

    drive(app, act)


def test_an_error_of_the_reading_thread_is_not_lost(runs):
    app = made(runs)
    wrong = RuntimeError("for the test")

    def look():
        raise wrong

    app.watched.look = look

    async def act(pilot, wait):
        await wait(lambda: app.failure is not None)

    with pytest.raises(AssertionError):
        drive(app, act)
    assert app.failure is wrong


def test_w_writes_the_report(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "two")
    app = made(tmp_path / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        await pilot.press("w")
        await wait(lambda: "written:" in lines(app.query_one("#keys"))[0])
        assert (tmp_path / "two" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert not list((tmp_path / "two").glob(".*.partial"))

    drive(app, act, (150, 30))


def test_a_report_that_cannot_be_written_is_said(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "two")
    (tmp_path / "two" / "report.html").mkdir()
    app = made(tmp_path / "two")

    async def act(pilot, wait):
        await wait(ready(app))
        await pilot.press("w")
        await wait(lambda: "no report: IsADirectoryError" in lines(app.query_one("#keys"))[0])

    drive(app, act)


def test_a_key_draws_the_next_optimizer_of_a_run(tmp_path):
    write_gan(tmp_path, [incident_line(3)], [incident_line(30)])
    app = made(tmp_path)

    async def act(pilot, wait):
        await wait(lambda: "step 19 of SGD of Critic" in shown(app))
        assert "2 incidents" in shown(app)
        await pilot.press("o")
        await wait(lambda: "step 39 of Adam of Generator" in shown(app))
        await pilot.press("o")
        await wait(lambda: "step 19 of SGD of Critic" in shown(app))

    drive(app, act, (120, 40))
