"""What the report says of a run, compared with the run itself."""

from __future__ import annotations

import base64
import copy
import json
import math
import random
import shutil
import struct
import time
from pathlib import Path

import pytest

from nanproof.report._markdown import markdown
from nanproof.report.folder._run import Run
from nanproof.report.folder._tokens import Tokens
from nanproof.report.page._contents import contents
from nanproof.report.page._grids import rows
from report import made

VERSION_1 = Path(__file__).parents[2] / "version_1"


def told(folder, **kwargs):
    data = contents(Run(folder, **kwargs).read(), Tokens())
    return json.loads(json.dumps(data, allow_nan=False))  # strict JSON, whatever the run holds


def close(x, y):
    return (x is None and not math.isfinite(y)) or (x is not None and math.isclose(x, y, rel_tol=1e-4))


@pytest.mark.parametrize("buckets", [2000, 64])
def test_curves_are_those_of_the_steps(buckets, tmp_path):
    """Every bucket against a slow walk over the steps: lowest, highest, mean, how many were bad, refused, clipped."""
    steps = made.write_run(tmp_path, 500, bad=(40, 41, 300))
    curves = told(tmp_path, buckets=buckets)["curves"]
    width = curves["width"]
    assert width == (1 if buckets == 2000 else 8)
    for i, start in enumerate(curves["steps"]):
        inside = [one for one in steps if start <= one[0] < start + width]
        for metric, place in (("loss", 1), ("grad_norm", 2)):
            values = [one[place] for one in inside]
            finite = [x for x in values if math.isfinite(x)]
            curve = curves[metric]
            assert close(curve["mean"][i], sum(finite) / len(finite) if finite else math.nan)
            assert curve["bad"][i] == len(values) - len(finite)
            if width > 1:
                assert close(curve["low"][i], min(finite, default=math.nan))
                assert close(curve["high"][i], max(finite, default=math.nan))
        assert curves["skipped"][i] == sum(one[3] == "skipped" for one in inside)
        assert curves["clipped"][i] == sum(one[3] == "clipped" for one in inside)
    assert sum(curves["skipped"]) == 3 and "scale" not in curves


def test_steps_around_incidents_are_there_one_by_one(tmp_path):
    steps = made.write_run(tmp_path, 3000, bad=(700, 2999))
    near = told(tmp_path, buckets=64)["near"]
    wanted = [one for one in steps if 650 <= one[0] <= 750 or one[0] >= 2949]
    assert near["steps"] == [one[0] for one in wanted]
    assert all(close(x, one[1]) for x, one in zip(near["loss"], wanted, strict=True))
    assert [near["steps"][i] for i in near["loss_bad"]] == [700, 2999]
    assert [step for step, n in zip(near["steps"], near["skipped"], strict=True) if n] == [700, 2999]
    assert told(tmp_path, buckets=4000)["near"] is None, "the curves show every step"


def cells(grid):
    """A heat map as the page unpacks it: by column, then by row."""
    data = base64.b64decode(grid["cells"])
    unit = (grid["high"] - grid["low"]) / 65532
    special = {0: -1.0, 1: 0.0, 65535: math.inf}
    values = [special.get(c, 10 ** (grid["low"] + (c - 2) * unit)) for c in struct.unpack(f"<{len(data) // 2}H", data)]
    height = len(grid["names"])
    return [values[i : i + height] for i in range(0, len(values), height)]


def alike(found, expected):
    return all(x == y or math.isclose(x, y, rel_tol=2e-3) for x, y in zip(found, expected, strict=True))


