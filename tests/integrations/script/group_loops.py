"""Loops with several optimizers, as people write them: `group_loops.py LOOP MODE OUT`. They know nothing of nanproof; the tests
run them with and without.

MODE is "clean", "bad" (the batch of step BAD makes a NaN) or "never" (what that batch would have been trained on is left out:
the run that a guarded "bad" one has to equal, bit for bit).
"""

import math
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

STEPS, BAD = 12, 7


class Net(nn.Module):
    """Computes its loss itself. `poison` makes one parameter's gradient NaN, and leaves the loss and the others as they are."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y, poison=None):
        loss = nn.functional.cross_entropy(self.head(torch.tanh(self.body(self.emb(x)))), y)
        return loss if poison is None else loss + (poison * 0).sqrt().sum()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 10, (8,), generator=generator)
    return x, x % 4


def real(step, size=6):
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 + step))


def bad(step):
    return MODE == "bad" and step == BAD


def never(step):
    return MODE == "never" and step == BAD


def muon(net):
    rest = [*net.emb.parameters(), *net.head.parameters()]
    return torch.optim.AdamW(rest, 1e-2), torch.optim.Muon([net.body.weight], lr=0.02)


def one_loss(make, culprit, clip="", parts=1, each_zero=False):
    """One model, one loss, several optimizers. `clip`: all at once, each before its step, or one of them only."""
    net = Net()
    optimizers = make(net)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    for step in range(STEPS):
        if never(step):
            continue
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not each_zero)
        for part in range(parts):
            x, y = batch(step * parts + part)
            (net(x, y, culprit(net) if bad(step) and part == parts - 1 else None) / parts).backward()
        if clip == "all":
            clip_grad_norm_(net.parameters(), 0.1)
        if clip == "body":
            clip_grad_norm_(net.body.parameters(), 0.05)
        for optimizer in optimizers:
            if clip == "each":
                clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            if clip == "value":
                nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.01)
            optimizer.step()
            if each_zero:
                optimizer.zero_grad()
        if not bad(step):
            schedule.step()
    return net


def sgd_for_each(net):
    return [torch.optim.SGD([p], 0.1, momentum=0.9) for p in net.parameters()]


def made_lazily():
    """As Pyro: an optimizer for each parameter, made when it is to step for the first time."""
    net = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Tanh())))
    optimizers = {}
    for step in range(STEPS):
        if never(step):
            continue
        loss = net(real(step)).square().mean()
        if bad(step):
            loss = loss + (net[4].bias * 0).sqrt().sum()
        loss.backward()
        for p in net.parameters():
            if p not in optimizers:
                optimizers[p] = torch.optim.Adam([p], 1e-2)
            optimizers[p].step()
        for p in net.parameters():
            p.grad = None
    return net


def actor_critic(culprit):
    """Two models, one loss, two optimizers."""
    actor, critic = nn.Linear(6, 2), nn.Linear(6, 1)
    a, c = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.RMSprop(critic.parameters(), 1e-2)
    for step in range(STEPS):
        if never(step):
            continue
        x = real(step)
        value = critic(x)
        advantage = (x.sum(1, keepdim=True) - value).detach()
        loss = -(actor(x).log_softmax(1)[:, :1] * advantage).mean() + (x.sum(1, keepdim=True) - value).square().mean()
        if bad(step):
            loss = loss + ((actor if culprit == "actor" else critic).bias * 0).sqrt().sum()
        a.zero_grad()
        c.zero_grad()
        loss.backward()
        a.step()
        c.step()
    return nn.ModuleList([actor, critic])


def two_timescales(first):
    """The second optimizer steps every other time. `first`: which of them is called first when both are."""
    net = Net()
    fast, slow = muon(net)
    for step in range(STEPS):
        if never(step):
            continue
        fast.zero_grad()
        slow.zero_grad()
        net(*batch(step), net.body.weight if bad(step) else None).backward()
        if step % 2 and first == "slow":
            slow.step()
        fast.step()
        if step % 2 and first == "fast":
            slow.step()
    return net


def made_later():
    """The body is trained from step 3 on, by an optimizer made then."""
    net = Net()
    optimizers = [torch.optim.AdamW([*net.emb.parameters(), *net.head.parameters()], 1e-2)]
    for step in range(STEPS):
        if step == 3:
            optimizers.append(torch.optim.Muon([net.body.weight], lr=0.02))
        if never(step):
            continue
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(*batch(step), net.body.weight if bad(step) else None).backward()
        for optimizer in optimizers:
            optimizer.step()
    return net


def two_tasks():
    """Two losses with a backward each, over a body they share; three optimizers that step together."""
    body, one, two = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 2)
    optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in (body, one, two)]
    for step in range(STEPS):
        if never(step):
            continue
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = torch.tanh(body(real(step)))
        one(hidden.clone()).square().mean().backward(retain_graph=True)
        loss = two(hidden).exp().mean()
        (loss + (two.bias * 0).sqrt().sum() if bad(step) else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.ModuleList([body, one, two])


def ensemble():
    """Two models that have nothing to do with each other: backward, backward, step, step."""
    nets = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in nets]
    for step in range(STEPS):
        for i, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            x = real(step) * math.nan if i == 0 and bad(step) else real(step)
            net(x).square().mean().backward()
        for i, optimizer in enumerate(optimizers):
            if not (i == 0 and never(step)):
                optimizer.step()
    return nets


def gan(first, culprit, detach=True, critics=1, twice=False):
    """A discriminator and a generator, with a backward each. `critics`: steps of the one for a step of the other. `twice`: the
    generator's parameters are divided between two optimizers."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    parts = [generator[0], generator[2]] if twice else [generator]
    og = [torch.optim.Adam(part.parameters(), 1e-2) for part in parts]
    od = torch.optim.Adam(critic.parameters(), 1e-2)

    def discriminate(step):
        for i in range(critics):
            here = culprit == "critic" and i == critics - 1
            if here and never(step):
                continue
            x, fake = real(step * critics + i), generator(real(5000 + step * critics + i, 4))
            if here and bad(step):
                x[5, 1] = math.nan
            od.zero_grad()
            (critic(fake.detach() if detach else fake).mean() - critic(x).mean()).backward()
            od.step()

    def generate(step):
        here = culprit == "generator"
        if here and never(step):
            return
        noise = real(9000 + step, 4)
        if here and bad(step):
            noise[2, 0] = math.nan
        for optimizer in og:
            optimizer.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        for optimizer in og:
            optimizer.step()

    for step in range(STEPS):
        for turn in (discriminate, generate) if first == "critic" else (generate, discriminate):
            turn(step)
    return nn.ModuleList([generator, critic])


