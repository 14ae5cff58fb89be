"""Attention's largest logit and entropies are those of loops over plain numbers; torch's functions are only borrowed."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from nanproof import Observe
from nanproof.observe._attention import COMPILES, QUERIES

ORIGINALS = (F.scaled_dot_product_attention, F.softmax, torch.softmax)
LENGTH, WIDTH, HEADS = 40, 16, 4
EVERY = LENGTH // QUERIES


@pytest.fixture(autouse=True)
def _torch_is_as_it_was():
    yield
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS


def slow(q: Tensor, k: Tensor, scale: float, allowed: Tensor, bias: Tensor | None = None) -> tuple[float, float, float]:
    """One sequence: (head, query, width). Loops over heads, queries and keys."""
    top, heads = -math.inf, []
    for h in range(q.shape[0]):
        shares = []
        for i in range(0, q.shape[1], max(1, q.shape[1] // QUERIES)):
            keys = [j for j in range(k.shape[1]) if allowed[h, i, j]]
            logits = [
                float(q[h, i].double() @ k[h * k.shape[0] // q.shape[0], j].double()) * scale
                + (0.0 if bias is None else float(bias[h, i, j]))
                for j in keys
            ]
            top = max([top, *logits])
            if len(keys) < 2:
                continue
            largest = max(logits)
            weights = [math.exp(x - largest) for x in logits]
            parts = [w / sum(weights) for w in weights]
            shares.append(-sum(p * math.log(p) for p in parts if p > 0) / math.log(len(keys)))
        heads.append(sum(shares) / len(shares) if shares else 0.0)
    return top, sum(heads) / len(heads), min(heads)


class Attention(nn.Module):
    """Attention in one of the ways that are seen."""

    def __init__(self, kind: str, key_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH * h // HEADS) for h in (HEADS, key_heads, key_heads))
        self.kind, self.key_heads = kind, key_heads

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))  # type: ignore

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if self.kind in ("F.softmax", "torch.softmax"):
            logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            logits = logits if mask is None else logits + mask
            weights = F.softmax(logits, dim=-1) if self.kind == "F.softmax" else torch.softmax(logits, -1)
            out = weights @ v
        else:
            more = {
                "plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": mask}, "scale": {"scale": 3.0},
                "grouped": {"enable_gqa": True, "is_causal": True},
            }[self.kind]  # fmt: skip
            out = F.scaled_dot_product_attention(q, k, v, **more)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, *args: Any, mask: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(*args)}) for _ in range(2))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["attn"](x, self.mask)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def observed(model: nn.Module, x: Tensor, steps: int = 1, **settings: Any) -> nanproof.Guard:
    observe = Observe(**{"modules": "*", "every": 1, **settings})
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=observe) as guard:
        for _ in range(steps):
            guard.train_step(x)
    return guard


def masks() -> dict[str, Tensor]:
    torch.manual_seed(5)
    kept = torch.rand(3, 1, LENGTH, LENGTH) > 0.4
    kept[..., 0] = True
    lower = torch.ones(LENGTH, LENGTH).tril().bool()
    return {
        "bool": kept,
        "bool of two dimensions": lower,
        "padding": kept[:, :, :1],
        "float": torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~kept, torch.finfo(torch.float32).min),
        "infinite": torch.zeros(LENGTH, LENGTH).masked_fill(~lower, -math.inf),
        "bias": torch.randn(3, HEADS, LENGTH, LENGTH),
    }


def check(model: Model, x: Tensor, allowed: Tensor, scale: float, bias: Tensor | None = None) -> None:
    expected = []
    with torch.no_grad():
        h = x
        for layer in model.layers:
            q, k, _ = layer["attn"].heads(h)
            expected.append(slow(q[0], k[0], scale, allowed, bias))
            h = layer["attn"](h, model.mask)
    guard = observed(model, x)
    seen = guard.history[0].observed
    assert seen is not None and list(seen.attention) == ["layers.0.attn", "layers.1.attn"]
    for found, wanted in zip(seen.attention.values(), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


SCALE = (WIDTH // HEADS) ** -0.5


@pytest.mark.parametrize("kind", ["plain", "scale", "causal", "grouped", "F.softmax", "torch.softmax"])
def test_kinds_of_attention(kind):
    torch.manual_seed(0)
    model, x = Model(kind, 2 if kind == "grouped" else HEADS), torch.randn(3, LENGTH, WIDTH) * 3
    allowed = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool)
    check(model, x, allowed.tril() if kind in ("causal", "grouped") else allowed, 3.0 if kind == "scale" else SCALE)


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("kind", ["mask", "F.softmax"])
def test_masks(kind, name):
    mask = masks()[name]
    if kind == "F.softmax" and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    torch.manual_seed(0)
    model, x = Model(kind, mask=mask), torch.randn(3, LENGTH, WIDTH) * 3
    first = mask[0] if mask.dim() == 4 else mask
    whole = first.expand(HEADS, LENGTH, LENGTH)
    allowed = whole if mask.dtype == torch.bool else whole > -1e30
    check(model, x, allowed, SCALE, whole if name == "bias" else None)


def test_short_sequences_and_one_token():
    for length in (1, 2, 17):
        torch.manual_seed(0)
        model, x = Model("causal"), torch.randn(2, length, WIDTH)
        check(model, x, torch.ones(HEADS, length, length, dtype=torch.bool).tril(), SCALE)


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_own_module(need_weights):
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model, x = Own(), torch.randn(1, LENGTH, WIDTH) * 3
    inner = model.attention
    q, k, _ = (
        t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in F.linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1)
    )
    wanted = slow(q[0].detach(), k[0].detach(), SCALE, torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool))
    seen = observed(model, x).history[0].observed
    assert seen is not None and seen.attention == {"attention": pytest.approx(wanted, rel=1e-4)}


def test_a_transformers_model():
    """Eager attention and torch's kernel, causal and grouped: the entropies are those of the weights the model gives out."""
    transformers = pytest.importorskip("transformers")
    found = {}
    ids = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for implementation in ("eager", "sdpa"):
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=32, attn_implementation=implementation,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight *= 50
                layer.self_attn.k_proj.weight *= 50
            if implementation == "eager":
                weights = model(ids, output_attentions=True).attentions
        with nanproof.Guard(
            model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=lambda m, b: m(b, labels=b).loss, observe=Observe(every=1)
        ) as guard:
            guard.train_step(ids)
        seen = guard.history[0].observed
        assert seen is not None
        found[implementation] = seen.attention
    assert list(found["eager"]) == list(found["sdpa"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for layer, eager, kernel in zip(weights, found["eager"].values(), found["sdpa"].values(), strict=True):
        assert eager == pytest.approx(kernel, rel=1e-3) and eager[0] > 0
        shares = [
            [entropy(layer[0, h, i, : i + 1].tolist()) for i in range(0, LENGTH, EVERY) if i > 0] for h in range(layer.shape[1])
        ]
        heads = [sum(row) / len(row) for row in shares]
        assert eager[1:] == pytest.approx((sum(heads) / len(heads), min(heads)), rel=1e-3)


def entropy(weights: list[float]) -> float:
    return -sum(p * math.log(p) for p in weights if p > 0) / math.log(len(weights))


def test_softmaxes_that_are_no_attention_are_left_alone():
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = Pool()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.pool(x.unsqueeze(1)).squeeze(1)) + F.softmax(x, -1)

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x, dim=-1) * x

    seen = observed(Pools(), torch.randn(2, 3, WIDTH)).history[0].observed
    assert seen is not None and seen.attention == {}


