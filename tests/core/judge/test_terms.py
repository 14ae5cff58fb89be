"""The terms of a loss: added up as by hand, found again from whatever was made of the sum, carried by every record, and named by
the incident, also of another rank."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import nanproof
from nanproof import Incident, UsageError, read_incidents, read_steps
from nanproof._wording import bad_terms
from nanproof.core._evidence import from_finding
from nanproof.core.judge._stats import Finding
from nanproof.core.judge._terms import Terms, mean_of, rose_most, terms_of, weighted_sum
from nanproof.numerics import losses
from toys import Lion
from zoo.two_ranks import two_ranks

NAN, INF = math.nan, math.inf


def scalars(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn((), dtype=dtype).requires_grad_() for _ in range(count)]


def by_name(terms: Terms | None) -> dict[str, float]:
    assert terms is not None
    return dict(zip(terms.names, terms.vector.tolist(), strict=True))


# -- the sum -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_are_those_of_the_plain_sum(seed, dtype):
    """Bit for bit, from left to right."""
    torch.manual_seed(seed)
    count = int(torch.randint(1, 6, ()))
    ours = scalars(count, dtype)
    plain = [t.detach().clone().requires_grad_() for t in ours]
    weights = {f"t{i}": float(torch.randn(())) for i in range(count) if i % 2}
    loss = weighted_sum({f"t{i}": t.square() for i, t in enumerate(ours)}, weights)
    wanted = sum(weights.get(f"t{i}", 1.0) * t.square() for i, t in enumerate(plain))
    assert torch.equal(loss, wanted) and loss.dtype == wanted.dtype
    loss.backward()
    wanted.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, plain, strict=True))


def test_half_terms_are_added_in_fp32():
    a = torch.tensor(60000.0, dtype=torch.float16, requires_grad=True)
    loss = weighted_sum({"a": a, "b": a * 1, "n": torch.tensor([3])})
    assert loss.dtype == torch.float32 and loss.item() == 120003.0
    loss.backward()
    assert a.grad.dtype == torch.float16 and a.grad.item() == 2.0


def test_a_weight_of_zero_leaves_the_term_out_but_notes_it():
    """0 * NaN is NaN: in the plain sum the value would be lost, and the gradient too."""
    x = torch.tensor(0.0, requires_grad=True)
    y = torch.tensor(2.0, requires_grad=True)
    loss = weighted_sum({"bad": x.log() * 0 + x.sqrt(), "good": y * 3}, {"bad": 0})
    loss.backward()
    assert loss.item() == 6.0 and y.grad.item() == 3.0 and x.grad is None
    assert math.isnan(by_name(terms_of(loss))["bad"])
    alone = weighted_sum({"bad": x.log()}, {"bad": 0.0})
    assert alone.item() == 0.0 and not alone.requires_grad and terms_of(alone) is None


@pytest.mark.parametrize(
    ("terms", "weights", "said"),
    [
        ({}, None, "an empty one"),
        ([torch.ones(())], None, "not list"),
        ({1: torch.ones(())}, None, "the name 1 is no string"),
        ({"a": 1.0}, None, "'a' is of type float"),
        ({"a": torch.ones(3)}, None, r"'a' has the shape \[3\]"),
        ({"a": torch.ones((), dtype=torch.complex64)}, None, "'a' is torch.complex64"),
        ({"a": torch.ones(())}, {"b": 1.0}, "no term b; the terms are a"),
        ({"a": torch.ones(())}, {"a": NAN}, "the weight of 'a' is nan"),
        ({"a": torch.ones(())}, {"a": INF}, "the weight of 'a' is inf"),
        ({"a": torch.ones(())}, {"a": torch.ones(())}, "the weight of 'a' is a tensor"),
        ({"a": torch.ones(())}, {"a": "1"}, "the weight of 'a' is '1'"),
        ({"a": torch.ones(())}, [1.0], "not list"),
    ],
)
def test_what_is_wrong_is_named(terms, weights, said):
    with pytest.raises(UsageError, match=said):
        weighted_sum(terms, weights)


def test_it_is_public_with_the_other_losses():
    assert losses.weighted_sum is weighted_sum


# -- finding them again --------------------------------------------------------------------------------------------------------


def changed(loss: torch.Tensor, how: str) -> torch.Tensor:
    deep = torch.randn(4, requires_grad=True)
    for _ in range(60):
        deep = deep.sin() + 1
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    in_place = loss * 1
    return {
        "not": lambda: loss,
        "divided": lambda: loss / 4,
        "scaled": lambda: scaler.scale(loss),
        "wider": lambda: loss.double().reshape(1),
        "regularised": lambda: loss + 0.01 * deep.sum(),
        "regularised first": lambda: 0.01 * deep.sum() + loss / 2,
        "in place": lambda: in_place.div_(3),
        "all": lambda: scaler.scale((loss * 0.5 + deep.mean()).float() / 8),
    }[how]()


@pytest.mark.parametrize("how", ["not", "divided", "scaled", "wider", "regularised", "regularised first", "in place", "all"])
def test_they_are_found_from_what_was_made_of_the_loss(how):
    a, b = scalars(2)
    loss = changed(weighted_sum({"a": a * 1, "b": b * 1, "c": torch.tensor(5.0)}, {"b": 0.5}), how)
    wanted = {"a": a.item(), "b": b.item(), "c": 5.0}
    assert by_name(terms_of(loss)) == wanted
    loss.backward()
    assert by_name(terms_of(loss)) == wanted, "the guard may hear of it only after backward"


def test_where_there_are_none_there_are_none():
    a = torch.randn((), requires_grad=True)
    assert terms_of(a.square()) is None and terms_of(torch.ones(())) is None and terms_of(a) is None
    with torch.no_grad():
        assert terms_of(weighted_sum({"a": a})) is None
    assert terms_of(weighted_sum({"a": a}).detach()) is None


def test_the_walk_over_the_graph_is_bounded():
    """However large the graph is: at the far end of a long one they are not looked for."""
    a = torch.randn((), requires_grad=True)
    loss = weighted_sum({"a": a})
    for _ in range(1000):
        loss = loss + 1
    assert terms_of(loss) is None


def test_inside_compile_it_is_the_sum_and_nothing_more():
    a, b = scalars(2)
    together = torch.compile(lambda x, y: weighted_sum({"x": x * 2, "y": y}, {"y": 0.5}), backend="aot_eager", fullgraph=True)
    loss = together(a, b)
    assert loss.item() == pytest.approx(2 * a.item() + 0.5 * b.item()) and terms_of(loss) is None
    loss.backward()
    assert a.grad.item() == 2.0 and b.grad.item() == 0.5


def test_of_several_sums_all_are_found():
    a, b = scalars(2)
    apart = weighted_sum({"a": a}) + 2 * weighted_sum({"b": b})
    assert by_name(terms_of(apart)) == {"a": a.item(), "b": b.item()}
    twice = (weighted_sum({"a": a, "b": b}) + weighted_sum({"a": b})) / 2
    assert by_name(terms_of(twice)) == pytest.approx({"a": (a.item() + b.item()) / 2, "b": b.item()})
    inside = weighted_sum({"all": weighted_sum({"a": a, "b": b})})
    assert by_name(terms_of(inside)) == {"all": pytest.approx(a.item() + b.item())}


def test_the_mean_is_over_those_who_have_a_term():
    first, second = Terms(("a", "b"), torch.tensor([1.0, 2.0])), Terms(("b", "c"), torch.tensor([4.0, NAN]))
    found = by_name(mean_of([first, None, second]))
    assert (found["a"], found["b"]) == (1.0, 3.0) and math.isnan(found["c"])
    assert mean_of([None]) is None and mean_of([None, first]) is first


class _Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_way():
    with _Reads() as reads:
        loss = weighted_sum({"a": torch.ones((), requires_grad=True), "b": torch.ones(())}, {"b": 2.0})
        mean_of([terms_of(loss / 2), terms_of(weighted_sum({"a": loss}))])
    assert reads.names == []
    with _Reads() as reads:
        bool(loss > 0)
    assert reads.names != []


# -- in a guarded run ----------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.text, self.latent = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.text(hidden).squeeze(-1), self.latent(hidden).squeeze(-1)


def two_terms(model, batch):
    """`level` is 0 in a bad batch: its log is -Inf."""
    x, level = batch
    text, latent = model(x)
    text_loss = text.square().mean()
    latent_loss = latent.square().mean() - level.log().mean()
    return weighted_sum({"text_loss": text_loss, "latent_loss": latent_loss}, {"latent_loss": 0.5})


def data(count: int, bad: int | None = None, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    out = [(torch.randn(3, 4, generator=g), torch.ones(3)) for _ in range(count)]
    if bad is not None:
        out[bad][1][1] = 0.0
    return out


def guarded(optimizer=None, **settings):
    torch.manual_seed(0)
    model = TwoHeads()
    make = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    return model, nanproof.Guard(model, make(model.parameters()), **settings)


def the_terms(model, batch) -> dict[str, float]:
    """The slow way."""
    with torch.no_grad():
        text, latent = model(batch[0])
        return {"text_loss": text.square().mean().item(), "latent_loss": (latent.square().mean() - batch[1].log().mean()).item()}


def own_loop(guard, model, batches, how: str, parts: int = 1, scaler=None) -> list[dict[str, float]]:
    """Every way of telling the guard of a loss; returns the mean terms of each step, read before it was taken."""
    wanted = []
    for start in range(0, len(batches), parts):
        micro = batches[start : start + parts]
        each = [the_terms(model, batch) for batch in micro]
        wanted.append({name: sum(one[name] for one in each) / parts for name in each[0]})
        if how == "train_step":
            guard.train_step(*micro)
            continue
        guard.optimizer.zero_grad()
        for batch in micro:
            loss = two_terms(model, batch) / parts
            if how == "backward":
                guard.backward(loss)
            elif scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()
        guard.step(None if how == "backward" else loss)
    return wanted


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("path", ["device", "host"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("how", "parts"), [("train_step", 1), ("train_step", 3), ("backward", 1), ("backward", 3), ("step", 1)])
def test_every_record_carries_them(how, parts, scaled, path, lag):
    """The mean over the micro-batches, without the weights, whoever did the backward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    optimizer = None if path == "device" else (lambda ps: Lion(ps, lr=1e-3))
    policy = nanproof.Policy(lag=lag)
    model, guard = guarded(optimizer, loss_fn=two_terms, scaler=scaler, policy=policy)
    with guard:
        wanted = own_loop(guard, model, data(4 * parts), how, parts, scaler)
    assert guard.path.startswith(path)
    assert [list(dict(r.terms)) for r in guard.history] == [["text_loss", "latent_loss"]] * 4
    for record, terms in zip(guard.history, wanted, strict=True):
        assert dict(record.terms) == pytest.approx(terms, rel=1e-5)
        assert len(record.by_parameter) == 6, "the norms stay what they are"
        loss = dict(record.terms)["text_loss"] + 0.5 * dict(record.terms)["latent_loss"]
        assert record.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("path", ["device", "host"])
