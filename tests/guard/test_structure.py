"""Models, optimizers and settings that change while a run goes on: a bad step still leaves no trace.

Each expectation comes from one of three oracles: the state before the bad step, a run that never saw it, or plain torch.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import nanproof
from crosses import part_of
from guard.guarding import INF, NAN, with_gradient
from guard.structures import LOOPS, Loop, Net, all_finite, samples, state_of, swap
from toys import Lion, batches, differences, mse, poison

# ------------------------------------------------------------------- parameters replaced while training


def grouped(model):
    """Return two groups of parameters, the head in the second."""
    return [{"params": [model.embed.weight, *model.body.parameters()]}, {"params": [*model.head.parameters()], "lr": 2e-2}]


FORMS = {
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW-foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "SGD-fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "SGD-foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
}


def edit_in_place(model, optimizer, train):
    old, model.head = model.head, nn.Linear(8, 1)
    swap(optimizer, old, model.head)
    return "head.weight"


def new_list(model, optimizer, train):
    model.head = nn.Linear(8, 1)
    optimizer.param_groups[1]["params"] = [*model.head.parameters()]
    return "head.bias"


def new_group_dict(model, optimizer, train):
    model.head = nn.Linear(8, 1)
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "params": [*model.head.parameters()]}
    return "head.weight"


def new_groups(model, optimizer, train):
    old, model.head = model.head, nn.Linear(8, 1)
    optimizer.param_groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    swap(optimizer, old, model.head)
    return "head.weight"


def add_group(model, optimizer, train):
    """The old head stays in its group, without gradients."""
    model.head = nn.Linear(8, 1)
    optimizer.add_param_group({"params": [*model.head.parameters()], "lr": 3e-2})
    return "head.weight"


def remove_parameter(model, optimizer, train):
    """Every parameter behind the removed one moves up by one place."""
    del optimizer.param_groups[0]["params"][1]
    optimizer.state.pop(model.body.weight, None)
    model.body.weight.requires_grad_(False).grad = None
    return "body.bias"


def move_to_another_group(model, optimizer, train):
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop(0))
    return "embed.weight"


def resize_embedding(model, optimizer, train):
    old, model.embed = model.embed, nn.Embedding(14, 6)
    model.embed.weight.data[:10] = old.weight.data
    swap(optimizer, old, model.embed)
    return "embed.weight"


def resize_data(model, optimizer, train):
    """The same Parameter object in another shape."""
    model.embed.weight.grad = None
    model.embed.weight.data = torch.randn(14, 6)
    optimizer.state.pop(model.embed.weight, None)
    return "embed.weight"


def freeze_and_unfreeze(model, optimizer, train):
    model.head.requires_grad_(False)
    train()
    model.head.requires_grad_(True)
    return "head.weight"


def to_double(model, optimizer, train):
    model.to(torch.double)
    optimizer.state.clear()
    return "body.weight"


def head_to_bfloat16(model, optimizer, train):
    model.head.to(torch.bfloat16)
    for p in model.head.parameters():
        optimizer.state.pop(p, None)
    return "head.weight"


def untie(model, optimizer, train):
    model.tied.weight = nn.Parameter(model.body.weight.detach().clone())
    optimizer.param_groups[0]["params"].append(model.tied.weight)
    return "tied.weight"


def move_state(model, optimizer, train):
    """The new weight goes on with the moments of the old one."""
    old, model.head.weight = model.head.weight, nn.Parameter(torch.randn(1, 8))
    optimizer.param_groups[1]["params"][0] = model.head.weight
    optimizer.state[model.head.weight] = optimizer.state.pop(old)
    return "head.weight"


def parametrize(model, optimizer, train):
    """One weight becomes two, with other names."""
    nn.utils.parametrizations.weight_norm(model.head)
    optimizer.param_groups[1]["params"] = [*model.head.parameters()]
    return "head.parametrizations.weight.original1"


CHANGES = {
    f.__name__: f
    for f in (
        edit_in_place,
        new_list,
        new_group_dict,
        new_groups,
        add_group,
        remove_parameter,
        move_to_another_group,
        resize_embedding,
        resize_data,
        freeze_and_unfreeze,
        to_double,
        head_to_bfloat16,
        untie,
        move_state,
        parametrize,
    )
}


def changed_run(change, form, how, *, fresh=False, bad=None):
    """Train, change the structure, train on: with a fresh guard or not, with bad steps or not."""
    torch.manual_seed(0)
    model = Net()
    optimizer = FORMS[form](grouped(model))
    loop = Loop(how, model, optimizer, max_norm=0.05, policy={"on_spike": "record"})
    data = samples(8)
    for batch in data[:3]:
        loop.step(batch)
    name = change(model, optimizer, lambda: loop.step(data[3]))
    if fresh:
        loop.renew()
    for batch in data[4:]:
        if bad:
            bad(loop, name)
        loop.step(batch)
    return loop, name


CROSSED = pytest.mark.parametrize(("change", "form", "how"), part_of(CHANGES, FORMS, LOOPS, every=4))


@CROSSED
def test_a_bad_gradient_of_a_new_tensor_is_refused_and_named(change, form, how):
    """Weights, moments and step counts stay as they were, and so does the rest of the run."""

    def bad(loop, name):
        incident = loop.refused([*samples(1, seed=9)[0], name])
        assert (incident.kind, incident.action) == ("nonfinite-gradient", "skipped")
        assert [culprit for culprit, _ in incident.culprits] == [name]
        assert math.isnan(loop.guard.history[-1].by_parameter[name])

    saw, _ = changed_run(CHANGES[change], form, how, bad=bad)
    never, _ = changed_run(CHANGES[change], form, how, fresh=True)
    assert [len(loop.guard.incidents) for loop in (saw, never)] == [4, 0]
    assert list(differences("", saw.state(), never.state())) == []


@CROSSED
def test_a_new_tensor_is_clipped_and_its_norm_is_recorded(change, form, how):
    """As a fresh guard does it, bit for bit, and as clip_grad_norm_ and step() do it, to rounding."""
    same, name = changed_run(CHANGES[change], form, how)
    fresh, _ = changed_run(CHANGES[change], form, how, fresh=True)
    assert same.guard.history[-1].action == "clipped"
    assert same.guard.history[-1].by_parameter == fresh.guard.history[-1].by_parameter
    assert same.guard.history[-1].by_parameter[name] > 0
    assert list(differences("", same.state(), fresh.state())) == []
    if change != "head_to_bfloat16":  # there the order of rounding decides
        plain, _ = changed_run(CHANGES[change], form.replace("fused", "foreach"), "plain")  # torch's fused SGD raises here
        for key, p in plain.model.named_parameters():
            assert (same.model.get_parameter(key) - p).norm() <= 1e-6 * p.norm(), key


# ------------------------------------------------------------------- modules added while training


class Averaging(nn.Linear):
    """A layer that keeps a running mean once somebody gave it a buffer for that."""

    def forward(self, x):
        if self.training and "mean" in self._buffers:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x)


class Growing(nn.Module):
    """A place for every way in which a module can be added."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.row = Averaging(6, 8), nn.Identity(), nn.Sequential(nn.Linear(8, 8))
        self.several, self.named, self.head = nn.ModuleList([nn.Tanh()]), nn.ModuleDict(), nn.Linear(8, 1)

    def forward(self, x):
        x = self.row(self.norm(self.body(x)))
        for module in (*self.several, *self.named.values()):
            x = module(x)
        return self.head(self.late(x) if hasattr(self, "late") else x)


