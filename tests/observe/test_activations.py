"""Observed activations are those of plain hooks: in every kind of step, for every kind of output, counted once."""

from __future__ import annotations

import copy
import io
import logging
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_hooks import PlainHooks, check, observed_run, reference, statistics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof import Observe
from nanproof._records import ABSENT
from toys import batches, differences, mse, net, poison, whole_state

SITES = ["0", "1", "2", "3", "4"]


def built(**kwargs: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """SGD: Adam makes much of round-off where a gradient is next to nothing, as before a BatchNorm."""
    torch.manual_seed(0)
    model = net(**kwargs)
    return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)


def singles(count: int, bad: dict[int, float] | None = None) -> list[list[Any]]:
    data = batches(count)
    return [[poison(b, bad[i]) if bad and i in bad else b] for i, b in enumerate(data)]


@pytest.mark.parametrize("lag", [0, 2])
def test_train_step(lag):
    """With dropout and BatchNorm, bad batches in the middle and one after another, at the end too; light looks in between."""
    steps = singles(14, {4: math.nan, 8: math.inf, 9: math.nan, 13: math.nan})
    model, optimizer = built()
    oracle = reference(model, optimizer, steps, mse, SITES)
    model, optimizer = built()
    guard = observed_run(model, optimizer, steps, mse, lag, every=3)
    assert [r.step for r in guard.history if r.action == "skipped"] == [4, 8, 9, 13]
    assert [r.step for r in guard.history] == list(range(14))
    for record, (outputs, gradients) in zip(guard.history, oracle, strict=True):
        assert record.observed is not None
        full = record.step % 3 == 0
        assert full <= bool(record.observed.outputs)
        check(record.observed, outputs, gradients, full=bool(record.observed.outputs))


@pytest.mark.parametrize("lag", [0, 2])
def test_nothing_of_a_bad_batch_is_in_the_records_of_others(lag):
    """The records of the other steps are, bit for bit, those of the run that never saw it."""
    steps = singles(10, {4: math.nan})
    with_bad = observed_run(*built(), steps, mse, lag)
    without = observed_run(*built(), steps[:4] + steps[5:], mse, lag)
    assert len(with_bad.incidents) == 1 and with_bad.incidents[0].diagnosis is not None
    others = [r.observed for r in with_bad.history if r.step != 4]
    assert others == [r.observed for r in without.history]


def test_micro_batches_are_one_step():
    data = batches(12)
    steps = [data[i : i + 3] for i in range(0, 12, 3)]
    steps[2] = [data[6], poison(data[7]), data[8]]
    model, optimizer = built()
    oracle = reference(model, optimizer, steps, mse, SITES)
    model, optimizer = built()
    guard = observed_run(model, optimizer, steps, mse)
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)
    assert guard.history[2].observed is not None and guard.history[2].observed.outputs["nan"][0] == 16


@pytest.mark.parametrize("every", [1, 2])
def test_a_loop_of_ones_own(every):
    """Accumulation, and evaluation between steps, which is not counted."""
    model, optimizer = built(dropout=0.0)
    twin, twin_optimizer = built(dropout=0.0)
    hooks = PlainHooks(twin, SITES)
    data = batches(12)
    with nanproof.Guard(model, optimizer, observe=Observe(modules="*", every=every)) as guard:
        for i in range(0, 12, 2):
            for which, opt in ((model, optimizer), (twin, twin_optimizer)):
                opt.zero_grad()
                loss = sum(mse(which, b) / 2 for b in data[i : i + 2])
                loss.backward()
                if which is model:
                    guard.step(loss)
                else:
                    nn.utils.clip_grad_norm_(which.parameters(), 1.0)
                    opt.step()
            outputs, gradients = hooks.take()
            check(guard.history[-1].observed, outputs, gradients, full=(i // 2) % every == 0)
            model.eval()
            with torch.no_grad():
                model(torch.full((4, 6), 1e6))
            model.train()
    assert [r.step for r in guard.history] == list(range(6))


def test_evaluation_between_train_steps_is_not_counted():
    """Not even with gradients, or in training mode: it belongs to no step."""
    steps = singles(6)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    oracle = reference(model, optimizer, steps, mse, SITES)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    with nanproof.Guard(model, optimizer, loss_fn=mse, observe=Observe(modules="*", every=1)) as guard:
        for [batch] in steps:
            guard.train_step(batch)
            model(torch.full((4, 6), 1e6)).sum().backward()
            with torch.no_grad():
                model(torch.full((4, 6), 1e7))
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Tower(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers, self.reentrant, self.head = nn.ModuleList(Block() for _ in range(3)), reentrant, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def tower_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0].clone().requires_grad_()).squeeze(-1), batch[1])


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_checkpoints_are_counted_once(reentrant):
    """And an activation in place does not change what its predecessor is seen to have returned."""
    sites = [name for name, m in Tower().named_modules() if name and not isinstance(m, nn.ModuleList)]
    ends = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = Tower(kind)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(1)
        if not ends:
            ends.append(reference(model, optimizer, singles(6, {3: math.nan}), tower_loss, sites))
        else:
            guard = observed_run(model, optimizer, singles(6, {3: math.nan}), tower_loss)
    assert guard.history[0].observed is not None and list(guard.history[0].observed.sites) == sites
    for record, (outputs, gradients) in zip(guard.history, ends[0], strict=True):
        check(record.observed, outputs, gradients)
    assert statistics(ends[0][0][0]["layers.0.mlp.0"])["zeros"] == 0 == guard.history[0].observed.outputs["zeros"][3]


