"""The parts of the screen: a line, a list with a cursor, the curves, a card over all. Text and names of styles go in, so that
nothing in a name or a message is taken for markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget

from nanproof.watch._charts import Window, drawn
from nanproof.watch._plot import Marks, Part
from nanproof.watch._runs import View
from nanproof.watch._table import Item
from nanproof.watch._words import wrapped

KINDS = (
    "line",
    "band",
    "cross",
    "axis",
    "label",
    "strong",
    "value",
    "good",
    "refused",
    "incident",
    "forecast",
    "turn",
    "cursor",
    "focused",
)


class Drawn(Widget):
    """Rows of text with the names of their styles."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"drawn--{kind}" for kind in KINDS}
    DEFAULT_CSS = """
    Drawn {
        & > .drawn--line { color: $primary; }
        & > .drawn--band { color: $primary 45%; }
        & > .drawn--cross { color: $error; text-style: bold; }
        & > .drawn--axis { color: $foreground 35%; }
        & > .drawn--label { color: $foreground 65%; }
        & > .drawn--strong { text-style: bold; }
        & > .drawn--value { color: $primary; text-style: bold; }
        & > .drawn--good { color: $success; }
        & > .drawn--refused { color: $error; text-style: bold; }
        & > .drawn--incident { color: $warning; text-style: bold; }
        & > .drawn--forecast { color: $accent; text-style: bold; }
        & > .drawn--turn { color: $warning; text-style: bold; }
        & > .drawn--cursor { background: $foreground 12%; }
        & > .drawn--focused { background: $primary 35%; }
    }
    """

    def rows(self, columns: int, height: int) -> list[tuple[list[Part], str]]:
        """What to draw: parts of a row, and the style below all of them."""
        raise NotImplementedError

    def redraw(self) -> None:
        self._drawn_at = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        if self._drawn_at != self.size:
            self._rows, self._drawn_at = self.rows(self.size.width, self.size.height), self.size
        parts, under = self._rows[y] if y < len(self._rows) else ([], "")
        base = self.rich_style
        if under:
            base += Style(bgcolor=self.get_component_rich_style(f"drawn--{under}").bgcolor)
        segments = [Segment(text, base + self._style(kind)) for text, kind in parts]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _style(self, kind: str) -> Style:
        """Colour and weight, without a background: that is the row's."""
        if not kind:
            return Style.null()
        found = self.get_component_rich_style(f"drawn--{kind}")
        return Style(color=found.color, bold=found.bold)

    _rows: list[tuple[list[Part], str]] = []  # noqa: RUF012
    _drawn_at: Size | None = None


class Line(Drawn):
    """One line of text."""

    def __init__(self, **settings: str) -> None:
        super().__init__(id=settings.get("id"))
        self.parts: list[Part] = []

    def put(self, parts: list[Part]) -> None:
        if parts != self.parts:
            self.parts = parts
            self.redraw()

    def rows(self, columns: int, height: int) -> list[tuple[list[Part], str]]:
        return [(self.parts, "")]