def test_a_heat_map_holds_the_norms(tmp_path):
    """Absent, zero, tiny, huge, non-finite: every cell comes back to three digits."""
    norms = [[1e-30, 0.5, None, 0.0], [3e20, 0.25, 7.0, 0.0], [math.nan, math.inf, None, 1e-3]]
    lines = [json.dumps({"v": 1, "kind": "header", "names": ["a", "b", "c", "d"]}) + "\n"]
    lines += [made.step_line(step, norms=row) for step, row in enumerate(norms)]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    grid = told(tmp_path)["norms"]
    assert grid["names"] == ["a", "b", "c", "d"] and grid["steps"] == [0, 1, 2]
    for column, row in zip(cells(grid), norms, strict=True):
        assert alike(column, [-1.0 if y is None else y if math.isfinite(y) else math.inf for y in row])


def test_many_parameters_are_put_together_by_module(tmp_path):
    """Two hundred parameters become the fifty modules they are in, each with its largest; a name without modules stays."""
    made.write_run(tmp_path, 30, names=[*made.NAMES, "head"], bad=(7,))
    run = Run(tmp_path).read()
    grid = contents(run, Tokens())["norms"]
    assert grid["names"] == [*(f"model.layers.{i} (4)" for i in range(50)), "head"] and grid["all"] == 201
    for column, found in zip(run.norms.columns, cells(grid), strict=True):
        assert alike(found, [max(column[4 * i : 4 * i + 4]) for i in range(50)] + [column[200]])


def test_names_without_modules_are_put_together_by_place():
    labels, members = rows([f"p{i}" for i in range(1000)])
    assert len(labels) == len(members) <= 120
    assert sorted(i for group in members for i in group) == list(range(1000))


def test_incidents_are_told_in_full(tmp_path):
    steps = made.write_run(tmp_path, 100, bad=(10, 20))
    data = told(tmp_path)
    first, second = data["incidents"]
    assert (first["number"], first["step"], first["kind"], first["action"]) == (1, 10, "nonfinite-loss", "skipped")
    known = first["diagnosis"]
    assert known["cause"] == "zero-denominator" and known["verified"] and known["fix"] == "Add an epsilon."
    assert known["why"] == "0/0 or x/0: no variance, an empty mask, no signal."
    assert known["place"] == "forward, div in loss_fn" and known["alternatives"] == ["log-of-zero"]
    assert "diagnosis" not in second and (second["same_as"], second["like"], second["like_cause"]) == (None, None, "")
    told_around = [[step, made.number(loss), made.number(norm), action, False] for step, loss, norm, action in steps[7:14]]
    assert first["around"] == told_around and first["around"][3] == [10, "nan", "nan", "skipped", False]
    assert data["marks"] == [[1, 10], [2, 20]] and data["all_incidents"] == 2
    assert data["causes"] == [["zero-denominator", 1], ["nonfinite-loss", 1]]
    assert all(said in data["summary"] for said in ("2 incidents", "100 steps", "2 refused"))


def test_of_thousands_of_incidents_the_first_of_each_cause_and_the_newest_are_shown(tmp_path):
    lines = [made.incident_line(i, diagnosis=made.diagnosis(cause=f"cause-{i % 3}", where=f"layer.{i}")) for i in range(3000)]
    made.write_run(tmp_path, 10, incidents=lines)
    data = told(tmp_path)
    numbers = [card["number"] for card in data["incidents"]]
    assert set(range(1, 16)) <= set(numbers) and numbers[-1] == 3000 and numbers == sorted(numbers) and len(numbers) <= 150
    assert data["all_incidents"] == 3000 and len(data["marks"]) == 3000
    assert len(json.dumps(data)) < 500_000


def recoveries_of(folder):
    (table,) = [table for table in told(folder)["tables"] if table["title"] == "Recoveries"]
    return table["rows"]


