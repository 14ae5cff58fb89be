"""Pins that `observe=` sees in every trainer what hooks of one's own see, step by step, and changes nothing: records, logs,
forecasts, and the monitor of activations with and without `protect`."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

import forked
import nanproof
from integrations.lightning_toys import LIGHTNINGS_OWN_WARNINGS, samples, toy, trainer_of
from integrations.tiny import Regression, feature_rows, llama, make_trainer, same, token_rows, weights
from nanproof import Forecast, Observe, Policy, UsageError, read_forecasts, read_steps
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.script._summary import Guarded
from nanproof.integrations.transformers import ActivationMonitorCallback
from toys import batches, net

EXAMPLES = Path(__file__).parents[2] / "examples"
SITES = [f"model.layers.{i}{part}" for i in range(2) for part in ("", ".self_attn", ".mlp")]
"""What "auto" takes of the tiny Llama, in the order of the model."""


class Oracle:
    """The largest absolute output of every module in training, by a hook of its own; a dictionary a step."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[dict[str, float]] = [{}]
        for name, module in model.named_modules():
            module.register_forward_hook(self._look_at(name))

    def _look_at(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) else output
            if module.training and isinstance(x, Tensor):
                top = x.detach().abs().max().item()
                self.steps[-1][name] = max(top, self.steps[-1].get(name, 0.0))

        return hook

    def stepped(self) -> None:
        self.steps.append({})

    def agrees(self, records: list[Any]) -> bool:
        for step, record in enumerate(records):
            assert record.step == step and record.observed is not None
            found = record.observed.by_site
            assert found and found == pytest.approx({site: self.steps[step][site] for site in found}, rel=1e-5), step
        return True


def left_behind(model: nn.Module) -> list[Any]:
    """Hooks of nanproof's that stayed on a model."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [hook for hook in hooks if type(hook).__module__.startswith("nanproof")]


class Steps(TrainerCallback):
    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.oracle.stepped()


@pytest.mark.parametrize(
    ("lag", "settings"),
    [(None, {}), (2, {"gradient_accumulation_steps": 2}), (None, {"gradient_checkpointing": True})],
    ids=["plain", "lag", "checkpointing"],
)
def test_a_protected_trainer_observes_what_hooks_see(tmp_path, lag, settings):
    """Every step, all micro-batches of it, once where a checkpoint runs its forward twice; and the weights are the same bits."""
    rows = token_rows(40)
    plain = make_trainer(tmp_path / "a", llama(), rows, **settings)
    oracle = Oracle(plain.model)
    plain.add_callback(Steps(oracle))
    nanproof.protect(plain, policy=Policy(lag=lag), run_dir=None)
    plain.train()
    trainer = make_trainer(tmp_path / "b", llama(), rows, **settings)
    guard = nanproof.protect(trainer, policy=Policy(lag=lag), observe=Observe(every=4))
    trainer.train()
    assert same(weights(plain.model), weights(trainer.model))
    records = guard.history
    assert len(records) == 10 // settings.get("gradient_accumulation_steps", 1) and oracle.agrees(records)
    assert list(records[0].observed.sites) == SITES
    full = [record.step for record in records if record.observed.outputs]
    assert full == [record.step for record in records if record.step % 4 == 0]
    first = records[0].observed
    assert len(first.gradients["rms"]) == len(SITES) and min(first.gradients["rms"]) > 0
    assert first.attention.keys() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert first.unmoved["model.embed_tokens"] >= 0
    on_disk = list(read_steps(tmp_path / "b" / "nanproof"))
    assert [r.observed.by_site for r in on_disk] == [pytest.approx(r.observed.by_site, rel=1e-5) for r in records]
    assert all(log["nanproof/forecasts"] == 0 for log in trainer.state.log_history if "learning_rate" in log)
    assert not any("nanproof/forecasts" in log for log in plain.state.log_history)
    assert not left_behind(trainer.model)


def test_steps_behind_a_bad_one_are_observed_when_they_are_taken(tmp_path):
    """With a lag they are run twice; each record has one forward in it, and the bad step shows where it was bad."""
    rows = token_rows(32)
    trainer = make_trainer(tmp_path, llama(), rows)
    guard = nanproof.protect(trainer, policy=Policy(lag=2, diagnose="never"), observe=True)
    broken = trainer.model.model.layers[1].mlp

    def spoil(module, args, output):
        return output * math.nan if torch.equal(spoiled["ids"], rows[12]["input_ids"]) else None

    spoiled: dict[str, Tensor] = {}
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: spoiled.update(ids=kwargs["input_ids"][0]), with_kwargs=True
    )
    broken.register_forward_hook(spoil)
    trainer.train()
    assert [incident.step for incident in guard.incidents] == [3]
    assert [record.step for record in guard.history] == list(range(8))
    for record in guard.history:
        bad = [site for site, value in record.observed.by_site.items() if not math.isfinite(value)]
        assert bad == (["model.layers.1", "model.layers.1.mlp"] if record.step == 3 else [])


def test_a_bad_value_is_refused_before_training_begins(tmp_path):
    """By every way in, with the value in the message."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(8))
    lightning = trainer_of("lightning.pytorch")
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    ways = (
        lambda: ProtectedRun(observe="all"),
        lambda: nanproof.protect(trainer, observe="all"),
        lambda: nanproof.protect(lightning, observe="all"),
        lambda: nanproof.protect(fabric, observe="all"),
    )
    for way in ways:
        with pytest.raises(UsageError, match="observe='all'"):
            way()
    with pytest.raises(UsageError, match="check_every_n_steps=0"):
        ActivationMonitorCallback(check_every_n_steps=0)
    with pytest.raises(UsageError, match="matches no module"):
        nanproof.protect(trainer, observe=Observe(modules="layers.*"))
        trainer.train()