ADDITIONS = {
    "replaced": lambda m, new: setattr(m, "norm", new),
    "setattr": lambda m, new: setattr(m, "late", new),
    "add_module": lambda m, new: m.add_module("late", new),
    "list append": lambda m, new: m.several.append(new),
    "list insert": lambda m, new: m.several.insert(0, new),
    "dict": lambda m, new: m.named.update({"new": new}),
    "sequential append": lambda m, new: m.row.append(new),
    "nested": lambda m, new: m.several.append(nn.Sequential(nn.Sequential(new))),
    "buffer": lambda m, new: m.body.register_buffer("mean", torch.zeros(6)),
    "buffer, not persistent": lambda m, new: m.body.register_buffer("mean", torch.zeros(6), persistent=False),
}


@pytest.mark.parametrize(("addition", "how", "steps_between"), part_of(ADDITIONS, LOOPS, (0, 1), every=2))
def test_buffers_that_came_later_are_restored(addition, how, steps_between):
    """A BatchNorm, or a buffer, that the guard did not see when it was made; the next batch is bad, or the one after it."""

    def run(saw_bad):
        torch.manual_seed(0)
        model = Growing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loop = Loop(how, model, optimizer, loss_fn=mse)
        data = batches(8)
        for batch in data[:3]:
            loop.step(batch)
        new = nn.BatchNorm1d(8)
        ADDITIONS[addition](model, new)
        if not addition.startswith("buffer"):
            optimizer.add_param_group({"params": [*new.parameters()]})
        for batch in data[3 : 3 + steps_between]:
            loop.step(batch)
        if saw_bad:
            assert loop.refused(poison(data[5])).kind == "nonfinite-loss"
            assert bool(model.eval()(data[5][0]).isfinite().all())
            model.train()
        for batch in data[6:]:
            loop.step(batch)
        return loop.state()

    assert list(differences("", run(True), run(False))) == []