class Listed(Drawn, can_focus=True):
    """Entries below each other, and a cursor that stays on its entry when others come."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-8)", show=False),
        Binding("pagedown", "move(8)", show=False),
        Binding("home", "move(-100000)", show=False),
        Binding("end", "move(100000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another entry."""

        def __init__(self, listed: Listed) -> None:
            super().__init__()
            self.listed = listed

    class Opened(Moved):
        """Enter was pressed on an entry."""

    def __init__(self, *, id: str, marks: Marks, follow: bool) -> None:
        super().__init__(id=id)
        self._marks, self._follow = marks, follow
        self.heading: list[Part] = []
        self.items: list[Item] = []
        self.cursor = 0
        self._top = 0

    @property
    def key(self) -> object:
        """Of the entry under the cursor; None where there is none."""
        return self.items[self.cursor].key if self.items else None

    def put(self, heading: list[Part], items: list[Item]) -> None:
        """Other entries. The cursor stays on its own; at the first of a list that grows at its top, it stays the first."""
        if heading == self.heading and items == self.items:
            return
        key = self.key
        self.heading, self.items = heading, items
        place = next((i for i, item in enumerate(items) if item.key == key), min(self.cursor, max(len(items) - 1, 0)))
        self.cursor = 0 if self._follow and self.cursor == 0 else place
        self.redraw()
        self.refresh(layout=True)

    def action_move(self, by: int) -> None:
        before = self.key
        self.cursor = min(max(self.cursor + by, 0), max(len(self.items) - 1, 0))
        if self.key != before:
            self.redraw()
            self.post_message(self.Moved(self))

    def go_to(self, key: object) -> None:
        """The cursor on the entry of this key."""
        place = next((i for i, item in enumerate(self.items) if item.key == key), self.cursor)
        if place != self.cursor:
            self.cursor = place
            self.redraw()

    def action_open(self) -> None:
        if self.items:
            self.post_message(self.Opened(self))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + sum(len(item.lines) for item in self.items)

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()

    def rows(self, columns: int, height: int) -> list[tuple[list[Part], str]]:
        used = sum(cell_len(text) for text, _ in self.heading)
        rule = self._marks.heavy if self.has_focus else self._marks.floor
        title = [*self.heading, (" " + rule * max(columns - used - 1, 0), "axis")]
        found: list[tuple[list[Part], str]] = [(title, "")]
        each = max((len(item.lines) for item in self.items), default=1)
        fit = max((height - 1) // each, 1)
        self._top = min(max(self._top, self.cursor - fit + 1), self.cursor, max(len(self.items) - fit, 0))
        for i, item in enumerate(self.items[self._top : self._top + fit + 1], self._top):
            under = ("focused" if self.has_focus else "cursor") if i == self.cursor else ""
            found += [(line, under) for line in item.lines]
        return found[:height]


class Curves(Drawn):
    """The curves of one run."""

    def __init__(self, *, marks: Marks) -> None:
        super().__init__(id="curves")
        self._marks = marks
        self.view: View | None = None
        self.window, self.how = Window(), "auto"
        self.only: str | None = None
        self.instead = ""
        """Said where there is nothing to draw."""

    def rows(self, columns: int, height: int) -> list[tuple[list[Part], str]]:
        lines = [] if self.view is None else drawn(self.view, columns, height, self.window, self.how, self.only, self._marks)
        if not lines:
            lines = [[]] * (height // 2) + [[(self.instead[:columns].center(columns), "label")]]
        return [(line, "") for line in lines]


class Card(ModalScreen[None]):
    """All that is known of one thing, over everything else."""

    CSS = """
    Card { align: center middle; background: $background 60%; }
    Card > Text { width: 90%; max-width: 110; height: auto; max-height: 90%; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark", "dismiss", show=False)]

    def __init__(self, title: str, found: Sequence[tuple[str, str]], marks: Marks) -> None:
        super().__init__()
        self._heading, self._found, self._marks = title, found, marks

    def compose(self) -> ComposeResult:
        yield Text(self._heading, self._found, self._marks)


class Text(Drawn, can_focus=True):
    """Headings and texts; scrolls where they are longer than the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
        Binding("home", "scroll(-100000)", show=False),
        Binding("end", "scroll(100000)", show=False),
    ]

    def __init__(self, title: str, found: Sequence[tuple[str, str]], marks: Marks) -> None:
        super().__init__()
        self._heading, self._found, self._marks = title, found, marks
        self._top = 0

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(wrapped(self._found, width, self._marks)) + 2

    def action_scroll(self, by: int) -> None:
        most = len(wrapped(self._found, self.size.width, self._marks)) + 2 - self.size.height
        self._top = min(max(self._top + by, 0), max(most, 0))
        self.redraw()

    def rows(self, columns: int, height: int) -> list[tuple[list[Part], str]]:
        lines: list[list[Part]] = [[(self._heading, "strong")], []]
        lines += [[(heading, "label"), (text, "")] for heading, text in wrapped(self._found, columns, self._marks)]
        hidden = len(lines) - self._top - height
        shown = lines[self._top : self._top + height]
        if hidden > 0 and shown:
            shown[-1] = [(f"{hidden + 1} more lines: down", "label")]
        return [(line, "") for line in shown]