def test_light_looks_and_settings_see_none():
    model, x = Model("causal"), torch.randn(2, LENGTH, WIDTH)
    assert all(r.observed and not r.observed.attention for r in observed(model, x, attention=False).history)
    records = observed(model, x, steps=5, every=2, forecast=False).history
    assert [bool(r.observed and r.observed.attention) for r in records] == [True, False, True, False, True]


def test_the_first_micro_batch_is_looked_at():
    torch.manual_seed(0)
    model, x = Model("causal"), torch.randn(2, LENGTH, WIDTH)
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=loss, observe=Observe(every=1)) as guard:
        guard.train_step(x)
        guard.train_step(x, x * 5, x * 9)
    first, second = (r.observed.attention for r in guard.history if r.observed)
    assert first == second and first


def test_nothing_is_seen_inside_replays(monkeypatch):
    """A bad batch is run again, several times, to find out what it was; each module was sampled once."""
    from nanproof.observe._attention import AttentionWatch

    sampled = []
    look = AttentionWatch._look
    monkeypatch.setattr(AttentionWatch, "_look", lambda self, samples: (sampled.append(list(samples)), look(self, samples))[1])
    model, x = Model("causal"), torch.randn(2, LENGTH, WIDTH)
    bad = x.clone()
    bad[0, 3] = math.nan
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) as guard:
        for batch in (x, bad, x):
            guard.train_step(batch)
    assert guard.incidents[0].diagnosis is not None
    assert sampled == [["layers.0.attn", "layers.1.attn"]] * 3
    seen = guard.history[1].observed
    assert seen is not None and all(math.isnan(top) for top, _, _ in seen.attention.values())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_torchs_functions_come_back_when_the_forward_raises(error):
    class Raises(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x[0, 0, 0] > 100:
                raise error("broken")
            return y

    torch.manual_seed(0)
    model, x = Raises("causal"), torch.randn(2, LENGTH, WIDTH)
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) as guard:
        guard.train_step(x)
        with pytest.raises(error):
            guard.train_step(x + 1000)
        if error is ValueError:
            assert F.softmax is ORIGINALS[1]
        guard.train_step(x)
        assert F.scaled_dot_product_attention is ORIGINALS[0]
    assert all(r.observed and len(r.observed.attention) == 2 for r in guard.history)


