"""The chart of a loss's terms in a real browser, and the y axis that loss, terms and comparisons share: linear, logarithmic, and
right with zeros and negative values."""

from __future__ import annotations

import functools
import itertools
import json
import math

import pytest

from nanproof.report import _html as html
from nanproof.report.folder._run import Run
from nanproof.report.folder._tokens import Tokens
from report import made
from report.looked import Looked

pytestmark = pytest.mark.browser

TERMS = "Plots.all.find((plot) => plot.root.parentElement.id === 'plot-terms')"
LOSS = "Plots.all.find((plot) => plot.root.parentElement.id === 'plot-loss')"
LANE = (
    """([row, step]) => {
  const u = """
    + TERMS
    + """, p = uPlot.pxRatio, x = Math.round(u.valToPos(step, "x", true));
  const y = Math.round(u.bbox.top + u.bbox.height + u.lanes[row].below * p);
  const spot = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  spot.drawImage(u.ctx.canvas, -x, -y);
  const [r, g, b, a] = spot.getImageData(0, 0, 1, 1).data;
  const told = (arm) => [1, 3, 5].map((i) => parseInt(Plots.colours[`arm-${arm}`].slice(i, i + 2), 16));
  const same = (arm) => told(arm).every((one, i) => Math.abs(one - [r, g, b][i]) < 12);
  return a > 100 ? [0, 1, 2, 3, 4, 5].findIndex(same) : null;
}"""
)
"""The colour at a step in a row under the chart; null where nothing is drawn."""


def falling(step, steps, size=1.0):
    return size * (0.3 + math.exp(-4 * step / steps)) + 0.01 * (step % 7)


