"""The pages of `nanproof watch --web`: the report of each run, made again when there is more of it, and a list where there are
several. What is served, without a word of HTTP; `_serve` has that.

Whoever opens `/` or `/run/0/` gets `entrance`, which shows nothing by itself. Its script fetches `page` beside it, with the
token, and puts that in its place; the report then fetches `data` in the same way. So the token is bound to this page of this
server: the browser never sends it by itself, as it would a cookie.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nanproof.report.folder._run import Run
from nanproof.watch._runs import View, Watched
from nanproof.watch._words import full_status, said


@dataclass(frozen=True, slots=True)
class Pages:
    """Who makes what is served."""

    page: Callable[[Run], str]
    """HTML that fetches `data`, beside it, every now and then."""
    data: Callable[[Run], Any]
    """What strict JSON can hold."""


def report_pages() -> Pages:
    """Those of `nanproof report`."""
    from nanproof.report._html import data, page

    return Pages(lambda run: page(run, live="data"), data)


class Answer:
    """A body, its kind and its tag, which changes with it."""

    def __init__(self, text: str, kind: str) -> None:
        self.body = text.encode("utf-8", "backslashreplace")
        self.packed = gzip.compress(self.body, 5, mtime=0) if len(self.body) > 1000 else b""
        self.tag = f'W/"{hashlib.sha256(self.body).hexdigest()[:32]}"'
        self.kind = kind


class Site:
    """Pages by path. Folders are looked at no more than once in `every` seconds, however many ask."""

    def __init__(self, watched: Watched, pages: Pages, *, every: float = 1.0) -> None:
        self._watched, self._pages, self._every = watched, pages, every
        self._lock = threading.Lock()
        self._looked = -1e9
        self._runs: list[Path] = []
        """By number: a run keeps its address when others come."""
        self._made: dict[tuple[int, str], tuple[View, Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """The page of a path; None where there is none. The path is compared, never opened."""
        with self._lock:
            if time.monotonic() - self._looked >= self._every:
                self._watched.look()
                self._looked = time.monotonic()
                self._runs += [folder for folder in self._watched.views if folder not in self._runs]
            if path == "/page":
                return self._of(0, "page") if len(self._runs) == 1 and not self._watched.waiting else self._index()
            if path == "/data":
                return self._of(0, "data") if self._runs else None
            return next(
                (self._of(i, what) for i in range(len(self._runs)) for what in ("page", "data") if path == at(i) + what), None
            )

    def _of(self, number: int, what: str) -> Answer:
        folder = self._runs[number]
        view = self._watched.views[folder]
        made = self._made.get((number, what))
        if made is None or made[0] is not view:
            run = self._watched.run(folder)
            if what == "page":
                answer = Answer(self._pages.page(run), "text/html; charset=utf-8")
            else:
                answer = Answer(json.dumps(self._pages.data(run), allow_nan=False, separators=(",", ":")), "application/json")
            made = self._made[number, what] = view, answer
        return made[1]

    def _index(self) -> Answer:
        views = [self._watched.views[folder] for folder in self._runs]
        rows = [
            f'<li><a href="{at(i)}">{escape(said(view.name))}</a> {escape(", ".join(full_status(view)))}</li>'
            for i, view in enumerate(views)
        ]
        rows += [f"<li>{escape(said(path))}: waiting, there is no run in it yet</li>" for path in self._watched.waiting]
        return Answer(_INDEX.replace("ROWS", "\n".join(rows)), "text/html; charset=utf-8")


def at(number: int) -> str:
    """The address of a run. What is shown there is beside it."""
    return f"/run/{number}/"


def entrance() -> tuple[str, str]:
    """The page that anybody gets, and its Content-Security-Policy. Nothing of any run is in it: it takes the token from the
    address and fetches the page of the same place with it, so it allows the scripts and styles of those pages too."""
    from nanproof.report._html import SCRIPTS, STYLES, asset, policy

    styles, scripts = [*map(asset, STYLES), _STYLE], [*map(asset, SCRIPTS), _ENTER, _REFRESH]
    return _ENTRANCE, f"{policy(styles, scripts, live=True)}; frame-ancestors 'none'"


_STYLE = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 50em; margin: 3em auto; padding: 0 1em } li { margin: .3em 0 }
a { font-weight: 600 }
"""

_ENTER = """
"use strict";
(async () => {
  const say = (text) => { document.getElementById("said").textContent = text; };
  const given = /^#token=([\\w-]+)$/.exec(location.hash), kept = "nanproof-token";
  const ask = (path, token) => fetch(path, { cache: "no-store", headers: { Authorization: `Bearer ${token}` } });
  const again = () => { if (location.hash.startsWith("#token=")) location.reload(); }; // another address was pasted over this one
  addEventListener("hashchange", again);
  let token = null;
  try { token = sessionStorage.getItem(kept); } catch { } // no storage: the token stays in the address
  try {
    const entered = given && await ask("/enter", given[1]);
    if (entered?.ok) {
      token = await entered.text();
      let rest = `#token=${token}`;
      try { sessionStorage.setItem(kept, token); rest = ""; } catch { }
      history.replaceState(null, "", location.pathname + rest);
    }
    const answer = token === null ? null : await ask("page", token);
    if (!answer || answer.status === 401) return say("Open the address that was printed in the terminal, with its token.");
    if (!answer.ok) return say(await answer.text());
    const page = await answer.text();
    window.nanproofToken = token; // for what the page fetches
    document.open();
    document.write(page);
    document.close();
    addEventListener("hashchange", again); // document.open has removed it
  } catch {
    say("The server does not answer.");
  }
})();
"""

_REFRESH = """
"use strict";
(() => {
  const open = () => { for (const link of document.links) link.hash = `token=${window.nanproofToken}`; }; // for a tab of its own
  open();
  setInterval(async () => {
    const headers = { Authorization: `Bearer ${window.nanproofToken}` };
    const answer = await fetch("page", { cache: "no-store", headers }).catch(() => null);
    document.getElementById("lost").hidden = Boolean(answer?.ok);
    if (!answer?.ok) return;
    const runs = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("runs");
    if (!runs) return location.reload(); // the only run has begun
    document.getElementById("runs").replaceWith(runs);
    open();
  }, 3000);
})();
"""

_HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark"><title>nanproof watch</title>
<style>{_STYLE}</style></head>"""

_ENTRANCE = f"""{_HEAD}<body><p id="said">Opening.</p><noscript>This page needs JavaScript.</noscript>
<script>{_ENTER}</script></body></html>
"""

_INDEX = f"""{_HEAD}<body><h1>Runs</h1><ul id="runs">
ROWS
</ul><p id="lost" hidden>The server does not answer: this is the last that was known.</p><script>{_REFRESH}</script></body></html>
"""
