"""The page in a real browser: what it draws, how it answers to mouse, keys and fingers, and that hostile strings do nothing.

Needs playwright and chromium (`browser` in conftest.py); left out where they are missing.
"""

from __future__ import annotations

import functools
import http.server
import json
import math
import os
import threading
import time

import pytest

from nanproof.report import _html as html
from nanproof.report.folder._run import Run
from nanproof.report.folder._tokens import Tokens
from report import made
from report.looked import Looked

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Writes the page of a run, once."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def page(name):
        run = folder / name
        if name == "long":
            made.write_run(run, 100_000, made.NAMES[:20], bad=range(1000, 100_000, 9000))
        elif name == "empty":
            run.mkdir()
        elif name == "hostile":
            hostile(run)
        else:
            made.write_run(run, 300, sites=["body", "head"], bad=(40, 41, 200))
            forecast = {
                "v": 1,
                "step": 150,
                "kind": "divergence",
                "message": "soon",
                "where": "head",
                "steps": 5.0,
                "margin": 1.0,
            }
            (run / "forecasts.jsonl").write_text(json.dumps({**forecast, "also": []}) + "\n")
        tokens = Tokens(Tokenizer() if name == "hostile" else None)
        path = folder / f"{name}.html"
        path.write_text(html.page(Run(run).read(), tokens=tokens), encoding="utf-8")
        return path.as_uri()

    return page


class Tokenizer:
    """One whose tokens are hostile."""

    def decode(self, ids, skip_special_tokens):
        return self.id_to_token(ids[0])

    def id_to_token(self, token):
        return made.HOSTILE[token % 9]


