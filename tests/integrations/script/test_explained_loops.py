"""What `nanproof run` says about loops whose loss, model or data is not where a trainer would have it."""

from __future__ import annotations

import json

import pytest

import forked

START = """
import copy, sys, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
"""


def incidents(tmp_path, script, *options):
    """Run a script under nanproof. Returns its incidents, and the whole summary."""
    (tmp_path / "script.py").write_text(START + script)
    done = forked.python("-m", "nanproof", "run", "--json", *options, "script.py", cwd=tmp_path)
    summary = json.loads([line for line in done.stderr.splitlines() if line.startswith('{"v"')][-1])
    return [i for one in summary["guarded"] for i in one["incidents"]], summary


ACTOR = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters())
for i in range(12):
    obs = torch.randn(6, 4)
    if i == {step}: {fault}
    mean, raw = net(obs).chunk(2, -1)
    policy = torch.distributions.Normal(mean, {std})
    loss = -policy.log_prob(torch.zeros(6, 1)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.parametrize("step", [0, 7])
def test_an_exception_is_an_incident_with_what_the_model_was_called_with(tmp_path, step):
    """Also in the first step, before anything was guarded. The exception still ends the script."""
    script = ACTOR.format(step=step, fault="obs[2, 1] = float('nan')", std="raw.exp()")
    (incident,), summary = incidents(tmp_path, script)
    assert (incident["step"], incident["kind"], incident["action"]) == (step, "exception", "recorded")
    assert "ValueError: Expected parameter loc" in incident["message"]
    found = incident["diagnosis"]
    assert (found["cause"], found["samples"], found["verified"]) == ("nonfinite-batch", [2], True)
    assert "obs" in found["where"] and summary["guarded"][0]["steps"] == step
    if step:
        assert "the model was called with non-finite numbers in args[0], sample 2" in incident["message"]


def test_an_exception_gets_the_cause_that_the_catalogue_has(tmp_path):
    """A standard deviation that is negative."""
    (incident,), _ = incidents(tmp_path, ACTOR.format(step=5, fault="pass", std="raw.exp() if i < 5 else raw - 9"))
    assert incident["kind"] == "exception" and incident["diagnosis"]["cause"] == "nonpositive-std"


def test_an_exception_outside_of_training_is_not_an_incident(tmp_path):
    """Saving to a folder that does not exist, after a healthy step."""
    script = """
net = nn.Linear(4, 1); opt = torch.optim.Adam(net.parameters())
for i in range(4):
    loss = net(torch.randn(6, 4)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    if i == 2: open("no/such/folder", "w")
"""
    assert incidents(tmp_path, script)[0] == []


AVERAGED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.l = nn.Linear(4, 1)
    def forward(self, x, y):
        return (self.l(x).squeeze(-1) - y).square().mean()
class Average(nn.Module):
    def __init__(self, model):
        super().__init__(); self.online, self.slow = model, copy.deepcopy(model).requires_grad_(False)
net = Net(); opt = torch.optim.Adam(net.parameters()); average = Average(net)
for i in range(9):
    x, y = torch.randn(8, 4), torch.randn(8)
    if i == 5: x[3, 1] = float("nan")
    loss = net(x, y); opt.zero_grad(); loss.backward(); opt.step()
"""


def test_the_model_is_the_module_that_is_called(tmp_path):
    """Not the average of its weights that holds it."""
    (incident,), summary = incidents(tmp_path, AVERAGED)
    assert summary["guarded"][0]["model"] == "Net"
    assert [name for name, _ in incident["culprits"]] == ["l.weight", "l.bias"]
    assert (incident["diagnosis"]["cause"], incident["diagnosis"]["samples"]) == ("nonfinite-batch", [3])


PARTS = """
parts = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
opt = torch.optim.Adam(parts.parameters())
for i in range(9):
    x = torch.randn(8, 4)
    hidden = parts[0](x); out = parts[1](hidden.relu())
    loss = out.square().mean()
    if i == 5: loss = loss + (parts[1].bias * 0).sqrt().sum()
    opt.zero_grad(); loss.backward(); opt.step()
"""


def test_a_model_that_is_called_in_parts_is_explained(tmp_path):
    """Nobody calls the list that holds them."""
    (incident,), summary = incidents(tmp_path, PARTS)
    assert (incident["kind"], incident["diagnosis"]["cause"]) == ("nonfinite-gradient", "sqrt-at-zero")
    assert incident["diagnosis"]["source"] == "script.py:11" and summary["guarded"][0]["model"] == "ModuleList"


BOUNDED = """
class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 1); self.register_buffer("upper", torch.tensor(float("inf")))
    def forward(self, x): return torch.minimum(self.l(x).squeeze(-1), self.upper)
