"""Locate: the operation, its module, the user's line, the sample and the token, whatever runs the forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof.explain.locate._locate import batch_shape, guilty_sample, locate, survey, where_in_batch
from nanproof.explain.replay._replay import Replay

BAD, TOKEN = 3, 5


class Block(nn.Module):
    """Attention written by hand: a mask of -inf, a softmax, a projection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, visible):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~visible[:, None, :], -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    """Tokens, two blocks, a head; `exp_at` puts an overflowing exp into a block."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(20, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 20)
        self.how = how

    def forward(self, ids, visible):
        x = self.embed(ids)
        for block in self.blocks:
            if self.how.startswith("checkpoint"):
                x = checkpoint(block, x, visible, use_reentrant=self.how.endswith("reentrant"))
            else:
                x = block(x, visible)
        return self.head(x)


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 20, (6, 9), generator=g), "visible": torch.ones(6, 9, dtype=torch.bool)}


def loss_fn(model, b):
    return F.cross_entropy(model(b["ids"], b["visible"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())


def birth_of(model, loss_fn, bad):
    replay = Replay(model, loss_fn, [bad])
    look, outcome = survey(replay)
    assert not outcome.finite
    return locate(replay, look, outcome), replay


@pytest.mark.parametrize("how", ["plain", "checkpoint", "checkpoint reentrant"])
def test_a_mask_is_no_birth(how):
    """-inf was put there; the softmax that makes NaN of it is guilty, in the first block, at the masked sample."""
    torch.manual_seed(0)
    bad = batch()
    bad["visible"][BAD] = False
    birth, _ = birth_of(Model(how), loss_fn, bad)
    assert (birth.op.name, birth.op.path) == ("_softmax", "blocks.0")
    assert birth.samples == (BAD,)
    assert birth.op.source.startswith("tests") and "test_locate.py" in birth.op.source


def test_the_token_is_named():
    """One embedding row is huge: the overflow is at its sample and its token."""
    torch.manual_seed(0)
    model, bad = Model(), batch()
    with torch.no_grad():
        model.embed.weight[19] = 200.0
    bad["ids"][bad["ids"] == 19] = 0
    bad["ids"][BAD, TOKEN] = 19

    def exp_loss(model, b):
        return model.embed(b["ids"]).exp().mean()

    birth, _ = birth_of(model, exp_loss, bad)
    assert birth.op.name == "exp" and birth.samples == (BAD,) and birth.tokens == (TOKEN,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    model, bad = Model(), batch()
    bad["visible"][BAD] = False

    def autocast_loss(model, b):
        with torch.autocast("cpu", dtype=dtype):
            return loss_fn(model, b)

    birth, _ = birth_of(model, autocast_loss, bad)
    assert birth.op.name == "_softmax" and birth.op.path == "blocks.0" and birth.samples == (BAD,)


def test_a_backward_fault_without_a_forward_nan():
    """The loss is finite; the gradient of a root at 0 is not. The forward operation is named, not the backward one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(6, 4)
    other = torch.randn(6, 4)
    other[BAD] = x[BAD]

    def distance(model, b):
        return ((model(b[0]) - model(b[1])) ** 2).sum(-1).sqrt().mean()

    birth, replay = birth_of(model, distance, (x, other))
    assert birth.op.name == "sqrt" and birth.in_backward and birth.at.node == "SqrtBackward0"
    assert birth.samples == (BAD,)
    assert guilty_sample(replay, [(torch.randn(6, 4), torch.randn(6, 4))]) == (BAD,)


def test_a_birth_inside_a_recurrent_module():
    """An LSTM is one module of many operations on slices of shared memory: the way back through them holds."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 6, batch_first=True), "head": nn.Linear(6, 1)})
    x = torch.randn(5, 7, 4)
    x[BAD, 2] = 1e30

    def lstm_loss(model, x):
        scaled = (x * x).sum(-1, keepdim=True).exp() * x
        return model["head"](model["rnn"](scaled)[0]).square().mean()

    birth, _ = birth_of(model, lstm_loss, x)
    assert birth.op.path == "loss_fn" and birth.samples == (BAD,)


def test_an_unused_bad_slice_is_not_blamed():
    """Half of a tensor is infinite on purpose and never used; the division that is used is guilty."""
    model = nn.Linear(4, 4)

    def two_halves(model, x):
        both = torch.cat((torch.full_like(x, torch.inf), x))
        used = model(both[len(x) :])
        return (used / (x.sum() * 0)).sum()

    birth, _ = birth_of(model, two_halves, torch.randn(3, 4))
    assert birth.op.name == "div"


def test_inf_counts_as_much_as_nan():
    model = nn.Linear(4, 1)
    birth, _ = birth_of(model, lambda m, x: (m(x) * 1e30 * 1e30).sum(), torch.randn(3, 4))
    assert birth.op.name == "mul"


def test_an_operation_that_raises_is_followed_back():
    """multinomial refuses NaN probabilities: the birth is where they came from."""
    model = nn.Linear(4, 5)

    def sample(model, x):
        logits = model(x) / 0.0 * 0.0
        torch.multinomial(logits.detach().softmax(-1), 1)
        return logits.sum()

    birth, _ = birth_of(model, sample, torch.randn(3, 4))
    assert birth.op.name in ("div", "mul")


def test_shapes_tell_samples_and_tokens():
    """(B, T), (T, B), (B*T), (B*H, T, T): where a mark is, as (samples, tokens)."""
    mark = torch.zeros(6, 9, dtype=torch.bool)
    mark[BAD, TOKEN] = True
    assert where_in_batch(mark, 6, 9) == ((BAD,), (TOKEN,))
    assert where_in_batch(mark.T, 6, 9) == ((BAD,), (TOKEN,))
    assert where_in_batch(mark.flatten(), 6, 9) == ((BAD,), (TOKEN,))
    heads = torch.zeros(12, 9, 9, dtype=torch.bool)
    heads[2 * BAD + 1, TOKEN] = True
    assert where_in_batch(heads, 6, 9)[0] == (BAD,)
    assert where_in_batch(torch.ones(7, dtype=torch.bool), 6, 9) == ((), ())
    assert batch_shape({"a": torch.zeros(6, 9), "b": [torch.zeros(6)], "c": 3}) == (6, 9)


@pytest.mark.parametrize("guilty", [0, 3, 5])
def test_a_sample_is_found_by_replacing_the_others(guilty):
    """A loss that mixes samples leaves no coordinates: healthy donors single the sample out; two guilty ones are not guessed."""
    model = nn.Linear(4, 1)

    def mixed(model, x):
        return model(x).mean() * (x.sum() / (x[:, 0] != 7).float().prod())

    bad = torch.randn(6, 4)
    bad[guilty, 0] = 7
    replay = Replay(model, mixed, [bad])
    assert guilty_sample(replay, [torch.randn(6, 4)]) == (guilty,)
    assert guilty_sample(replay, []) == ()
    bad[(guilty + 1) % 6, 0] = 7
    assert guilty_sample(replay, [torch.randn(6, 4)]) == ()


def test_micro_batches_name_the_bad_one():
    """The diagnosis is of the micro-batch that was bad, and its sample is counted there."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=lambda m, x: m(x).square().mean())
    parts = [torch.randn(6, 4) for _ in range(3)]
    parts[1][BAD, 2] = float("nan")
    guard.train_step(*parts)
    incident = guard.incidents[0]
    assert incident.micro_batch == 1
    assert incident.diagnosis.cause == "nonfinite-batch" and incident.diagnosis.samples == (BAD,)