def hostile(run):
    """Hostile strings wherever there can be one: names, messages, diagnosis, samples, tokens, quarantine, environment."""
    import torch
    from safetensors.torch import save_file

    def line(i, text):
        known = made.diagnosis(cause=text, evidence=[text] * 3, fix=text, where=text, source=text, samples=[1], tokens=[2])
        bundle = f"/x/step-{i:06d}-nonfinite-loss"
        return made.incident_line(
            i, message=text, culprits=[[text, "nan"]], diagnosis={**known, "alternatives": [text]}, bundle=bundle
        )

    made.write_run(
        run, 30, names=made.HOSTILE, sites=made.HOSTILE, incidents=[line(i, text) for i, text in enumerate(made.HOSTILE)]
    )
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    about = {"model": made.HACK, "versions": {made.HACK: made.HACK}}
    lines[0] = json.dumps({"v": 1, "kind": "opened", "time": 1.0, "about": about}) + "\n"
    (run / "steps.jsonl").write_text("".join(lines))
    for i, text in enumerate(made.HOSTILE):
        bundle = run / "incidents" / f"step-{i:06d}-nonfinite-loss"
        bundle.mkdir(parents=True)
        save_file({"t": torch.arange(40).reshape(2, 20), "x": torch.full((2, 3), torch.inf)}, bundle / "batch.safetensors")
        pairs = [["token_ids" + text[:50_000], {"tensor": "t"}], [text[:50_000], {"tensor": "x"}]]
        (bundle / "manifest.json").write_text(json.dumps({"batches": [{"dict": pairs}]}))
    entries = [{"index": text, "hash": text, "step": 1, "cause": text, "at": text} for text in made.HOSTILE]
    (run / "quarantine.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries[:8]))


def test_dragging_zooms_all_plots_and_all_ways_back_work(browser, pages):
    seen = Looked(browser, pages("plain"))
    full = seen.views()
    assert full == [-0.5, 299.5]
    assert seen.ask("Plots.all.length") == 6, "events, loss, norm, learning rate, two heat maps"
    ways = [
        lambda: seen.page.click("#reset"),
        lambda: seen.page.keyboard.press("Escape"),
        lambda: seen.page.keyboard.press("0"),
        lambda: seen.page.dblclick("#plot-grad_norm .u-over"),
    ]
    for plot, back in zip(("plot-loss", "plot-lr", "heat-norms", "plot-events"), ways, strict=True):
        seen.page.locator(f"#{plot}").scroll_into_view_if_needed()
        seen.drag(plot, 0.25, 0.5)
        low, high = seen.views()
        assert low == pytest.approx(74.5, abs=3) and high == pytest.approx(149.5, abs=3)
        back()
        assert seen.views() == full
    seen.close()


def test_keys_do_everything(browser, pages):
    seen = Looked(browser, pages("plain"))
    press = seen.page.keyboard.press
    full = seen.views()
    press("+")
    low, high = seen.views()
    assert (low, high) == (74.5, 224.5)
    press("ArrowRight")
    assert seen.views() == [104.5, 254.5]
    press("ArrowLeft")
    press("-")
    assert seen.views() == full
    open_cards = "[...document.querySelectorAll('details')].map(card => card.open)"
    press("n")
    assert seen.ask(open_cards) == [True, False, False]
    press("j")
    press("j")
    press("j")
    assert seen.ask(open_cards) == [True, True, True]
    assert seen.ask("document.activeElement.closest('details').id") == "incident-3"
    press("p")
    assert seen.ask("document.activeElement.closest('details').id") == "incident-2"
    press("?")
    assert seen.ask("document.getElementById('help').open")
    press("+")
    press("Escape")
    assert not seen.ask("document.getElementById('help').open") and seen.views() == full
    press("l")
    assert seen.page.get_attribute("#plot-loss button", "aria-pressed") == "true"
    seen.page.reload()
    press("Tab")
    assert seen.ask("document.activeElement.textContent") == "Skip to the curves"
    assert seen.ask("getComputedStyle(document.activeElement).outlineStyle") != "none"
    seen.close(asked=2)


def test_a_mark_a_link_and_a_button_open_a_card(browser, pages):
    seen = Looked(browser, pages("plain") + "#incident-3")
    assert seen.ask("document.getElementById('incident-3').open")
    assert seen.ask("document.getElementById('incident-3').getBoundingClientRect().top") < 900
    seen.page.locator("#plot-events").scroll_into_view_if_needed()
    x, y, width, _ = seen.box("plot-events")
    seen.page.mouse.click(x + width * (40.5 / 300), y + 8)
    card = seen.page.locator("#incident-1")
    assert seen.ask("document.getElementById('incident-1').open")
    text = card.inner_text()
    for said in (
        "zero-denominator",
        "0/0 or x/0",
        "the divisor is 0",
        "Add an epsilon.",
        "Verified",
        "train.py:12",
        "log-of-zero",
        "Steps around it",
    ):
        assert said in text
    card.get_by_text("Show in the curves").click()
    assert seen.views() == pytest.approx([-0.5, 99.5], abs=11)
    seen.page.locator("#incident-2 summary").click()
    assert "Not diagnosed." in seen.page.locator("#incident-2").inner_text()
    seen.close()


def test_incidents_that_are_alike_are_one_card(browser, tmp_path):
    """A mark of any of them opens it; one that was dealt with otherwise has a card of its own, with a link to the first."""
    lines = [made.incident_line(step, same_as=30) for step in (100, 200)]
    halted = made.incident_line(299, action="halted", same_as=30, cap="max_skip_rate", cap_count=20)
    made.write_run(tmp_path / "run", 300, incidents=[made.incident_line(30, diagnosis=made.diagnosis()), *lines, halted])
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path / "run").read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    assert seen.ask("document.querySelectorAll('#cards details').length") == 2
    assert seen.page.inner_text("#more-cards") == "" and "3 times" in seen.page.inner_text("#incident-1 summary")
    seen.page.locator("#plot-events").scroll_into_view_if_needed()
    x, y, width, _ = seen.box("plot-events")
    seen.page.mouse.click(x + width * (200.5 / 300), y + 8)
    assert "as at step 30, 2 more times: steps 100, 200" in seen.page.inner_text("#incident-1")
    last = seen.page.locator("#incident-4")
    assert "zero-denominator" in last.inner_text() and "run halted" in last.inner_text()
    last.locator("summary").click()
    assert "20 of the last steps were refused (max_skip_rate)" in last.inner_text()
    assert "As at step 30: zero-denominator." in last.inner_text()
    for _ in range(2):  # the second time the address is the same
        seen.page.locator("#incident-1 summary").click()
        assert not seen.ask("document.getElementById('incident-1').open")
        last.locator("a").click()
        assert seen.ask("document.getElementById('incident-1').open")
    seen.close()