# ------------------------------------------------------------------- frozen weights and tensors that the forward writes


class Written(nn.Module):
    """A student and a frozen twin, and one `write(model, x)` that the forward calls while training."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(12, 6))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.running, self.first = torch.zeros(6), None

    def forward(self, x):
        if self.training:
            self.count += 1
            self.write(self, x.detach())
        out = self.student(x) + 0.1 * self.teacher(x) + self.running + self.queue.mean(0)
        return self.head(out if self.first is None else out + self.first)

    def pairs(self):
        return zip(self.teacher.parameters(), self.student.parameters(), strict=True)


def rebind_data(model, x):
    for k, q in model.pairs():
        k.data = k.data * 0.9 + q.data * 0.1


def data_in_place(model, x):
    for k, q in model.pairs():
        k.data.mul_(0.9).add_(q.data, alpha=0.1)


@torch.no_grad()
def copy_in_place(model, x):
    for k, q in model.pairs():
        k.copy_(k * 0.9 + q * 0.1)


@torch.no_grad()
def lerp_in_place(model, x):
    for k, q in model.pairs():
        k.lerp_(q, 0.1)


@torch.no_grad()
def lerp_out(model, x):
    for k, q in model.pairs():
        torch.lerp(k, q, 0.1, out=k)


def new_parameter(model, x):
    model.teacher.weight = nn.Parameter(model.teacher.weight * 0.9 + model.student.weight.detach() * 0.1, requires_grad=False)


@torch.no_grad()
def late_average(model, x):
    """An EMA that starts with the sixth forward, as many do."""
    if model.count > 5:
        lerp_in_place(model, x)


def queue_with_pointer(model, x):
    at = int(model.pointer)
    model.queue[at : at + 4] = x[:4]
    model.pointer[0] = (at + 4) % 12


def rebind_attribute(model, x):
    model.running = model.running * 0.9 + x.mean(0) * 0.1


def attribute_in_place(model, x):
    model.running.mul_(0.9).add_(x.mean(0), alpha=0.1)


def attribute_at_first_forward(model, x):
    model.first = x.mean(0) if model.first is None else model.first * 0.9 + x.mean(0) * 0.1


WRITES = {
    f.__name__: f
    for f in (
        rebind_data,
        data_in_place,
        copy_in_place,
        lerp_in_place,
        lerp_out,
        new_parameter,
        queue_with_pointer,
        rebind_attribute,
        attribute_in_place,
        attribute_at_first_forward,
        late_average,
    )
}


@pytest.mark.parametrize(("write", "form", "how"), part_of(WRITES, ["AdamW-fused", "SGD-foreach"], LOOPS, every=2))
def test_what_the_forward_writes_is_restored(write, form, how):
    """Momentum encoders, teachers, queues and running statistics, whichever way they are written."""
    bad = 8 if write == "late_average" else 3

    def run(saw_bad):
        torch.manual_seed(0)
        model = Written(WRITES[write])
        loop = Loop(how, model, FORMS[form](p for p in model.parameters() if p.requires_grad), loss_fn=mse)
        for i, batch in enumerate(batches(12)):
            if i != bad:
                loop.step(batch)
            elif saw_bad:
                assert loop.refused(poison(batch)).kind == "nonfinite-loss"
        loop.close()
        assert len(loop.guard.incidents) == saw_bad
        return loop.state()

    assert list(differences("", run(True), run(False))) == []


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("write", [name for name in WRITES if name != "late_average"])
def test_what_the_first_forward_writes_is_restored(write, how):
    """Nothing was ever written before the batch that is refused."""
    torch.manual_seed(0)
    model = Written(WRITES[write])
    loop = Loop(how, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True), loss_fn=mse)
    loop.refused(poison(batches(1)[0]))
    assert model.first is None


# ------------------------------------------------------------------- settings that are not numbers


OPTIMIZERS = {
    **FORMS,
    "AdamW-single": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=1e-3),
    "Lion": lambda ps: Lion(ps, lr=1e-3),
}
SETTINGS = {
    "lr nan": ("lr", NAN),
    "lr inf": ("lr", INF),
    "lr -inf": ("lr", -INF),
    "weight_decay nan": ("weight_decay", NAN),
    "betas nan": ("betas", (NAN, 0.999)),
    "momentum nan": ("momentum", NAN),
    "lr tensor nan": ("lr", torch.tensor(NAN)),
}
TAKES = {  # besides lr, which all of them take
    "AdamW-fused": ("weight_decay", "betas", "tensor"),
    "AdamW-foreach": ("weight_decay", "betas"),
    "AdamW-single": ("weight_decay", "betas", "tensor"),
    "SGD-fused": ("weight_decay", "momentum", "tensor"),
    "SGD-foreach": ("weight_decay", "momentum"),
    "RMSprop": ("weight_decay", "momentum"),
    "Muon": ("weight_decay", "momentum"),
    "Lion": ("betas",),
}
CASES = [
    f"{name}, {setting}"
    for name, takes in TAKES.items()
    for setting in SETTINGS
    if setting in ("lr nan", "lr inf", "lr -inf") or any(word in setting for word in takes)
]


def matrices():
    """A model that Muon trains too: without biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))


