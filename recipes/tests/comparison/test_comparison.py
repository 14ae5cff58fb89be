"""Runs side by side: the same data comes back, the table says what was measured, and nothing from a file acts or gets lost."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from comparison import compared
from nanproof import UsageError
from nanproof_recipes.comparison.comparison import Arm, Check, Column, Comparison, read, rich_table, write
from nanproof_recipes.comparison.curves import ROOM, charts
from nanproof_recipes.comparison.page import page
from report import made


class Elements(HTMLParser):
    """Every element with its attributes; texts of scripts and styles; and the cells of tables, row by row."""

    def __init__(self, text):
        super().__init__()
        self.found, self.raw, self.rows, self.text, self._inside = [], {"script": [], "style": [], "data": []}, [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.found.append((tag, attrs))
        if tag in ("script", "style", "td", "th"):
            self._inside = "data" if attrs.get("id") == "data" else tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append([attrs.get("class", ""), ""])

    def handle_endtag(self, tag):
        self._inside = None if tag in ("script", "style", "td", "th") else self._inside

    def handle_data(self, data):
        if self._inside in self.raw:
            self.raw[self._inside].append(data)
            return
        self.text += data
        if self._inside:
            self.rows[-1][-1][1] += data.strip()


ARM = compared.small().to_json()["arms"][0]


def text_at(width, comparison):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(rich_table(comparison))
    return out.getvalue()


def test_what_is_written_can_be_read_again(tmp_path):
    """Strict JSON, all digits, NaN and None apart; a second round changes nothing."""
    comparison = compared.small()
    assert write(comparison, tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / "comparison.html"

    def refuse(name):
        raise AssertionError(name)

    text = (tmp_path / "new" / "folder" / "comparison.json").read_text()
    assert json.loads(text, parse_constant=refuse) == comparison.to_json()
    again = read(tmp_path / "new" / "folder")
    assert again.to_json() == comparison.to_json()
    assert again.columns == comparison.columns and again.checks == comparison.checks
    for one, other in zip(again.arms, comparison.arms, strict=True):
        assert one.values.keys() == other.values.keys()
        for key, value in other.values.items():
            assert one.values[key] == value or (math.isnan(value) and math.isnan(one.values[key]))
        assert str(one.curves) == str(other.curves)
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {f"comparison.{x}" for x in ("json", "md", "html")}


def test_text_that_reads_as_a_number_stays_text():
    columns = (Column("word", "word", "text"), Column("number", "number"))
    given = Comparison("r", "t", "l", columns, (Arm("a", "", "finished", {"word": "nan", "number": -math.inf, "more": "x"}),))
    values = Comparison.from_json(given.to_json()).arms[0].values
    assert values == {"word": "nan", "number": -math.inf, "more": "x"}


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"arms": [3]},
        {"arms": 5},
        {"columns": [{"key": "a", "title": "a", "form": "colour", "note": ""}]},
        {"title": 7},
        {"settings": []},
        {"arms": [{"name": "a"}]},
        {"arms": [{**ARM, "curves": {"loss": ["12"]}}]},
        {"arms": [{**ARM, "values": {"loss": [1]}}]},
    ],
)
def test_another_file_is_refused(tmp_path, change):
    """What is not a comparison raises one kind of error, which names the file."""
    (tmp_path / "comparison.json").write_text(json.dumps({**compared.small().to_json(), **change}))
    with pytest.raises(UsageError, match="comparison"):
        read(tmp_path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match=r"comparison\.json cannot be read"):
        read(tmp_path)
    (tmp_path / "comparison.json").write_text("{" * 100_000)
    with pytest.raises(UsageError, match=r"comparison\.json"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write(compared.small(), tmp_path / "file")


def test_curves_have_one_length_and_steps_are_numbers():
    with pytest.raises(UsageError, match="step 2, loss 1"):
        Arm("a", "", "", {}, curves={"step": [1, 2], "loss": [1.0]})
    with pytest.raises(UsageError, match="no whole number"):
        Arm("a", "", "", {}, curves={"step": [1, None], "loss": [1.0, 2.0]})


def test_the_table_says_what_was_measured():
    """Each form of a column in its way; NaN is marked, what was not measured is a dash, and neither is a zero."""
    lines = compared.small().table().splitlines()
    assert lines[0] == "| arm | last loss | accuracy | NaN parameters | skipped | time | ended |"
    assert lines[1] == "|---|---:|---:|---:|---:|---:|---|"
    assert lines[2] == "| broken | 0 | 0.0 % | 1,234,567 | – | 6 min 21 s | finished |"
    assert lines[4] == "| patched 001 | **nan** | – | 1,234,567 | – | 6 min 21 s | raised ValueError |"
    assert lines[6] == "| fixed | 0.42 | 53.3 % | 0 | 0 | 6 min 21 s | finished |"


@pytest.mark.parametrize(
    ("value", "form", "said"),
    [
        (None, "number", "–"),
        (math.nan, "seconds", "**nan**"),
        (math.inf, "share", "**inf**"),
        (-math.inf, "count", "**-inf**"),
        ("nan", "text", "**nan**"),
        ("fp16 | x", "text", "fp16 \\| x"),
        ("", "text", "–"),
        (True, "number", "yes"),
        (0.1 + 0.2, "number", "0.3"),
        (123456.7, "number", "123,457"),
        (2e-4, "number", "0.0002"),
        (1.7976931348623157e308, "number", "1.798e+308"),
        (10**18, "count", "1e+18"),
        (0.004, "seconds", "0.0 s"),
        (-3.0, "seconds", "-3"),
        (1.0, "share", "100.0 %"),
    ],
)
def test_values_are_written_by_their_form(value, form, said):
    one = Comparison("r", "t", "l", (Column("x", "x", form),), (Arm("a", "", "finished", {"x": value}),))
    assert one.table().splitlines()[2] == f"| a | {said} | finished |"


def test_the_text_tells_all_but_the_curves(tmp_path):
    write(compared.small(), tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert compared.small().table() in text
    for said in (
        "# Unit conversion, fine-tuned in fp16",
        "- Holds: The broken arm ends with NaN parameters. 1,234,567 of 1,234,567",
        "- **Does not hold**: The guarded arm",
        "- last loss: As the trainer logged it",
        "### patched 001",
        "Ended: raised ValueError: Attempting to unscale FP16 gradients.",
        "- Step 1 made 120 of 120 LoRA tensors NaN.",
        "| learning rate | 0.0002 |",
        "| cap | inf |",
        "torch 2.13.0, nanproof 0.8",
    ):
        assert said in text


def test_a_terminal_of_any_width():
    """A row an arm; in pieces where all columns do not fit, and one value below the other where not even one does. No line is too
    long, and no value is cut."""
    comparison = compared.small()
    values = {cell for row in comparison.table().replace("**", "").splitlines()[2:] for cell in row.strip("| ").split(" | ")}
    for width, pieces in ((200, 1), (80, 1), (60, 2), (40, 3), (20, 0)):
        text = text_at(width, comparison)
        assert max(map(len, text.splitlines())) <= width
        starts = [line[:11].strip() for line in text.splitlines()]
        arms = [arm.name for arm in comparison.arms]
        assert [name for name in starts if name in arms] == arms * pieces, width
        known = " ".join(text.split())
        assert all(value in known for value in values - {"raised ValueError", "patched 000", "patched 001"}), width
    lines = [line.split() for line in text_at(20, comparison).splitlines() if line.strip()]
    assert lines[0] == ["arm", "broken"] and sum(line[0] == "arm" for line in lines) == 5


def test_a_terminal_is_not_steered():
    text = text_at(80, compared.hostile())
    assert "\\x1b[2J\\x07" in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_the_page_says_it_without_scripts(tmp_path):
    """Table, checks, story, samples, settings: parsed, and compared with the values."""
    given = compared.small(tmp_path)
    seen = Elements(page(given, tmp_path))
    told = {row[0][1]: row[1:] for row in seen.rows}
    assert told["broken"][0] == ["num", "0"] and told["broken"][3] == ["num", "–"]
    assert told["patched 001"][0] == ["num nonfinite", "nan"] and told["patched 001"][1] == ["num", "–"]
    assert told["fixed"][1] == ["num", "53.3 %"] and told["arm"][1] == ["num", "accuracy"]
    assert sum("nonfinite" in cell[0] for row in seen.rows for cell in row) == 1
    assert [cell[1] for cell in seen.rows[-1]] == ["How many feet are 3 km?", "9843", "<answer>984</answer>", "wrong"]
    for said in (
        given.title,
        given.lead,
        "1 of 2 hold",
        "does not hold",
        "fp16 weights, AdamW with eps 1e-8",
        "The trainer logged loss 0.0",
        "raised ValueError: Attempting to unscale",
        "SmolLM2-135M",
        "torch 2.13.0, nanproof 0.8",
        "150 steps recorded, 3 refused",
    ):
        assert said in seen.text, said
    assert {a["href"] for tag, a in seen.found if tag == "a" and not a["href"].startswith("#")} == {"./runs/guarded/report.html"}
    ids = [a["id"] for _, a in seen.found if "id" in a]
    assert len(ids) == len(set(ids)) and {a["href"][1:] for tag, a in seen.found if tag == "a" and a["href"][0] == "#"} <= set(
        ids
    )


def test_incidents_of_a_run_are_in_the_page(tmp_path):
    given = compared.small(tmp_path)
    (data,) = Elements(page(given, tmp_path)).raw["data"]
    cards = json.loads(data)["incidents"]
    assert [len(of_arm) for of_arm in cards] == [0, 0, 0, 3, 0]
    first = cards[3][0]
    assert (first["step"], first["action"], first["message"]) == (40, "skipped", "the loss is nan")
    assert first["diagnosis"]["fix"] == "Add an epsilon." and first["diagnosis"]["verified"]


@pytest.mark.parametrize("run", ["gone", "../outside", "/etc", "javascript:x", "a\0b", "x" * 5000, ""])
def test_a_run_that_is_not_there(tmp_path, run):
    """Said so, and never looked for outside of the comparison's folder."""
    made.write_run(tmp_path / "outside", 10, bad=(3,))
    folder = tmp_path / "inside"
    given = compared.small()
    write(replace(given, arms=(replace(given.arms[3], run=run),)), folder)
    seen = Elements((folder / "comparison.html").read_text())
    assert "The folder of its run is not here." in seen.text and "recorded" not in seen.text
    assert not [a for tag, a in seen.found if tag == "a" and not a["href"].startswith("#")]