@pytest.mark.parametrize(
    ("action", "label"), [("healed", "healed by a verified fix"), ("salvaged", "taken without the bad part of the batch")]
)
def test_what_was_done_is_on_the_card(action, label, browser, tmp_path):
    fields = {"remedy": "a divisor of 0 is taken as 1"} if action == "healed" else {"left_out": [3]}
    made.write_run(tmp_path / "run", 10, incidents=[made.incident_line(4, action=action, **fields)])
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path / "run").read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    assert label in seen.page.inner_text("#incident-1 summary")
    seen.page.click("#incident-1 summary")
    done = "healed: a divisor of 0 is taken as 1" if action == "healed" else "took the step without sample 3 of the batch"
    assert done in seen.page.inner_text("#incident-1")
    seen.close()


def test_the_line_under_the_cursor_tells_step_and_cell(browser, pages):
    seen = Looked(browser, pages("plain"))
    told = Run(pages("plain").removeprefix("file://").removesuffix(".html")).read()
    seen.page.locator("#plot-loss").scroll_into_view_if_needed()
    x, y, width, height = seen.box("plot-loss")
    seen.page.mouse.move(x + width * (100.5 / 300), y + height / 2)
    said = seen.page.inner_text("#readout")
    assert "step 100" in said and f"{told.curves.mean('loss')[100]:.4g}" in said
    seen.page.locator("#heat-norms").scroll_into_view_if_needed()
    x, y, width, height = seen.box("heat-norms")
    seen.page.mouse.move(x + width * (40.5 / 300), y + height * (2.5 / 8))
    said = seen.page.inner_text("#readout")
    assert "step 40" in said and told.norms.names[2] in said and "non-finite" in said
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, pages, scheme):
    """As the system has it, and by the switch; the curves change with the page."""
    seen = Looked(browser, pages("plain"), color_scheme=scheme)
    light = "getComputedStyle(document.body).backgroundColor"
    line = "Plots.colours.line"
    paper = {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 26)"}
    assert seen.ask(light) == paper[scheme]
    first = seen.ask(line)
    for wanted in ("light", "dark", scheme):
        seen.page.click("#theme")
        assert seen.ask(light) == paper[wanted]
    assert seen.ask(line) == first
    other = "dark" if scheme == "light" else "light"
    seen.page.emulate_media(color_scheme=other)
    seen.page.wait_for_function(f"() => {line} !== {first!r}")
    assert seen.ask(light) == paper[other] and seen.ask(line) != first
    seen.close()


def test_a_phone(browser, pages):
    """Nothing is wider than the screen, buttons are large enough, and two fingers zoom."""
    seen = Looked(browser, pages("plain"), viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    seen.ask("document.querySelectorAll('details').forEach(card => { card.open = true; })")
    assert seen.ask("document.documentElement.scrollWidth") <= 360
    assert (
        seen.ask(
            "Math.min(...[...document.querySelectorAll('#bar button')].filter(b => b.offsetHeight).map(b => b.offsetHeight))"
        )
        >= 36
    )
    seen.ask("document.getElementById('plot-loss').scrollIntoView()")
    x, y, width, height = seen.box("plot-loss")
    client = seen.context.new_cdp_session(seen.page)

    def fingers(kind, *shares):
        points = [{"x": x + share * width, "y": y + height / 2} for share in shares]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 0.4, 0.6)
    for spread in (0.15, 0.2, 0.3):
        fingers("touchMove", 0.5 - spread, 0.5 + spread)
    fingers("touchEnd")
    low, high = seen.views()
    assert high - low == pytest.approx(100, rel=0.1) and (low + high) / 2 == pytest.approx(149.5, abs=10)
    seen.page.click("#reset")
    assert seen.views() == [-0.5, 299.5]
    seen.close()


