"""What was observed goes to disk as strict JSON and comes back; files of before it was written still read."""

from __future__ import annotations

import json
import math
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nanproof
from nanproof import Forecast, Observe, Observed, StepRecord, read_forecasts, read_steps
from nanproof._records import ABSENT, line
from nanproof.core._telemetry import Journal
from nanproof.core.journal._norms import payloads
from nanproof.files._blocks import HEADER, STEP, BlockReader, unpacked_columns
from toys import batches, mse, net, poison


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def strict(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text, parse_constant=no_constant) for text in path.read_text().splitlines()]


LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def single(x: float) -> float:
    """As float32 has it; finite if it is finite."""
    return float(struct.unpack("<f", struct.pack("<f", max(-LARGEST, min(x, LARGEST))))[0]) if math.isfinite(x) else x


def same(a: Any, b: Any) -> bool:
    """As float32, or with six significant digits; NaN is itself."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (array, tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (a != a and b != b) or b in (single(a), float(f"{a:.6g}"))
    return bool(a == b)


def same_observed(a: Observed, b: Observed) -> bool:
    names = ("sites", "absmax", "outputs", "gradients", "updates", "attention", "unmoved")
    return all(same(getattr(a, name), getattr(b, name)) for name in names)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention, self.head = (
            nn.Embedding(20, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 1),
        )
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0]).mean()


def test_a_run_comes_back(tmp_path):
    """Everything that can be observed, with modules that are never called and a bad batch."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = [torch.randint(20, (2, 6)) for _ in range(6)]

    def spoilt(model: nn.Module, batch: Any) -> torch.Tensor:
        ids, factor = batch
        return (model(ids) * factor - 1).square()

    observe = Observe(modules="*", every=2)
    with nanproof.Guard(model, optimizer, loss_fn=spoilt, observe=observe, run_dir=tmp_path) as guard:
        for i, ids in enumerate(data):
            guard.train_step([ids, torch.tensor(math.inf if i == 4 else 1.0)])
    lines = strict(tmp_path / "steps.jsonl")
    assert [x["kind"] for x in lines] == ["opened", *["step"] * 6, "closed"]
    assert not any("observed" in x or "norms" in x for x in lines)
    back = list(read_steps(tmp_path))
    assert [r.step for r in back] == list(range(6))
    for mine, theirs in zip(guard.history, back, strict=True):
        assert mine.observed is not None and theirs.observed is not None
        assert same_observed(mine.observed, theirs.observed)
        assert theirs.observed.sites == tuple(n for n, _ in model.named_modules() if n)
    full = back[0].observed
    assert full is not None and full.outputs and full.gradients and full.updates and full.attention and full.unmoved
    assert full.absmax[full.sites.index("unused")] == ABSENT and "unused" not in full.by_site
    bad = back[4].observed
    assert back[4].action == "skipped" and bad is not None and any(not math.isfinite(x) for x in bad.gradients["absmax"])


def test_values_that_are_not_finite(tmp_path):
    model = net(batch_norm=False)
    data = batches(4)
    data[1], data[2] = poison(data[1]), poison(data[2], math.inf)
    with nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=mse, observe=Observe(modules="*", every=1), run_dir=tmp_path
    ) as guard:
        for batch in data:
            guard.train_step(batch)
    back = [r.observed.absmax[0] for r in read_steps(tmp_path) if r.observed is not None]
    assert math.isnan(back[1]) and back[2] == math.inf
    for mine, theirs in zip(guard.history, read_steps(tmp_path), strict=True):
        assert mine.observed is not None and theirs.observed is not None and same_observed(mine.observed, theirs.observed)


numbers = st.one_of(st.floats(min_value=0), st.sampled_from([ABSENT, math.nan, math.inf, 0.0, 1e-320, 1e308, 123456.7]))
arrays = st.lists(numbers, min_size=3, max_size=3).map(lambda values: array("d", values))
shares = st.floats() | st.just(-1.0)


@st.composite
def observations(draw: Any) -> Observed:
    columns = {
        name: draw(st.dictionaries(st.sampled_from(["rms", "nan", "absmax", "ratio"]), arrays, max_size=3))
        for name in ("outputs", "gradients", "updates")
    }
    names = st.text(max_size=5)
    attention = draw(st.dictionaries(names, st.tuples(shares, shares, shares), max_size=2))
    unmoved = draw(st.dictionaries(names, shares, max_size=2))
    return Observed(sites=("a", "b", "c"), absmax=draw(arrays), attention=attention, unmoved=unmoved, **columns)


@settings(max_examples=150)
@given(observations())
def test_any_observation_comes_back(observed):
    (payload,) = payloads([record(0, observed)])
    again = Observed.from_columns(unpacked_columns(payload), observed.sites)
    assert again is not None and same_observed(observed, again)


