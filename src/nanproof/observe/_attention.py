"""How sharp attention is: the largest logit and the entropy, from a sample of queries, where the model calls torch's own
attention or a softmax over it.

Only on full looks, and only while the model's own forward runs: for that time torch's functions are replaced by ones that keep
the arguments (a function mode would make every other operation dearer). They are looked at when the forward ends, all layers at
once. Compiled code, and kernels from other packages, are not seen; should torch start to compile something meanwhile, it finds
its own functions.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import unwrap
from nanproof.core.support._context import rehearsal
from nanproof.core.support._hooks import OwnHook
from nanproof.observe._activations import transformed
from nanproof.observe._borrowed import PRODUCT, borrow, give_all_back, give_back
from nanproof.observe._sites import named

log = logging.getLogger("nanproof")

QUERIES = 16
"""Looked at, of the first sequence of a batch."""
ROWS = 64
"""Looked at where sequences and heads are not told apart."""
COMPILES = 4
"""Forwards with compilation inside, until attention is left alone."""
Sharpness = tuple[float, float, float]
"""The largest logit; the entropy over its possible maximum, as a mean over all heads and of the sharpest head: 0 is one key, 1
all alike."""
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


class AttentionWatch:
    """Samples each attention once a step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.due = False
        """Whether this step is looked at."""
        self.off = False
        self._names = {id(module): name for name, module in named(model).items()}
        self._courier, self._device = Courier(device), device
        self._kept: dict[str, _Sample] = {}
        self._seen: dict[str, Tensor] = {}
        self._inside = False
        self._compiles = 0
        """Forwards in which torch compiled something."""
        root = unwrap(model)
        self._hooks = [
            root.register_forward_pre_hook(_Enter(self), prepend=True),
            root.register_forward_hook(_Leave(self), always_call=True),
        ]

    def begin(self, due: bool) -> None:
        self._give_back()  # a forward that was interrupted did not
        self.due = due
        self._seen.clear()

    def enter(self) -> None:
        """The model's forward begins."""
        if not self.due or self.off or self._inside or rehearsal or transformed():
            return
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint runs its forward again
            self._inside = True
            if "torch._dynamo" in sys.modules:
                sys.modules["torch._dynamo"].callback_handler.register_start_callback(self._compiling)
            borrow(self)

    def leave(self) -> None:
        """It has ended, well or not."""
        if not self._inside:
            return
        self._give_back()
        kept_samples, self._kept = self._kept, {}
        self.tried(self._look, kept_samples)

    def _give_back(self) -> None:
        """Torch has its own functions again."""
        if not self._inside:
            return
        self._inside = False
        if "torch._dynamo" in sys.modules:
            with suppress(ValueError):  # someone has cleared them
                sys.modules["torch._dynamo"].callback_handler.remove_start_callback(self._compiling)
        give_back(self)

    def _compiling(self, *args: Any) -> None:
        """Torch compiles something inside of the forward. What it compiles must not depend on this look: code that was compiled
        for torch's own functions would be compiled again for others, and again."""
        give_all_back()
        self._compiles += 1
        if self._compiles == COMPILES:
            self.off = True
            log.info("nanproof: attention is not observed any more: its functions are part of what torch compiles")

    def send(self) -> Callable[[], dict[str, Sharpness]]:
        names, values = list(self._seen), list(self._seen.values())
        self._seen.clear()
        if not names:
            return dict
        parcel = self._courier.send(torch.cat([v.to(self._device, non_blocking=True) for v in values]))

        def read() -> dict[str, Sharpness]:
            numbers = parcel()
            return {name: (numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]) for i, name in enumerate(names)}

        return read

    def close(self) -> None:
        self.due = False
        self._give_back()
        self._kept.clear()
        for hook in self._hooks:
            hook.remove()

    def tried(self, look: Callable[..., None], *args: Any) -> None:
        """Looking is never the reason a run dies."""
        try:
            look(*args)
        except Exception as error:
            log.debug("nanproof: looking at attention failed", exc_info=True)
            log.warning("nanproof: attention is not observed any more: %s: %s", type(error).__name__, error)
            self.off = True

    def called(self, frame: FrameType, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One of torch's functions is called, by whomever."""
        self.tried(self.keep, frame, function, args, kwargs)

    def place(self, frame: FrameType | None) -> str | None:
        """The module that is calling: from the frames, since hooks on every module would cost more."""
        for _ in range(16):
            if frame is None:
                return None
            for key in ("self", "module"):
                name = self._names.get(id(frame.f_locals.get(key)))
                if name is not None:
                    return name
            frame = frame.f_back
        return None

    def keep(self, frame: FrameType, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of attention, or of a softmax that may be one."""
        sample = _product(*args, **kwargs) if function == PRODUCT else _softmax(*args, **kwargs)
        if sample is None:
            return
        name = self.place(frame)
        if name is not None and name not in self._seen and (function == PRODUCT or _ATTENTION.search(name)):
            self._kept.setdefault(name, sample)

    @torch.no_grad()
    def _look(self, samples: dict[str, _Sample]) -> None:
        alike: dict[Any, list[str]] = {}
        for name, sample in samples.items():
            alike.setdefault(sample.key, []).append(name)
        for names in alike.values():
            with torch.autocast(samples[names[0]].query.device.type, enabled=False):
                found = _sharpness_of([samples[name] for name in names])
            self._seen.update(zip(names, found.unbind(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Some queries and all keys of an attention, or the logits themselves: views, until the forward ends."""

    query: Tensor
    key_tensor: Tensor | None
    mask: Tensor | None
    whole_mask: Tensor | None
    """Which the mask is a part of; layers often share one."""
    scale: float
    causal: int
    """Of each so many queries one was taken, and later keys are hidden from it; 0: nothing is hidden by that."""

    @property
    def key(self) -> Any:
        """What samples that are looked at together have in common."""
        k, q = self.key_tensor, self.query
        return q.shape, q.dtype, q.device, None if k is None else k.shape, id(self.whole_mask), self.scale, self.causal


def _product(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> _Sample | None:  # fmt: skip
    if query.dim() != 4:
        return None
    length, every = query.shape[-2], max(1, query.shape[-2] // QUERIES)
    mask = attn_mask
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], length, key.shape[-2])[..., ::every, :]
        mask = mask[:1] if mask.dim() == 4 else mask
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    return _Sample(query.detach()[:1, :, ::every], key.detach()[:1], mask, attn_mask, factor, every if is_causal else 0)


def _softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> _Sample | None:
    if dim not in (-1, input.dim() - 1) or input.dim() not in (3, 4):
        return None
    if input.dim() == 3:  # (sequence and head, query, key), as in nn.MultiheadAttention
        input = input[None, :ROWS]
    return _Sample(input.detach()[:1, :, :: max(1, input.shape[-2] // QUERIES)], None, None, None, 1.0, 0)


def _sharpness_of(samples: list[_Sample]) -> Tensor:
    """(sample, 3). All have one shape."""
    first = samples[0]
    q = torch.cat([s.query for s in samples])
    if first.key_tensor is None:
        return sharpness(q.float(), q > torch.finfo(first.query.dtype).min / 2)
    k = torch.cat([s.key_tensor for s in samples if s.key_tensor is not None])
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = (q @ k.transpose(-2, -1)).float() * first.scale
    allowed = None
    if first.causal:
        at = torch.arange(0, q.shape[-2] * first.causal, first.causal, device=q.device)
        allowed = torch.arange(k.shape[-2], device=q.device) <= at[:, None]
    elif first.mask is not None and first.mask.dtype == torch.bool:
        allowed = first.mask
    elif first.mask is not None:
        logits, allowed = logits + first.mask.float(), first.mask > torch.finfo(first.mask.dtype).min / 2
    return sharpness(logits, allowed)


def sharpness(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """(sample, 3): largest allowed logit, mean entropy over heads, entropy of the sharpest head. Logits are (sample, head, query,
    key); entropies are over their maximum, the logarithm of how many keys are allowed; queries with one key do not count."""
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=logits.device)
    allowed = allowed.expand(logits.shape)
    hidden = logits.masked_fill(~allowed, -torch.inf)
    logs = torch.log_softmax(hidden, -1)
    entropy = -torch.where(allowed, logs.exp() * logs, 0).sum(-1)
    keys = allowed.sum(-1)
    share = torch.where(keys > 1, entropy / keys.clamp(min=2).float().log(), 0)
    heads = share.sum(-1) / (keys > 1).sum(-1).clamp(min=1)
    return torch.stack((hidden.amax((1, 2, 3)), heads.mean(1), heads.amin(1)), 1)


class _Enter(OwnHook):
    def __init__(self, watch: AttentionWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and (module.training or torch.is_grad_enabled()):
            self._watch.enter()


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self._watch.leave()