def test_terms_change_nothing_of_a_run(path):
    """Weights, losses, norms: bit for bit those of the same loss without terms."""
    ends = []
    for loss_fn in (two_terms, lambda m, b: (two_terms(m, b).detach() * 0) + plain_sum(m, b)):
        optimizer = None if path == "device" else (lambda ps: Lion(ps, lr=1e-3))
        model, guard = guarded(optimizer, loss_fn=loss_fn)
        with guard:
            for batch in data(5):
                guard.train_step(batch)
        ends.append((torch.cat([p.detach().reshape(-1) for p in model.parameters()]), guard.history))
    (weights, history), (plain, without) = ends
    assert torch.equal(weights, plain)
    assert [(r.loss, r.grad_norm, list(r.norms)) for r in history] == [(r.loss, r.grad_norm, list(r.norms)) for r in without]
    assert all(r.terms for r in history) and not any(r.terms for r in without)
    assert "terms" not in without[0].to_json()


def plain_sum(model, batch):
    text, latent = model(batch[0])
    return text.square().mean() * 1.0 + (latent.square().mean() - batch[1].log().mean()) * 0.5


def test_what_is_given_up_leaves_no_terms():
    """Micro-batches whose gradients were cleared do not count; nor does a loss that was dropped, or one that raised."""
    model, guard = guarded(loss_fn=two_terms)
    first, second = data(2)
    with guard:
        guard.backward(two_terms(model, first))
        guard.optimizer.zero_grad()
        guard.backward(two_terms(model, second))
        wanted = the_terms(model, second)
        guard.step()
        assert dict(guard.history[0].terms) == pytest.approx(wanted, rel=1e-5)
        guard.optimizer.zero_grad()
        plain_sum(model, first).backward()
        guard.step(torch.zeros(()))
        assert guard.history[1].terms == ()
        stepper = guard.parts.stepper
        stepper.note_loss(two_terms(model, first))
        stepper.drop_loss()
        assert stepper.noted == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("how", "parts"), [("train_step", 1), ("train_step", 2), ("backward", 1), ("backward", 2), ("step", 1)])