def two_groups(model):
    return [{"params": [model[0].weight]}, {"params": [model[2].weight]}]


def names_setting(incident, setting, group):
    """Whether the text of an incident names the setting and the group, such as `lr of group 1` or `param_groups[1]['lr']`."""
    return setting in str(incident) and re.search(rf"group\w*\W{{0,2}}{group}\b", str(incident)) is not None


@pytest.mark.parametrize(("case", "group", "how"), part_of(CASES, (0, 1), LOOPS, every=3))
def test_a_setting_that_is_not_finite_refuses_the_step(case, group, how):
    """Nothing is written, the setting and its group are named, and training goes on when it is finite again."""
    name, setting = case.split(", ")
    key, value = SETTINGS[setting]

    def run(saw_bad):
        model = matrices()
        optimizer = OPTIMIZERS[name](two_groups(model))
        loop = Loop(how, model, optimizer, loss_fn=mse)
        data = batches(7)
        for batch in data[:3]:
            loop.step(batch)
        if saw_bad:
            usual = optimizer.param_groups[group][key]
            optimizer.param_groups[group][key] = value
            incident = loop.refused(data[3])
            assert (incident.step, incident.kind, incident.action) == (3, "nonfinite-weight", "skipped")
            assert names_setting(incident, key, group), str(incident)
            optimizer.param_groups[group][key] = usual
        for batch in data[4:]:
            loop.step(batch)
        loop.close()
        assert len(loop.guard.incidents) == saw_bad
        return loop.state()

    assert list(differences("", run(True), run(False))) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the first step may be the refused one
