"""The page of a comparison in a real browser: arms that can be switched, one zoom for all charts, a mark wherever there was NaN.

Needs playwright and chromium (`browser` in conftest.py); left out where they are missing.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace

import pytest

from comparison import compared
from nanproof_recipes.comparison.comparison import Arm, Comparison, write
from report import made
from report.looked import Looked

pytestmark = pytest.mark.browser
PRESSED = (
    "[...document.querySelectorAll('#legend button[aria-pressed]')].map((one) => one.getAttribute('aria-pressed') === 'true')"
)
LANE = """([chart, row, step]) => {
  const u = Plots.all[chart], p = uPlot.pxRatio, { left, top, height } = u.bbox;
  const x = Math.round(u.valToPos(step, "x", true)), y = Math.round(top + height + u.lanes[row].below * p);
  const spot = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  spot.drawImage(u.ctx.canvas, -x, -y);
  const [r, g, b, a] = spot.getImageData(0, 0, 1, 1).data;
  const told = (arm) => [1, 3, 5].map((i) => parseInt(Plots.colours[`arm-${arm}`].slice(i, i + 2), 16));
  const same = (arm) => told(arm).every((one, i) => Math.abs(one - [r, g, b][i]) < 12);
  return a > 100 ? [0, 1, 2, 3, 4, 5].findIndex(same) : null;
}"""
"""The arm whose colour is at a step in a row under a chart; null where nothing is drawn."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Writes the page of a comparison, once."""

    @functools.cache
    def page(name):
        folder = tmp_path_factory.mktemp(name)
        made_of = {"small": compared.small, "hostile": compared.hostile, "large": lambda folder: compared.large()}
        return write(made_of[name](folder), folder).as_uri()

    return page


def page_of(curves, folder):
    arms = tuple(Arm(f"arm {i}", "", "finished", {}, curves=given) for i, given in enumerate(curves))
    return write(Comparison("r", "Made", "For a test.", (), arms), folder).as_uri()


def lane(seen, chart, row, step):
    return seen.page.evaluate(LANE, [chart, row, step])


def test_every_nan_has_its_mark(browser, pages):
    """Under the chart, at its step, in the colour of its arm; and nothing where there was a number."""
    seen = Looked(browser, pages("small"), color_scheme="light")
    assert lane(seen, 0, 0, 12) == lane(seen, 0, 0, 20) == 2, "the loss of patched 001"
    assert lane(seen, 0, 0, 11) is None and lane(seen, 0, 0, 30) is None
    for row, arm in ((0, 0), (1, 1)):
        assert [lane(seen, 1, row, step) for step in (2, 75, 150)] == [arm] * 3, "the norms of broken and patched 000"
    assert lane(seen, 1, 2, 15) == 2 and lane(seen, 1, 2, 60) is None
    assert lane(seen, 0, 1, 40) == lane(seen, 0, 1, 90) == 3 and lane(seen, 0, 1, 60) is None, "incidents of the guard"
    assert "broken: first" in (said := seen.ask("Plots.all[1].root.getAttribute('aria-label')"))
    assert "149 of 150 not finite from step 2" in said
    seen.close()


def test_a_logged_zero_is_drawn_as_zero(browser, pages):
    """On the linear axis and on the logarithmic one."""
    seen = Looked(browser, pages("small"))
    broken = "Plots.all[0].data[1]"
    for _ in range(2):
        assert seen.ask(f"{broken}[0]") > 1 and seen.ask(f"[...new Set({broken}.slice(1))]") == [0]
        assert seen.ask("Plots.all[0].valToPos(0, 'y') <= Plots.all[0].over.clientHeight + 1")
        seen.page.click("#chart-0 button")
    seen.page.click("#chart-0 button")
    assert seen.ask("Plots.all.map((plot) => plot.how)") == ["asinh", "linear", "linear"]
    seen.close()


def test_arms_are_switched_off_and_on(browser, pages):
    seen = Looked(browser, pages("small"))
    lines = "Plots.all.map((plot) => plot.series.length - 1)"
    assert seen.ask(lines) == [5, 5, 5] and not seen.page.is_visible("#all")
    seen.page.click("#legend button >> nth=0")
    assert seen.ask(lines) == [4, 4, 4] and seen.ask(PRESSED) == [False, True, True, True, True]
    assert lane(seen, 1, 0, 75) == 1, "the row of the first arm is gone too"
    seen.page.keyboard.press("2")
    assert seen.ask(PRESSED) == [False, False, True, True, True]
    seen.page.dblclick("#legend button >> nth=4")
    assert seen.ask(PRESSED) == [False, False, False, False, True] and seen.ask(lines) == [1, 1, 1]
    seen.page.keyboard.press("5")
    assert seen.ask(PRESSED) == [False] * 5
    seen.page.keyboard.press("9")
    seen.page.click("#all")
    assert seen.ask(PRESSED) == [True] * 5 and seen.ask(lines) == [5, 5, 5]
    seen.close()