def test_the_incident_names_the_term(tmp_path, how, parts, lag):
    """Of the bad micro-batch. In the message too, the bad one first; and all of it survives on disk."""
    policy = nanproof.Policy(lag=lag)
    model, guard = guarded(loss_fn=two_terms, policy=policy, run_dir=tmp_path)
    batches = data(5 * parts, bad=3 * parts + (parts - 1))
    with guard:
        own_loop(guard, model, batches, how, parts)
    [incident] = guard.incidents
    assert incident.kind == "nonfinite-loss" and incident.micro_batch == (1 if parts == 2 else None)
    terms = dict(incident.terms)
    assert list(terms) == ["text_loss", "latent_loss"] and terms["latent_loss"] == INF
    assert f"; of the terms latent_loss is inf, text_loss is {terms['text_loss']:.4g}" in incident.message
    bad = next(r for r in guard.history if r.action == "skipped")
    assert dict(bad.terms)["latent_loss"] == INF
    if parts == 2:
        assert terms["text_loss"] != dict(bad.terms)["text_loss"], "the micro-batch's own, not the mean"
    [read] = read_incidents(tmp_path)
    assert dict(read.terms) == pytest.approx(terms, rel=1e-5)
    written = [r for r in read_steps(tmp_path) if r.action == "skipped"]
    assert [dict(r.terms)["latent_loss"] for r in written] == [INF]
    plain = json.loads((tmp_path / "incidents.jsonl").read_text())
    assert plain["terms"] == {"text_loss": pytest.approx(terms["text_loss"], rel=1e-5), "latent_loss": "inf"}