@dataclass
class Out:
    hidden: Tensor


class Returns(nn.Module):
    """A linear layer that hands out its result in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if self.how == "model output":
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=y)
        return {
            "tuple": (y, None), "list": [y], "dict": {"ids": torch.arange(3), "hidden": y}, "late": (None, torch.arange(2), y),
            "twice": (y, y * 1e9), "none": None, "integers": y.argmax(-1), "object": Out(y),
            "nested": (None, [torch.arange(2), (y, y * 1e9)], y * 1e9),
        }[self.how]  # fmt: skip


class Uses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.part, self.head, self.unused = Returns(how), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        if isinstance(y, Tensor) or y is None:
            return self.head(x)
        found = pick(y)
        return self.head(self.part.inner(found) + pick(self.part(found)))  # called twice


def pick(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Out):
        return output.hidden
    values = list(output.values()) if isinstance(output, dict) else list(output)
    if len(values) == 3 and isinstance(values[1], list):
        return values[1][1][0]
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


@pytest.mark.parametrize("how", ["tuple", "list", "dict", "model output", "late", "twice", "nested"])
def test_outputs_of_any_shape_modules_called_twice_and_never(how):
    torch.manual_seed(0)
    model = Uses(how)
    twin = copy.deepcopy(model)
    sites = ["part", "part.inner", "head", "unused"]
    oracle = reference(twin, torch.optim.SGD(twin.parameters(), 1e-2), singles(2), mse, sites, pick)
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), singles(2), mse)
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)
        assert record.observed is not None and record.observed.absmax[3] == ABSENT
        assert "unused" not in record.observed.by_site and len(record.observed.by_site) == 3


@pytest.mark.parametrize("how", ["none", "integers", "object"])
def test_outputs_without_values_are_not_there(how):
    torch.manual_seed(0)
    model = Uses(how)
    loss = mse
    if how == "object":
        loss = lambda model, batch: F.mse_loss(model.head(model.part(batch[0]).hidden).squeeze(-1), batch[1])  # noqa: E731
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), singles(2), loss)
    assert not guard.incidents
    for record in guard.history:
        assert record.observed is not None and set(record.observed.by_site) == {"part.inner", "head"}


def test_gradients_of_gradients():
    """A gradient penalty goes through each output twice."""

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        [g] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return g.square().mean() + mse(model, batch)

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    model, twin = models
    oracle = reference(twin, torch.optim.SGD(twin.parameters(), 1e-2), singles(3), penalty, ["0", "1", "2"])
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), singles(3), penalty)
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)


def test_gradients_have_the_loss_scale_in_them():
    scaled, plain = (
        nanproof.Guard(*built(dropout=0.0), loss_fn=mse, observe=Observe(modules="*", every=1), scaler=scaler)
        for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0), None)
    )
    for guard in (scaled, plain):
        guard.train_step(batches(1)[0])
        guard.close()
    one, other = (guard.history[0].observed for guard in (scaled, plain))
    assert one is not None and other is not None
    assert list(one.gradients["absmax"]) == pytest.approx([1024 * x for x in other.gradients["absmax"]], rel=1e-5)


def test_a_salvaged_step_has_a_record_of_its_own():
    """First the whole batch, refused; then what is left of it."""
    data = batches(3)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    guard = nanproof.Guard(
        model, optimizer, loss_fn=mse, observe=Observe(modules="*", every=1), policy=nanproof.Policy(salvage=True)
    )
    with guard:
        guard.train_step(data[0])
        weights = [p.detach().clone() for p in model.parameters()]
        guard.train_step(poison(data[1]))
    assert [(r.step, r.action == "skipped") for r in guard.history] == [(0, False), (1, True), (1, False)]
    twin, _ = built(dropout=0.0, batch_norm=False)
    with torch.no_grad():
        for p, w in zip(twin.parameters(), weights, strict=True):
            p.copy_(w)
    rest = [i for i in range(len(data[1][0])) if i != 2]
    seen = reference(twin, torch.optim.SGD(twin.parameters(), 1e-2), [[[t[rest] for t in data[1]]]], mse, SITES)
    check(guard.history[2].observed, *seen[0])
    bad = guard.history[1].observed
    assert bad is not None and all(math.isnan(x) for x in bad.absmax)


def test_gradients_can_be_left_out():
    guard = observed_run(*built(), singles(2), mse, gradients=False)
    assert all(r.observed and r.observed.outputs and not r.observed.gradients for r in guard.history)


def test_dtypes_under_autocast_are_noted():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return F.mse_loss(out.squeeze(-1).float(), batch[1])

    model, optimizer = built(dropout=0.0)
    oracle = reference(model, optimizer, singles(3), loss, SITES)
    model, optimizer = built(dropout=0.0)
    guard = observed_run(model, optimizer, singles(3), loss)
    lookout: Any = guard.parts.engine.lookout
    assert lookout._observer.dtypes[0] == lookout._observer.dtypes[len(SITES)] == torch.bfloat16
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)


@pytest.mark.parametrize("lag", [0, 2])
def test_observing_changes_no_bit(lag):
    """Weights, moments, buffers, random numbers: with bad batches, dropout, BatchNorm; whatever is looked at."""
    steps = singles(12, {3: math.nan, 7: 1e38})
    ends = []
    for observe in (None, True, Observe(modules="*", every=1)):
        model, _ = built()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, observe=observe, policy=nanproof.Policy(lag=lag))
        for [batch] in steps:
            guard.train_step(batch)
        ends.append(whole_state(model, optimizer, guard=guard))
        guard.close()
        assert [r.step for r in guard.history if r.action == "skipped"] == [3, 7]
    assert not list(differences("", ends[0], ends[1])) and not list(differences("", ends[0], ends[2]))


def test_copies_of_the_model_work_and_are_not_counted():
    steps = singles(6)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    oracle = reference(model, optimizer, steps, mse, SITES)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    with nanproof.Guard(model, optimizer, observe=Observe(modules="*", every=1)) as guard:
        for [batch] in steps:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                assert torch.equal(twin(batch[0]), copy.deepcopy(twin)(batch[0]))
                (mse(twin, batch) * 1e6).backward()
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)


def test_hooks_are_gone_after_close():
    model, optimizer = built()
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    guard = nanproof.Guard(model, optimizer, loss_fn=mse, observe=True)
    guard.train_step(batches(1)[0])
    assert any(m._forward_hooks for m in model.modules())
    loss = mse(model, batches(1)[0])  # a graph that outlives the guard
    guard.close()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
    loss.backward()


class Float8(nn.Module):
    """Returns what torch can find no maximum of."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to(torch.float8_e4m3fn)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.odd = nn.Linear(6, 1), Float8()

    def forward(self, x: Tensor) -> Tensor:
        self.odd(x)
        return self.linear(x)