@pytest.mark.parametrize("bad", [0, 4])
@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW-foreach", "SGD-fused", "RMSprop", "Muon", "Lion"])
@pytest.mark.parametrize("how", LOOPS)
def test_a_rate_that_a_schedule_makes_nan_refuses_the_step(how, name, bad):
    """The loop advances the schedule itself, so the next rate is finite."""
    model = matrices()
    optimizer = OPTIMIZERS[name](two_groups(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: NAN if n == bad else 1 / (n + 1))
    loop = Loop(how, model, optimizer, loss_fn=mse)
    for i, batch in enumerate(batches(8)):
        if i == bad:
            incident = loop.refused(batch)
            assert incident.kind == "nonfinite-weight" and names_setting(incident, "lr", 0), str(incident)
        else:
            loop.step(batch)
        scheduler.step()
    loop.close()
    assert [r.action == "skipped" for r in loop.guard.history] == [i == bad for i in range(8)]
    assert len(loop.guard.incidents) == 1 and all_finite(loop.state())


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("name", "moment"),
    [(n, m) for n, ms in {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}.items() for m in ms],
)
@pytest.mark.parametrize("form", ["fused", "foreach"])
@pytest.mark.parametrize("how", LOOPS)
def test_a_moment_poisoned_before_the_last_step_is_rolled_back_at_close(how, form, name, moment, value):
    """No later step would find it: close() looks once more and goes back to a good state."""
    model = matrices()
    optimizer = FORMS[f"{name}-{form}"](two_groups(model))
    loop = Loop(how, model, optimizer, loss_fn=mse, policy={"snapshot_every": 2})
    good = [loop.state()]
    data = batches(8)
    for batch in data[:7]:
        loop.step(batch)
        good.append(loop.state())
    optimizer.state[model[0].weight][moment][0, 0] = value
    loop.step(data[7])
    loop.close()
    state = loop.state()
    assert "nonfinite-weight" in [i.kind for i in loop.guard.incidents]
    assert all_finite(state)
    assert any(not list(differences("", state, earlier)) for earlier in good)


ODDITIES = {
    "growth_rate inf": lambda ps: Lion([{**g, "growth_rate": INF, "d_max": -INF} for g in ps], lr=1e-3),
    "eps None": lambda ps: torch.optim.Adafactor(ps, lr=1e-2, eps=(None, 1e-3)),
    "rate 0 in one group": lambda ps: torch.optim.AdamW([ps[0], {**ps[1], "lr": 0.0}], lr=1e-2, fused=True),
    "rate 0 as tensor": lambda ps: torch.optim.AdamW([ps[0], {**ps[1], "lr": torch.tensor(0.0)}], lr=1e-2, fused=True),
    "no weight decay": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.0, foreach=True),
    "no momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.0, foreach=True),
    "clip threshold inf": lambda ps: Lion([{**g, "clip_threshold": INF, "note": "lr=nan", "mask": None} for g in ps], lr=1e-3),
}


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("oddity", ODDITIES)
def test_odd_settings_of_healthy_optimizers_are_not_incidents(oddity, how):
    """The run is the plain one, bit for bit."""
    runs = []
    for way in (how, "plain"):
        model = matrices()
        loop = Loop(way, model, ODDITIES[oddity](two_groups(model)), loss_fn=mse, max_norm=None)
        for batch in batches(12):
            loop.step(batch)
        loop.close()
        runs.append(loop)
    assert runs[0].guard.incidents == []
    assert list(differences("", runs[0].state(), runs[1].state())) == []


# ------------------------------------------------------------------- sparse gradients


