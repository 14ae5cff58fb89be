"""The benchmarks run, on models too small to measure anything. A run does not erase the results of others."""

from __future__ import annotations

import json

import pytest

import forked
from tools import cost_tables, results


def written(folder, name="gpu_tiny"):
    return json.loads((folder / f"{name}.json").read_text())


def test_the_host_benchmark_runs(tmp_path):
    done = forked.python("-m", "benchmarks.host", "--rounds", "1", "--counts", "12", "--size", "4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(next(tmp_path.glob("host_*.json")).read_text())["12"]["rows"]
    assert {"plain clip + step", "nanproof guard.step", "isnan loop"} < rows.keys()


@pytest.mark.slow
@pytest.mark.parametrize("group", ["steps", "compiled"])
def test_every_part_of_the_gpu_benchmark_runs(group, tmp_path):
    done = forked.python(
        "-W", "ignore", "-m", "benchmarks.gpu", "--tiny", "--rounds", "1", "--only", group, "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    for part in written(tmp_path).values():
        rows = part.get("rows", {}) if isinstance(part, dict) else {}
        assert not [name for name, row in rows.items() if name.startswith("nanproof") and "failed" in row]


def test_parts_of_earlier_runs_stay(tmp_path):
    old = {"device": "a", "date": "2026-01-01", "torch": "2.6", "one": {"rows": {}}, "two": {"rows": {}}}
    (tmp_path / "x.json").write_text(json.dumps(old))
    results.add("x", "a", {"two": {"rows": {"new": 1}}}, tmp_path)
    found = written(tmp_path, "x")
    assert (found["one"]["date"], found["one"]["torch"]) == ("2026-01-01", "2.6")
    assert found["two"]["rows"] == {"new": 1} and found["two"]["date"] == found["date"] != "2026-01-01"
    results.add("x", "another machine", {"two": {"rows": {}}}, tmp_path)
    assert "one" not in written(tmp_path, "x")


def row(ratio, **more):
    return {"ms": 2.0 * ratio, "ratio": ratio, **more}


def test_the_table_of_costs_has_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_tables, "RESULTS", tmp_path)
    first = {"plain clip + step": row(1.0, host_ms=1.0, host_ratio=1.0)}
    captured = {"nanproof guard.step, capture": row(0.9, host_ms=0.5, host_ratio=0.5, path="device; captured", replays=7)}
    failed = {"arc-training": {"failed": "NotImplementedError: no DTensor"}}
    results.add("gpu", "NVIDIA X", {"5 M": {"rows": first | captured}, "fsdp2": {"rows": first | failed}}, tmp_path)
    host_rows = {"plain clip + step": row(1.0), "nanproof guard.step": row(0.7), "nanproof guard.step, run_dir": row(0.8)}
    results.add("host_cpu", "C", {"5000": {"rows": host_rows}, "50": {"rows": host_rows}}, tmp_path)
    lines = cost_tables.costs().splitlines()
    assert lines[0].split(" | ")[2:] == [
        "`guard.step`", "`guard.step`, no `run_dir`", "`guard.step`, captured", "arc-training 5.2.0 |",
    ]  # fmt: skip
    assert lines[2] == "| X: 5 M Llama | 2 · 1 |  |  | 0.900 · 0.500 |  |"
    assert lines[3] == "| X: 271 M Llama, FSDP2, one rank | 2 · 1 |  |  |  | fails |"
    assert lines[4].startswith("| CPU: optimizer's part, 50 tensors | 2 | 0.800 | 0.700 |")
    assert "5,000 tensors" in lines[5]
    assert any("device; captured; 7 replays" in line for line in lines)
    assert any("NotImplementedError: no DTensor" in line for line in lines)