def test_hostile_strings_do_nothing(browser, pages):
    """Every card is opened, every text shown in full, every cell looked at; nothing runs, nothing is asked for."""
    seen = Looked(browser, pages("hostile"))
    seen.ask("document.querySelectorAll('details').forEach(card => { card.open = true; })")
    seen.page.wait_for_timeout(50)
    for _ in range(3):
        seen.ask("document.querySelectorAll('button.more').forEach(button => button.click())")
    assert (
        seen.ask("document.querySelectorAll('main script, main img, main svg, main iframe, main a[href^=javascript]').length")
        == 0
    )
    text = seen.page.inner_text("main")
    assert made.HACK in text and "\\u202egnp.exe" in text and "\u202e" not in text
    assert "guilty" in text, "samples are shown"
    seen.page.locator("#heat-norms").scroll_into_view_if_needed()
    x, y, width, height = seen.box("heat-norms")
    for row in range(9):
        seen.page.mouse.move(x + width / 2, y + height * (row + 0.5) / 9)
    assert seen.ask("document.documentElement.scrollWidth") <= 1200
    assert os.path.getsize(pages("hostile").removeprefix("file://")) < 1_000_000
    seen.close()


def test_a_long_run_opens_quickly_and_shows_every_step_around_an_incident(browser, pages):
    address = pages("long")
    start = time.perf_counter()
    seen = Looked(browser, address)
    assert seen.views() == [-0.5, 99_999 + 0.5] or seen.views()[1] > 99_998
    assert time.perf_counter() - start < 5
    points = "Plots.all[1].data[0].length"
    assert seen.ask(points) < 2001
    start = time.perf_counter()
    seen.ask("Plots.setView(9960, 10040)")
    assert time.perf_counter() - start < 1
    inside = seen.ask("Plots.all[1].data[0].filter(x => x >= 9960 && x <= 10040)")
    assert inside == list(range(9960, 10041))
    seen.close()


LEFT = "[...document.querySelectorAll('.u-over')].map((one) => Math.round(one.getBoundingClientRect().left))"
EXTREMES = {
    "largest": [1.7976931348623157e308, -1.7976931348623157e308, 1.0],
    "smallest": [5e-324, 1e-300, 1.0],
    "zero": [0.0, 0.0, 0.0],
    "one": [2.0],
    "none": [math.nan, math.nan],
}


@pytest.mark.parametrize("what", EXTREMES)
def test_extreme_numbers_are_drawn(browser, tmp_path, what):
    """A plot of 600 decades would never end; and the last step is as far out as steps go."""
    lines = [json.dumps({"v": 1, "kind": "header", "names": ["a", "b"]}) + "\n"]
    for i, x in enumerate(EXTREMES[what]):
        size = x if x != x else abs(x)
        step = i if i < 2 else (1 << 40) - 1
        lines.append(made.step_line(step, x, size, scale=None if x != x else made.number(size), norms=[size, 0.0]))
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path).read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    for key in ("l", "+", "+", "ArrowLeft", "l", "0", "-"):
        seen.page.keyboard.press(key)
    assert seen.views()[0] == -0.5
    assert len(set(seen.ask(LEFT))) == 1, "a plot without any number begins where the others do"
    seen.close()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_axis_has_numbers_up_to_the_largest_float32(browser, tmp_path, sign):
    """Logarithmic and linear."""
    lines = [json.dumps({"v": 1, "kind": "header", "names": ["a"]}) + "\n"]
    lines += [made.step_line(i, sign * 10.0**i, 10.0**i, norms=[1.0]) for i in range(39)]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path).read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    for _ in range(2):
        loss, norm = seen.ask("Plots.all.slice(0, 2).map((plot) => plot.axes[1]._values)")
        assert 3 <= len(loss) <= 12 and 3 <= len(norm) <= 12
        seen.page.keyboard.press("l")
    seen.close()


def test_an_incident_after_the_last_step_has_its_mark(browser, tmp_path):
    """An exception comes before its step is recorded; at a step that was taken again, both records are told."""
    lines = [
        made.step_line(i, math.nan if i == 3 else 1.0, action="skipped" if i == 3 else "stepped") for i in (0, 1, 2, 3, 2, 3, 4)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    found = made.incident_line(3, action="rewound") + made.incident_line(5, kind="exception", action="recorded")
    (tmp_path / "incidents.jsonl").write_text(found)
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path).read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    assert seen.views() == [-0.5, 5.5]
    seen.page.click("#incident-1 summary")
    rows = [row.split() for row in seen.page.locator("#incident-1 tr").all_inner_texts()]
    assert [row for row in rows if row[0] == "3"] == [["3", "nan", "0.5", "refused"], ["3", "nan", "0.5", "refused,", "again"]]
    seen.close()