def test_going_back_is_told(tmp_path):
    """A rewind and a rollback whose verdict came late; a resume, which has no incident; a salvaged and a healed step; a sample in
    quarantine. What was seen is not looked into."""
    found = made.diagnosis(cause="outlier-batch")
    incidents = [
        made.incident_line(9, "nonfinite-weight", "rewound", restored_step=5, restored_from="memory", stepped_over=2, attempt=1),
        made.incident_line(8, action="salvaged", left_out=[3], message="a; healed: b; back to the copy in memory of step 1"),
        made.incident_line(3, action="healed", remedy="a divisor of 0 is taken as 1", undone=["x"], diagnosis=made.diagnosis()),
        made.incident_line(11, action="rolled-back", restored_step=6, restored_from="step-00000006", attempt=2),
        made.incident_line(12, quarantined=[17], diagnosis=found),
        made.incident_line(13, message="the loss is nan; healed: nothing; the step is taken without sample 3 of the batch"),
    ]
    made.write_run(tmp_path, 1, incidents=incidents)
    steps = [*range(10), *range(5, 8), *range(6, 9), 8, 9, 10, 11, 12, *range(6, 14)]
    (tmp_path / "steps.jsonl").write_text("".join(made.step_line(step) for step in steps))
    data = told(tmp_path)
    assert data["turns"] == [[9, 5], [7, 6], [12, 6]] and "went back 3 times" in data["summary"]
    assert recoveries_of(tmp_path) == [
        ["3", "", "healed", "zero-denominator", "undid a fix that did not hold: x; healed: a divisor of 0 is taken as 1"],
        ["7", "6", "went back", "", "resumed after it had been stopped, or gone back by the program itself"],
        ["8", "", "salvaged", "nonfinite-loss", "took the step without sample 3 of the batch"],
        ["9", "5", "rewound", "nonfinite-weight", "went back to step 5 from memory, skipping 2 batches (attempt 1)"],
        ["11", "6", "rolled-back", "nonfinite-loss", "went back to step 6 from checkpoint step-00000006 (attempt 2)"],
        ["12", "", "skipped", "outlier-batch", "quarantined dataset index 17"],
    ]


def test_a_run_of_version_1_is_read(tmp_path):
    """Its decisions are in the text of the message, which is shown whole. Where it went back to is taken from its steps."""
    shutil.copytree(VERSION_1, tmp_path / "run")
    data = told(tmp_path / "run")
    assert data["broken"] == 0 and [card["action"] for card in data["incidents"]] == ["rewound", "skipped", "rolled-back"]
    assert all((card["outcome"], card["same_as"], card["count"]) == ("", None, 1) for card in data["incidents"])
    healed, back = recoveries_of(tmp_path / "run")
    assert healed[:4] == ["4", "", "rewound", "zero-denominator"]
    assert healed[4].startswith("the loss is nan; ") and healed[4].endswith("; healed: a divisor of 0 is taken as 1")
    assert back[:3] == ["16", "10", "rolled-back"] and back[4].endswith("; back to the checkpoint of step 10 (try 1)")
    assert "the step is taken without sample 1 of the batch" in markdown(Run(tmp_path / "run").read())


def test_incidents_that_are_alike_share_a_card(tmp_path):
    """Only where `same_as` says so: an incident of the same kind that was not diagnosed is on its own."""
    made.write_run(
        tmp_path,
        60,
        incidents=[
            made.incident_line(39, diagnosis=made.diagnosis()),
            made.incident_line(40, message="other"),
            *(made.incident_line(step, same_as=39) for step in (41, 42, 43, 50)),
            made.incident_line(51, action="halted", same_as=39, cap="max_consecutive_skips", cap_count=11),
        ],
    )
    data = told(tmp_path)
    first, other, halted = data["incidents"]
    assert (first["number"], first["count"]) == (1, 5) and first["again"] == "as at step 39, 4 more times: steps 41-43, 50"
    assert (other["count"], other["again"], other["same_as"], other["like"]) == (1, "", None, None)
    assert (halted["number"], halted["same_as"], halted["like"], halted["like_cause"]) == (7, 39, 1, "zero-denominator")
    assert halted["outcome"] == "11 steps in a row were refused (max_consecutive_skips)"
    assert data["causes"] == [["zero-denominator", 6], ["nonfinite-loss", 1]]
    assert data["marks"] == [[1, 39], [2, 40], [1, 41], [1, 42], [1, 43], [1, 50], [7, 51]]
    text = markdown(Run(tmp_path).read())
    assert "It happened again: as at step 39, 4 more times: steps 41-43, 50" in text
    assert text.count("## Step") == 3, "one for each cause, and one for the halt"


