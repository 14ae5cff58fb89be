"""The pages of `nanproof watch --web`: the report of each run, made again when there is more of it, and a list where there are
several. What is served, without a word of HTTP; `_serve` has that."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
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

_CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
INDEX_CSP = f"{_CLOSED}; style-src 'unsafe-inline'"
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"<>]*)">')


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

    def __init__(self, text: str, kind: str, csp: str) -> None:
        self.body = text.encode("utf-8", "backslashreplace")
        self.packed = gzip.compress(self.body, 5, mtime=0) if len(self.body) > 1000 else b""
        self.tag = f'W/"{hashlib.sha256(self.body).hexdigest()[:32]}"'
        self.kind, self.csp = kind, csp


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
            if path == "/":
                return self._of(0, "page") if len(self._runs) == 1 and not self._watched.waiting else self._index()
            if path == "/data":
                return self._of(0, "data") if self._runs else None
            return next(
                (self._of(i, what) for i in range(len(self._runs)) for what in ("page", "data") if path == at(i, what)), None
            )

    def _of(self, number: int, what: str) -> Answer:
        folder = self._runs[number]
        view = self._watched.views[folder]
        made = self._made.get((number, what))
        if made is None or made[0] is not view:
            run = self._watched.run(folder)
            if what == "page":
                text = self._pages.page(run)
                answer = Answer(text, "text/html; charset=utf-8", policy_of(text))
            else:
                answer = Answer(
                    json.dumps(self._pages.data(run), allow_nan=False, separators=(",", ":")), "application/json", _CLOSED
                )
            made = self._made[number, what] = view, answer
        return made[1]

    def _index(self) -> Answer:
        views = [self._watched.views[folder] for folder in self._runs]
        rows = [
            f'<li><a href="{at(i, "page")}">{escape(said(view.name))}</a> {escape(", ".join(full_status(view)))}</li>'
            for i, view in enumerate(views)
        ]
        rows += [f"<li>{escape(said(path))}: waiting, there is no run in it yet</li>" for path in self._watched.waiting]
        return Answer(_INDEX.replace("ROWS", "\n".join(rows)), "text/html; charset=utf-8", INDEX_CSP)


def policy_of(page: str) -> str:
    """What the page says may run on it, as a header too: a frame around it can only be forbidden there. A page that says nothing
    may run nothing."""
    found = _POLICY.search(page[:5000])
    return f"{found[1]}; frame-ancestors 'none'" if found else INDEX_CSP


def at(number: int, what: str) -> str:
    """The path of a run's page, or of its data, which is beside it."""
    return f"/run/{number}/" + ("data" if what == "data" else "")


_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark"><title>nanproof watch</title>
<style>body { font: 16px/1.6 system-ui, sans-serif; max-width: 50em; margin: 3em auto; padding: 0 1em } li { margin: .3em 0 }
a { font-weight: 600 }</style>
</head><body><h1>Runs</h1><ul>
ROWS
</ul></body></html>
"""