def test_an_empty_run_is_a_page(browser, pages):
    seen = Looked(browser, pages("empty"))
    assert "No step is recorded yet" in seen.page.inner_text("#plots")
    assert seen.page.inner_text("#no-cards") == "None.", "that every step was taken would not be true"
    for key in ("+", "ArrowLeft", "n", "l", "0"):
        seen.page.keyboard.press(key)
    seen.page.click("#theme")
    seen.close()


def test_a_live_page_takes_new_data_and_keeps_what_one_was_looking_at(browser, tmp_path):
    """New steps and incidents come in; zoom, open cards and place stay; when the server ends, the page says so."""
    folder = tmp_path / "run"
    made.write_run(folder, 200, bad=(50,))
    lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(lines[:102]))
    run = Run(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            while run.poll():
                pass
            live = self.path == "/data"
            body = (json.dumps(html.data(run)) if live else html.page(run, live="data")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if live else "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    seen = Looked(browser, f"http://127.0.0.1:{server.server_port}/")
    assert seen.views() == [-0.5, 99.5]
    seen.page.locator("#incident-1 summary").click()
    seen.ask("Plots.setView(20, 60)")
    seen.ask("scrollTo(0, 300)")
    (folder / "steps.jsonl").write_text("".join(lines))
    with open(folder / "incidents.jsonl", "a") as file:
        file.write(made.incident_line(150))
    seen.page.wait_for_selector("#incident-2", state="attached", timeout=8000)
    assert seen.views() == [20, 60] and seen.ask("scrollY") == 300
    assert seen.ask("[...document.querySelectorAll('details')].map(card => card.open)") == [True, False]
    assert "200 steps" in seen.page.inner_text("#summary")
    seen.page.keyboard.press("0")
    assert seen.views() == [-0.5, 199.5]
    assert seen.said == [] and {url.rsplit("/", 1)[1] for url in seen.asked} <= {"", "data", "favicon.ico"}
    server.shutdown()
    server.server_close()
    thread.join()
    seen.page.wait_for_selector("#lost", state="visible", timeout=8000)
    assert seen.page.is_visible("#incident-1")
    seen.context.close()


def test_the_curves_of_each_optimizer_can_be_chosen(browser, tmp_path):
    """By the list above them, and from a card of it."""
    made.write_gan(tmp_path / "run", [made.incident_line(3)], [made.incident_line(30, culprits=[["a", "nan"]])])
    path = tmp_path / "page.html"
    path.write_text(html.page(Run(tmp_path / "run").read()), encoding="utf-8")
    seen = Looked(browser, path.as_uri())
    assert seen.views() == [-0.5, 19.5] and "Adam of Generator" in seen.page.inner_text("#incident-2 summary")
    seen.page.select_option("#optimizer-choice", label="Adam of Generator")
    assert seen.views() == [-0.5, 39.5]
    seen.page.click("#incident-1 summary")
    seen.page.locator("#incident-1").get_by_text("Show in the curves").click()
    assert seen.page.input_value("#optimizer-choice") == "0" and seen.views() == [-0.5, 19.5]
    seen.close()


def test_a_run_with_one_optimizer_has_nothing_to_choose(browser, pages):
    seen = Looked(browser, pages("plain"))
    assert not seen.page.is_visible("#optimizer-choice")
    seen.close()


def test_the_legend_of_a_heat_map_says_what_an_empty_cell_is(browser, tmp_path):
    made.write_run(tmp_path / "run", 5, names=["a", "b"])
    path = tmp_path / "page.html"
    for empty in (False, True):
        if empty:
            with open(tmp_path / "run" / "steps.jsonl", "a") as file:
                file.write(made.step_line(5, norms=[None, 1.0]))
        path.write_text(html.page(Run(tmp_path / "run").read()), encoding="utf-8")
        seen = Looked(browser, path.as_uri())
        assert ("no gradient" in seen.page.inner_text("#heat-norms .legend")) == empty
        seen.close()