class Sparse(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.embed = nn.Embedding(10, 6, sparse=True)
        self.head = nn.Linear(6, 1) if head else None


def sparse_loss(model, batch):
    """The loss is finite. A value in the batch stands in for the gradient of one looked-up row, or of all."""
    ids, value, everywhere = batch
    out = model.embed(ids)
    if value is not None and everywhere:
        out.register_hook(lambda g: torch.full_like(g, value))
    elif value is not None:
        out = with_gradient(out, value)
    return (out if model.head is None else model.head(out)).square().mean()


SPARSE = {
    "SparseAdam": (False, lambda m: torch.optim.SparseAdam(m.parameters(), lr=1e-2)),
    "SGD": (True, lambda m: torch.optim.SGD(m.parameters(), lr=1e-2)),
    "SparseAdam, AdamW": (
        True,
        lambda m: [torch.optim.SparseAdam(m.embed.parameters(), lr=1e-2), torch.optim.AdamW(m.head.parameters(), fused=True)],
    ),
}
DISTINCT, REPEATED = [0, 1, 2, 3], [1, 1, 1, 4]
SPARSE_FAULTS = {  # the ids of a batch, the value, whether all elements have it, and the kind of the incident
    "nan": (DISTINCT, NAN, False, "nonfinite-gradient"),
    "nan, repeated ids": (REPEATED, NAN, False, "nonfinite-gradient"),
    "inf": (DISTINCT, INF, False, "nonfinite-gradient"),
    "-inf everywhere": (REPEATED, -INF, True, "nonfinite-gradient"),
    "3e38 everywhere": (DISTINCT, 3e38, True, "gradient-norm-overflow"),
}


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("fault", SPARSE_FAULTS)
@pytest.mark.parametrize("optimizer", SPARSE)
def test_a_bad_sparse_gradient_is_named_for_what_it_is(optimizer, fault, how):
    """A NaN is not an overflow of the norm, though the norm is not finite either way."""
    ids, value, everywhere, kind = SPARSE_FAULTS[fault]
    torch.manual_seed(0)
    head, make = SPARSE[optimizer]
    model = Sparse(head)
    loop = Loop(how, model, make(model), loss_fn=sparse_loss, max_norm=1.0)
    loop.step([torch.tensor(ids), None, False])
    incident = loop.refused([torch.tensor(ids), value, everywhere])
    assert incident.kind == kind and math.isfinite(incident.loss)
    assert [name for name, _ in incident.culprits] == ["embed.weight"]
    loop.step([torch.tensor(ids), None, False])
    assert len(loop.guard.incidents) == 1 and all_finite(loop.state())


# ------------------------------------------------------------------- weights that the optimizer makes non-finite


class Countdown(torch.optim.Optimizer):
    """Divides by the steps that are left, which are none at its eighth."""

    def __init__(self, params, steps=7):
        super().__init__(params, {"lr": 1e-2, "steps": steps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                done = self.state[p].setdefault("step", torch.zeros(()))
                p.sub_(p.grad * group["lr"] / (group["steps"] - done))
                done += 1


DIVIDES_BY_ZERO = {  # the step that divides by zero, and the optimizer
    "Adam-fused": (0, lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=0.0, fused=True)),
    "Adam-foreach": (0, lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=0.0, foreach=True)),
    "Adam-single": (0, lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=0.0, foreach=False)),
    "AdamW-default": (0, lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=0.0)),
    "RMSprop": (0, lambda ps: torch.optim.RMSprop(ps, lr=1e-2, eps=0.0)),
    "Adagrad-fused": (0, lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=0.0, fused=True)),
    "Adagrad-foreach": (0, lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=0.0, foreach=True)),
    "own": (7, Countdown),
}


