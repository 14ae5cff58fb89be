"""A page that is open in a browser, and all that goes on in it: for the tests of the report's pages."""

from __future__ import annotations

VIEWS = "Plots.all.map(plot => [plot.scales.x.min, plot.scales.x.max])"


class Looked:
    """Opens the page; `close` makes sure that nothing went wrong in it."""

    def __init__(self, browser, address, **options):
        options.setdefault("viewport", {"width": 1200, "height": 900})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def ask(self, script):
        return self.page.evaluate(script)

    def views(self):
        """The steps that all plots show: they must be the same."""
        views = self.ask(VIEWS)
        assert len({tuple(round(x, 6) for x in view) for view in views}) == 1
        return views[0]

    def box(self, plot):
        box = self.page.locator(f"#{plot} .u-over").bounding_box()
        return box["x"], box["y"], box["width"], box["height"]

    def drag(self, plot, start, end):
        x, y, width, height = self.box(plot)
        self.page.mouse.move(x + start * width, y + height / 2)
        self.page.mouse.down()
        self.page.mouse.move(x + end * width, y + height / 2, steps=4)
        self.page.mouse.up()

    def close(self, asked=1):
        """Nothing was complained about, and nothing but the page itself was asked for."""
        assert self.ask("window.hacked") is None
        assert self.said == [] and len(self.asked) == asked, (self.said, self.asked)
        self.context.close()
