"""What a healthy step pays for its own lines does not grow with the number of parameters: calls are counted, not seconds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
import nanproof
from counted import FIRST, LAST, STEPS, Calls, Wide


def calls_of_a_loop(count: int) -> Counter[str]:
    torch.manual_seed(0)
    model, criterion, calls = Wide(count), nn.MSELoss(), Calls()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanproof.Guard(model, optimizer) as guard:
        for step in range(STEPS):
            x, y = torch.randn(8, 4), torch.randn(8)
            if step == FIRST:
                calls.__enter__()
            out = model(x)
            loss = criterion(out, y)
            optimizer.zero_grad()
            loss.backward()
            guard.step(loss)
            if step == LAST:
                calls.__exit__()
        assert not guard.incidents
    return calls.counts


def test_a_step_of_an_own_loop_calls_as_much_with_200_parameters_as_with_10() -> None:
    few, many = calls_of_a_loop(10), calls_of_a_loop(200)
    assert few["explain/lines/"] > 0
    assert few == many


def test_a_step_of_an_own_loop_makes_few_calls_for_its_lines() -> None:
    """35 a step when this was written; 73 before they were counted."""
    counts = calls_of_a_loop(10)
    assert counts["explain/lines/"] / (LAST + 1 - FIRST) <= 36


SCRIPT = """
import json, sys
import torch
from torch import nn
from counted import FIRST, LAST, STEPS, Calls, Wide

torch.manual_seed(0)
model, criterion, calls = Wide(int(sys.argv[1])), nn.MSELoss(), Calls()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
for step in range(STEPS):
    x, y = torch.randn(8, 4), torch.randn(8)
    if step == FIRST:
        calls.__enter__()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step == LAST:
        calls.__exit__()
print(json.dumps(calls.counts))
"""


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_of_a_script_calls_as_much_with_200_parameters_as_with_10(clips: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT if clips else SCRIPT.replace("    nn.utils.clip", "    # nn.utils.clip"))
    counts = []
    for count in ("10", "200"):
        done = forked.python("-m", "nanproof", "run", "train.py", count, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert counts[0]["integrations/"] > 0
    assert counts[0] == counts[1]
