"""Pieces of policy-gradient losses on a device: the same numbers as on the host, and no waiting for them."""

from __future__ import annotations

import math

import pytest
import torch

from nanproof.integrations.trl._grpo import Window
from nanproof.numerics.rl import Signals, group_advantages, kl, masked_mean, ratio

pytestmark = pytest.mark.gpu


def pieces(new, old, mask, rewards, window):
    """A loss with everything in it, and its signals noted."""
    advantages = group_advantages(rewards, 4, floor=1e-3).value
    r = ratio(new, old, mask, limit=20.0)
    loss = masked_mean(-r.value * advantages[:, None] + 0.1 * kl(new, old, mask), mask, -1).mean()
    loss.backward()
    window.add(Signals.of_tokens(new, mask, old=old, ref=old, sampler=old, entropy=new.abs()))
    window.add(Signals.of_rewards(rewards, 4))
    return loss.detach(), new.grad, r.clamped


def test_a_loss_waits_for_nothing_and_is_what_the_host_computes():
    """Masked tokens are NaN and Inf; sync_debug_mode raises at every wait."""
    new, old, rewards = torch.randn(8, 16) * 30, torch.randn(8, 16), torch.randn(8)
    mask = torch.rand(8, 16) < 0.7
    new[~mask], old[~mask] = math.nan, -math.inf
    there = [t.cuda() for t in (new, old, mask, rewards)]
    there[0].requires_grad_()
    far, near = Window(), Window()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = pieces(*there, far)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = pieces(new.requires_grad_(), old, mask, rewards, near)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    assert far.read() == pytest.approx(near.read(), rel=1e-4)
