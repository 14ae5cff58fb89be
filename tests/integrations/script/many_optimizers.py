"""Small runs with every kind of optimizer and loop, one after the other: `many_optimizers.py OUT BAD_STEP`. It knows nothing of
nanproof; the tests run it with and without."""

import math
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

STEPS = 12


class Lion(torch.optim.Optimizer):
    """Made by hand, as people do; its step takes an argument of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_((0.9 * momentum + 0.1 * p.grad).sign(), alpha=-group["lr"] * factor)
                    momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class Model(nn.Module):
    """Computes its loss itself, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(12, 1)

    def forward(self, x, y):
        return {"loss": (self.head(self.body(x)) - y).float().square().mean()}


def batch(step):
    x = torch.randn(8, 6)
    y = x.sum(dim=1, keepdim=True)
    if step == BAD:
        x[3, 2] = math.nan
    return x, y


def plain(model, optimizer, scheduler=None, **more):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))["loss"]
        loss.backward()
        optimizer.step(**more)
        if scheduler is not None:
            scheduler.step()
        said(loss, next(model.parameters()).grad.norm())


def with_closure(model, optimizer):
    calls = []
    for step in range(STEPS):
        x, y = batch(step)

        def closure(x=x, y=y):
            calls.append(1)
            optimizer.zero_grad()
            loss = model(x, y)["loss"]
            loss.backward()
            return loss

        said(optimizer.step(closure), torch.tensor(float(len(calls))))


def with_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(*batch(step))["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        said(loss, norm, scaler.get_scale())


def two_optimizers(model):
    """One for the body and one for the head, stepped in turn, and clipped part by part."""
    body, head = torch.optim.AdamW(model.body.parameters(), 1e-3), torch.optim.SGD(model.head.parameters(), 1e-2)
    for step in range(STEPS):
        body.zero_grad()
        head.zero_grad()
        loss = model(*batch(step))["loss"]
        loss.backward()
        norms = [clip_grad_norm_(part.parameters(), 0.5) for part in (model.body[0], model.body[1], model.head)]
        body.step()
        head.step()
        said(loss, *norms)


def no_module():
    weight = torch.randn(6, 1, requires_grad=True)
    optimizer = torch.optim.Adam([weight], 1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = (x @ weight - y).square().mean()
        loss.backward()
        optimizer.step()
        said(loss)
    return weight


def said(*numbers):
    print(*(float(number.detach() if isinstance(number, torch.Tensor) else number).hex() for number in numbers))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    saved = {}
    for name in ("rmsprop", "sgd", "lion", "closure", "scaler", "fused", "two", "none", "lbfgs"):
        print(name)
        model = Model()
        if name == "rmsprop":
            plain(model, torch.optim.RMSprop(model.parameters(), 1e-3))
        elif name == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
            plain(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4))
        elif name == "lion":
            plain(model, Lion(model.parameters()), factor=0.5)
        elif name == "closure":
            with_closure(model, torch.optim.Adam(model.parameters(), 1e-3))
        elif name in ("scaler", "fused"):
            with_scaler(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=name == "fused"))
        elif name == "two":
            two_optimizers(model)
        elif name == "lbfgs":
            with_closure(model, torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=2))
        saved[name] = {"weight": no_module()} if name == "none" else model.state_dict()
    torch.save(saved, sys.argv[1])


if __name__ == "__main__":
    BAD = int(sys.argv[2])
    main()
