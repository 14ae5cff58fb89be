"""The report as one HTML file: opens from disk, asks nobody for anything, and runs no code but its own.

Data goes in as JSON that no parser of HTML can take for markup. Scripts and styles are allowed by their checksums alone, so
that nothing else on the page could run even if it got there.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from nanproof.report._out import put
from nanproof.report.folder._run import Run
from nanproof.report.folder._tokens import Tokens, find
from nanproof.report.page._contents import contents

PAGE = "report.html"
STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "base.js", "plots.js", "terms.js", "heat.js", "cards.js", "page.js")


def data(run: Run, tokens: Tokens | None = None) -> dict[str, Any]:
    """What the page shows, as strict JSON holds it. The newest steps are those that `run.poll` has read."""
    return contents(run, find(run.folder) if tokens is None else tokens)


def page(run: Run, *, tokens: Tokens | None = None, live: str | None = None) -> str:
    """The page. With `live`, the address it fetches its newest data from every two seconds, relative to its own; without, it
    fetches nothing."""
    told = data(run, tokens)
    styles, scripts = map(asset, STYLES), map(asset, SCRIPTS)
    return document(f"{told['name']}: nanproof report", _body(told), {**told, "live": live}, styles, scripts, live=live)


def write(folder: Path) -> Path:
    """Write `report.html` into a run's folder, completely or not at all, and return its path."""
    path = folder / PAGE
    put(path, page(Run(folder).read()), folder)
    return path


def document(
    title: str, body: str, told: dict[str, Any], styles: Iterable[str], scripts: Iterable[str], *, live: str | None = None
) -> str:
    """Return a whole file around a body that is safe already, with its data. No other style or script is allowed in it."""
    styles, scripts = list(styles), list(scripts)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(styles, scripts, live=live is not None)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{html.escape(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
        "</head>",
        body,
        f'<script type="application/json" id="data">{embedded(told)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def policy(styles: Iterable[str], scripts: Iterable[str], *, live: bool) -> str:
    """Return the Content-Security-Policy of a page: these styles and scripts, no others; with `live` it may fetch from its own
    server."""
    allowed = {
        "default-src": "'none'",
        "script-src": " ".join(map(_checksum, scripts)),
        "style-src": " ".join(map(_checksum, styles)),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{what} {whom}" for what, whom in allowed.items())


def embedded(value: Any) -> str:
    """JSON inside an element: without any character that ends it, opens a comment, or ends a line for some parser."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _body(told: dict[str, Any]) -> str:
    """The places that the scripts fill. What is written here is all that is seen without them."""
    name, summary = html.escape(told["name"]), html.escape(told["summary"])
    return asset("body.html").replace("{{name}}", name).replace("{{summary}}", summary)


@cache
def asset(name: str) -> str:
    """A file of the package's `assets`."""
    return (files("nanproof.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _checksum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