def test_two_runs_in_a_folder_are_none(tmp_path):
    for name in ("a", "b"):
        made.write_run(tmp_path / "runs" / name, 10)
    given = compared.small()
    seen = Elements(page(replace(given, arms=(replace(given.arms[3], run="runs"),)), tmp_path))
    assert "The folder of its run is not here." in seen.text


def test_no_arms_and_no_columns(tmp_path):
    empty = Comparison("r", "Nothing", "Nothing was run.", (), ())
    path = write(empty, tmp_path)
    seen = Elements(path.read_text())
    assert "No arm was run." in seen.text and json.loads(seen.raw["data"][0])["charts"] == []
    assert "No arm was run." in (tmp_path / "comparison.md").read_text()
    assert read(tmp_path) == empty
    assert text_at(80, empty).split() == ["arm", "ended"]
    bare = replace(empty, columns=compared.COLUMNS, arms=(Arm("a", "", "finished", {}),))
    assert bare.table().splitlines()[2] == "| a | – | – | – | – | – | finished |"
    assert [cell[1] for cell in Elements(page(bare, tmp_path)).rows[1]] == ["a", *["–"] * 5, "finished"]


def test_hostile_strings_are_only_text(tmp_path):
    """The same elements as with plain strings in their place; data that cannot leave its element; a page that stays small."""
    given = compared.hostile(tmp_path)
    plain = json.loads(json.dumps(given.to_json()))
    words = {text: f"w{i}" for i, text in enumerate(made.HOSTILE)}

    def tame(value):
        if isinstance(value, dict):
            return {words.get(key, key): tame(item) for key, item in value.items()}
        if isinstance(value, list):
            return [tame(item) for item in value]
        return words.get(value, value) if isinstance(value, str) else value

    text = page(given, tmp_path)
    seen, tamed = Elements(text), Elements(page(Comparison.from_json(tame(plain)), tmp_path))
    assert [tag for tag, _ in seen.found] == [tag for tag, _ in tamed.found]
    assert len(text.encode()) < 1_500_000
    assert not set(seen.raw["data"][0]) & set("<>&\u2028\u2029") and json.loads(seen.raw["data"][0])
    assert "{{lead}}" in seen.text and "\x1b" not in text and "\u202e" not in text
    allowed = set("id class title href dir scope type role tabindex lang charset name content http-equiv hidden".split())
    assert all(key in allowed or key.startswith(("aria-", "data-")) for _, a in seen.found for key in a)
    assert all(a["href"].startswith("#") for tag, a in seen.found if tag == "a")
    write(given, tmp_path)
    assert "<script" not in (tmp_path / "comparison.md").read_text() and "<img" not in (tmp_path / "comparison.md").read_text()


