"""The host's work in a healthy step does not grow with the number of parameters: no loop over them runs in Python.

Calls are counted by `sys.setprofile`, and lines by `sys.settrace`, because a comprehension makes no calls. What torch does in its
own Python code (a hook's dispatch, `zero_grad`) is not counted.
"""

import sys
from collections import Counter

import pytest
import torch
from torch import nn

import nanproof

OURS = nanproof.__file__.removesuffix("__init__.py")
SETTLED = 45
"""Steps after which a guard has looked at what it looks at only in the beginning, and a step at which it looks at no graph."""


class Net(nn.Module):
    """Layers in a row, of which some are frozen and some have buffers."""

    def __init__(self, layers, norms=False, frozen=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(layers if norms else 0))
        self.frozen = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(layers if frozen else 0))

    def forward(self, x):
        for several in (self.layers, self.norms, self.frozen):
            for layer in several:
                x = x + 0.1 * layer(x)
        return x


def _mse(model, batch):
    return model(batch).square().mean()


def _ours(frame):
    return frame.f_code.co_filename.startswith(OURS)


def _work(step):
    """How many calls and lines of the library one call of `step` takes, by function."""
    counts = Counter()

    def profile(frame, event, arg):
        if _ours(frame) and event in ("call", "c_call"):
            counts[frame.f_code.co_filename.removeprefix(OURS), frame.f_code.co_qualname, event] += 1

    def trace(frame, event, arg):
        if not _ours(frame):
            return None
        if event == "line":
            counts[frame.f_code.co_filename.removeprefix(OURS), frame.f_code.co_qualname, "line"] += 1
        return trace

    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return counts


def _adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


def _two(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    half = len(trained) // 2
    return [torch.optim.AdamW(trained[:half], lr=1e-3), torch.optim.SGD(trained[half:], lr=1e-3)]


def _partly(model):
    """Some of its parameters never get a gradient."""
    model.unused = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in model.layers)
    return _adamw(model)


def _guarded(layers, way, make, options, run_dir):
    torch.manual_seed(0)
    policy = nanproof.Policy(lag=options.get("lag"))
    model = Net(layers, **{name: value for name, value in options.items() if name != "lag"})
    optimizer = make(model)
    guard = nanproof.Guard(model, optimizer, loss_fn=_mse if way == "train_step" else None, run_dir=run_dir, policy=policy)
    batch = torch.randn(3, 4)
    if way == "train_step":
        return guard, lambda: guard.train_step(batch)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

    def step():
        for each in optimizers:
            each.zero_grad()
        loss = _mse(model, batch)
        if way == "backward":
            guard.backward(loss)
        else:
            loss.backward()
        guard.step(loss)

    return guard, step


CASES = {
    "guard.step": ("step", _adamw, {}),
    "guard.backward": ("backward", _adamw, {}),
    "train_step": ("train_step", _adamw, {}),
    "SGD with momentum": ("step", _sgd, {}),
    "two optimizers": ("train_step", _two, {}),
    "frozen parameters": ("train_step", _adamw, {"frozen": True}),
    "buffers that every forward writes": ("train_step", _adamw, {"norms": True}),
    "parameters without gradients": ("step", _partly, {}),
    "verdicts that come late": ("train_step", _adamw, {"lag": 2}),
    "verdicts that come late, guard.step": ("step", _adamw, {"lag": 2}),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="counts by co_qualname, which Python 3.10 does not have")
@pytest.mark.parametrize(("name", "folder"), [*((name, False) for name in CASES), ("guard.step", True), ("train_step", True)])
def test_no_loop_over_parameters(name, folder, tmp_path):
    """A step over 50 layers runs the lines and makes the calls of a step over 20. Both have more nodes than a look at a graph
    takes."""
    way, make, options = CASES[name]
    found = []
    for layers in (20, 50):
        guard, step = _guarded(layers, way, make, options, tmp_path / str(layers) if folder else None)
        with guard:
            for _ in range(SETTLED):
                step()
            found.append(_work(step))
    few, many = found
    grew = {key: (few[key], count) for key, count in many.items() if count > few[key] + 3}  # clipping takes a call or two
    assert not grew
