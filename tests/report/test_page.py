"""The page as text: one file, small, and with nothing in it that was not meant to be there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from nanproof.report import _html as html
from nanproof.report.folder._run import Run
from report import made


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.texts.setdefault(self.found[-1][0] + (self.found[-1][1].get("id") or ""), []).append(data)


@pytest.fixture
def big(tmp_path):
    """A run of 20,000 steps with 200 parameters, and 60 modules that are observed."""
    folder = tmp_path / "big"
    made.write_run(folder, 20_000, made.NAMES, [f"model.layers.{i}" for i in range(60)], bad=range(1000, 20_000, 1000))
    return folder


def test_a_long_run_makes_a_small_page(big):
    """Under a megabyte, from 50 megabytes, in memory that does not grow with the run: 40 megabytes are what it takes."""
    code = "import sys; from pathlib import Path; from nanproof.cli._report import write; "
    code += "write(Path(sys.argv[1])); "
    code += "about = Path('/proc/self/status'); print(about.read_text() if about.exists() else '')"
    said = subprocess.run([sys.executable, "-c", code, str(big)], check=True, capture_output=True, text=True, timeout=120).stdout
    assert (big / "report.html").stat().st_size < 1_000_000
    if most := re.search(r"VmHWM:\s*(\d+) kB", said):
        assert int(most[1]) < 75 << 10


def hostile(folder):
    def line(i, text):
        known = made.diagnosis(cause=text, evidence=[text] * 5, fix=text, where=text, source=text, alternatives=[text])
        return made.incident_line(i, message=text, culprits=[[text, "nan"]], diagnosis=known, bundle=text)

    made.write_run(folder, 30, names=made.HOSTILE, incidents=[line(i, text) for i, text in enumerate(made.HOSTILE)])
    return folder


def test_data_cannot_leave_its_element(tmp_path):
    """The elements of a page full of hostile strings are those of a plain one; its data is strict JSON."""
    made.write_run(tmp_path / "plain", 30, bad=(3,))
    plain = Elements(html.page(Run(tmp_path / "plain").read()))
    name = '<b onclick=x>&amp;"{{summary}}'
    page = Elements(html.page(Run(hostile(tmp_path / name)).read()))
    assert [tag for tag, _ in page.found] == [tag for tag, _ in plain.found]
    (text,) = page.texts["scriptdata"]
    data = json.loads(text)
    assert data["name"] == name and data["live"] is None
    assert not set(text) & set("<>&\u2028\u2029")


@pytest.mark.parametrize("live", [None, "data"])
def test_only_the_files_own_scripts_may_run(live, tmp_path):
    """The policy names the checksum of every script and style, and of nothing else; only a live page may fetch."""
    made.write_run(tmp_path, 30)
    text = html.page(Run(tmp_path).read(), live=live)
    page = Elements(text)
    (policy,) = [a["content"] for tag, a in page.found if tag == "meta" and "http-equiv" in a]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for kind in ("script", "style"):
        sums = [f"'sha256-{base64.b64encode(hashlib.sha256(said.encode()).digest()).decode()}'" for said in page.texts[kind]]
        assert rules[f"{kind}-src"].split() == sums
    assert rules["default-src"] == "'none'" and rules["connect-src"] == ("'self'" if live else "'none'")
    assert not any({"src", "srcdoc", "style", "onclick", "onload"} & set(a) for _, a in page.found)
    assert all(a["href"].startswith("#") for tag, a in page.found if "href" in a)
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")


def test_the_library_is_shipped_with_its_licence():
    from importlib.resources import files

    folder = files("nanproof.report") / "assets" / "uplot"
    version = re.search(r"uPlot (\S+),", (folder / "VERSION").read_text())[1]
    assert f"(v{version})" in (folder / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert "MIT License" in (folder / "LICENSE").read_text()


def test_a_page_without_a_step(tmp_path):
    page = Elements(html.page(Run(tmp_path).read()))
    assert json.loads(page.texts["scriptdata"][0])["curves"]["steps"] == []
