"""The optimizer's part as one real CUDA graph: the same bits as without, no host sync, verdicts that come late."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import nanproof
from toys import Run, batches, finite, mse, net, poison, syncs_raise, whole_state

pytestmark = pytest.mark.gpu
BAD = {5, 9, 10, 20}
STEPS = 30


def to_cuda(batch):
    return [x.cuda() for x in batch]


def _run(capture, saw_bad=True, whole=True, bad=BAD, **options):
    """A run of 30 steps. `capture`: whether graphs are replayed; learning rates are tensors either way."""
    torch.manual_seed(0)
    model = net(**options).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    policy = nanproof.Policy(capture=True)
    guard = nanproof.Guard(
        model, optimizer, loss_fn=mse if whole else None, scheduler=scheduler if whole else None, policy=policy
    )
    captures = guard.parts.stepper.captures
    assert captures is not None
    if not capture:
        captures.why_not = "compared with"
    for i, batch in enumerate(batches(STEPS)):
        if i in bad and not saw_bad:
            continue
        batch = to_cuda(poison(batch) if i in bad else batch)
        if whole:
            guard.train_step(batch)
            continue
        optimizer.zero_grad(set_to_none=False)
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
        scheduler.step()
    state = whole_state(model, optimizer, scheduler, None, guard)
    guard.close()
    assert finite(model, optimizer)
    return Run(guard, state), captures


@pytest.mark.parametrize("whole", [True, False], ids=["train_step", "guard.step"])
def test_replayed_steps_have_the_bits_of_other_steps(whole):
    plain, _ = _run(False, whole=whole)
    graphs, captures = _run(True, whole=whole)
    assert captures.replays > 0 or captures.why_not
    if not whole:  # its gradients are kept, so every address repeats
        assert captures.replays >= STEPS - 3 and "captured as a CUDA graph" in graphs.guard.path
    assert plain.same_as(graphs) == []
    assert [i.step for i in graphs.guard.incidents] == sorted(BAD)


def test_a_bad_batch_leaves_no_trace():
    disturbed, _ = _run(True)
    oracle, _ = _run(True, saw_bad=False)
    assert [i.step for i in disturbed.guard.incidents] == sorted(BAD)
    assert disturbed.same_as(oracle) == []


def test_the_host_never_waits():
    """Capturing included."""
    model = net(batch_norm=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [to_cuda(b) for b in batches(60)]
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(capture=True)) as guard:

        def one(batch):
            optimizer.zero_grad(set_to_none=False)
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)

        one(data[0])
        with syncs_raise():
            for batch in data[1:]:
                one(batch)
        assert guard.parts.stepper.captures.replays >= 55
    assert len(guard.history) == 60 and guard.incidents == []
    assert all(math.isfinite(record.loss) for record in guard.history)


def test_under_cuda_graphs_of_the_model_too():
    """`torch.compile(mode="reduce-overhead")`: forward, backward and the optimizer's part are graphs."""
    torch.manual_seed(0)
    model = net(batch_norm=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, mode="reduce-overhead")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nanproof.Guard(compiled, optimizer, loss_fn=mse, policy=nanproof.Policy(capture=True)) as guard:
            for i, batch in enumerate(map(to_cuda, batches(40))):
                guard.train_step(poison(batch) if i == 20 else batch)
            captures = guard.parts.stepper.captures
    assert [i.step for i in guard.incidents] == [20] and finite(model, optimizer)
    assert captures.replays > 0, captures.why_not
