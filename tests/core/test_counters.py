"""What a loop counts on the device is in the record of the step, and comes with its verdict."""

from __future__ import annotations

import json

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard, StepRecord, read_steps
from nanproof.core._counters import counted
from nanproof.numerics.generation import NumericalStabilityLogitsProcessor


def test_counters_stand_in_the_record_of_the_step(tmp_path, caplog):
    """As they were when the step was taken, beside the terms' place; one that raises is left out, and the run goes on."""
    model = torch.nn.Linear(3, 1)
    guard = Guard(model, torch.optim.Adam(model.parameters()), run_dir=tmp_path)
    seen = torch.zeros((), dtype=torch.int64)

    def fails():
        return {"never": torch.ones(2)}

    guard.counters += [lambda: {"rows": seen, "half": seen / 2}, fails]
    for _ in range(3):
        seen += 1
        model.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        guard.step(loss)
    seen += 100
    guard.close()
    wanted = [(("rows", float(n)), ("half", n / 2)) for n in (1, 2, 3)]
    assert [record.counters for record in guard.history] == wanted
    assert [record.counters for record in read_steps(tmp_path)] == wanted
    assert caplog.text.count("left out of the records") == 1 and guard.incidents == []


def test_a_logits_processor_in_a_loop_of_ones_own():
    """What it had to end while the loop sampled stands in the next step's record."""
    model = torch.nn.Linear(3, 1)
    guard = Guard(model, torch.optim.Adam(model.parameters()))
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=1)
    guard.counters.append(processor.counters)
    for bad in (0, 2):
        processor.start()
        logits = torch.zeros(4, 5)
        logits[:bad, 3] = torch.nan
        processor(torch.zeros(4, 2, dtype=torch.long), logits)
        model.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        guard.step(loss)
    guard.close()
    assert [dict(record.counters)["nan_rows"] for record in guard.history] == [0, 2]
    assert [dict(record.counters)["tokens"] for record in guard.history] == [4, 8]


def test_records_without_counters_are_as_they_were(tmp_path):
    """No key in the line; and a line of before there were any can be read."""
    model = torch.nn.Linear(3, 1)
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path) as guard:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        guard.step(loss)
    data = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[1])
    assert data["kind"] == "step" and "counters" not in data
    assert StepRecord.from_json(data, guard.history[0].names).counters == ()


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "waits for the device"
        return func(*args, **(kwargs or {}))


def test_counting_does_not_wait():
    with NoHostReads():
        found = counted([lambda: {"a": torch.tensor(3), "b": torch.tensor([2.5])}, dict], torch.device("cpu"))
    assert found.names == ("a", "b") and found.vector.tolist() == [3.0, 2.5]
    assert counted([dict], torch.device("cpu")) is None
