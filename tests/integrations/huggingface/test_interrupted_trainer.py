"""Ctrl-C in a protected Trainer: the model is at the boundary of a step, and trains on."""

import random
import signal
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import nanproof
from zoo import interrupts
from zoo.interrupts import counting

BAD = 17


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}


class Seen(transformers.TrainerCallback):
    """The state at every boundary of a step."""

    def __init__(self):
        self.states = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.states.append({name: t.clone() for name, t in model.state_dict().items()})


def trainer(folder, *callbacks):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=draw), "labels": torch.randn((), generator=draw)} for _ in range(24)]
    rows[BAD]["x"][1] = float("nan")
    args = transformers.TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
    )
    made = transformers.Trainer(Net(), args, train_dataset=rows, callbacks=list(callbacks))
    return made, nanproof.protect(made, run_dir=None, policy=nanproof.Policy(diagnose="always"))


def same(model, state):
    return all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_an_interrupt_leaves_the_state_of_a_step_boundary(tmp_path, monkeypatch):
    places = (*interrupts.TRACED, str(Path(transformers.__file__).parent / "trainer"))
    monkeypatch.setattr(interrupts, "TRACED", places)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        seen = Seen()
        undisturbed, guard = trainer(tmp_path, seen)
        with counting() as count:
            undisturbed.train()
        seen.on_step_begin(None, None, None, undisturbed.model)
        assert len(guard.incidents) == 1 and len(seen.states) == 7
        draw, struck = random.Random(0), 0
        for _ in range(5):
            made, _ = trainer(tmp_path)
            try:
                with counting(draw.randrange(1, count[0])):
                    made.train()
            except KeyboardInterrupt:
                struck += 1
            assert any(same(made.model, state) for state in seen.states)
            assert torch.is_grad_enabled() and all(p.requires_grad for p in made.model.parameters())
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            made.train()
            assert all(torch.isfinite(t).all() for t in made.model.state_dict().values())
        assert struck >= 3
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_callback_that_raises_between_forward_and_step_leaves_no_statistics(tmp_path, error):
    class Raises(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise error

    seen = Seen()
    made, _ = trainer(tmp_path, seen, Raises())
    with pytest.raises(error):
        made.train()
    assert same(made.model, seen.states[-1])