def record(step: int, observed: Observed | None, names: tuple[str, ...] = ("w",)) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=2.0, action="stepped", clip=1.0, lr=(0.1,), scale=None, spike=False, typical=(0.0, 0.0),
        spread=(0.0, 0.0), loss_size=1.0, weights_checked=False, names=names, norms=array("d", [1.0]), observed=observed,
    )  # fmt: skip


def test_a_header_is_written_when_names_or_sites_change(tmp_path):
    """A resumed run may observe other modules, or none; each record is read with the header before it."""
    names, sites, others = ("w",), ("a",), ("b", "c")
    journal = Journal(tmp_path)
    for step, (of, values) in enumerate(((sites, [1.0]), (sites, [2.0]), (others, [3.0, 4.0]), (None, []))):
        observed = None if of is None else Observed(sites=of, absmax=array("d", values))
        journal.step(record(step, observed, names))
    journal.close()
    assert [x["kind"] for x in strict(tmp_path / "steps.jsonl")] == ["opened", *["step"] * 4, "closed"]
    with open(tmp_path / "norms.bin", "rb") as file:
        kinds = [block.kind for block, _ in BlockReader().blocks(file)]
    assert kinds == [HEADER, STEP, STEP, HEADER, STEP, HEADER, STEP]
    back = [r.observed.by_site if r.observed else None for r in read_steps(tmp_path)]
    assert back == [{"a": 1.0}, {"a": 2.0}, {"b": 3.0, "c": 4.0}, None]


def test_old_files_and_runs_that_do_not_observe(tmp_path):
    path = tmp_path / "steps.jsonl"
    old = record(7, None)
    seen = {"absmax": [3.0, None], "outputs": {"rms": [1.0, "nan"]}}
    plain = {**old.to_json(), "v": 2}
    path.write_text(
        line({"v": 1, "kind": "header", "names": ["w"], "sites": ["a", "b"]}) + line(plain) + line({**plain, "observed": seen})
    )
    first, second = read_steps(path)
    assert first == old and second.observed is not None
    assert second.observed.by_site == {"a": 3.0} and math.isnan(second.observed.outputs["rms"][1])
    model = net()
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=mse, run_dir=tmp_path / "run") as guard:
        guard.train_step(batches(1)[0])
    assert [r.observed for r in read_steps(tmp_path / "run")] == [None] and guard.history[0].observed is None
    assert guard.forecasts == [] and not (tmp_path / "run" / "forecasts.jsonl").exists()


def test_forecasts_come_back(tmp_path):
    given = [
        Forecast(step=3, kind="activation-overflow", message="soon", where="a.b", steps=12.5, margin=3.25, also=("c", "d")),
        Forecast(step=9, kind="divergence", message="it grows"),
        Forecast(step=10, kind="activation-overflow", message="?", where="x", steps=math.inf, margin=math.nan),
    ]
    journal = Journal(tmp_path)
    assert not (tmp_path / "forecasts.jsonl").exists(), "made with the first of them"
    for forecast in given:
        journal.forecast(forecast)
    journal.close()
    assert len(strict(tmp_path / "forecasts.jsonl")) == 3
    back = list(read_forecasts(tmp_path))
    assert back[:2] == given[:2] == list(read_forecasts(tmp_path / "forecasts.jsonl"))[:2]
    assert back[2].steps == math.inf and back[2].margin is not None and math.isnan(back[2].margin)
    assert str(back[0]) == "step 3: activation-overflow ahead. soon"
    Journal(None).forecast(given[0])
    with pytest.raises(ValueError, match="unknown kind of forecast"):
        Forecast(step=1, kind="rain", message="")


def test_a_later_nanproof_may_write_more(tmp_path):
    data = {**Forecast(step=3, kind="divergence", message="m").to_json(), "new": [1, 2]}
    (tmp_path / "forecasts.jsonl").write_text(line(data))
    assert [f.step for f in read_forecasts(tmp_path)] == [3]


def test_a_loaded_state_begins_anew():
    """What was on its way from steps of the other state is dropped, and no line goes through both."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policy = nanproof.Policy(lag=2)
    guard = nanproof.Guard(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), policy=policy, observe=True)
    states = guard.state_dict()
    for _ in range(6):
        guard.train_step(torch.randn(3, 4))
    lookout: Any = guard.parts.engine.lookout
    assert lookout._parcels and len(lookout._forecaster._series)
    guard.load_state_dict(states)
    assert not lookout._parcels and not len(lookout._forecaster._series)
    guard.train_step(torch.randn(3, 4))
    guard.close()
    assert guard.history[-1].step == 0 and guard.history[-1].observed is not None