def test_only_the_files_own_scripts_may_run(tmp_path):
    seen = Elements(page(compared.small(), tmp_path))
    (policy,) = [a["content"] for tag, a in seen.found if tag == "meta" and "http-equiv" in a]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for kind in ("script", "style"):
        sums = [
            f"'sha256-{base64.b64encode(hashlib.sha256(said.encode()).digest()).decode()}'"
            for said in seen.raw[kind]
            if said.strip()
        ]
        assert rules[f"{kind}-src"].split() == sums
    assert rules["default-src"] == rules["connect-src"] == "'none'"


def line_of(values, steps=None, name="loss"):
    """The line that is drawn of one curve."""
    given = {"step": list(range(len(values))) if steps is None else steps, name: values}
    made_of = charts([Arm("a", "", "", {}, curves=given)])
    return made_of["width"], (made_of["charts"][0]["lines"][0] if made_of["charts"] else None)


def test_a_short_curve_is_drawn_as_it_is():
    """Zero stays zero, None is no point, NaN is a gap with a mark."""
    width, line = line_of([2.0, 0.0, None, math.nan, math.nan, 1.0, -math.inf])
    assert width == 1 and line["x"] == [0, 1, 3, 4, 5, 6]
    assert line["mean"] == [2.0, 0.0, None, None, 1.0, None]
    assert line["bad"] == [[3, 4, 2, "nan"], [6, 6, 1, "inf"]] and line["count"] == 6
    assert line_of([None, None]) == (1, None)