def test_what_goes_wrong_in_looking_never_ends_the_run(caplog):
    torch.manual_seed(0)
    model = Strange()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, logger="nanproof"):
        guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), singles(4), mse)
    assert len(guard.history) == 4 and not guard.incidents
    [warning] = [r.message for r in caplog.records]
    assert "not observed any more" in warning and "Error" in warning
    unwatched = torch.optim.SGD(plain.parameters(), 1e-2)
    with nanproof.Guard(plain, unwatched, loss_fn=mse) as guard:
        for [batch] in singles(4):
            guard.train_step(batch)
    assert torch.equal(model.linear.weight, plain.linear.weight)


def test_two_guards_at_once():
    """A GAN: each guard's records are of its own steps."""

    def play(observe: Any) -> tuple[nanproof.Guard, nanproof.Guard]:
        torch.manual_seed(0)
        maker, judge = nn.Sequential(nn.Linear(3, 6)), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

        def judged(judge: nn.Module, batch: Any) -> Tensor:
            return judge(maker(batch[1]).detach()).mean() - judge(batch[0]).mean()

        made = [torch.optim.SGD(m.parameters(), 1e-2) for m in (maker, judge)]
        guards = (
            nanproof.Guard(maker, made[0], loss_fn=lambda m, b: -judge(m(b[1])).mean(), observe=observe),
            nanproof.Guard(judge, made[1], loss_fn=judged, observe=observe),
        )
        hooks = {"maker": PlainHooks(maker, ["0"]), "judge": PlainHooks(judge, ["0", "1", "2"])}
        for x, _ in batches(5):
            for guard, name in zip(guards, hooks, strict=True):
                for other in hooks.values():
                    other.take()
                guard.train_step([x, x[:, :3]])
                outputs, gradients = hooks[name].take()
                if observe:
                    check(guard.history[-1].observed, outputs, gradients)
        for guard in guards:
            guard.close()
        return guards

    observed, plain = play(Observe(modules="*", every=1)), play(None)
    for mine, theirs in zip(observed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True))