def test_the_birth_is_in_the_term_and_not_in_the_sum():
    """The replay looks through the sum: log of 0, on the line that made the term."""
    model, guard = guarded(loss_fn=two_terms)
    with guard:
        for batch in data(5, bad=3):
            guard.train_step(batch)
    found = guard.incidents[0].diagnosis
    assert (found.cause, found.op, found.samples, found.verified) == ("log-of-zero", "log", (1,), True)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "- level.log().mean()" in text)
    assert found.source.endswith(f"test_terms.py:{line}")
    asked = nanproof.diagnose(model, two_terms, data(1, bad=0)[0])
    assert (asked.cause, asked.source) == (found.cause, found.source)


def test_a_finite_loss_with_bad_gradients_says_no_more_than_before():
    """The terms are there, and the message is as it was."""

    def loss_fn(model, batch):
        text, latent = model(batch[0])
        if batch[1].min() == 0:
            latent.register_hook(lambda g: g * NAN)
        terms = {"text": text.square().mean(), "latent": latent.square().mean(), "left out": torch.tensor(NAN)}
        return weighted_sum(terms, {"left out": 0})

    _, guard = guarded(loss_fn=loss_fn)
    with guard:
        for batch in data(4, bad=2):
            guard.train_step(batch)
    [incident] = guard.incidents
    assert incident.kind == "nonfinite-gradient" and "of the terms" not in incident.message
    assert [name for name, value in incident.terms if math.isfinite(value)] == ["text", "latent"]
    assert math.isnan(dict(incident.terms)["left out"]), "it was no part of the loss, and is not blamed"


def test_a_loss_given_with_the_step_is_that_of_the_last_backward():
    """The terms of a good micro-batch are not put down to the bad one."""
    for bad in (0, 1):
        model, guard = guarded()
        micro = data(2)
        micro[bad][0][0, 0] = NAN
        with guard:
            for batch in micro:
                loss = two_terms(model, batch) / 2
                loss.backward()
            guard.step(loss)
        [incident] = guard.incidents
        assert incident.micro_batch == bad
        assert [name for name, value in incident.terms if math.isnan(value)] == (["text_loss", "latent_loss"] if bad else [])
        assert bool(incident.terms) is (bad == 1)


# -- spikes --------------------------------------------------------------------------------------------------------------------