def test_a_chart_for_every_name_the_losses_first():
    """With a line for every arm that has it, and none for one that logged nothing of it. The rest of many is named."""
    first = {"step": [0, 1], "grad_norm": [1.0, 2.0], "valid_text_loss": [None, 3.0], "kl": [1.0, 1.0], "loss": [1.0, math.nan]}
    second = {
        "step": [0, 1],
        "text_loss": [1.0, 1.0],
        "valid_text_loss": [None, None],
        "latent_loss": [2.0, 1e30],
        "lr": [1.0, 1.0],
    }
    found = charts([Arm("a", "", "", {}, curves=first), Arm("b", "", "", {}, curves=second)])
    titles = ["Loss", "Valid text loss", "Text loss", "Latent loss", "Gradient norm", "Learning rate", "KL"]
    assert [chart["title"] for chart in found["charts"]] == titles and found["left_out"] == []
    assert [[line["arm"] for line in chart["lines"]] for chart in found["charts"]] == [[0], [0], [1], [1], [0], [1], [0]]
    many = {f"curve_{i}": [1.0] for i in range(15)}
    found = charts([Arm("a", "", "", {}, curves={**many, "nothing": [None], "loss": [1.0]})])
    assert len(found["charts"]) == 12 and found["left_out"] == [f"Curve {i}" for i in range(11, 15)]


def test_a_tail_of_nan_is_one_mark_to_the_end():
    _, line = line_of([2.0] * 60 + [math.nan] * 140)
    assert line["bad"] == [[60, 199, 140, "nan"]] and line["x"][-1] == 199


WORDS = "\u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442"
SAID = f"first\tline\n  second, indented\n{WORDS}\r\n\x00\x1b[31m\x07\u202e<script>window.hacked=1</script>\n"


def test_samples_keep_their_lines_and_do_nothing(tmp_path):
    """All of a text of 400 characters is there; what cannot be seen is written as an escape."""
    text = (SAID + "lorem ipsum " * 40)[:400]
    arm = Arm("a", "", "", {}, samples=({"said": text, "long": "x" * 5000}, {"said": "short"}))
    page = write(Comparison("r", "t", "l", (), (arm,)), tmp_path).read_text()
    cell = page[page.index("<td><bdi>first") :].partition("</bdi>")[0]
    shown = rf"{WORDS}\r" + "\n" + r"\x00\x1b[31m\x07\u202e&lt;script&gt;window"
    assert cell.startswith(f"<td><bdi>first\tline\n  second, indented\n{shown}")
    assert cell.endswith(text[-60:]) and not any(c in page for c in "\x00\x1b\x07\u202e\r")
    assert "x" * 1000 + "\u2026 (5,000 characters)" in page and "x" * 1001 not in page
    assert "white-space: pre-wrap" in page


