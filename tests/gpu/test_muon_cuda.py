"""Muon beside AdamW on CUDA: the verdict stays on the device, and the device puts Muon back where a step was bad."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanproof
from nanproof.core.fast._kernels import Kernels
from toys import batches, mse, net, poison, syncs_raise

pytestmark = pytest.mark.gpu
BAD = {0, 3, 4, 7, 19}
STEPS = 20


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def trained(bad: set[int], own_loop: bool = False, keep: bool = True, **options):
    torch.manual_seed(0)
    model = net().cuda()
    optimizers = pair(model)
    guard = nanproof.Guard(model, optimizers, loss_fn=mse, **options)
    for i, batch in enumerate(batches(STEPS)):
        if i in BAD and not keep:
            continue
        x = [t.cuda() for t in (poison(batch) if i in bad else batch)]
        if own_loop:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = mse(model, x)
            loss.backward()
            guard.step(loss)
        else:
            guard.train_step(x)
    guard.close()
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    state += [t.clone() for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return guard, state


def test_bad_batches_leave_no_trace():
    """The first step among them: the momentum that it makes must not stay bad."""
    guard, saw = trained(BAD)
    assert guard.path.startswith("device") and "Muon is put back" in guard.path
    assert [i.step for i in guard.incidents if i.action == "skipped"] == sorted(BAD)
    _, never = trained(set(), keep=False)
    assert len(saw) == len(never) and all(torch.equal(a, b) for a, b in zip(saw, never, strict=True))


def test_in_a_loop_of_ones_own_no_bad_step_is_taken():
    guard, saw = trained(BAD, own_loop=True)
    assert [r.step for r in guard.history if r.action == "skipped"] == sorted(BAD)
    assert all(torch.isfinite(t).all() for t in saw)


def test_the_host_never_waits():
    torch.manual_seed(0)
    model = net().cuda()
    guard = nanproof.Guard(model, pair(model), loss_fn=mse)
    data = [[t.cuda() for t in batch] for batch in batches(40)]
    for batch in data[:5]:
        guard.train_step(batch)
    with syncs_raise():
        for batch in data[5:]:
            guard.train_step(batch)
    guard.close()
    assert not guard.incidents and len(guard.history) == 40


def test_what_is_put_aside_comes_back_bit_for_bit():
    """Sizes that do not fill a block, and a good step, which changes nothing."""
    aside = Kernels.aside(torch.device("cuda", 0))
    assert aside is not None
    tensors = [torch.randn(n, device="cuda") for n in (1, 7, 4096, 65536, 100_003)]
    before = [t.clone() for t in tensors]
    for bad in (1.0, 0.0):
        skip = torch.full((), bad, device="cuda")
        aside.save(tensors, skip)
        for t in tensors:
            t.fill_(float("nan") if bad else 2.0)
        aside.put_back(skip)
        wanted = before if bad else [torch.full_like(t, 2.0) for t in tensors]
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