def test_one_zoom_for_all_charts(browser, pages):
    seen = Looked(browser, pages("small"))
    full = seen.views()
    assert full == [0.5, 150.5]
    ways = [
        lambda: seen.page.click("#reset"),
        lambda: seen.page.keyboard.press("Escape"),
        lambda: seen.page.dblclick("#chart-2 .u-over"),
    ]
    for i, back in enumerate(ways):
        seen.page.locator(f"#chart-{i}").scroll_into_view_if_needed()
        seen.drag(f"chart-{i}", 0.2, 0.4)
        assert seen.views() == pytest.approx([30.5, 60.5], abs=2)
        seen.page.keyboard.press("1")
        assert seen.views() == pytest.approx([30.5, 60.5], abs=2), "switching an arm keeps the zoom"
        seen.page.keyboard.press("a")
        back()
        assert seen.views() == full
    seen.page.keyboard.press("+")
    seen.page.keyboard.press("ArrowRight")
    assert seen.views() == [53.0, 128.0]
    seen.close()


def test_the_line_under_the_cursor_tells_every_arm(browser, pages):
    seen = Looked(browser, pages("small"))
    seen.page.locator("#chart-1").scroll_into_view_if_needed()
    top = seen.page.locator("#plots").bounding_box()["y"]
    for share, third in ((0.5, "patched 001 –"), (15 / 150, "patched 001 nan")):
        x, y, width, height = seen.box("chart-1")
        seen.page.mouse.move(x + width * share, y + height / 2)
        title, *arms = seen.page.locator("#readout > span").all_inner_texts()
        assert title.startswith("Gradient norm at step") and arms[:3] == ["broken nan", "patched 000 nan", third]
        assert all(float(said.split()[1]) > 0 for said in arms[3:])
    assert seen.page.locator("#plots").bounding_box()["y"] == top, "nothing moves under the cursor"
    seen.close()


def test_incidents_stand_with_their_arm(browser, pages):
    seen = Looked(browser, pages("small") + "#arm-3-incident-1")
    assert seen.ask("[...document.querySelectorAll('details')].map((card) => card.id)") == [
        f"arm-3-incident-{i}" for i in (1, 2, 3)
    ]
    card = seen.page.locator("#arm-3 #arm-3-incident-1")
    for said in ("zero-denominator", "fix verified", "step refused", "the loss is nan", "Add an epsilon.", "train.py:12"):
        assert said in card.inner_text()
    card.get_by_text("Show in the curves").click()
    assert seen.views() == pytest.approx([0.5, 90.5], abs=11)
    seen.page.click("#arm-3-incident-2 summary")
    seen.page.click("#arm-3-incident-2 a")
    assert seen.ask("location.hash") == "#arm-3-incident-1"
    assert seen.page.get_attribute("#arm-3 p a", "href") == "./runs/guarded/report.html"
    seen.close()


def test_keys_go_from_arm_to_arm_and_turn_the_axes(browser, pages):
    seen = Looked(browser, pages("small"))
    press = seen.page.keyboard.press
    for key, arm in (("n", 0), ("j", 1), ("n", 2), ("p", 1), ("k", 0), ("k", 0)):
        press(key)
        assert seen.ask("document.activeElement.id") == f"arm-{arm}"
    for wanted in (["asinh", "log", "log"], ["linear"] * 3):
        press("l")
        assert seen.ask("Plots.all.map((plot) => plot.how)") == wanted
        assert seen.page.get_attribute("#chart-0 button", "aria-pressed") == str(wanted[0] == "asinh").lower()
    press("?")
    assert seen.ask("document.getElementById('help').open")
    press("Escape")
    assert not seen.ask("document.getElementById('help').open")
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, pages, scheme):
    seen = Looked(browser, pages("small"), color_scheme=scheme)
    papers, swatches = {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 26)"}, {}
    for wanted in ("light", "dark"):
        seen.page.click("#theme")
        assert seen.ask("getComputedStyle(document.body).backgroundColor") == papers[wanted]
        swatches[wanted] = seen.ask("getComputedStyle(document.querySelector('.compared .swatch')).borderTopColor")
        line = seen.ask("Plots.colours['arm-0']")
        assert swatches[wanted] == "rgb({}, {}, {})".format(*(int(line[i : i + 2], 16) for i in (1, 3, 5)))
        assert lane(seen, 1, 0, 75) == 0, "what is drawn changes with the page"
    assert swatches["light"] != swatches["dark"]
    seen.close()


