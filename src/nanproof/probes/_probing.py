"""What a probe works with: the step as it is, and forward passes with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.support._context import Mode, RandomState
from nanproof.core.support._tree import map_tensors
from nanproof.explain.replay._replay import CannotReplay, Replay
from nanproof.probes._recorder import Compared, Lookup, Recorder, Swap

SHARE = 1e-5
"""A part of the gradient below this share of the whole is rounding."""
NOISE = 32.0
"""Changes below this many roundings of the largest number are rounding, where there is no gradient."""

COPIED = 1 << 26
"""Weights that are copied, in elements, at the most."""

Look = Callable[[Recorder, Tensor], None]
"""Looks at a pass while the graph of its loss is there."""


class DoesNotApply(Exception):
    """The question makes no sense for this step."""


@dataclass
class Probing:
    """One step under probe."""

    replay: Replay
    optimizer: torch.optim.Optimizer
    accumulate: int = 1
    """Micro-batches that the loop splits a batch into, and whose losses it averages."""
    known: set[int] = field(default_factory=set)
    """Samples with which something else is wrong."""

    @property
    def model(self) -> nn.Module:
        return self.replay.model

    @property
    def batch(self) -> Any:
        return self.replay.batches[0]

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weights, if they are few enough to be copied."""
        found = [p for p in self.replay.parameters.values() if p.is_floating_point() and not p.is_inference()]
        return found if sum(p.numel() for p in found) <= COPIED else []

    @cached_property
    def steady(self) -> Mode:
        """The mode of the run, but modules that keep statistics of the batch are in evaluation:
        normalising over the batch mixes samples and positions on purpose."""
        modules = self.replay.modules
        mode = self.replay.mode
        kept = _written_buffers(self.replay)
        training = [t and id(m) not in kept for m, t in zip(modules, mode.training, strict=True)]
        return replace(mode, training=training)

    @cached_property
    def base(self) -> Recorder:
        """The step as it is."""
        return self.run()

    def run(
        self,
        *contexts: AbstractContextManager[Any],
        recorder: Recorder | None = None,
        swap: Swap | None = None,
        batch: Any = None,
        mode: Mode | None = None,
        look: Look | None = None,
        random: RandomState | None = None,
    ) -> Recorder:
        """Run a forward pass, with the same random numbers each time. Raises `DoesNotApply` if the
        changed step does not run."""
        recorder = recorder or Recorder(self.model, swap=swap)
        replay = self.replay
        before, replay.mode = replay.mode, mode or self.steady
        failed: list[Exception] = []

        def before_backward(loss: Tensor) -> None:
            recorder.loss = float(loss.detach())
            moved_on = RandomState.now([]).moved_since(random or replay.random)
            recorder.draws = recorder.draws or bool(moved_on & {"python", "numpy"})
            if look is not None:
                try:
                    look(recorder, loss)
                except CannotReplay:
                    raise
                except Exception as error:
                    failed.append(error)

        try:
            outcome = replay.run(
                _mode_stays(self.model),
                *contexts,
                recorder,
                batches=None if batch is None else [batch],
                backward=False,
                before_backward=before_backward,
                random=random,
            )
        finally:
            replay.mode = before
        recorder.let_go()
        if outcome.error is not None or failed:
            raise DoesNotApply(str(outcome.error or failed[0]))
        return recorder


@contextmanager
def _mode_stays(model: nn.Module) -> Iterator[None]:
    """A loss function that calls `model.train()`, as a Trainer does, must not undo the mode of a pass."""
    own = model.__dict__.get("train")
    model.__dict__["train"] = lambda mode=True: model
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["train"]
        else:
            model.__dict__["train"] = own


def _written_buffers(replay: Replay) -> set[int]:
    """Modules whose buffers a training forward writes, and batch norms."""
    kept = {id(m) for m in replay.modules if isinstance(m, nn.modules.batchnorm._NormBase)}
    before = [(m, [(b, b._version, b.detach().clone()) for b in m._buffers.values() if b is not None]) for m in replay.modules]

    def after() -> None:
        for module, buffers in before:
            now = {id(b) for b in module._buffers.values()}
            if any(id(b) not in now or (b._version != v and not torch.equal(b, value)) for b, v, value in buffers):
                kept.add(id(module))

    replay.run(backward=False, after=after)
    return kept


def gradient_share(target: Tensor, weights: Tensor, lookups: Sequence[Lookup], where: Tensor) -> float | None:
    """Return which share of the gradient of `target`, weighted at random by `weights`, reaches the
    places `where` of the lookups. 0 for what does not depend on them: a masked value adds exactly 0.
    None where it cannot be computed."""
    outputs = [x.output for x in lookups if x.output.requires_grad]
    if not outputs or not target.requires_grad:
        return None
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(target.shape, generator=generator).to(target.device, torch.float32)
    try:
        gradients = torch.autograd.grad((target.float() * noise * weights).sum(), outputs, retain_graph=True, allow_unused=True)
    except RuntimeError:  # reentrant checkpoints
        return None
    found = [g.float().flatten(where.dim()).norm(dim=-1) for g in gradients if g is not None]
    whole = sum(float(g.square().sum()) for g in found) ** 0.5
    return 0.0 if not whole else sum(float(g[where].square().sum()) for g in found) ** 0.5 / whole


def moved(before: Tensor, after: Tensor, where: Tensor | None = None) -> float:
    """Return the largest change, at the places given."""
    if before.shape != after.shape:
        raise DoesNotApply("the shapes differ")
    change = (before.double() - after.double()).abs()
    if where is not None:
        change = change[where]
    return float(change.nan_to_num(posinf=0).max()) if change.numel() else 0.0


def depends(change: float, control: float, values: Tensor, share: float | None, least: float = SHARE) -> bool:
    """Whether a change is more than rounding, compared with one that had to come."""
    if share is not None:
        return change > 0 and share > least
    rounding = NOISE * torch.finfo(values.dtype).eps * float(values.abs().max()) if values.numel() else 0.0
    return change > max(1e-3 * control, rounding)


def laid_out(result: Compared, samples: int, length: int) -> Tensor | None:
    """Return predictions as (samples, positions, numbers), where they are a row a token; the last position may be missing."""
    return _laid_out(result.predictions, samples, length)


def values_laid_out(result: Compared, samples: int, length: int) -> Tensor | None:
    """The same for the numbers as they were."""
    return _laid_out(result.values, samples, length)


def _laid_out(t: Tensor, samples: int, length: int) -> Tensor | None:
    if t.dim() == 2 and t.shape[0] in (samples * length, samples * (length - 1)):
        return t.reshape(samples, -1, t.shape[-1])
    if t.dim() == 3 and t.shape[0] == samples and t.shape[1] in (length, length - 1):
        return t
    return None


def changed_rows(batch: Any, samples: int, row: int, source: int) -> Any:
    """A batch in which one sample is replaced by another."""

    def change(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != samples or t.layout is not torch.strided:
            return t
        t = t.detach().clone()
        t[row] = t[source]
        return t

    return map_tensors(batch, change)


@contextmanager
def shaken(parameters: Sequence[Tensor]) -> Iterator[None]:
    """While open, every weight has a little noise: a head that begins at zero hides what it is given."""
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=generator).to(p.device, p.dtype) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
