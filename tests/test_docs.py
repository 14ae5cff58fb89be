"""What the documents say is true: figures, code, commands, links. What is made from the code is what the code makes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import forked
import nanproof
from nanproof import Forecast, read_incidents, read_steps

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CAUSES = sorted((DOCS / "causes").glob("*.md"))
THEIR_WARNINGS = {"lightning.md": ["-W", "ignore::FutureWarning"], "deepspeed.md": ["-W", "ignore"]}
"""Frameworks that warn about their own use of torch."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^(````*).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path.read_text()), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(next(name for i in range(99) if (name := f"{slug}-{i}" if i else slug) not in found))
    return found


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p not in CAUSES], ids=name_of)
def test_figures_are_the_measured_ones(path):
    """Also the catalogue: it is made from the classes."""
    from tools.tables import filled

    text = path.read_text()
    assert filled(text) == text, "run: python -m tools.tables"


def test_generated_pages_are_what_the_code_makes():
    """A page for each cause and the references: none differs, is missing, or is left over."""
    from tools.tables import generated

    made = generated()
    stale = [name_of(path) for path, text in made.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run: python -m tools.tables (for {stale})"
    assert set(CAUSES) <= made.keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    """Files are there, and the headings that are linked to."""
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]*)?\)", prose(path.read_text())):
        if target.startswith("http"):
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{name_of(path)}: {target}"
        assert not anchor or anchor[1:] in anchors(there), f"{name_of(path)}: {target}{anchor}"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.slow if p.name == "units-sft.md" else (), id=name_of(p))  # trains for 20 s
        for p in DOCUMENTS
        if p not in CAUSES and blocks(p.read_text(), "python")
    ],
)
def test_python_in_the_documents_runs(path, tmp_path, taught):
    """Every ```python block, in order, in one file: what a reader would paste."""
    if path.name == "deepspeed.md":
        pytest.importorskip("deepspeed.runtime")
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks(path.read_text(), "python")))
    strict = ["-W", "error", *THEIR_WARNINGS.get(path.name, [])]
    if path.name == "README.md":  # from nothing, as a reader does; the others with torch imported
        subprocess.run([sys.executable, *strict, str(script)], check=True, cwd=tmp_path, timeout=120)
        return
    share = f"import taught, pathlib; taught.share(pathlib.Path({str(taught)!r}))" if path.name == "units-sft.md" else ""
    done = forked.python(*strict, script, cwd=tmp_path, before=share)
    assert done.returncode == 0, done.stderr


SHOWN = [p for p in CAUSES if blocks(p.read_text(), "python")]
SCRIPTS = [pytest.param(p, id=p.stem, marks=() if i % 3 == 0 else pytest.mark.slow) for i, p in enumerate(SHOWN)]
"""Every third in the ordinary run: `test_zoo.py` runs the same cases."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_on_the_pages_of_causes_show_them(path, monkeypatch):
    """Each prints the diagnosis of its broken run, which names the cause of the page, and none of its healthy one."""
    from zoo.plain import load
    from zoo.registry import CASES

    load()
    monkeypatch.setattr(logging.getLogger("nanproof"), "disabled", True)
    (script,) = blocks(path.read_text(), "python")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(script, path.name, "exec", dont_inherit=True), {"__name__": "page"})
    name = re.search(r"^    t = (\w+)\(fixed\)$", script, flags=re.MULTILINE)[1]
    broken, healthy = (line for line in said.getvalue().splitlines() if line.startswith(("broken:", "fixed:")))
    assert any(broken.startswith(f"broken: cause: {slug} ") for slug in (path.stem, *CASES[name].also)), broken
    assert healthy.strip() == "fixed:"


def test_no_recorded_diagnosis_stumbled():
    """A cause whose `match` raises is said to have failed, among the evidence."""
    from tools import said

    assert not re.search(r"looking for \S+ failed", (said.RESULTS / "said.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["box_size_clamped_after_exp", "infinite_depth_target", "learned_std_crosses_zero"])
def test_what_the_pages_quote_is_said(name):
    """A diagnosis that was recorded for the pages comes again, but for the lines of sources."""
    from tools import said

    said.load()
    recorded = json.loads((said.RESULTS / "said.json").read_text())["cases"][name]
    again = json.loads(json.dumps(said.one(name)[1]))
    logging.disable(logging.NOTSET)

    def timeless(data: object) -> str:
        return re.sub(r"\.py:\d+", ".py", json.dumps(data))

    assert timeless(again["told"]) == timeless(recorded["told"]), "run: python -m tools.said"
    assert again["plain"]["log"] == recorded["plain"]["log"]


def commands_in(text: str) -> list[str]:
    """Command lines of nanproof in blocks and in backticks; placeholders in capitals are arguments like any other."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(text))
    found = [re.search(r"(?:^|-m )nanproof ([a-z]+ ?.*)$", line) for line in lines]
    return [match[1] for match in found if match and "..." not in match[1] and "[" not in match[1]]