def test_a_phone(browser, pages):
    seen = Looked(browser, pages("small"), viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    seen.ask("document.querySelectorAll('details').forEach((card) => { card.open = true; })")
    assert seen.ask("document.documentElement.scrollWidth") <= 360
    heights = "[...document.querySelectorAll('#bar button')].filter((b) => b.offsetHeight).map((b) => b.offsetHeight)"
    assert min(seen.ask(heights)) >= 36
    names = "[...document.querySelectorAll('.compared th[scope=row] bdi')].map((one) => one.getClientRects().length)"
    assert seen.ask(names) == [1] * 5, "no name is broken into pieces"
    assert lane(seen, 1, 0, 75) == 0
    seen.close()


def test_hostile_strings_do_nothing(browser, pages):
    seen = Looked(browser, pages("hostile"))
    seen.ask("document.querySelectorAll('details').forEach((card) => { card.open = true; })")
    seen.page.wait_for_timeout(50)
    for _ in range(3):
        seen.ask("document.querySelectorAll('button.more').forEach((button) => button.click())")
    assert seen.ask("document.querySelectorAll('main script, main img, main svg, main iframe, main style').length") == 0
    assert seen.ask("[...document.querySelectorAll('a')].every((a) => a.getAttribute('href').startsWith('#'))")
    for i in range(seen.ask("Plots.all.length")):
        seen.page.locator(f"#chart-{i}").scroll_into_view_if_needed()
        x, y, width, height = seen.box(f"chart-{i}")
        seen.page.mouse.move(x + width / 2, y + height / 2)
    text = seen.page.inner_text("main")
    assert made.HACK in text and "\\u202egnp.exe" in text and "\u202e" not in text
    assert seen.ask("document.documentElement.scrollWidth") <= 1200
    seen.close()


def test_twelve_long_arms_open_quickly(browser, pages):
    address = pages("large")
    start = time.perf_counter()
    seen = Looked(browser, address)
    assert seen.ask("Plots.all.length") == 5
    assert time.perf_counter() - start < 5
    dashes = seen.ask("Plots.all[0].series.filter((one) => one.width > 0).map((one) => (one.dash || []).length)")
    assert dashes == [0] * 6 + [2] * 6, "twelve lines can be told apart"
    start = time.perf_counter()
    seen.page.keyboard.press("1")
    seen.page.keyboard.press("l")
    seen.ask("Plots.setView(1000, 1100)")
    assert time.perf_counter() - start < 3
    seen.close()


EXTREMES = {
    "largest": [1.7976931348623157e308, -1.7976931348623157e308, 1.0],
    "smallest": [5e-324, 1e-300, 1.0],
    "zero": [0.0, 0.0, 0.0],
    "one": [2.0],
    "none": [math.nan, math.inf],
}


@pytest.mark.parametrize("what", EXTREMES)
def test_extreme_numbers_are_drawn(browser, tmp_path, what):
    """Axes of hundreds of decades, of none, and of no number at all."""
    values = EXTREMES[what]
    steps = [0, 1, 1 << 30][: len(values)]
    seen = Looked(browser, page_of([{"step": steps, "loss": values}, {"step": [0], "loss": [1.0]}], tmp_path))
    ticks = "Plots.all[0].axes[1]._values.filter(Boolean).length"
    for key in ("2", "l", "+", "ArrowLeft", "l", "0", "1", "l", "l", "a", "-"):
        seen.page.keyboard.press(key)
        if "1" not in seen.ask("[...Plots.hidden].map((arm) => String(arm + 1))") and what != "none":
            assert 1 <= seen.ask(ticks) <= 20, "an axis has numbers"
    assert seen.views()[0] == -0.5
    seen.close()


def test_steps_of_one_arm_are_no_gaps_in_another(browser, tmp_path):
    """Arms log at steps of their own; only what was NaN interrupts a line."""
    curves = [{"step": [0, 10, 20, 30], "loss": [4.0, 3.0, math.nan, 2.0]}, {"step": [5, 15, 25], "loss": [1.0, 1.0, 1.0]}]
    seen = Looked(browser, page_of(curves, tmp_path))
    points = seen.ask("Plots.all[0].data.map((column) => [...column].map((x) => (x === undefined ? 'none' : x)))")
    assert points[0] == [0, 5, 10, 15, 20, 25, 30]
    assert points[1][::2] == [4, 3, None, 2] and points[2][1::2] == [1, 1, 1]
    assert None not in points[2]
    seen.close()


def test_a_page_without_curves_or_arms(browser, tmp_path):
    empty = Comparison("r", "Nothing", "Nothing was run.", (), ())
    for i, one in enumerate((empty, replace(empty, arms=(Arm("a", "", "finished", {}),)))):
        seen = Looked(browser, write(one, tmp_path / str(i)).as_uri())
        assert not seen.page.is_visible("#charts")
        for key in ("+", "ArrowLeft", "n", "l", "0", "1", "a", "?", "Escape"):
            seen.page.keyboard.press(key)
        seen.page.click("#theme")
        seen.close()


def test_every_curve_has_its_chart_one_arm_dies_and_one_explodes(browser, tmp_path):
    """Four arms of a loss with terms: NaN from step 60 on, up to 1e30, whole, and one without most. The axis is logarithmic where
    an arm explodes, also where another logs 0.0, and what is usual can still be told from zero."""
    steps = list(range(200))
    usual = [2.0 + math.sin(step / 9) for step in steps]
    names = ("loss", "text_loss", "latent_loss", "grad_norm")
    dies = {name: [x if step < 60 else math.nan for step, x in enumerate(usual)] for name in names}
    explodes = {
        **dict.fromkeys(names, usual),
        "latent_loss": [x if step < 170 else 10.0 ** (step - 169) for step, x in enumerate(usual)],
    }
    whole = {**dict.fromkeys(names, usual), "valid_text_loss": [x if step % 20 == 0 else None for step, x in enumerate(usual)]}
    zeros = {"loss": usual, "latent_loss": [0.0] * 200}
    seen = Looked(
        browser, page_of([{"step": steps, **one} for one in (dies, explodes, whole, zeros)], tmp_path), color_scheme="light"
    )
    titles = seen.page.locator("#plots figcaption bdi").all_inner_texts()
    assert titles == ["Loss", "Text loss", "Latent loss", "Valid text loss", "Gradient norm"]
    assert seen.ask("Plots.all.map((plot) => [plot.series.length - 1, plot.how])") == [
        [4, "linear"], [3, "linear"], [4, "asinh"], [1, "linear"], [3, "linear"],
    ]  # fmt: skip
    for chart in (0, 1, 2, 4):
        assert [lane(seen, chart, 0, step) for step in (59, 60, 130, 199)] == [None, 0, 0, 0]
    zero, low, most = seen.ask("[4, 3, 2].map((k) => Plots.all[2].valToPos(Plots.all[2].data[k][199], 'y'))")
    assert zero - low > 2 and low - most > 80
    assert len(seen.ask("Plots.all[2].axes[1]._values")) >= 4
    seen.page.keyboard.press("2")
    assert seen.ask("Plots.all[2].how") == "asinh" and seen.ask("Plots.all[2].scales.y.max") < 5, (
        "the axis fits those that are left"
    )
    seen.close()


@pytest.mark.parametrize("width", [1200, 360])
def test_samples_are_readable(browser, tmp_path, width):
    """Line breaks and indents are kept, a column is not so narrow that every word has a line, and the page is as wide as the
    screen."""
    text = "def f(x):\n    return x\n" + "a word and another one, " * 20
    arm = Arm(
        "a", "", "finished", {}, samples=({"prompt": "The [MASK] sat.", "step 100": text, "step 200": text, "kept": "yes"},) * 2
    )
    address = write(Comparison("r", "t", "l", (), (arm,)), tmp_path).as_uri()
    seen = Looked(browser, address, viewport={"width": width, "height": 700})
    cell = seen.page.locator(".samples td").nth(1)
    assert cell.inner_text().startswith("def f(x):\n    return x\na word")
    box = cell.bounding_box()
    assert box["width"] >= 220 and box["height"] < 700
    assert seen.ask("document.documentElement.scrollWidth") <= width
    seen.close()
