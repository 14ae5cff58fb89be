"""Two ranks (gloo) that are started again go on exactly where they were, also with what each rank has of its own."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import nanproof
from recover.test_recovery import loader, same, train, weights
from toys import mse, net
from zoo.two_ranks import two_ranks


def started(rank, folder):
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = nanproof.Checkpoints(folder, every=10, prove=3) if folder else None
    guard = nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(diagnose="never"), checkpoints=where)
    return guard, guard.wrap(loader(seed=rank))


def goes_on(rank, folder):
    """Train to step 30; stop at 27, resume at 20, and train to 30. What differs, at step 20 and at the end."""
    whole, data = started(rank, None)
    at = {}
    train(whole, data, 30, lambda guard: at.update({guard.next_step: weights(guard)}))
    stopped, data = started(rank, folder)
    train(stopped, data, 27)
    stopped.parts.recovery.close(alone=False)
    fresh, data = started(rank, folder)
    step = fresh.resume()
    early = same(weights(fresh), at[step])
    train(fresh, data, 30)
    return step, early, same(weights(fresh), at[30]), at[20]["model.1.running_mean"].tolist()


def test_buffers_of_a_rank_stay_with_it(tmp_path):
    """The statistics of BatchNorm differ from rank to rank under DDP: after a resume each rank has its own again."""
    [(zero, one)] = two_ranks(("test_two_ranks_go_on:goes_on", (str(tmp_path),), {}))
    assert zero[:3] == one[:3] == [20, [], []]
    assert zero[3] != one[3]
