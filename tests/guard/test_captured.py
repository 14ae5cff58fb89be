"""Steps that are captured once and replayed, without a GPU: a stand-in for a CUDA graph records the operations of torch, has no
effect while it does, forbids reading a value, and replays them on the same memory. tests/gpu has the real ones."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import nanproof
from nanproof.core.fast._captured import Captures
from nanproof.core.fast._scalars import Scalars


class RecordedGraph:
    """What a CUDA graph is: operations at fixed addresses."""

    def __init__(self):
        self.operations = []

    def capture(self, body):
        recorder = _Recorder(self.operations)
        try:
            with recorder:
                return body()
        finally:
            recorder.undo()

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, out in self.operations:
                for old, new in zip(_tensors(out), _tensors(function(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, operations):
        super().__init__()
        self._operations, self._saved = operations, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "local_scalar_dense" in str(function) or function._schema.name == "aten::equal":
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for place, value in zip(function._schema.arguments, args, strict=False):
            if place.alias_info is not None and place.alias_info.is_write:
                for tensor in _tensors(value):
                    self._saved.setdefault(tensor.data_ptr(), (tensor, tensor.clone()))
        out = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, out))
        return out

    def undo(self):
        with torch.no_grad():
            for tensor, before in self._saved.values():
                tensor.copy_(before)


def _tensors(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Run:
    """A guarded loop that keeps its gradients; `graphs` says whether its steps are captured."""

    def __init__(self, graphs, make=None, policy=None, max_norm=1.0):
        self.model = _net()
        make = make or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.optimizer = make(self.model)
        self.guard = nanproof.Guard(self.model, self.optimizer, policy=policy, max_norm=max_norm)
        stepper = self.guard.parts.stepper
        stepper.kernels = None  # those of the CPU read numbers
        stepper.captures = self.captures = Captures(RecordedGraph)
        if not graphs:
            self.captures.why_not = "compared with"
        for path in stepper._path.paths:
            path.captured = True
        self.generator = torch.Generator().manual_seed(1)

    def step(self, factor=1.0, keep=True):
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not keep)
        x = torch.randn(16, 4, generator=self.generator)
        loss = self.model(x).square().mean() * factor
        loss.backward()
        self.guard.step(loss)

    def state(self):
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        found = [p.detach().clone() for p in self.model.parameters()]
        found += [p.grad.clone() for p in self.model.parameters()]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                found += [value.clone() for value in state.values() if value is not None]
        return [*found, self.guard.parts.stepper.stats.state.clone()]


def _same(runs):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*(run.state() for run in runs), strict=True))


def _two(model):
    return [
        torch.optim.AdamW(model[0].parameters(), lr=1e-2, amsgrad=True),
        torch.optim.SGD(model[2].parameters(), lr=1e-2, momentum=0.9),
    ]


def _rates(model):
    return [(model[0], 0.1), (model[2], 0.01)]


MAKERS = {
    "AdamW": None,
    "Adam maximize": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True, weight_decay=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    ),
    "two optimizers": _two,
}


@pytest.mark.parametrize(("name", "max_norm"), [*((name, 1.0) for name in MAKERS), ("AdamW", None), ("AdamW", "auto")])
def test_a_replayed_step_is_the_same_step_bit_for_bit(name, max_norm):
    """Healthy steps, NaN, Inf, an overflowing norm and spikes, under a learning rate that changes at every step."""
    runs = [Run(graphs, MAKERS[name], max_norm=max_norm) for graphs in (False, True)]
    factors = {5: math.nan, 9: math.inf, 11: 1e38, 25: 1e4}
    for step in range(32):
        for run in runs:
            for optimizer in run.optimizer if isinstance(run.optimizer, list) else [run.optimizer]:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.95
            run.step(factors.get(step, 1.0))
        assert _same(runs), step
    plain, graphs = ([(r.step, r.action, r.loss, r.grad_norm, r.clip, list(r.norms)) for r in run.guard.history] for run in runs)
    assert str(plain) == str(graphs)
    assert [i.kind for i in runs[0].guard.incidents] == [i.kind for i in runs[1].guard.incidents]
    assert runs[1].captures.replays == 30 and "captured as a CUDA graph" in runs[1].guard.path


def test_other_settings_state_and_addresses_make_another_graph():
    """A setting that is baked in, state that was replaced, gradients elsewhere: none of them replays the old graph."""
    runs = [Run(graphs) for graphs in (False, True)]

    def both(count, change=None, keep=True):
        before = runs[1].captures.replays
        for run in runs:
            if change is not None:
                change(run)
            for _ in range(count):
                run.step(keep=keep)
        assert _same(runs)
        return runs[1].captures.replays - before

    def load(run):
        run.optimizer.load_state_dict(run.optimizer.state_dict())

    def new_moment(run):
        run.optimizer.state[run.model[0].weight]["exp_avg"] = torch.ones_like(run.model[0].weight)

    assert both(5) == 3
    assert both(4, lambda run: run.optimizer.param_groups[0].update(weight_decay=0.3)) == 2 + 1
    assert both(4, load) > 0
    assert both(4, new_moment) > 0
    assert both(3, lambda run: run.model.zero_grad()) >= 0
    assert both(3, lambda run: run.optimizer.register_step_post_hook(lambda *_: None)) == 0


def test_gradients_that_never_repeat_end_the_attempt():
    run = Run(True)
    kept = []
    for _ in range(Captures.PATIENCE + 8):
        run.step(keep=False)
        kept += [p.grad for p in run.model.parameters()]
    assert run.captures.replays == 0
    assert "not captured: the addresses of gradients do not repeat" in run.guard.path


class BareGraph:
    """Holds no tensor of what it captures, as a CUDA graph does, which knows addresses only."""

    def capture(self, body):
        return RecordedGraph().capture(body)

    def replay(self):
        pass


def test_a_graph_does_not_keep_gradients_alive():
    """Their memory would not come again, so no step would ever be replayed, and each graph would hold a set of gradients."""
    run = Run(True)
    run.guard.parts.stepper.captures = run.captures = Captures(BareGraph)
    for _ in range(3):
        run.step()
    assert run.captures.replays == 1
    gradients = [weakref.ref(p.grad) for p in run.model.parameters()]
    run.model.zero_grad(set_to_none=True)
    assert [gradient() for gradient in gradients] == [None] * len(gradients)


class Reading:
    """Takes the place of kernels, and reads a number on the host, which a capture forbids."""

    def norms(self, gradients):
        assert gradients[0].sum().item() is not None

    def judge(self, *args):
        return Scalars().judge(*args)


def test_what_cannot_be_captured_takes_the_usual_path():
    """A capture that fails has no effect; the step it was for is taken once."""
    runs = [Run(graphs) for graphs in (False, True)]
    for _ in range(6):
        for run in runs:
            run.guard.parts.stepper.kernels = Reading()
            run.step()
        assert _same(runs)
    assert runs[1].captures.replays == 0 and "not permitted" in runs[1].captures.why_not


def test_capture_is_asked_for_and_has_no_effect_on_a_cpu():
    model = _net()
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), policy=nanproof.Policy(capture=True))
    assert guard.path.endswith("; not captured: weights are not whole tensors on one CUDA device")
    with pytest.raises(nanproof.UsageError, match="capture"):
        nanproof.Policy(capture="yes")
