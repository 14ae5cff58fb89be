"""Explaining on a CUDA device: causes, places and samples as on the CPU, with a real lag, and no sync while all is well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof.explain.replay._replay import Replay
from toys import Run, batches, mse, net, poison, whole_state

pytestmark = pytest.mark.gpu
SAMPLE = 3


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, visible):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~visible[:, None, :], -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(20, 16), Attention(), Attention()
        self.head = nn.Linear(16, 20)

    def forward(self, ids, visible):
        return self.head(self.second(self.first(self.embed(ids), visible), visible))


def tokens(bad=False):
    visible = torch.ones(6, 9, dtype=torch.bool, device="cuda")
    visible[SAMPLE] = not bad
    return {"ids": torch.randint(0, 20, (6, 9), device="cuda"), "visible": visible}


def next_token(model, b):
    return F.cross_entropy(model(b["ids"], b["visible"])[:, :-1].flatten(0, 1).float(), b["ids"][:, 1:].flatten())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fully_masked_row(dtype, scaled):
    """Under autocast and a GradScaler, two steps late: cause, module and sample, with the fix verified."""
    torch.manual_seed(0)
    model = Model().cuda()

    def loss_fn(model, b):
        with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
            return next_token(model, b)

    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8) if scaled else None
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn=loss_fn, scaler=scaler)
    for i in range(9):
        guard.train_step(tokens(bad=i == 4))
    guard.close()
    (incident,) = guard.incidents
    told = incident.diagnosis
    assert incident.step == 4 and told.cause == "attention-row-fully-masked" and told.verified
    assert told.where == "first" and told.samples == (SAMPLE,)


def test_a_backward_fault():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).cuda()
    guard = nanproof.Guard(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        loss_fn=lambda m, b: ((m(b[0]) - m(b[1])) ** 2).sum(-1).sqrt().mean(),
    )
    for i in range(8):
        a, b = torch.randn(6, 4, device="cuda"), torch.randn(6, 4, device="cuda")
        if i == 5:
            b[SAMPLE] = a[SAMPLE]
        guard.train_step((a, b))
    guard.close()
    (incident,) = guard.incidents
    assert incident.step == 5 and incident.diagnosis.cause == "sqrt-at-zero"
    assert incident.diagnosis.samples == (SAMPLE,) and incident.diagnosis.verified


def test_fp16_overflow_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()

    def loss_fn(model, b):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(b[0])
        return F.mse_loss(out.float().squeeze(-1), b[1])

    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn=loss_fn)
    for i in range(7):
        x = torch.randn(8, 8, device="cuda")
        if i == 3:
            x[SAMPLE] *= 60000
        guard.train_step((x, torch.randn(8, device="cuda")))
    guard.close()
    told = guard.incidents[0].diagnosis
    assert told.cause == "fp16-activation-overflow" and told.samples == (SAMPLE,) and told.verified


def test_a_transient_fault():
    model, count = net().cuda(), [0]

    def once(module, inputs, output):
        count[0] += 1
        return output * float("nan") if count[0] == 6 else output

    model[0].register_forward_hook(once)
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn=mse)
    for batch in batches(10):
        guard.train_step([x.cuda() for x in batch])
    guard.close()
    assert guard.incidents[0].diagnosis.cause == "transient-fault"


def test_a_replay_is_bit_for_bit_with_dropout():
    model, batch = net(dropout=0.5).cuda(), [x.cuda() for x in batches(1)[0]]
    replay = Replay(model, mse, [batch])
    first = replay.run()
    torch.rand(1000, device="cuda")
    assert replay.run().same_as(first)


def test_the_run_is_the_same_with_and_without_diagnoses():
    """Replays in the middle of a lag leave no trace."""

    def run(when):
        torch.manual_seed(0)
        model = net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(diagnose=when))
        for i, batch in enumerate(batches(16)):
            guard.train_step([x.cuda() for x in (poison(batch) if i in (3, 7) else batch)])
        return Run(guard, whole_state(model, optimizer, guard=guard))

    assert run("always").same_as(run("never")) == []


def test_silent_failures_are_found_without_a_sync():
    """bf16 weights at a tiny learning rate: the sample of weights travels with the lag."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)).cuda().bfloat16()
    guard = nanproof.Guard(
        model,
        torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0),
        loss_fn=lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]),
    )
    for _ in range(20):
        guard.train_step((torch.randn(16, 8, device="cuda", dtype=torch.bfloat16), torch.randint(0, 4, (16,), device="cuda")))
    guard.close()
    assert guard.incidents[0].diagnosis.cause == "bf16-update-rounding"


class Rooted(nn.Module):
    """Checkpoints a function of its own, with a root whose gradient at 0 is infinite."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, both):
        x, kept = both
        out = self.part(x, kept) if self.reentrant is None else checkpoint(self.part, x, kept, use_reentrant=self.reentrant)
        return out, kept

    def part(self, x, kept):
        return x + torch.sqrt((self.linear(x) * kept).square())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts(reentrant):
    """Backward runs in a thread of its own, and computes the parts again there: place and verdict are those without."""
    found = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = nn.Sequential(Rooted(how), Rooted(how), Rooted(how)).cuda()
        kept = torch.ones(6, 1, device="cuda")
        kept[SAMPLE] = 0
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        diagnosis = nanproof.diagnose(model, lambda m, b: m(b)[0].abs().mean(), (x, kept))
        found.append((diagnosis.cause, diagnosis.where, diagnosis.op, diagnosis.samples, diagnosis.verified))
    assert found[0] == found[1] == ("sqrt-at-zero", "2", "sqrt", (SAMPLE,), True)