@pytest.fixture(scope="module")
def called():
    """`tools.reference_cli.called`, with the commands made once and not for every line."""
    from tools import reference_cli

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_cli, "commands", cache(reference_cli.commands))
        yield reference_cli.called


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if commands_in(p.read_text())], ids=name_of)
def test_commands_in_the_documents_are_understood(path, called):
    """Every command is one, and every option of it. An argument may be missing: prose speaks of `nanproof run --observe`."""
    for line in commands_in(path.read_text()):
        command, args = called(shlex.split(line))
        wrong = ""
        try:
            if command is not None:
                command.make_context(command.name, args)
        except Exception as error:
            wrong = "" if type(error).__name__ == "MissingParameter" else str(error)
        assert not wrong, f"{name_of(path)}: nanproof {line}: {wrong}"


def test_the_first_steps_can_be_walked(tmp_path):
    """docs/start.md: its first block is train.py; the commands under it do what it says."""
    text = (DOCS / "start.md").read_text()
    (tmp_path / "train.py").write_text(blocks(text, "python")[0])
    statuses = {}
    for line in (line for block in blocks(text, "bash") for line in block.splitlines()):
        program, *args = shlex.split(line)
        if program == "python" or args[0] in ("replay", "check"):
            run = [*(["-m", "nanproof"] if program == "nanproof" else []), *args]
            statuses[args[0]] = forked.python(*run, cwd=tmp_path).returncode
    assert statuses == {"train.py": 0, "replay": 1, "check": 0}


def test_the_lines_that_are_shown_can_be_read(tmp_path):
    """docs/reference/formats.md: each example is a line that the readers take."""
    text = (DOCS / "reference" / "formats.md").read_text()
    shown = dict(re.findall(r"^## (\S+)\n.*?^```json\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    for name in ("steps.jsonl", "incidents.jsonl"):
        (tmp_path / name).write_text(shown[name])
    assert [(r.step, r.action) for r in read_steps(tmp_path)] == [(0, "clipped"), (20, "skipped")]
    assert [i.diagnosis.cause for i in read_incidents(tmp_path)] == ["zero-denominator"]
    assert Forecast.from_json(json.loads(shown["forecasts.jsonl"])).where == "head"
    from nanproof.recover.data._quarantine import _entry

    assert _entry(shown["quarantine.jsonl"].encode()).index == 17


def test_every_finding_of_the_doctor_is_described():
    finding = pytest.importorskip("nanproof.logs.judge._finding")
    text = (DOCS / "doctor.md").read_text()
    assert [kind for kind in finding.KINDS if f"`{kind}`" not in text] == []


def test_every_public_name_is_in_the_reference():
    headings = set(re.findall(r"^### (\w+)$", (DOCS / "reference" / "api.md").read_text(), flags=re.MULTILINE))
    assert set(nanproof.__all__) <= headings


def test_every_document_is_in_the_navigation():
    """And nothing else is."""
    yaml = pytest.importorskip("yaml")
    spec = importlib.util.spec_from_file_location("mkdocs_hook", ROOT / "tools" / "mkdocs_hook.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    nav = hook.expanded(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(hook.pages_in(nav)) == there


def test_the_site_builds_and_fetches_nothing(tmp_path):
    """Strict: a link or an anchor that leads nowhere fails. No page loads a script, style or picture from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    done = forked.python(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
