"""Lightning's Fabric, protected: the loop stays as it is, a bad batch leaves no trace, clipping is the guard's."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.integrations.lightning._fabric import protect_fabric
from toys import batches, net

PACKAGES = ["lightning.fabric", "lightning_fabric"]
STEPS, BAD, SAMPLE = 12, 5, 3


class Own(nn.Module):
    """A model that returns its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        out = self.net(x).squeeze(-1)
        return SimpleNamespace(loss=F.mse_loss(out.float(), y.float()), out=out)


def data(bad: bool) -> list[list[torch.Tensor]]:
    found = batches(STEPS)
    if bad:
        found[BAD][0][SAMPLE, 2] = float("nan")
    return found


def run(
    data, *, package="lightning.fabric", protect=True, clip=None, own_loss=True, accumulate=1, precision="32-true", late=False
):
    """A loop as in Fabric's documents. Returns the weights, the guard and what clip_gradients returned."""
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    model = Own()
    kind = torch.optim.AdamW if clip is None else torch.optim.SGD  # Adam makes much of the last bits of a gradient near 0
    optimizer = kind(model.parameters(), lr=1e-2, fused=True)
    guard = protect_fabric(fabric) if protect and not late else None
    model, optimizer = fabric.setup(model, optimizer)
    if late:
        guard = protect_fabric(fabric, model, optimizer)
    norms = []
    torch.manual_seed(1)
    for i, (x, y) in enumerate(data):
        output = model(x, y)
        loss = output.loss if own_loss else F.mse_loss(output.out.float(), y)
        fabric.backward(loss / accumulate if accumulate > 1 else loss)
        if (i + 1) % accumulate:
            continue
        if clip is not None:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False))
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
        assert not {"backward", "clip_gradients", "setup", "_nanproof"} & set(vars(fabric))
        assert "optimizer_step" not in vars(fabric.strategy)
    return {k: v.clone() for k, v in model.state_dict().items()}, guard, norms


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("late", [False, True])
def test_a_bad_batch_leaves_no_trace(package, late):
    """Bit for bit the run without the batch; unprotected, the weights are lost. Step, cause and sample are named."""
    lost, _, _ = run(data(bad=True), package=package, protect=False)
    assert not all(torch.isfinite(v).all() for v in lost.values())
    weights, guard, _ = run(data(bad=True), package=package, late=late)
    clean, _, _ = run([b for i, b in enumerate(data(bad=False)) if i != BAD], package=package, late=late)
    assert same(weights, clean)
    (incident,) = guard.incidents
    assert (incident.step, incident.action, incident.diagnosis.cause) == (BAD, "skipped", "nonfinite-batch")
    assert incident.diagnosis.samples == (SAMPLE,)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accumulation_and_precision(accumulate, precision):
    weights, guard, _ = run(data(bad=True), accumulate=accumulate, precision=precision)
    gone = (BAD,) if accumulate == 1 else (4, 5)
    clean, _, _ = run([b for i, b in enumerate(data(False)) if i not in gone], accumulate=accumulate, precision=precision)
    assert same(weights, clean)
    assert [i.step for i in guard.incidents] == [BAD // accumulate]
    assert guard.incidents[0].diagnosis.cause == "nonfinite-batch"


def test_a_loss_of_the_loops_own_is_guarded_and_attributed():
    """Such a step is run again from the loop's own lines."""
    weights, guard, _ = run(data(bad=True), own_loss=False)
    assert all(torch.isfinite(v).all() for v in weights.values())
    (incident,) = guard.incidents
    assert (incident.step, incident.action) == (BAD, "skipped")
    assert "net.0.weight" in dict(incident.culprits)
    found = incident.diagnosis
    assert (found.cause, found.samples, found.verified, found.where) == ("nonfinite-batch", (SAMPLE,), True, "batch['x']")


def test_a_healthy_run_is_fabrics_own():
    """Bit for bit without clipping; with it to 1e-6, and `clip_gradients` returns the same norms."""
    assert same(run(data(False))[0], run(data(False), protect=False)[0])
    guarded, guard, norms = run(data(False), clip=0.1)
    plain, _, theirs = run(data(False), clip=0.1, protect=False)
    assert all(torch.allclose(guarded[k], plain[k], atol=1e-6, rtol=0) for k in plain)
    assert torch.allclose(torch.stack(norms), torch.stack(theirs), rtol=1e-6)
    assert [r.grad_norm for r in guard.history] == pytest.approx([float(n) for n in norms])
    assert all(n > 0.1 for n in norms)


def test_gradients_are_read_once(monkeypatch):
    """The norms that `clip_gradients` returns are those that the step is judged by, unless somebody wrote to a gradient since."""
    from nanproof.core.judge._parameters import Parameters

    calls = []
    norms = Parameters.norms
    monkeypatch.setattr(Parameters, "norms", lambda *args: (calls.append(1), norms(*args))[1])
    run(data(False), clip=0.1)
    assert len(calls) == STEPS


def test_clipping_by_value_and_other_norms_are_refused():
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(Own(), torch.optim.AdamW(Own().parameters()))
    guard = protect_fabric(fabric, model, optimizer)
    with pytest.raises(nanproof.UnsupportedError, match="infinite"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.raises(nanproof.UnsupportedError, match="type 2"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
    guard.close()


def test_two_models_with_an_optimizer_each():
    """A guard for each: only the one whose batch was bad refuses."""
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        model = Own()
        pairs.append(fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    guards = [protect_fabric(fabric, *pair) for pair in pairs]
    for first, second in zip(data(bad=True), data(bad=False), strict=True):
        for (model, optimizer), batch in zip(pairs, (first, second), strict=True):
            optimizer.zero_grad()
            fabric.backward(model(*batch).loss)
            optimizer.step()
    guards[0].close()
    assert "backward" in vars(fabric)
    guards[1].close()
    assert "backward" not in vars(fabric)
    assert [[i.step for i in guard.incidents] for guard in guards] == [[BAD], []]
    assert all(len(guard.history) == STEPS for guard in guards)
    assert all(torch.isfinite(p).all() for model, _ in pairs for p in model.parameters())


def test_a_bad_step_among_the_last_ones_is_settled_at_close():
    """With verdicts two steps late, the good batch behind it is trained on while the run closes."""
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    found = {}
    for name, kinds in (("saw", ("good", "bad", "good")), ("never", ("good", "good"))):
        torch.manual_seed(0)
        plain = Own()
        guard = protect_fabric(fabric, policy=nanproof.Policy(lag=2))
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, fused=True))
        (x, y) = batches(1)[0]
        torch.manual_seed(1)
        for kind in kinds:
            optimizer.zero_grad()
            fabric.backward(model(x * float("nan") if kind == "bad" else x, y).loss)
            optimizer.step()
        guard.close()
        found[name] = [p.detach().clone() for p in plain.parameters()], [(i.step, i.action) for i in guard.incidents]
    assert found["saw"][1] == [(1, "skipped")] and found["never"][1] == []
    assert all(torch.equal(a, b) for a, b in zip(found["saw"][0], found["never"][0], strict=True))