def scaled(culprit):
    """One scaled loss, two optimizers, a GradScaler that looks for its scale, clipping after unscaling."""
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.05), torch.optim.AdamW(net[2].parameters(), 1e-2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    for step in range(STEPS):
        if never(step):
            continue
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (net(real(step)).float() - 1).square().mean()
        if bad(step):
            loss = loss + (net[culprit].bias * 0).sqrt().sum()
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in net.parameters()]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
        scaler.update()
        print("scale", scaler.get_scale())
        moved = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
        if len(set(moved)) > 1:
            print("half taken at step", step)
    return net


LOOPS = {
    "muon, fault in adamw": lambda: one_loss(muon, lambda net: net.emb.weight),
    "muon, fault in muon": lambda: one_loss(muon, lambda net: net.body.weight),
    "clipped together": lambda: one_loss(muon, lambda net: net.body.weight, clip="all"),
    "clipped one by one": lambda: one_loss(muon, lambda net: net.body.weight, clip="each"),
    "one of them clipped": lambda: one_loss(muon, lambda net: net.emb.weight, clip="body"),
    "clipped by value": lambda: one_loss(muon, lambda net: net.emb.weight, clip="value"),
    "accumulated": lambda: one_loss(muon, lambda net: net.body.weight, clip="all", parts=3),
    "cleared in between": lambda: one_loss(muon, lambda net: net.body.weight, each_zero=True),
    "one for each parameter": lambda: one_loss(sgd_for_each, lambda net: net.head.bias),
    "made lazily": made_lazily,
    "actor-critic, actor": lambda: actor_critic("actor"),
    "actor-critic, critic": lambda: actor_critic("critic"),
    "two timescales, fast first": lambda: two_timescales("fast"),
    "two timescales, slow first": lambda: two_timescales("slow"),
    "made later": made_later,
    "two tasks": two_tasks,
    "ensemble": ensemble,
    "gan, critic first, critic": lambda: gan("critic", "critic"),
    "gan, critic first, generator": lambda: gan("critic", "generator"),
    "gan, generator first, critic": lambda: gan("generator", "critic"),
    "gan, generator first, generator": lambda: gan("generator", "generator"),
    "gan, not detached, critic": lambda: gan("generator", "critic", detach=False),
    "wgan, critic": lambda: gan("critic", "critic", critics=3),
    "wgan, generator": lambda: gan("generator", "generator", critics=3),
    "gan of three, critic": lambda: gan("generator", "critic", twice=True),
    "gan of three, generator": lambda: gan("critic", "generator", twice=True),
    "scaler, first": lambda: scaled(0),
    "scaler, second": lambda: scaled(2),
}


if __name__ == "__main__":
    _, name, MODE, out = sys.argv
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.save(LOOPS[name]().state_dict(), out)