m = Bounded(); opt = torch.optim.Adam(m.parameters())
for i in range(9):
    x, y = torch.randn(8, 4), torch.randn(8)
    if i == 5: y[6] = float("nan")
    loss = (m(x) - y).square().mean(); opt.zero_grad(); loss.backward(); opt.step()
"""


def test_a_buffer_that_has_not_changed_is_not_suspected(tmp_path):
    """A bound that is Inf on purpose. The NaN is in the targets, which never reach the model."""
    (incident,), _ = incidents(tmp_path, BOUNDED)
    found = incident["diagnosis"]
    assert (found["cause"], found["where"], found["samples"], found["verified"]) == ("nonfinite-batch", "batch['y']", [6], True)


IN_PLACE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.l = nn.Linear(4, 1)
    def forward(self, x):
        x.sub_(x.mean(1, keepdim=True))
        x.div_(x.std(1, keepdim=True))
        return self.l(x).squeeze(-1)
net = Net(); opt = torch.optim.Adam(net.parameters())
for i in range(9):
    x, y = torch.randn(8, 4), torch.randn(8)
    if i == {step}: x[3] = 1.0
    loss = {loss}; opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.parametrize("loss", ["F.mse_loss(net(x), y)", "net(x).square().mean()"])
@pytest.mark.parametrize("step", [0, 5])
def test_a_batch_that_the_model_writes_into_is_not_blamed_on_the_data(tmp_path, loss, step):
    """The line that does it is named. In the first step there is no copy from before, so it is not verified."""
    (incident,), _ = incidents(tmp_path, IN_PLACE.format(loss=loss, step=step))
    found = incident["diagnosis"]
    assert (found["cause"], found["samples"]) == ("changed-in-place", [3])
    assert found["source"] in ("script.py:9", "script.py:10") and found["verified"] is (step == 5)


def test_a_step_is_healed_from_the_loops_own_lines(tmp_path):
    """With heal on, the fix that was verified on the lines is applied and the step is taken."""
    import torch

    import nanproof

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(heal=True)) as guard:
        for i in range(9):
            x, weights = torch.randn(8, 4), torch.ones(8)
            if i == 5:
                weights.zero_()
            each = model(x).squeeze(-1).square()
            loss = (each * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            guard.step(loss)
    (incident,) = guard.incidents
    assert incident.diagnosis.cause in ("zero-denominator", "no-supervised-targets") and incident.diagnosis.verified
    assert incident.action == "healed" and incident.remedy


STRANGE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)
    def forward(self, x, extra): return self.head(x)
class Shut(dict):
    def items(self): raise RuntimeError("not today")
round = [1]; round.append(round)
deep = []
for _ in range(3000): deep = [deep]
extra = {"round": round, "deep": deep, "shut": Shut(a=1), "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)],
         layout=torch.jagged)}[KIND]
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(6):
    x = torch.randn(8, 4)
    if i == 4: x[2, 1] = float("nan")
    loss = net(x, extra).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
print("done")
"""


@pytest.mark.parametrize("kind", ["round", "deep", "jagged", "shut"])
def test_what_a_model_is_called_with_never_fails_the_loop(tmp_path, kind):
    """A list that contains itself, one of three thousand levels, a tensor without a shape, a dictionary that cannot be read."""
    (incident,), summary = incidents(tmp_path, STRANGE.replace("KIND", repr(kind)))
    assert (incident["step"], incident["kind"], incident["action"]) == (4, "nonfinite-loss", "skipped")
    assert incident["diagnosis"]["cause"] == "nonfinite-batch" and summary["guarded"][0]["steps"] == 6


PARTS_OF_A_LIST = """
class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
        self.average = nn.Linear(4, 8)
holder = Holder()
parts = holder.parts
opt = torch.optim.Adam(parts.parameters())
for i in range(4):
    loss = parts[1](parts[0](torch.randn(8, 4)).relu()).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""
LOOKED_AT_FIRST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1).requires_grad_(False)
    def forward(self, x): return self.head(self.body(x))
net = Net()
opt = torch.optim.Adam(net.body.parameters())
with torch.no_grad(): net.body(torch.zeros(1, 4))
for i in range(4):
    loss = net(torch.randn(8, 4)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.parametrize(
    ("script", "model"), [(PARTS_OF_A_LIST, "ModuleList"), (LOOKED_AT_FIRST, "Net")], ids=["parts", "looked"]
)
def test_the_model_is_the_smallest_that_holds_the_parts_and_not_what_was_only_looked_at(tmp_path, script, model):
    _, summary = incidents(tmp_path, script)
    assert [one["model"] for one in summary["guarded"]] == [model]