def test_words():
    assert bad_terms([("a", 1.0), ("b", INF), ("c", NAN)]) == "of the terms b is inf, c is nan, a is 1"
    assert bad_terms([("a", 1.0)]) == bad_terms([]) == ""


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": 2.0, "b": 0.9}, {"a": 2.1, "b": 4.1e6}, "b rose most, 0.9 to 4.1e+06"),
        ({"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 5.9}, ""),  # a doubled: 5.9 is not three times that
        ({"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 6.0}, "b rose most, 1 to 6"),
        ({"a": 2.0, "b": 1.0}, {"a": 0.1, "b": 2.9}, ""),  # that the other fell makes it no larger
        ({"a": 2.0}, {"a": 7.0}, "a rose most, 2 to 7"),
        ({"a": 2.0, "b": 0.0}, {"a": 70.0, "b": 1e-9}, ""),  # from nothing: by no factor
        ({"a": 2.0, "b": NAN}, {"a": 70.0, "b": 1.0}, "a rose most, 2 to 70"),
        ({"a": 2.0}, {"b": 70.0}, ""),
        ({}, {"a": 7.0}, ""),
    ],
)
def test_what_rose_most_is_said_only_when_it_is_clear(before, now, said):
    assert rose_most(tuple(before.items()), tuple(now.items())) == said


def test_an_outlier_batch_names_the_term_that_rose():
    """A spike is reported steps later, against the record before it."""

    def loss_fn(model, batch):
        text, latent = model(batch[0])
        return weighted_sum({"text": (text - 1).square().mean() + 1, "latent": (latent - batch[1]).square().mean() + 1})

    _, guard = guarded(loss_fn=loss_fn, policy=nanproof.Policy(diagnose="never"))
    batches = data(45, seed=3)
    batches[35][1][:] = 300.0
    with guard:
        for batch in batches:
            guard.train_step(batch)
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (35, "spike")
    seen = {r.step: dict(r.terms) for r in guard.history}
    assert dict(incident.terms) == seen[35]
    assert incident.message.endswith(f"; latent rose most, {seen[34]['latent']:.4g} to {seen[35]['latent']:.4g}")
    record = guard.history[-1]
    assert from_finding(Finding("spike", record, "so it is")).message == "so it is"


# -- records -------------------------------------------------------------------------------------------------------------------


def test_files_from_before_are_read():
    incident = Incident(step=1, kind="spike", action="recorded")
    plain = incident.to_json()
    assert "terms" not in plain and Incident.from_json(plain) == incident


# -- several ranks -------------------------------------------------------------------------------------------------------------


def ranks(rank: int, kind: str, parts: int):
    """Rank 1's second term is infinite at step 2. Rank 0 has a loss without terms in the same run, if `parts` is 1."""
    torch.manual_seed(0)
    model: nn.Module = TwoHeads()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    loss_fn = two_terms if rank == 1 or parts > 1 else plain_sum
    batches = data(4 * parts, bad=3 * parts - 1 if rank == 1 else None, seed=rank + 1)
    with nanproof.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn=loss_fn) as guard:
        for i in range(4):
            guard.train_step(*batches[i * parts : (i + 1) * parts])
    found = [[i.step, i.kind, i.rank, i.micro_batch, i.message, [[n, str(x)] for n, x in i.terms]] for i in guard.incidents]
    return found, [bool(r.terms) for r in guard.history]


def test_the_guilty_ranks_term_is_named_on_every_rank():
    """By DistributedDataParallel and fully_shard; also on a rank whose own loss has no terms."""
    jobs = [("core.judge.test_terms:ranks", (kind, parts), {}) for kind in ("ddp", "fsdp2") for parts in (1, 2)]
    for (_, (kind, parts), _), ((zero, zero_has), (one, one_has)) in zip(jobs, two_ranks(*jobs), strict=True):
        where = (kind, parts)
        [[step, what, rank, micro, message, terms]] = one
        assert (step, what, rank, micro) == (2, "nonfinite-loss", 1, 1 if parts == 2 else None), where
        assert "; of the terms latent_loss is inf, text_loss is " in message, where
        assert [name for name, _ in terms] == ["text_loss", "latent_loss"] and terms[1][1] == "inf", where
        assert zero[0][5] == terms and zero[0][4].split("of the terms")[1] == message.split("of the terms")[1], where
        assert all(one_has) and (all(zero_has) if parts > 1 else not any(zero_has)), where