def dividing_run(name, how, healthy=False, **policy):
    """Return the loop, not closed, and its state before each step. Unless healthy, some gradients are exactly 0."""
    at, make = DIVIDES_BY_ZERO[name]
    model = matrices()
    parameters = [{"params": [*model.parameters()], **({"steps": 100} if healthy and name == "own" else {})}]
    loop = Loop(how, model, make(parameters), loss_fn=mse, max_norm=None, policy=policy)
    good = []
    try:
        for x, y in batches(10 if healthy else at + 1):
            good.append(loop.state())
            loop.step([x if healthy else x * torch.tensor([1.0, 0, 1, 1, 1, 1]), y])
        loop.guard.sync()
    except nanproof.TrainingHalted:
        assert not healthy
    return loop, good


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("name", DIVIDES_BY_ZERO)
def test_a_weight_that_the_optimizer_makes_nonfinite_is_found_at_that_step(name, how):
    """Loss and gradients are finite; 0 / 0 in the update is not."""
    loop, _ = dividing_run(name, how)
    assert loop.guard.incidents, "nothing was found before close()"
    incident = loop.guard.incidents[0]
    assert (incident.step, incident.kind) == (DIVIDES_BY_ZERO[name][0], "nonfinite-weight")
    if how == "train_step":
        assert incident.diagnosis.cause == "optimizer-made-nonfinite"


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("name", DIVIDES_BY_ZERO)
def test_a_weight_that_the_optimizer_makes_nonfinite_is_put_back(name, how):
    """With snapshots the run ends on a good state, not on the broken one."""
    loop, good = dividing_run(name, how, snapshot_every=1)
    loop.close()
    state = loop.state()
    assert all_finite(state)
    assert any(not list(differences("", state, earlier)) for earlier in good)


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("name", DIVIDES_BY_ZERO)
def test_the_same_optimizers_are_healthy_where_nothing_is_divided_by_zero(name, how):
    loop, _ = dividing_run(name, how, healthy=True)
    loop.close()
    assert loop.guard.incidents == [] and all(r.action == "stepped" for r in loop.guard.history)


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("form", [{"foreach": True}, {"foreach": False}], ids=["foreach", "single"])
def test_half_weights_under_an_eps_that_underflows_are_put_back(form, how):
    """1e-8 is 0 in fp16: the column of zeros divides 0 by 0."""
    model = matrices().half()
    loop = Loop(how, model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8, **form), loss_fn=mse)
    x, y = batches(1, dtype=torch.float16)[0]
    incident = loop.refused([x * torch.tensor([1, 0, 1, 1, 1, 1]), y])
    assert (incident.step, incident.kind) == (0, "nonfinite-weight")
    if how == "train_step":
        assert incident.diagnosis.cause in ("optimizer-made-nonfinite", "fp16-optimizer-underflow")


# ------------------------------------------------------------------- optimizers whose step only a copy can undo


