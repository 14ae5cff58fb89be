"""Every part of the benchmarks runs, on models too small to measure anything. A run does not erase the results of others."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks import gpu, host
from benchmarks.variants import VARIANTS, compare, facts_of, guard_step, plain
from tools import cost_tables, results
from toys import batches, mse, net

pytestmark = pytest.mark.filterwarnings("ignore")  # other tools are among the variants


def written(folder, name="gpu_tiny"):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("part", gpu.GROUPS["steps"])
def test_a_part_runs(part, tmp_path):
    gpu.main(["--tiny", "--rounds", "1", "--only", part, "--out", str(tmp_path)])
    rows = written(tmp_path)[part].get("rows", {})
    assert not [name for name in rows if name in gpu.GUARDED and "failed" in rows[name]]
    if part in ("whole step", "5 M", "resnet50", "fsdp2"):
        assert rows.keys() > gpu.GUARDED


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.GROUPS["compiled"])
def test_a_compiled_part_runs(part, tmp_path):
    """Inductor needs a minute for the first."""
    gpu.main(["--tiny", "--rounds", "1", "--only", part, "--out", str(tmp_path)])
    rows = written(tmp_path)[part]["rows"]
    assert rows.keys() > gpu.GUARDED and not [name for name in rows if name in gpu.GUARDED and "failed" in rows[name]]


def test_each_compiled_model_has_code_of_its_own():
    """Models that share a forward would share what torch compiled for it, and look through it in turn."""
    at = gpu.Setting("cpu", 1, tiny=True)
    build = gpu.compiled(gpu.llama("5 M", at), None).build
    one, other = build(), build()
    assert type(one).forward.__code__ is not type(other).forward.__code__
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]


def test_the_models_are_those_of_the_titles():
    at = gpu.Setting("meta", 1, tiny=False)
    with torch.device("meta"):
        assert "Llama of 271 M" in gpu.llama("271 M", at).title
        small = gpu.llama("5 M", at)
        assert "Llama of 5.3 M" in small.title and len(list(small.build().parameters())) == 57
        assert "ResNet-50 of 26 M" in gpu.resnet(at).title


def test_the_host_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    host.main(["--rounds", "1", "--counts", "12", "--size", "4", "--out", str(tmp_path)])
    name = "host_gpu" if torch.cuda.is_available() else "host_cpu"
    assert {"plain clip + step", "nanproof guard.step", "isnan loop"} < written(tmp_path, name)["12"]["rows"].keys()


def broken(model, loss_fn):
    raise NotImplementedError("no such models\nreally")


def missing(model, loss_fn):
    raise ModuleNotFoundError("No module named 'rival'")


def test_a_variant_that_fails_or_is_absent_leaves_the_others(capsys):
    variants = {"plain": plain, "absent": missing, "broken": broken, "guarded": guard_step}
    rows = compare(net, mse, batches(1)[0], rounds=2, steps=1, names=list(variants), variants=variants)
    assert rows["broken"] == {"failed": "NotImplementedError: no such models"}
    assert "absent" not in rows and "rival" in capsys.readouterr().out
    assert rows["plain"]["ratio"] == 1 and rows["guarded"]["path"].startswith("device")
    with pytest.raises(NotImplementedError):
        compare(net, mse, batches(1)[0], rounds=2, steps=1, names=["broken", "plain"], variants=variants)


def test_arc_training_takes_every_healthy_step():
    """Otherwise its time would be that of steps it skipped."""
    pytest.importorskip("arc")
    with VARIANTS["arc-training"](net(), mse) as step:
        for batch in batches(40):
            step(batch)
        assert facts_of(partial(step, None)) == {"skipped healthy steps": 0}


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