def test_forecasts_stay_when_the_loop_begins_again():
    """As incidents do, also in a copy."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = ProtectedRun(observe=True)
    guard.start(model, optimizer)
    guard.engine.tell.forecast(Forecast(step=3, kind="divergence", message="it grows"))
    guard.start(model, optimizer, step=4)
    other = copy.deepcopy(guard)
    assert [f.step for f in guard.forecasts] == [f.step for f in other.forecasts] == [3]
    assert other.observe == guard.observe == Observe()
    guard.engine.tell.forecast(Forecast(step=5, kind="divergence", message="it grows"))
    assert len(guard.forecasts) == 2 and len(other.forecasts) == 1
    guard.close()


def test_forecasts_are_logged_and_written(tmp_path):
    """The model of examples/observe.py in a Trainer: said before it overflows, counted in the log, read from the folder."""
    spec = importlib.util.spec_from_file_location("example_of_observing", EXAMPLES / "observe.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = example.Classifier()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": example.loss_fn(self.net, (x, labels))}

    torch.manual_seed(0)
    labels, centres = torch.randint(10, (64 * 190,)), 2 * torch.randn(10, 32)
    rows = [{"x": x, "labels": y} for x, y in zip(centres[labels] + torch.randn(len(labels), 32), labels, strict=True)]
    once = {"per_device_train_batch_size": 64, "learning_rate": 5e-3, "warmup_steps": 0}
    trainer = make_trainer(tmp_path, Classifier(), rows, **once)
    guard = nanproof.protect(trainer, policy=Policy(diagnose="never"), observe=Observe(modules=["*.blocks.*", "*.head"]))
    with suppress(nanproof.TrainingHalted):
        trainer.train()
    first = next(forecast for forecast in guard.forecasts if forecast.kind == "activation-overflow")
    overflow = next(r.step for r in guard.history if not math.isfinite(r.observed.by_site["net.head"]))
    assert first.step < overflow == guard.incidents[0].step
    assert [str(forecast) for forecast in read_forecasts(tmp_path / "nanproof")] == [str(f) for f in guard.forecasts]
    counted = [log["nanproof/forecasts"] for log in trainer.state.log_history if "learning_rate" in log]
    assert counted[first.step] == 1 + sum(f.step <= first.step for f in guard.forecasts if f is not first)
    assert counted[0] == 0 and counted[-1] == sum(f.step < len(counted) for f in guard.forecasts)


# -- the monitor ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{}, {22: math.nan}], ids=["healthy", "bad"])
@pytest.mark.parametrize(("protected", "lag"), [(False, None), (True, 0), (True, 2)])
def test_the_monitor_sees_the_same_with_and_without_protection(tmp_path, caplog, protected, lag, bad):
    """`last` is what hooks see at the last look, or in a bad step, which is named with the module whose output came first."""
    monitor = ActivationMonitorCallback(check_every_n_steps=2, observe_only=not protected)
    trainer = make_trainer(tmp_path, Regression(), feature_rows(24, bad), callbacks=[monitor])
    oracle = Oracle(trainer.model)
    trainer.add_callback(Steps(oracle))
    if protected:
        nanproof.protect(trainer, policy=Policy(lag=lag, diagnose="never"))
    trainer.train()
    if bad:
        assert monitor.bad == [5] and all(math.isnan(value) for value in monitor.last.values())
        assert "step 5: outputs that are not finite: first body.0 (nan), and 1 more: head" in caplog.text
    else:
        assert monitor.bad == [] and "not finite" not in caplog.text
        assert monitor.last == pytest.approx({site: oracle.steps[4][site] for site in ("body.0", "head")}, rel=1e-5)
    logs = [log for log in trainer.state.log_history if "learning_rate" in log]
    known = logs[4]["nanproof/activation_max"]  # of step 4, or of the look before it
    assert any(known == pytest.approx(max(oracle.steps[i][s] for s in ("body.0", "head")), rel=1e-5) for i in (2, 4))
    assert logs[4]["nanproof/bad_activation_steps"] == 0 and logs[4]["nanproof/activation_near_max"] == 0
    assert ("nanproof/forecasts" in logs[-1]) == protected
    assert not left_behind(trainer.model)


def test_the_monitor_says_what_the_guard_observes_unless_told_otherwise(tmp_path):
    """Its modules and its interval; what `observe=` says wins, and with observe=False the monitor looks by itself."""
    rows = feature_rows(8)
    for observe, expected in (
        (None, ("head",)),
        (Observe(modules="body.*"), tuple(f"body.{i}" for i in range(4))),
        (False, None),
    ):
        monitor = ActivationMonitorCallback(1, modules=lambda name, module: name == "head")
        trainer = make_trainer(tmp_path, Regression(), rows, callbacks=[monitor])
        guard = nanproof.protect(trainer, observe=observe)
        trainer.train()
        seen = guard.history[-1].observed
        assert (None if seen is None else seen.sites) == expected
        assert set(monitor.last) == set(expected or ("head",))


def test_the_first_bad_module_is_the_one_that_ends_first(tmp_path, caplog):
    """A block comes before its parts in the model, and after them in a forward."""
    model = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * math.inf)
    monitor = ActivationMonitorCallback(observe_only=True)
    trainer = make_trainer(tmp_path, model, token_rows(12), callbacks=[monitor], max_grad_norm=0.0)
    trainer.train()
    assert "step 0: outputs that are not finite: first model.layers.0.mlp (" in caplog.text
    assert monitor.bad == [0, 1, 2] and caplog.text.count("not finite") == 1, "a run that stays bad is not told of at every step"


# -- other frameworks ----------------------------------------------------------------------------------------------------------


def test_sft_is_observed(tmp_path):
    """TRL's trainer has its own loss and its own collator: what goes through the model is seen all the same."""
    pytest.importorskip("trl.trainer")
    from integrations.tiny_trl import sft

    trainer = sft(tmp_path, max_steps=3)
    oracle = Oracle(trainer.model)
    trainer.add_callback(Steps(oracle))
    guard = nanproof.protect(trainer, observe=Observe(modules="model.layers.*", every=2, attention=False))
    trainer.train()
    assert len(guard.history) == 3 and oracle.agrees(guard.history)
    assert "model.layers.0.mlp.down_proj" in guard.history[0].observed.by_site