def two(steps=300):
    """Text and latents; the latents are Inf once, and NaN from step 200 to 220."""
    bad = {120: math.inf, **dict.fromkeys(range(200, 221), math.nan)}
    return [{"text_loss": falling(i, steps), "latent_loss": bad.get(i, falling(i, steps, 2.0))} for i in range(steps)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Writes the page of a run, once."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def page(name):
        if name == "two":
            made.write_terms(folder / name, two())
        elif name == "twelve":
            made.write_terms(folder / name, [{f"head_{k}_loss": falling(i, 5000, k + 1.0) if (i, k) != (3000, 4) else math.nan
                                              for k in range(12)} for i in range(5000)])  # fmt: skip
        elif name == "hostile":
            made.write_terms(folder / name, [dict.fromkeys(made.HOSTILE, x) for x in (1.0, math.nan, 2.0)])
        else:
            made.write_run(folder / name, 30)
        return written(folder / name)

    return page


def written(run):
    path = run.with_suffix(".html")
    path.write_text(html.page(Run(run).read(), tokens=Tokens()), encoding="utf-8")
    return path.as_uri()


def test_terms_are_drawn_under_the_loss_and_zoom_with_it(browser, pages):
    seen = Looked(browser, pages("two"))
    figures = "[...document.querySelectorAll('#plots figure')].map((figure) => figure.id)"
    assert seen.ask(figures) == ["plot-events", "plot-loss", "plot-terms", "plot-grad_norm", "plot-lr"]
    assert len(set(seen.ask("[...document.querySelectorAll('.u-over')].map((one) => one.getBoundingClientRect().left)"))) == 1
    columns = seen.ask(f"{TERMS}.data.map((column) => [...column])")
    assert columns[0] == list(range(300))
    for column, name in zip(columns[1:], ("text_loss", "latent_loss"), strict=True):
        values = [step[name] for step in two()]
        assert [x is None for x in column] == [not math.isfinite(x) for x in values], "NaN is a gap"
        assert all(x is None or x == pytest.approx(y, rel=1e-4) for x, y in zip(column, values, strict=True))
    seen.page.locator("#plot-terms").scroll_into_view_if_needed()
    seen.drag("plot-terms", 0.25, 0.5)
    assert seen.views() == pytest.approx([74.5, 149.5], abs=3)
    seen.page.dblclick("#plot-terms .u-over")
    assert seen.views() == [-0.5, 299.5]
    seen.page.keyboard.press("+")
    assert seen.views() == [74.5, 224.5]
    seen.close()


def test_a_run_without_terms_has_no_such_chart(browser, pages):
    seen = Looked(browser, pages("none"))
    assert seen.page.locator("#plot-terms").count() == 0
    seen.page.keyboard.press("l")
    assert seen.ask(f"{LOSS}.how") == "log"
    seen.close()


def test_what_is_not_finite_has_its_mark_in_the_colour_of_its_term(browser, pages):
    seen = Looked(browser, pages("two"), color_scheme="light")
    assert seen.ask(f"{TERMS}.lanes.length") == 1
    marked = {step: seen.page.evaluate(LANE, [0, step]) for step in (50, 119.2, 120, 121, 190, 200, 210, 220, 230)}
    assert marked == {50: None, 119.2: None, 120: 2, 121: None, 190: None, 200: 2, 210: 2, 220: 2, 230: None}
    said = seen.page.get_attribute("#plot-terms [role=img]", "aria-label")
    assert said.startswith("Loss terms by step. text_loss: first 1.3, last ")
    assert said.endswith("22 not finite from step 120") and said.count("not finite") == 1
    seen.close()


def test_the_line_under_the_cursor_tells_every_term(browser, pages):
    seen = Looked(browser, pages("two"))
    seen.page.locator("#plot-terms").scroll_into_view_if_needed()
    for step, latent in ((100, f"{two()[100]['latent_loss']:.4g}"), (210, "non-finite")):
        x, y, width, height = seen.box("plot-terms")
        seen.page.mouse.move(x + width * ((step + 0.5) / 300), y + height / 2)
        parts = seen.page.locator("#readout > span").all_inner_texts()
        assert parts[0] == f"step {step}" and parts[1].startswith("text_loss 0.") and parts[2] == f"latent_loss {latent}"
    seen.page.locator("#plot-grad_norm").scroll_into_view_if_needed()
    x, y, width, height = seen.box("plot-grad_norm")
    seen.page.mouse.move(x + width * (100.5 / 300), y + height / 2)
    assert "gradient norm" in seen.page.inner_text("#readout") and "text_loss" not in seen.page.inner_text("#readout")
    seen.close()


def test_terms_are_switched_off_and_on_with_the_keyboard(browser, pages):
    """The focus stays on the button, and what is hidden stays so when the axis is turned."""
    seen = Looked(browser, pages("two"))
    told = "(one) => [one.innerText.replace(/\\s+/g, ' ').trim(), one.ariaPressed]"
    names = f"[...document.querySelectorAll('.terms-legend button')].map({told})"
    last = two()[-1]
    both = [f"{name} {last[name]:.4g}" for name in ("text_loss", "latent_loss")]
    assert seen.ask(names) == [[both[0], "true"], [both[1], "true"]]
    seen.page.focus("#term-1")
    seen.page.keyboard.press("Enter")
    assert seen.ask(names) == [[both[0], "true"], [both[1], "false"]] and seen.ask("document.activeElement.id") == "term-1"
    assert seen.ask(f"[{TERMS}.series.length, {TERMS}.lanes.length]") == [2, 0]
    assert "latent" not in seen.page.get_attribute("#plot-terms [role=img]", "aria-label")
    seen.page.keyboard.press("l")
    assert seen.ask(f"[{TERMS}.series.length, {TERMS}.how]") == [2, "log"]
    seen.page.click("#term-0")
    assert seen.ask(f"{TERMS}.how") == "none", "no term at all is an empty chart"
    seen.page.keyboard.press("+")
    seen.page.click("#term-1")
    seen.page.click("#term-0")
    assert seen.ask(f"[{TERMS}.series.length, {TERMS}.lanes.length]") == [3, 1]
    seen.close()


def test_the_key_turns_both_axes_and_each_button_its_own(browser, pages):
    seen = Looked(browser, pages("two"))
    how = f"[{LOSS}.how, {TERMS}.how]"
    assert seen.ask(how) == ["linear", "linear"]
    for key, wanted in (("l", ["log", "log"]), ("l", ["linear", "linear"])):
        seen.page.keyboard.press(key)
        assert seen.ask(how) == wanted
    seen.page.click("#log-terms")
    assert seen.ask(how) == ["linear", "log"] and seen.ask("document.activeElement.id") == "log-terms"
    assert [seen.page.get_attribute(f"#{name}", "aria-pressed") for name in ("log", "log-terms")] == ["false", "true"]
    assert seen.ask(f"{TERMS}.data[1][100]") == pytest.approx(math.log10(two()[100]["text_loss"]), abs=1e-3)
    seen.page.click("#log")
    assert seen.ask(how) == ["log", "log"]
    seen.close()


def axis_of(seen, plot):
    """(how, numbers at the axis, where they are in pixels from the top)"""
    ticks = "(u) => [u.how, u.axes[1]._values, u.axes[1]._splits.map((y) => u.valToPos(y, 'y')), u.over.clientHeight]"
    return seen.ask(f"({ticks})({plot})")


SPREADS = {
    "decades": ([10.0 ** (3 - i / 20) for i in range(100)], "log"),
    "explodes": ([1.0 + i / 100 if i < 60 else 10.0 ** (i - 60) for i in range(91)], "log"),
    "explodes from zero": ([0.0 if i == 5 else 2.0 if i < 60 else 10.0 ** (i - 60) for i in range(91)], "asinh"),
    "both signs": ([(-1.0) ** i * 10.0 ** (i / 12) for i in range(100)], "asinh"),
    "below zero": ([-(10.0 ** (i / 12)) for i in range(100)], "asinh"),
    "near zero": ([math.sin(i / 9) for i in range(100)], "linear"),
    "flat": ([2.0 + i / 1000 for i in range(100)], "linear"),
}


@pytest.mark.parametrize("what", SPREADS)
def test_the_axis_fits_the_values(browser, tmp_path, what):
    """Logarithmic from the start where the loss lies decades apart; every value has a place, in order and inside the chart; the
    axis has numbers, and none stands on another. Turned by the key as well."""
    values, wanted = SPREADS[what]
    made.write_terms(tmp_path / "run", [{"a": x, "b": 1.0} for x in values])
    seen = Looked(browser, written(tmp_path / "run"))
    for turn, key in itertools.product(range(2), ("0", "+")):
        seen.page.keyboard.press(key)
        for plot in (LOSS, TERMS):
            how, numbers, places, height = axis_of(seen, plot)
            if turn == 0 and plot == TERMS:
                assert how == wanted
            told = [text for text in numbers if text]
            assert 2 <= len(told) <= 13 and len(set(told)) == len(told)
            ordered = sorted(places)
            assert all(b - a > 8 for a, b in itertools.pairwise(ordered)), (how, numbers, places)
        heights = seen.ask(f"[...{TERMS}.data[1]].map((y) => {TERMS}.valToPos(y, 'y'))")
        start, end = (math.ceil(x) for x in seen.views())
        assert all(-1 <= y <= height + 1 for y in heights[start:end])
        if key == "+":  # what is in view fills the chart
            both = [*heights[start:end], *seen.ask(f"[...{TERMS}.data[2]].map((y) => {TERMS}.valToPos(y, 'y'))")[start:end]]
            assert max(both) - min(both) > 0.45 * height, (how, key)
        pairs = sorted(zip(values, heights, strict=True))
        assert all(a[1] >= b[1] - 1e-6 for a, b in itertools.pairwise(pairs)), "what is larger is not lower"
        if key == "+":
            seen.page.keyboard.press("l")
    seen.close()


def test_one_that_explodes_does_not_hide_a_zero_or_the_others(browser, tmp_path):
    """Zero, 2 and 1e30 on one axis: three heights that can be told apart. The size of the largest value alone must not decide
    where the linear part ends."""
    values, _ = SPREADS["explodes from zero"]
    made.write_terms(tmp_path / "run", [{"a": x} for x in values])
    seen = Looked(browser, written(tmp_path / "run"))
    zero, usual, most = seen.ask(f"[5, 6, 90].map((i) => {TERMS}.valToPos({TERMS}.data[1][i], 'y'))")
    assert zero - usual > 2 and usual - most > 100
    seen.close()


def test_a_zoomed_chart_shows_what_is_in_view(browser, tmp_path):
    """Where it never moves, far from all else, too."""
    made.write_terms(tmp_path / "run", [{"a": 1e20 if i < 50 else 0.0 if i < 60 else 1e-3 * i} for i in range(100)])
    seen = Looked(browser, written(tmp_path / "run"))
    for _ in range(2):
        for first, last in ((10, 20), (52, 58), (70, 90)):
            seen.ask(f"Plots.setView({first}, {last})")
            places = seen.ask(f"[...{TERMS}.data[1]].slice({first}, {last}).map((y) => {TERMS}.valToPos(y, 'y'))")
            *_, ticks, height = axis_of(seen, TERMS)
            assert all(-1 <= y <= height + 1 for y in places) and len(ticks) >= 2
        seen.page.keyboard.press("l")
    seen.close()


def test_a_live_page_turns_logarithmic_when_the_loss_explodes(browser, tmp_path):
    """Until somebody asks for one or the other."""
    made.write_terms(tmp_path / "run", [{"a": 1.0, "b": 2.0}] * 50)
    seen = Looked(browser, written(tmp_path / "run"))
    how = f"[{LOSS}.how, {TERMS}.how]"
    assert seen.ask(how) == ["linear", "linear"]
    made.write_terms(tmp_path / "run", [{"a": 1.0, "b": 2.0}] * 50 + [{"a": 1.0, "b": 1e30}])
    later = json.dumps(html.data(Run(tmp_path / "run").read(), Tokens()))
    take = "(told) => { Plots.takeData(JSON.parse(told)); Plots.draw(); }"
    seen.page.evaluate(take, later)
    assert seen.ask(how) == ["log", "log"]
    seen.page.keyboard.press("l")
    seen.page.evaluate(take, later)
    assert seen.ask(how) == ["linear", "linear"]
    seen.close()


def test_twelve_terms_can_be_told_apart_and_every_step_around_an_incident_is_there(browser, pages):
    seen = Looked(browser, pages("twelve"))
    drawn = f"{TERMS}.series.filter((one) => one.width > 0).map((one) => [one.stroke(), (one.dash || []).length])"
    looks = seen.ask(drawn)
    assert len({tuple(look) for look in looks}) == len(looks) == 12
    assert seen.page.locator(".terms-legend button").count() == 12
    points = f"{TERMS}.data[0].length"
    assert seen.ask(points) * 12 <= 8000
    seen.ask("Plots.setView(2970, 3030)")
    inside = seen.ask(f"[...{TERMS}.data[0]].filter((x) => x >= 2970 && x <= 3030)")
    assert inside == list(range(2970, 3031))
    column = seen.ask(f"{TERMS}.data[3 * 4 + 3][{TERMS}.data[0].indexOf(3000)]")
    assert column is None and seen.page.evaluate(LANE, [0, 3000]) == 1 and seen.page.evaluate(LANE, [0, 2990]) is None
    seen.page.keyboard.press("0")
    assert seen.ask(points) * 12 <= 8000
    bar = seen.page.locator("#bar").bounding_box()["height"]
    seen.page.locator("#plot-terms").scroll_into_view_if_needed()
    x, y, width, height = seen.box("plot-terms")
    seen.page.mouse.move(x + width / 2, y + height / 2)
    assert seen.page.locator("#readout > span b").count() == 13
    assert seen.page.locator("#bar").bounding_box()["height"] == bar, "nothing moves under the cursor"
    seen.close()


@pytest.mark.parametrize("name", ["two", "twelve", "hostile"])
def test_a_phone(browser, pages, name):
    seen = Looked(browser, pages(name), viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    seen.ask("document.querySelectorAll('details').forEach((card) => { card.open = true; })")
    assert seen.ask("document.documentElement.scrollWidth") <= 360
    assert seen.ask("Math.min(...[...document.querySelectorAll('.terms-legend button')].map((one) => one.offsetHeight))") >= 26
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, pages, scheme):
    seen = Looked(browser, pages("two"), color_scheme=scheme)
    stroke = f"{TERMS}.series[1].stroke()"
    first = seen.ask(stroke)
    assert seen.page.evaluate(LANE, [0, 210]) == 2
    swatch = seen.ask("getComputedStyle(document.querySelector('.terms-legend .swatch')).borderTopColor")
    assert swatch == "rgb({}, {}, {})".format(*(int(first[i : i + 2], 16) for i in (1, 3, 5)))
    seen.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    seen.page.wait_for_function(f"() => {stroke} !== {first!r}")  # a loaded machine takes its time
    assert seen.ask(stroke) != first and seen.page.evaluate(LANE, [0, 210]) == 2, "what is drawn changes with the page"
    seen.close()


def test_a_card_names_the_terms_the_bad_one_first_and_marked(browser, pages):
    seen = Looked(browser, pages("two"))
    seen.page.click("#incident-1 summary")
    line = seen.page.locator("#incident-1 .terms")
    assert line.inner_text() == f"Terms: latent_loss inf, text_loss {two()[120]['text_loss']:.4g}"
    assert line.locator(".nonfinite").all_inner_texts() == ["latent_loss inf"]
    seen.close()


def test_hostile_names_do_nothing(browser, pages):
    seen = Looked(browser, pages("hostile"))
    seen.ask("document.querySelectorAll('details').forEach((card) => { card.open = true; })")
    seen.page.locator("#plot-terms").scroll_into_view_if_needed()
    x, y, width, height = seen.box("plot-terms")
    seen.page.mouse.move(x + width / 2, y + height / 2)
    for i in range(seen.page.locator(".terms-legend button").count()):
        seen.page.click(f"#term-{i}")
    assert seen.ask("document.querySelectorAll('main script, main img, main svg, main iframe').length") == 0
    assert "<script>window.hacked=1</script>" in seen.page.inner_text("main") and "\u202e" not in seen.page.inner_text("main")
    assert seen.ask("document.documentElement.scrollWidth") <= 1200
    seen.close()