def test_a_card_has_the_bundle_of_any_of_its_incidents(tmp_path):
    """Only the newest bundles are kept: that of the first incident may be gone."""
    names = [f"step-00000{step}-nonfinite-loss" for step in (3, 4)]
    incidents = [
        made.incident_line(3, diagnosis=made.diagnosis(), bundle=f"run/incidents/{names[0]}"),
        made.incident_line(4, same_as=3, bundle=f"run/incidents/{names[1]}"),
    ]
    made.write_run(tmp_path, 9, incidents=incidents)
    assert [(card["bundle"], card["command"]) for card in told(tmp_path)["incidents"]] == [("gone", "")]
    (tmp_path / "incidents" / names[1]).mkdir(parents=True)
    (tmp_path / "incidents" / names[1] / "manifest.json").write_text("{}")
    (card,) = told(tmp_path)["incidents"]
    assert card["bundle"] == "there" and names[1] in card["command"]


NUMBERS = [True, 3.5, "x", [], {}, -1, 10**30]
TEXTS = [True, 3, 3.5, [], ["x"], {"a": 1}]
WRONG = {
    "remedy": TEXTS,
    "restored_from": TEXTS,
    "cap": TEXTS,
    "restored_step": NUMBERS,
    "same_as": NUMBERS,
    "stepped_over": [*NUMBERS, None],
    "attempt": [*NUMBERS, None],
    "cap_count": [*NUMBERS, None],
    "undone": [None, 1, "x", [1], [None], {"a": 1}, [["x"]]],
    "left_out": [None, 1, "12", ["1"], [1.5], [True], [10**30], {"1": 1}],
    "quarantined": [None, 1, "12", ["1"], [1.5], [True], [10**30], {"1": 1}],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_decision_of_the_wrong_type_is_refused(name, tmp_path):
    values = WRONG[name]
    made.write_run(tmp_path, 5, incidents=[made.incident_line(1, **{name: value}) for value in values])
    run = Run(tmp_path).read()
    assert run.broken == len(values) and not run.incidents


WHOLE = {"empty folder": 0, "empty files": 0, "header only": 0, "cut line": 19, "nonsense": 20, "no incidents": 20, "all nan": 5}


@pytest.mark.parametrize("what", WHOLE)
def test_any_run_has_a_report(what, tmp_path):
    """Being written, cut, damaged, without a file: what can be read is told."""
    steps, incidents = tmp_path / "steps.jsonl", tmp_path / "incidents.jsonl"
    if what != "empty folder":
        made.write_run(tmp_path, 20, bad=(5,))
    if what == "empty files":
        steps.write_text("")
        incidents.write_text("")
    elif what == "header only":
        steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:2]))
    elif what == "cut line":
        steps.write_text(steps.read_text()[:-40])
        incidents.write_text(incidents.read_text()[:-40])
    elif what == "nonsense":
        steps.write_bytes(b"\0\xff\n[]\n{}\n1\nnull\n" + steps.read_bytes() + b'{"kind":"step"}\n')
        incidents.write_text('{"step":3}\n"x"\n' + incidents.read_text())
    elif what == "no incidents":
        incidents.unlink()
    elif what == "all nan":
        steps.write_text("".join(made.step_line(i, math.nan, math.inf, "skipped") for i in range(5)))
    data = told(tmp_path)
    assert data["summary"] and data["numbers"] and len(data["curves"]["steps"]) == WHOLE[what]
    assert len(data["incidents"]) == (1 if what in ("header only", "nonsense", "all nan") else 0)