@LIGHTNINGS_OWN_WARNINGS
@pytest.mark.parametrize("lag", [None, 2])
def test_lightning_is_observed(lag):
    """The sites of the module; the count of forecasts is in Lightning's logs."""
    module = toy("lightning.pytorch")
    oracle = Oracle(module)
    trainer = trainer_of("lightning.pytorch", log_every_n_steps=1)
    guard = nanproof.protect(trainer, policy=Policy(lag=lag), run_dir=None, observe=True)

    class Count(importlib.import_module("lightning.pytorch").Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            oracle.stepped()

    trainer.callbacks.append(Count())
    trainer.fit(module, torch.utils.data.DataLoader(samples(bad=False), batch_size=8))
    assert len(guard.history) == 12 and oracle.agrees(guard.history)
    assert guard.history[0].observed.sites == ("net.0", "net.4")
    assert trainer.callback_metrics["nanproof/forecasts"] == 0


@pytest.mark.parametrize(
    ("framework", "loss"),
    [("accelerate", "own"), ("accelerate", "outside"), ("accelerate", "two models"), ("fabric", "own"), ("fabric", "outside")],
)
def test_raw_loops_are_observed(framework, loss):
    """Also where the guard learns of a step only at its backward, after the forward."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = self.net(x).squeeze(-1)
            return {"loss": F.mse_loss(out, y), "out": out}

    parts = [Own(), nn.Linear(1, 1)] if loss == "two models" else [Own()]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2)
    if framework == "accelerate":
        loop, *ready, optimizer = _accelerated(parts, optimizer)
        guard = nanproof.protect(loop, observe=True)
    else:
        loop = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
        guard = nanproof.protect(loop, observe=True)
        model, optimizer = loop.setup(parts[0], optimizer)
        ready = [model]
    oracle = Oracle(parts[0])
    for x, y in batches(6):
        out = ready[0](x, y)
        value = out["loss"] if loss == "own" else F.mse_loss(out["out"], y)
        if loss == "two models":
            value = value + ready[1](out["out"][:, None]).square().mean()
        loop.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        oracle.stepped()
    guard.close()
    records = guard.history
    assert len(records) == 6
    for step, record in enumerate(records):
        prefix = "0." if loss == "two models" else ""
        seen = record.observed.by_site
        expected = {f"{prefix}{site}": oracle.steps[step][site] for site in ("net.0", "net.4")}
        assert {site: seen[site] for site in expected} == pytest.approx(expected, rel=1e-5), step


def _accelerated(parts: list[nn.Module], optimizer: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(*parts, optimizer)


SCRIPT = """
import sys
import torch
from observe import Classifier, loss_fn

torch.set_num_threads(1)
torch.manual_seed(0)
model, centres = Classifier(), 2 * torch.randn(10, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(int(sys.argv[1])):
    labels = torch.randint(10, (64,))
    loss = loss_fn(model, (centres[labels] + torch.randn(64, 32), labels))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


def test_run_with_observe_tells_forecasts(tmp_path):
    """An unchanged script: a line when it is seen coming, and again in the summary; the records are in the folder."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "nanproof", "run", "--observe", "--json", "--run-dir", "records", "train.py", "160"]
    done = forked.python(*command, cwd=tmp_path, before=f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})")
    assert done.returncode == 0, done.stderr
    *said, summary = done.stderr.splitlines()
    [told] = json.loads(summary)["guarded"]
    forecasts = list(read_forecasts(tmp_path / "records"))
    assert "activation-overflow" in {forecast.kind for forecast in forecasts}
    assert [Forecast.from_json(forecast) for forecast in told["forecasts"]] == forecasts
    assert [line for line in said if " ahead. " in line] == [f"nanproof: {forecast}" for forecast in forecasts]
    steps = list(read_steps(tmp_path / "records"))
    assert len(steps) == told["steps"] == 160 and all(record.observed.by_site for record in steps[1:])


def test_the_summary_tells_forecasts_and_counts_the_rest():
    """For a person: ten of them, and how many more."""
    forecasts = tuple(Forecast(step=i, kind="divergence", message="it grows") for i in range(12))
    plain = {
        "path": "device",
        "verdicts": "",
        "guarded": True,
        "steps": 20,
        "refused": 0,
        "overflows": 0,
        "incidents": (),
        "run_dir": None,
    }
    spent = {"own_seconds": 0.0, "trouble_seconds": 0.0, "span_seconds": 0.0}
    _, *lines = Guarded(name="AdamW", model="GPT", forecasts=forecasts, **plain, **spent).lines()
    assert lines == [*(f"  step {i}: divergence ahead. it grows" for i in range(10)), "  and 2 more forecasts"]
