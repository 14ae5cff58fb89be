"""What the summary of `nanproof run` calls nanproof's own time, and how often a model is called: what belongs to the loop, and
what only trouble costs."""

from __future__ import annotations

import json

import pytest

import forked

SLOW = """
import time, torch
from torch import nn
from nanproof.explain import _diagnose

explain = _diagnose.explain
made = []

def slowly(case):
    made.append(case.kind)
    time.sleep(0.4)
    return explain(case)

_diagnose.explain = slowly
"""
BAD_BATCH = """
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(20):
    x = torch.randn(8, 4) * (float("nan") if i == 10 else 1.0)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
BAD_FROM_THE_START = BAD_BATCH.replace("i == 10", "i == 0")
UNUSED_HEAD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.body(x).square().mean()

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).backward()
    optimizer.step()
"""
TWO = """
models = [nn.Linear(4, 1), nn.Linear(4, 1)]
optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in models]
for i in range(20):
    for k, (model, optimizer) in enumerate(zip(models, optimizers)):
        x = torch.randn(8, 4) * (float("nan") if (i, k) == (10, 1) else 1.0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
AFTERWARDS = "assert made, 'there was nothing to diagnose'\n"


@pytest.mark.parametrize(
    "script",
    [BAD_BATCH, BAD_FROM_THE_START, UNUSED_HEAD, TWO],
    ids=["bad batch", "bad from the start", "suspicion", "two optimizers"],
)
def test_a_slow_diagnosis_is_not_part_of_nanproofs_own_time(script, tmp_path):
    """Nor are looking for the model, and all else that the first step alone needs."""
    (tmp_path / "train.py").write_text(SLOW + script + AFTERWARDS)
    done = forked.python("-m", "nanproof", "run", "--json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    guarded = json.loads(done.stderr.strip().splitlines()[-1])["guarded"]
    assert all(0 <= one["own_seconds"] < 0.3 for one in guarded)
    assert sum(one["trouble_seconds"] for one in guarded) >= 0.4
    assert all(one["own_seconds"] <= one["span_seconds"] - one["trouble_seconds"] for one in guarded)


COUNTED = """
import torch
from torch import nn

calls = []

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, x, y):
        calls.append(1)
        return nn.functional.cross_entropy(self.head(self.embed(x)).flatten(0, 1), y.flatten())

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(60):
    s = torch.randint(0, 20, (8, 17))
    loss = model(s[:, :-1], s[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(len(calls))
"""


def test_a_healthy_script_calls_its_model_as_often_as_without_nanproof(tmp_path):
    """Its labels are its inputs moved by one, as they should be."""
    (tmp_path / "train.py").write_text(COUNTED)
    done = forked.python("-m", "nanproof", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "60", done.stderr