def test_strings_are_cut_and_shown_escaped(tmp_path):
    """Whatever stands in names, messages and evidence: the data stays small, and no character in it acts."""

    def line(i, text):
        known = made.diagnosis(cause=text, evidence=[text] * 50, fix=text, where=text, source=text, alternatives=[text])
        return made.incident_line(i, message=text, culprits=[[text, "nan"]], diagnosis=known, bundle=text)

    made.write_run(tmp_path, 10, names=made.HOSTILE, incidents=[line(i, text) for i, text in enumerate(made.HOSTILE)])
    text = json.dumps(told(tmp_path), ensure_ascii=False)
    assert len(text) < 400_000
    assert not any(c in text for c in "\x1b\x07\0\u202e\u202c\u2066\u2069\u200b\ufeff\u2028\u2029")
    assert "\\\\u202egnp.exe" in text and "characters)" in text


ODD = [
    None,
    True,
    0,
    -1,
    3.5,
    10**400,
    -(10**30),
    1e308,
    "x",
    "nan",
    "",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    [["a"]],
    [[1, 2, 3]],
    "\u202e",
]


def changed(rng, value):
    """A copy of a record with something odd at some place of it."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        value[key] = changed(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.6:
        value[0] = changed(rng, value[0])
        return value
    return copy.deepcopy(rng.choice(ODD))


@pytest.mark.parametrize("name", ["incidents", "steps", "forecasts", "quarantine"])
def test_no_record_makes_it_fail(name, tmp_path):
    """Whatever stands in a field instead of what should, there is a page and a text; the record is passed over."""
    made.write_run(tmp_path, 6, bad=(3,), sites=["a"])
    forecast = {
        "v": 1,
        "step": 5,
        "kind": "divergence",
        "message": "soon",
        "where": "head",
        "steps": 5.0,
        "margin": 1.0,
        "also": [],
    }
    (tmp_path / "forecasts.jsonl").write_text(json.dumps(forecast) + "\n")
    entry = {
        "index": 1,
        "hash": "1e",
        "size": 2,
        "worker": None,
        "workers": None,
        "step": 9,
        "cause": "n",
        "bundle": "b",
        "at": "2",
    }
    (tmp_path / "quarantine.jsonl").write_text(json.dumps(entry) + "\n")
    path, rng = tmp_path / f"{name}.jsonl", random.Random(name)
    good = [json.loads(line) for line in path.read_text().splitlines()]
    for _ in range(40):
        lines = [changed(rng, rng.choice(good)) if rng.random() < 0.5 else line for line in good]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = Run(tmp_path).read()
        json.dumps(contents(run, Tokens()), allow_nan=False)
        assert markdown(run).startswith("# ")


def test_a_halt_is_told_first(tmp_path):
    """A run that was halted is closed: "has ended" would hide how. One that went on after a resume was not."""
    made.write_run(tmp_path, 1, incidents=[made.incident_line(0, action="halted")])
    assert told(tmp_path)["summary"].startswith("This run was halted at step 0: 1 step recorded, ")
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(made.step_line(1))
    assert "halted" not in told(tmp_path)["summary"]


@pytest.mark.parametrize(("refused", "steps", "share"), [(20, 20, "100 %"), (3, 20, "15 %"), (1, 300, "0.33 %")])
def test_shares_are_in_plain_digits(tmp_path, refused, steps, share):
    made.write_run(tmp_path, steps, bad=tuple(range(refused)))
    assert next(one["more"] for one in told(tmp_path)["numbers"] if one["label"] == "refused") == share


def test_many_incidents_are_told_quickly_and_in_little_room(tmp_path):
    """Each of its own cause, and each went back: whatever is done for every one must not look at all others."""
    count = 20_000
    found = [
        made.incident_line(i, action="rewound", diagnosis=diagnosis_of(i) if i % 2 else None, message="x" * 300)
        for i in range(count)
    ]
    made.write_run(tmp_path, 3, incidents=found)
    run = Run(tmp_path).read()
    run.turns = [(i, i - 1) for i in reversed(range(1, count))]
    began = time.process_time()
    data = contents(run, Tokens())
    assert time.process_time() - began < 5  # it takes 1; 12 nanoseconds for every pair would be 5
    assert len(json.dumps(data)) < 800_000 and data["all_incidents"] == count
    assert len(data["incidents"]) > 50
    numbers = {card["number"] for card in data["incidents"]}
    assert all(card["like"] is None or card["like"] in numbers for card in data["incidents"] if "like" in card)


def diagnosis_of(i):
    return made.diagnosis(cause=f"cause-{i}")


def test_where_cards_are_too_large_for_all_the_newest_are_still_there(tmp_path):
    """The first of each cause, then the newest: the oldest of the rest are those that are left out."""
    found = [made.incident_line(i, diagnosis=made.diagnosis(evidence=["y" * 700] * 8, where=f"layer.{i}")) for i in range(100)]
    made.write_run(tmp_path, 3, incidents=found)
    shown = [card["number"] for card in told(tmp_path)["incidents"]]
    assert 10 < len(shown) < 100 and shown == [1, 2, 3, 4, 5, *range(101 - (len(shown) - 5), 101)]


def test_incidents_that_were_not_diagnosed_share_a_card_if_they_look_the_same(tmp_path):
    """As in the terminal: counted, and not called the same trouble."""
    lines = [made.incident_line(step, culprits=[["a", "nan"]]) for step in (3, 4, 5)]
    made.write_run(tmp_path, 10, incidents=[*lines, made.incident_line(6, culprits=[["b", "nan"]])])
    data = told(tmp_path)
    assert [(card["step"], card["count"], card["again"]) for card in data["incidents"]] == [
        (3, 3, "2 more not diagnosed: steps 4-5"),
        (6, 1, ""),
    ]
    assert data["all_incidents"] == 4
    assert "It happened again: 2 more not diagnosed: steps 4-5" in markdown(Run(tmp_path).read())


def test_all_optimizers_of_a_run_are_in_its_report(tmp_path):
    """One list of incidents, and curves with their marks for each."""
    made.write_gan(tmp_path, [made.incident_line(3)], [made.incident_line(4), made.incident_line(30, diagnosis=made.diagnosis())])
    data = told(tmp_path)
    assert [(card["number"], card["optimizer"], card["part"], card["step"]) for card in data["incidents"]] == [
        (1, "SGD of Critic", 0, 3),
        (2, "Adam of Generator", 1, 4),
        (3, "Adam of Generator", 1, 30),
    ]
    (part,) = data["parts"]
    assert (data["marks"], part["marks"]) == ([[1, 3]], [[2, 4], [3, 30]])
    assert (len(data["curves"]["steps"]), len(part["curves"]["steps"])) == (20, 40)
    assert [(one["name"], one["steps"], one["incidents"]) for one in data["optimizers"]] == [
        ("SGD of Critic", 20, 1),
        ("Adam of Generator", 40, 2),
    ]
    assert data["all_incidents"] == 3 and "60 steps of 2 optimizers" in data["summary"]
    assert data["tables"][0]["title"] == "Optimizers" and len(data["tables"][0]["rows"]) == 2
    text = markdown(Run(tmp_path).read())
    assert "## Step 30 of Adam of Generator: zero-denominator" in text and "| SGD of Critic | 20 |" in text


def test_a_halted_run_has_that_state(tmp_path):
    made.write_run(tmp_path, 5, incidents=[made.incident_line(4, action="halted")])
    data = told(tmp_path)
    assert data["state"] == "halted" and data["numbers"][0] == {"label": "state", "value": "halted", "more": ""}


def test_empty_cells_of_a_heat_map_are_counted(tmp_path):
    """So that its legend can say what they mean."""
    made.write_run(tmp_path, 3, names=["a", "b"])
    assert told(tmp_path)["norms"]["absent"] == 0
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(made.step_line(3, norms=[None, 1.0]))
    assert told(tmp_path)["norms"]["absent"] == 1