def test_an_interrupted_run_gives_torchs_functions_back_when_it_is_closed():
    class Interrupted(Model):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Interrupted("causal")
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1))
    with pytest.raises(KeyboardInterrupt), guard:
        guard.train_step(torch.randn(2, LENGTH, WIDTH))
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS


def test_guards_within_guards():
    """A model whose forward runs another one, both observed; and two guards on one model."""

    class Student(Model):
        teacher: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.teacher[0](x) * 0.1

    torch.manual_seed(0)
    student, teacher, x = Student("causal"), Model("plain"), torch.randn(2, LENGTH, WIDTH)
    student.teacher = [teacher]
    made = [nanproof.Guard(m, torch.optim.SGD(m.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1))
            for m in (student, teacher, student)]  # fmt: skip
    for guard in made:
        guard.train_step(x)
        assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS
    for guard in made:
        guard.close()
        seen = guard.history[0].observed
        assert seen is not None and list(seen.attention) == ["layers.0.attn", "layers.1.attn"]


def test_what_goes_wrong_in_looking_does_not_reach_the_model(caplog):
    """A mask that torch takes and that the sample cannot be made of, and the run goes on."""

    class Odd(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            F.softmax(input=x.unsqueeze(1), dim=-1, _stacklevel=3)
            torch.softmax(x.unsqueeze(1), dim=-1, dtype=torch.float64)
            q, k, v = self.heads(x)
            return x + F.scaled_dot_product_attention(query=q, key=k, value=v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = Model("plain"), torch.randn(2, LENGTH, WIDTH)
    model.layers[0]["attn"] = Odd("plain")
    with caplog.at_level(logging.WARNING, logger="nanproof"):
        guard = observed(model, x, steps=2)
    assert len(guard.history) == 2 and not guard.incidents and not caplog.records


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_say_nothing():
    torch._dynamo.reset()
    plain, x = Model("causal"), torch.randn(2, LENGTH, WIDTH)
    model = torch.compile(plain, backend="aot_eager", fullgraph=True)
    guard = observed(model, x, steps=2)
    assert all(r.observed and not r.observed.attention and r.observed.by_site for r in guard.history)
    _check_compiled_later(x)


def _check_compiled_later(x: Tensor) -> None:
    later = Model("causal")
    with nanproof.Guard(later, torch.optim.SGD(later.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) as guard:
        later.compile(backend="aot_eager", fullgraph=True)
        guard.train_step(x)
        guard.train_step(x)
    assert all(r.observed and not r.observed.attention and r.observed.by_site for r in guard.history)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("borrowed", [True, False])
def test_what_is_compiled_inside_of_the_forward_finds_torchs_own_functions(before, borrowed):
    """A helper that is compiled, before the guard was made or during a look. If it calls what is borrowed, attention is soon left
    alone, long before torch gives up to compile it; else eager attention is seen."""
    torch._dynamo.reset()
    found = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append((F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def helper(x: Tensor) -> Tensor:
        return x * F.softmax(x, -1) if borrowed else x * 2

    class Helped(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(helper(x))

    torch.manual_seed(0)
    model, x = Helped("causal"), torch.randn(2, LENGTH, WIDTH)
    if before:
        loss(model, x).backward()
        model.zero_grad()
    guard = observed(model, x, steps=12, every=2, forecast=False)
    assert not guard.incidents and all(found) and len(found) <= COMPILES + 1
    seen = [bool(r.observed and r.observed.attention) for r in guard.history]
    assert not any(seen[1::2]) and (borrowed or all(seen[2::2]))
    plain = Helped("causal")
    assert torch.isfinite(loss(plain, x))
    torch._dynamo.reset()


def test_two_forwards_that_do_not_end_in_the_order_they_began_in():
    """Two threads, one inside of the other's forward for a part of it: each sees its own, and torch is as it was."""

    class Waits(Model):
        begins: Any = None
        ends: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.begins.set()
            assert self.ends.wait(60)
            return super().forward(x)

    torch.manual_seed(0)
    models, x = [Waits("causal"), Waits("plain")], torch.randn(2, LENGTH, WIDTH)
    made = [nanproof.Guard(m, torch.optim.SGD(m.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) for m in models]
    threads = [threading.Thread(target=guard.train_step, args=(x,)) for guard in made]
    for model, thread in zip(models, threads, strict=True):
        model.begins, model.ends = threading.Event(), threading.Event()
        thread.start()
        assert model.begins.wait(60)
    for model, thread in zip(models, threads, strict=True):  # who began first ends first
        model.ends.set()
        thread.join()
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS
    for guard in made:
        guard.close()
        seen = guard.history[0].observed
        assert seen is not None and list(seen.attention) == ["layers.0.attn", "layers.1.attn"]


def test_two_interrupted_runs_give_torchs_functions_back():
    class Interrupted(Model):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    models = [Interrupted("causal"), Interrupted("causal")]
    made = [nanproof.Guard(m, torch.optim.SGD(m.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) for m in models]
    for guard in made:
        with pytest.raises(KeyboardInterrupt):
            guard.train_step(torch.randn(2, LENGTH, WIDTH))
    for guard in made:
        guard.close()
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == ORIGINALS


def test_what_someone_else_puts_in_place_meanwhile_stays():
    """A function replaced inside of the forward is theirs to put back, not the guard's."""
    original = F.softmax

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs)

    class Patches(Model):
        def forward(self, x: Tensor) -> Tensor:
            F.softmax = theirs
            return super().forward(x)

    model = Patches("causal")
    try:
        with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(every=1)) as guard:
            guard.train_step(torch.randn(2, LENGTH, WIDTH))
        assert F.softmax is theirs
    finally:
        F.softmax = original
