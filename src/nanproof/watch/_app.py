"""`nanproof watch` in a terminal: the runs, the curves of one of them, and what happened, as it is written. Needs textual."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.events import Resize
from textual.message import Message
from textual.theme import Theme

from nanproof.report import _html
from nanproof.watch._charts import TITLES, Window, shown_metrics
from nanproof.watch._plot import Marks, Part
from nanproof.watch._runs import Entry, View, Watched
from nanproof.watch._table import events_table, runs_table
from nanproof.watch._widgets import Card, Curves, Line, Listed
from nanproof.watch._words import card, facts, fitted, said, status, title

_SIDE, _WIDE = 72, 190
"""Columns of the list of runs where it stands beside the curves, and of a screen that is wide enough for that."""
DARK = Theme(
    name="nanproof-dark",
    primary="#6cb6ff",
    accent="#c49bff",
    warning="#e5b567",
    error="#ff7b72",
    success="#7ee0a0",
    foreground="#d5dbe3",
    background="#101418",
    surface="#1a2027",
    dark=True,
)
LIGHT = Theme(
    name="nanproof-light",
    primary="#0b5cad",
    accent="#7a3fc0",
    warning="#9a5b00",
    error="#c02a22",
    success="#1a7f4b",
    foreground="#1c232b",
    background="#fbfcfd",
    surface="#eef1f4",
    dark=False,
)
KEYS = (
    ("q", "quit"),
    ("?", "help"),
    ("tab", "other list"),
    ("enter", "details"),
    ("+ -", "zoom"),
    ("left right", "move"),
    ("f", "follow"),
    ("l", "log"),
    ("m", "one curve"),
    ("w", "report"),
)
HELP = (
    ("up down", "choose a run, or what happened in it"),
    ("tab", "from the runs to what happened, and back"),
    ("enter", "all that is known of it: cause, evidence, fix"),
    ("+ -", "fewer steps, more steps"),
    ("left right", "earlier steps, later steps"),
    ("0", "all steps"),
    ("f", "follow the newest step, or stay"),
    ("l", "logarithmic, linear, or as it fits"),
    ("m", "one curve alone, then the next"),
    ("o", "the next optimizer of a run that has several"),
    ("w", "write the report of the run: report.html in its folder"),
    ("t", "light or dark"),
    ("q", "quit; the run goes on"),
)


class WatchApp(App[None]):
    """Reads on a thread of its own, once a second; draws when something changed."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "nanproof watch"
    CSS = (
        f"$side: {_SIDE};"
        + """
    Screen { layout: vertical; background: $background; color: $foreground; overflow: hidden; }
    Line { height: 1; padding: 0 1; }
    #body { layout: vertical; height: 1fr; }
    #runs { height: auto; max-height: 30%; padding: 0 1; display: none; }
    #main { height: 1fr; }
    #curves { height: 1fr; padding: 0 1; }
    #events { height: auto; max-height: 34%; min-height: 3; padding: 0 1; }
    .several #runs { display: block; }
    .wide #body { layout: horizontal; }
    .wide.several #runs { width: $side; height: 1fr; max-height: 100%; }
    .wide #main { width: 1fr; height: 1fr; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("question_mark,h", "help", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", show=False),
        Binding("minus", "zoom(2.0)", show=False),
        Binding("left", "move(-0.25)", show=False),
        Binding("right", "move(0.25)", show=False),
        Binding("0", "whole", show=False),
        Binding("f", "follow", show=False),
        Binding("l", "scale", show=False),
        Binding("m", "metric", show=False),
        Binding("o", "optimizer", show=False),
        Binding("t", "theme", show=False),
        Binding("w", "write", show=False),
    ]

    class Looked(Message):
        """The thread has looked, and something is new."""

    class Said(Message):
        """Something for the last line of the screen."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, watched: Watched, marks: Marks, *, every: float = 1.0) -> None:
        super().__init__()
        self.watched, self.marks = watched, marks
        self.failure: BaseException | None = None
        """What ended the thread, if anything did."""
        self._every = every
        self._stop, self._wake = threading.Event(), threading.Event()
        self._entries: list[Entry] = []
        self._told: tuple[object, ...] = ()
        """What the list of events was made from."""
        self._chosen: Path | None = None
        self._notice = ""
        self._columns = 80

    def compose(self) -> ComposeResult:
        yield Line(id="head")
        with Container(id="body"):
            yield Listed(id="runs", marks=self.marks, follow=False)
            with Vertical(id="main"):
                yield Curves(marks=self.marks)
                yield Listed(id="events", marks=self.marks, follow=True)
        yield Line(id="keys")

    def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = DARK.name
        self.show()
        self.query_one("#events").focus()
        self.set_interval(10.0, self.show)  # a run that stands still writes nothing, and that is worth saying
        threading.Thread(target=self._look, name="nanproof-watch", daemon=True).start()

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    def _look(self) -> None:
        """The thread that reads."""
        while not self._stop.is_set():
            try:
                if self.watched.look():
                    self.post_message(self.Looked())
            except Exception as error:  # an error of a thread would be seen by no one
                self.failure = error
                self.call_later(self.exit)
                return
            if not self.watched.behind:
                self._wake.wait(self._every)
            self._wake.clear()

    def on_watch_app_looked(self) -> None:
        self.show()

    def on_watch_app_said(self, message: Said) -> None:
        self.notice(message.text)

    def on_resize(self, event: Resize) -> None:
        self._columns = event.size.width
        self.show()

    @property
    def views(self) -> list[View]:
        """The runs, and the folders that are waited for."""
        waited = [View(folder=path, name=str(path)) for path in self.watched.waiting]
        return [*self.watched.views.values(), *waited]

    @property
    def view(self) -> View | None:
        """The run that is looked at."""
        views = self.views
        return next((view for view in views if view.folder == self._chosen), views[0] if views else None)

    def show(self) -> None:
        """Put what is known on the screen."""
        views, view = self.views, self.view
        screen = self.screen_stack[0]
        runs, events, curves = screen.query_one("#runs", Listed), screen.query_one("#events", Listed), screen.query_one(Curves)
        looks = (len(views) > 1, self._columns >= _WIDE)
        if looks != (screen.has_class("several"), screen.has_class("wide")):
            (runs if looks[0] else events).focus()
            screen.set_class(looks[0], "several")
            screen.set_class(looks[1], "wide")
        runs.put(*runs_table(views, (_SIDE if looks[1] else self._columns) - 2, self.marks))
        if view is None:
            return
        if view.folder in self.watched.views:
            self._chosen = view.folder  # and it stays, when others join
        runs.go_to(view.folder)
        if self.watched.close != view.folder:
            self.watched.close = view.folder
            self._wake.set()
        told = (view.folder, view.total_incidents, view.total_forecasts, *view.incidents[-1:], *view.forecasts[-1:])
        if told != self._told:
            self._told, self._entries = told, view.groups()
            events.put(_events_heading(view), events_table(self._entries, self.marks))
        curves.view, curves.instead = view, self._instead(view)
        curves.redraw()
        screen.query_one("#head", Line).put(self._head(view))
        screen.query_one("#keys", Line).put(self._foot())

    def _head(self, view: View) -> list[Part]:
        state, *rest = status(view)
        name = said(view.name, self.marks.ascii)[: max(self._columns // 2, 12)]
        kind = {"running": "good", "halted": "refused", "stopped": "refused"}.get(state, "label")
        following = [] if self._window.steps is None else ["following" if self._window.end is None else "held: f follows"]
        room = self._columns - len(name) - len(state) - 6
        return [(name, "strong"), (f"  {state}  ", kind), (fitted([*rest, *following], room), "")]

    def _foot(self) -> list[Part]:
        if self._notice:
            return [(self._notice[: self._columns - 2], "value")]
        parts: list[Part] = []
        room = self._columns - 2
        for key, what in KEYS:
            key = key if self.marks.ascii else key.replace("left right", "\u2190\u2192")
            room -= len(key) + len(what) + 3
            if room < -2:
                break
            parts += [(key, "value"), (f" {what}  ", "label")]
        return parts

    def _instead(self, view: View) -> str:
        if view.step is not None:
            return "make the window larger to see the curves"
        name = said(view.folder, self.marks.ascii)
        if view.folder in self.watched.waiting:
            return f"waiting for {name}: there is no run in it yet"
        return f"{name}: no step yet" if self.watched.views else "looking"

    def notice(self, text: str) -> None:
        """Say something in the last line for a while."""
        self._notice = said(text, self.marks.ascii)
        self.show()
        self.set_timer(8.0, self._quiet)

    def _quiet(self) -> None:
        self._notice = ""
        self.show()

    def on_listed_moved(self, message: Listed.Moved) -> None:
        if message.listed.id == "runs" and isinstance(message.listed.key, Path):
            self._chosen = message.listed.key
            self.watched.drawn = 0
            self._window = Window()
            self.show()

    def on_listed_opened(self, message: Listed.Opened) -> None:
        view = self.view
        if view is None:
            return
        if message.listed.id == "runs":
            self._open(view.name, facts(view))
        elif message.listed.cursor < len(self._entries):
            entry = self._entries[message.listed.cursor]
            self._open(title(entry), card(entry))

    def _open(self, heading: str, found: list[tuple[str, str]]) -> None:
        self.push_screen(Card(said(heading, self.marks.ascii), found, self.marks))

    @property
    def _window(self) -> Window:
        return self.screen_stack[0].query_one(Curves).window

    @_window.setter
    def _window(self, window: Window) -> None:
        self.screen_stack[0].query_one(Curves).window = window

    def _through(self, change: Callable[[View], Window]) -> None:
        """Other steps are shown, if there are any."""
        if self.view is not None and self.view.step is not None:
            self._window = change(self.view)
            self.show()

    def action_zoom(self, factor: float) -> None:
        self._through(lambda view: self._window.zoomed(factor, view))

    def action_move(self, share: float) -> None:
        self._through(lambda view: self._window.moved(share, view))

    def action_follow(self) -> None:
        self._through(lambda view: self._window.held(view))

    def action_whole(self) -> None:
        self._through(lambda view: Window())

    def action_scale(self) -> None:
        curves = self.screen_stack[0].query_one(Curves)
        order = ("auto", "log", "linear")
        curves.how = order[(order.index(curves.how) + 1) % len(order)]
        self.notice({"auto": "scale: as it fits", "log": "scale: logarithmic", "linear": "scale: linear"}[curves.how])

    def action_metric(self) -> None:
        """All curves, then each alone."""
        curves = self.screen_stack[0].query_one(Curves)
        order = [None, *(shown_metrics(self.view) if self.view else [])]
        place = order.index(curves.only) if curves.only in order else 0
        curves.only = order[(place + 1) % len(order)]
        self.notice("all curves" if curves.only is None else f"only: {TITLES[curves.only]}")

    def action_optimizer(self) -> None:
        """Draw the next optimizer of the run."""
        names = [str(optimizer["name"]) for optimizer in self.view.optimizers] if self.view is not None else []
        if not names:
            self.notice("this run has one optimizer")
            return
        self.watched.drawn = (self.watched.drawn + 1) % len(names)
        self._window = Window()
        self._wake.set()
        self.notice(f"curves of {names[self.watched.drawn]}")

    def action_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_help(self) -> None:
        self._open("Keys", list(HELP))

    def action_write(self) -> None:
        view = self.view
        if view is None or view.step is None:
            self.notice("there is nothing to report yet")
            return
        self.notice(f"writing the report of {view.name}")
        threading.Thread(target=self._write, args=(view.folder,), daemon=True).start()

    def _write(self, folder: Path) -> None:
        try:
            text = f"written: {_html.write(folder)}"
        except Exception as error:  # an error of a thread would be written over the screen
            text = f"no report: {type(error).__name__}: {error}"
        self.post_message(self.Said(text))


def _events_heading(view: View) -> list[Part]:
    count, ahead = view.total_incidents, view.total_forecasts
    if not count and not ahead:
        return [("no incidents", "label")]
    text = f"{count} incident{'s' * (count != 1)}" + (f", {ahead} forecast{'s' * (ahead != 1)}" if ahead else "")
    listed = sum(1 + len(entry.again) for entry in view.grouped)
    return [(text, "strong"), (f", the newest {listed}" if count > listed else ", newest first", "label")]