def test_a_step_that_raised_leaves_nothing_in_the_next():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = mse(model, batch)
        if float(batch[0].max()) > 1e5:
            raise ValueError("this batch is broken")
        return found

    model, optimizer = built(batch_norm=False)
    with nanproof.Guard(model, optimizer, loss_fn=loss, observe=Observe(modules="*", every=1)) as guard:
        for i, batch in enumerate(batches(4)):
            if i == 2:
                with pytest.raises(ValueError, match="broken"):
                    guard.train_step(batch, [batch[0] * 1e6, batch[1]])
            guard.train_step(batch)
    assert [r.step for r in guard.history] == [0, 1, 3, 4]
    model, optimizer = built(batch_norm=False)
    oracle = reference(model, optimizer, singles(4), mse, SITES)
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)


def test_packed_sequences_of_a_recurrent_layer():
    """Their values are one level down in what the layer returns."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = nn.LSTM(6, 4), nn.Linear(4, 1)
            self.absmax: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            packed, _ = self.recurrent(nn.utils.rnn.pack_sequence([x, x[:2]]))
            self.absmax.append(packed.data.abs().max().item())
            return self.head(packed.data)[:, 0][: x.shape[0]]

    torch.manual_seed(0)
    model = Packed()
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), singles(3), mse)
    seen = [r.observed.by_site["recurrent"] for r in guard.history if r.observed is not None]
    assert seen == pytest.approx(model.absmax)


@pytest.mark.parametrize("how", ["vmap", "grad", "inference mode"])
def test_what_torch_func_and_inference_run_between_steps_is_not_seen_and_ends_nothing(how, caplog):
    """Gradients by sample, say: the sites are observed as before in the steps that follow."""

    def between(model: nn.Module, x: Tensor) -> None:
        if how == "inference mode":
            with torch.inference_mode():
                model(1e6 * x)
            return
        parameters = dict(model.named_parameters())

        def by_sample(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (1e6 * x.unsqueeze(0),)).sum()

        gradient = torch.func.grad(by_sample)
        if how == "grad":
            gradient(parameters, x[0])
        else:
            torch.vmap(gradient, (None, 0))(parameters, x)

    steps = singles(5)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    oracle = reference(model, optimizer, steps, mse, SITES)
    model, optimizer = built(dropout=0.0, batch_norm=False)
    with nanproof.Guard(model, optimizer, observe=Observe(modules="*", every=1)) as guard:
        for [batch] in steps:
            between(model, batch[0])
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
    assert not caplog.records
    for record, seen in zip(guard.history, oracle, strict=True):
        check(record.observed, *seen)