def test_without_steps_values_are_counted():
    made_of = charts([Arm("a", "", "", {}, curves={"kl": [1.0, 2.0]})])
    assert made_of["charts"][0]["lines"][0]["x"] == [0, 1] and made_of["charts"][0]["title"] == "KL"


def test_a_step_taken_again_replaces_the_number_and_not_the_nan():
    _, line = line_of([1.0, 2.0, math.nan, 7.0, 8.0], steps=[0, 1, 2, 1, 2])
    assert line["x"] == [0, 1, 2] and line["mean"] == [1.0, 7.0, 8.0]
    assert line["bad"] == [[2, 2, 1, "nan"]]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_no_nan_is_lost_when_a_curve_is_thinned(share):
    """Against a plain count: every value that is not finite lies in a mark, and marks count all of them; extremes are kept."""
    rng = random.Random(7)
    values = [math.nan if rng.random() < share else rng.choice([math.inf, 1.0]) if rng.random() < share / 10 else rng.gauss(0, 1)
              for _ in range(40_000)]  # fmt: skip
    width, line = line_of(values)
    bad = [i for i, x in enumerate(values) if not math.isfinite(x)]
    assert sum(count for _, _, count, _ in line["bad"]) == len(bad)
    inside = {i for first, last, *_ in line["bad"] for i in range(first, last + 1)}
    assert set(bad) <= inside
    assert len(line["x"]) <= 1500 and len(line["bad"]) <= 1500 and width > 1
    finite = [x for x in values if math.isfinite(x)]
    if finite:
        assert max(x for x in line["high"] if x is not None) == pytest.approx(max(finite), rel=1e-4)
        assert min(x for x in line["low"] if x is not None) == pytest.approx(min(finite), rel=1e-4)


def test_twelve_long_arms_make_a_small_page(tmp_path):
    """And with a run each, full of incidents, it is still below the limit."""
    given = compared.large()
    for i in range(12):
        lines = [
            made.incident_line(k, message="m" * 3000, diagnosis=made.diagnosis(evidence=["e" * 700] * 5, where=f"layer.{k}"))
            for k in range(200)
        ]
        made.write_run(tmp_path / f"run{i}", 250, incidents=lines)
    arms = tuple(
        replace(arm, run=f"run{i}", samples=({"question": "q" * 300, "said": "<" * 300},) * 200)
        for i, arm in enumerate(given.arms)
    )
    path = write(replace(given, arms=arms), tmp_path)
    assert path.stat().st_size < 1_500_000
    (data,) = Elements(path.read_text()).raw["data"]
    told = json.loads(data)
    assert sum(len(line["x"]) for chart in told["charts"] for line in chart["lines"]) <= ROOM
    assert all(told["incidents"])


def test_torch_is_not_needed(tmp_path):
    compared.small(tmp_path)
    code = "import sys; from nanproof_recipes.comparison import Comparison, rich_table, write; "
    code += "c = Comparison('r', 't', 'l', (), ()); write(c, sys.argv[1]); rich_table(c); "
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_a_check_is_a_plain_truth_value():
    given = replace(compared.small(), checks=(Check("a", "b", 1),))
    assert given.to_json()["checks"] == [{"claim": "a", "measured": "b", "holds": True}]


def test_no_width_cuts_a_column_off():
    """Heads of several words, some of which rich would leave whole: every last value of every column is there at any width."""
    titles = ["reward", "reward_std", "logged loss", "NaN/Inf steps", "bad logits", "NaN tensors", "refused", "rolled back"]
    columns = tuple(Column(f"c{i}", title, "count") for i, title in enumerate(titles))
    values = {f"c{i}": 701 + i for i in range(len(titles))}
    made = Comparison("r", "t", "l", columns, (Arm("guarded-seed-1", "", "finished", values),))
    for width in range(50, 140):
        console = Console(width=width, file=io.StringIO())
        console.print(rich_table(made))
        words = console.file.getvalue().split()
        assert {str(value) for value in values.values()} <= set(words), width
        assert {word for title in titles for word in title.split()} <= set(words), width