def with_closure(line_search, how, data, policy=None, fault_at=None):
    """Train with LBFGS. In a batch with a third element, evaluation `fault_at` of the loss is NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn=line_search)
    guard = None
    if how != "plain":
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, max_norm=None, policy=nanproof.Policy(**policy or {}))
    for batch in data:
        before, calls = state_of(model, [optimizer]), []

        def closure(batch=batch, calls=calls):
            optimizer.zero_grad()
            loss = mse(model, batch)
            calls.append(loss)
            if len(batch) > 2 and len(calls) == fault_at + 1:
                loss = loss * NAN
            loss.backward()
            return loss

        if guard is None:
            optimizer.step(closure)
        elif how == "train_step":
            guard.train_step(batch)
        else:
            guard.step(closure=closure)
        if len(batch) > 2 or bool(batch[0].isnan().any()):
            assert guard.history[-1].action == "skipped"
            assert list(differences("", before, state_of(model, [optimizer]))) == []
    return guard, state_of(model, [optimizer])


SEARCHES = pytest.mark.parametrize("line_search", [None, "strong_wolfe"])


@SEARCHES
@pytest.mark.parametrize("how", LOOPS)
def test_a_healthy_run_of_lbfgs_is_the_plain_one(line_search, how):
    data = batches(6)
    guard, state = with_closure(line_search, how, data)
    _, plain = with_closure(line_search, "plain", data)
    assert guard.path.startswith("copy") and guard.incidents == []
    assert list(differences("", state, plain)) == []


@SEARCHES
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", LOOPS)
def test_a_bad_batch_leaves_no_trace_in_lbfgs(line_search, how, bad):
    data = batches(6)
    guard, state = with_closure(line_search, how, [poison(b) if i == bad else b for i, b in enumerate(data)])
    _, never = with_closure(line_search, how, [b for i, b in enumerate(data) if i != bad])
    assert [(i.step, i.kind, i.action) for i in guard.incidents] == [(bad, "nonfinite-loss", "skipped")]
    assert list(differences("", state, never)) == []


@pytest.mark.parametrize("fault_at", [0, 2])
def test_a_bad_evaluation_within_a_step_of_lbfgs_refuses_all_of_it(fault_at):
    """The weights have moved by the time the third evaluation is NaN."""
    data = batches(6)
    guard, state = with_closure(None, "step", [[*b, True] if i == 3 else b for i, b in enumerate(data)], fault_at=fault_at)
    _, never = with_closure(None, "step", [b for i, b in enumerate(data) if i != 3])
    assert [i.step for i in guard.incidents] == [3]
    assert list(differences("", state, never)) == []


IN_BACKWARD = {
    "SGD": lambda p: torch.optim.SGD([p], lr=1e-2, momentum=0.9, foreach=False),
    "AdamW-single": lambda p: torch.optim.AdamW([p], lr=1e-2, foreach=False),
    "AdamW-fused": lambda p: torch.optim.AdamW([p], lr=1e-2, fused=True),
}


def within_backward(name, data, guarded=True, hooks_first=True, policy=None):
    """Train with one optimizer a parameter, each of which steps in a hook of the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = {p: IN_BACKWARD[name](p) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    def register():
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    guard = None
    if hooks_first:
        register()
    if guarded:
        guard = nanproof.Guard(model, [*optimizers.values()], max_norm=None, policy=nanproof.Policy(**policy or {}))
    if not hooks_first:
        register()
    for batch in data:
        before = state_of(model, [*optimizers.values()])
        loss = mse(model, batch)
        loss.backward()
        if guard:
            guard.step(loss)
        if bool(batch[0].isnan().any()):
            assert guard.history[-1].action == "skipped"
            assert list(differences("", before, state_of(model, [*optimizers.values()]))) == []
    return guard, state_of(model, [*optimizers.values()])


ORDERS = pytest.mark.parametrize("hooks_first", [True, False], ids=["hooks first", "guard first"])


@ORDERS
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_a_healthy_run_of_optimizers_within_backward_is_the_plain_one(name, hooks_first):
    data = batches(6)
    guard, state = within_backward(name, data, hooks_first=hooks_first)
    _, plain = within_backward(name, data, guarded=False)
    assert guard.incidents == [] and [r.action for r in guard.history] == ["stepped"] * 6
    assert list(differences("", state, plain)) == []


@ORDERS
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_a_bad_batch_leaves_no_trace_in_optimizers_within_backward(name, bad, hooks_first):
    data = batches(6)
    guard, state = within_backward(name, [poison(b) if i == bad else b for i, b in enumerate(data)], hooks_first=hooks_first)
    _, never = within_backward(name, [b for i, b in enumerate(data) if i != bad], hooks_first=hooks_first)
    assert [(i.step, i.action) for i in guard.incidents] == [(bad, "skipped")]
    assert list(differences("", state, never)) == []


COPIED = {
    "LBFGS": lambda **policy: with_closure(None, "step", batches(2), policy),
    "in backward": lambda **policy: within_backward("SGD", batches(2), policy=policy),
}


@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_that_is_not_wanted_is_refused_with_its_size(kind):
    with pytest.raises(nanproof.UnsupportedError, match=r"\d\s?([KMGT]i?B|bytes|B)\b"):
        COPIED[kind](copy=False)


@pytest.mark.parametrize("copy", [True, "auto"])
@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_that_is_wanted_or_small_is_taken(kind, copy):
    guard, _ = COPIED[kind](copy=copy)
    assert [r.action for r in guard.history] == ["stepped"] * 2


def test_a_copy_that_cannot_be_is_a_usage_error():
    with pytest.raises(nanproof.UsageError, match="copy"):
        nanproof.Policy(copy="never")
