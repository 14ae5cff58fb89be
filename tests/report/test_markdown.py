"""The text for an issue: what is in it, and what is not."""

from __future__ import annotations

import re
from pathlib import Path

from nanproof.report._markdown import MOST, code, markdown, plain
from nanproof.report.folder._run import Run
from report import made


def text_of(folder):
    return markdown(Run(folder).read())


def test_an_issue_has_all_that_is_asked_for(tmp_path):
    made.write_run(tmp_path / "run", 100, bad=(10, 50))
    text = text_of(tmp_path / "run")
    for said in ("# run", "100 steps recorded, 2 refused", "## Step 10: zero-denominator", "confidence 0.93", "`train.py:12`"):
        assert said in text
    assert "Add an epsilon. (verified: the step was run again with it, and held)" in text and "- the divisor is 0" in text
    assert "| torch 2.13.0 |" in text and "Toy" in text
    rows = re.findall(r"^\| (\**\d+\**) \|", text, re.M)
    assert rows[:11] == [*map(str, range(5, 10)), "**10**", *map(str, range(11, 16))], "the steps around it"


def test_every_cause_comes_once(tmp_path):
    lines = [made.incident_line(i, diagnosis=made.diagnosis(cause="abc"[i % 3])) for i in range(30)]
    made.write_run(tmp_path, 50, incidents=lines)
    assert re.findall(r"^## Step (\d+): (\w)", text_of(tmp_path), re.M) == [("0", "a"), ("1", "b"), ("2", "c")]


def test_no_path_of_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "alice"))
    home = str(Path.home())
    folder = tmp_path / "alice" / "run"
    known = made.diagnosis(
        source=f"{home}/train.py:3", evidence=[f"{home}/train.py:3: x / y", f"in '{home}'"], where=f"{home}/m.py"
    )
    made.write_run(folder, 20, incidents=[made.incident_line(3, message=f"see {home}/log", diagnosis=known)])
    text = text_of(folder)
    assert "~/train.py:3" in text and "alice" not in text.replace("alice-", "")


def test_nothing_that_comes_from_files_acts(tmp_path):
    """No HTML, no table cut by a pipe, no heading or block from within, nobody notified, and short enough to be posted."""
    nasty = [
        *made.HOSTILE,
        "| a | b |",
        "```\n# x\n```",
        "@someone #12",
        "`|`",
        "![x](http://x)",
        "**bold** _it_ ~~no~~",
        "$x$",
        "\\|",
    ]

    def line(i, text):
        known = made.diagnosis(cause=f"cause-{i}", evidence=[text] * 50, fix=text, where=text, source=text, alternatives=[text])
        return made.incident_line(i, message=text, culprits=[[text, "nan"]] * 20, diagnosis=known)

    made.write_run(tmp_path, 50, incidents=[line(i, text) for i, text in enumerate(nasty)])
    for start in range(0, len(nasty), 8):
        (tmp_path / "incidents.jsonl").write_text("".join(line(i, text) for i, text in enumerate(nasty[start : start + 8])))
        text = text_of(tmp_path)
        assert len(text) < MOST
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # what stands between backticks is shown as it is
        assert "<" not in outside.replace("<!-- -->", "") and ">" not in outside.replace("<!-- -->", "")
        assert not re.search(r"[@#]\w", outside) and not re.search(r"(?<!\\)\]\(", outside)
        for row in (row for row in text.splitlines() if row.startswith("|")):
            assert len(re.findall(r"(?<!\\)\|", row)) in (3, 4, 5, 7), row
        assert text.count("```") % 2 == 0
        assert not any(c in text for c in "\x1b\x07\0\u202e\u2028")


def test_what_is_escaped():
    assert plain("a_b _c_ *d* <e> & `f` [g](h) | i") == r"a_b \_c\_ \*d\* &lt;e&gt; &amp; \`f\` \[g\](h) \| i"
    assert plain("@you #3 a @ b") == "@<!-- -->you #<!-- -->3 a @ b"
    assert code("x`y``z|") == "``` x`y``z\u00a6 ```" and code("") == ""


def test_where_there_is_no_room_for_all_incidents_the_rest_is_whole(tmp_path):
    lines = [
        made.incident_line(i, message="m " * 900, diagnosis=made.diagnosis(cause=f"c{i}", evidence=["e " * 400] * 12))
        for i in range(20)
    ]
    made.write_run(tmp_path, 50, incidents=lines)
    text = text_of(tmp_path)
    assert len(text) <= MOST and 3 < len(re.findall("^## Step", text, re.M)) < 8
    assert "more of them are in the run's folder" in text and text.rstrip().endswith("| versions | torch 2.13.0 |")
