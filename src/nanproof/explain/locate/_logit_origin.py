"""Where in the model a bad row of logits was born: the forward of its prefix is run again, without a cache, and located.

On failure only. The prompt's forward is known from references that a hook kept; the tokens that were generated since are put
behind it. Whatever goes wrong in here, the answer is that nothing is known, never an error of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import is_dtensor, unwrap
from nanproof.core.support._context import Mode, rehearsal
from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain._case import BadWeight, Case
from nanproof.explain.locate._calls import Survey
from nanproof.explain.locate._locate import Birth, locate
from nanproof.explain.replay._replay import Deadline, Replay

_SECONDS = 30.0
"""How long one look may take."""
_CACHES = ("past_key_values", "past_key_value", "cache_position", "cache_params", "mems", "return_dict")


@dataclass(frozen=True, slots=True)
class Birthplace:
    """What a second look at a bad row says."""

    where: str | None = None
    """Path of the module."""
    op: str | None = None
    because: str | None = None
    """A sentence: a weight or an input that is not finite, or that the second forward was clean."""
    everywhere: bool = False
    """It is true of every row: the weights are not finite."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """How the model was called for the prompt: references only."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    versions: tuple[int, ...]
    """Of the parameters: weights that were changed since say nothing about the row any more."""
    pixels: Tensor | None
    """What an image encoder was called with before. `generate` calls it by itself, outside the forward."""


class PromptKeeper:
    """Keeps references to what the model was called with last. Costs nothing on a device. Calls that are to be differentiated
    are no sampling: nothing of training is held on to."""

    def __init__(self, model: nn.Module) -> None:
        inner = unwrap(model)
        under = getattr(inner, "get_base_model", None)  # an adapter's generate calls the model inside it
        self.model: nn.Module = under() if callable(under) else inner
        self._latest: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.saw_prompt = False
        """A prompt was put into an empty cache since `prompt` was asked: a new generation, even if its tokens are as many as
        the last one's next step would have."""
        self._pixels: Tensor | None = None
        self._hooks: list[Any] = [self.model.register_forward_pre_hook(self._keep, with_kwargs=True)]
        if (encoder := _image_encoder(self.model)) is not None:
            self._hooks.append(encoder.register_forward_pre_hook(self._keep_pixels, with_kwargs=True))

    def _keep(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or rehearsal:
            return
        self._latest = args, {name: value for name, value in kwargs.items() if name not in _CACHES}
        tokens = kwargs.get("input_ids")
        self.saw_prompt = bool(kwargs.get("use_cache")) and isinstance(tokens, Tensor) and tokens.shape[-1] > 1

    def _keep_pixels(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or rehearsal):
            self._pixels = kwargs.get("pixel_values", args[0] if args else None)

    def prompt(self) -> Prompt | None:
        """Of the generation that begins: the call that came last."""
        self.saw_prompt = False
        if self._latest is None:
            return None
        modules, device = list(self.model.modules()), next((p.device for p in self.model.parameters()), torch.device("cpu"))
        pixels, self._pixels = self._pixels, None
        return Prompt(*self._latest, Mode.now(modules, device), _versions(self.model), pixels)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._latest = self._pixels = None

    def find(self, prompt: Prompt, ids: Tensor | None, row: int, position: int) -> Birthplace:
        """Of the row whose logits were bad after so many generated tokens. `ids`: the tokens of all rows up to there. Where they
        are gone, or the forward cannot be run again, the weights are left to look at: of a model that is split over ranks, those
        of this one."""
        if _versions(self.model) != prompt.versions:
            return Birthplace(because="the weights were changed since, so the forward cannot be run again")
        if ids is not None and not _split(self.model):
            with suppress(Exception):
                return self._run_again(prompt, ids, row, position)
        return _said(Case("generation", model=self.model), None)

    def _run_again(self, prompt: Prompt, ids: Tensor, row: int, position: int) -> Birthplace:
        call, batch = _prefix(prompt, ids, row, position)
        found = self._again(call, batch, prompt.mode)
        if found is None:
            return Birthplace(
                because="the same prefix gives finite logits when it is run again: it was transient, or it came from the cache "
                "or from a logits processor before this one"
            )
        if "mm_encoder_outputs" in batch and prompt.pixels is not None and not found.everywhere:
            with suppress(Exception):  # an encoder that takes more than pixels
                return self._again(_features, {"pixel_values": prompt.pixels}, prompt.mode) or found
        return found

    def _again(self, call: Callable[[nn.Module, Any], Tensor], batch: dict[str, Any], mode: Mode) -> Birthplace | None:
        """What a second run shows; None if it is finite."""
        replay = Replay(self.model, call, [batch], mode=mode, deadline=Deadline.after(_SECONDS))
        look = Survey(self.model)
        outcome = replay.run(look.watching(), backward=False)
        if outcome.error is not None:
            raise outcome.error
        return None if outcome.finite else _said(Case("generation", replay=replay), locate(replay, look, outcome))


def _image_encoder(model: nn.Module) -> nn.Module | None:
    """The outermost module whose main input is pixels, and that does not read tokens."""
    for module in model.modules():
        pixels = module is not model and getattr(module, "main_input_name", None) == "pixel_values"
        if pixels and "input_ids" not in signature(module.forward).parameters:
            return module
    return None


def _features(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The image features as `generate` makes them, as one number."""
    inner: Any = getattr(model, "base_model", model)
    with torch.no_grad():
        out = inner.get_image_features(**batch, return_dict=True)
        return torch.stack([t.abs().amax() for _, t in tensors_in(out) if t.is_floating_point()]).sum()


def _said(case: Case, birth: Birth | None) -> Birthplace:
    """Weights and inputs that are not finite come first: no operation is to blame for them."""
    where = birth.op.path if birth is not None else None
    op = birth.op.name.strip("_") if birth is not None else None
    weights = [*case.bad_weights, *case.bad_buffers]
    if weights:
        guilty = next((w for w in weights if w.name.rpartition(".")[0] == where), weights[0])
        more = f" (and {len(weights) - 1} more weights are not finite)" if len(weights) > 1 else ""
        return Birthplace(where or guilty.name.rpartition(".")[0], op, f"weight {guilty.name} has {_count(guilty)}{more}", True)
    inputs = [bad for bad in case.bad_batch if not bad.only_negative]
    if inputs:
        name = re.sub(r"\['(\w+)'\]", r".\1", inputs[0].name.removeprefix("batch")).lstrip(".")
        return Birthplace(where, op, f"the input {name} has {inputs[0].count} that are NaN or Inf")
    if birth is None:
        again = case.replay is not None
        return Birthplace(because="it is bad when run again, but the operation was not found" if again else None)
    return Birthplace(where, op, f"at {birth.op.source}" if birth.op.source else None)


def _count(weight: BadWeight) -> str:
    nan = int(torch.isnan(weight.tensor).sum())
    said = [f"{n} {kind}" for n, kind in ((nan, "NaN"), (weight.count - nan, "Inf")) if n]
    rows = f" in row {weight.rows[0]}" if len(weight.rows) == 1 else ""
    return " and ".join(said) + rows


def _prefix(prompt: Prompt, ids: Tensor, row: int, position: int) -> tuple[Any, dict[str, Any]]:
    """(loss_fn, batch) of a forward of the row's prompt and of the tokens that were generated up to the position."""
    args, kwargs = list(prompt.args), dict(prompt.kwargs)
    key = next((k for k in ("decoder_input_ids", "input_ids") if isinstance(kwargs.get(k), Tensor)), None)
    first = kwargs[key] if key is not None else args[0]
    if not isinstance(first, Tensor) or first.dim() != 2 or len(first) != len(ids):
        raise ValueError("the prompt's forward does not show its tokens")
    rows, width = first.shape
    whole = ids.to(first.device)
    if ids.shape[1] != width + position or not torch.equal(whole[row, :width], first[row]):
        raise ValueError("the model was called with other tokens than the processor")
    if (mask := kwargs.get("attention_mask")) is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        kwargs["attention_mask"] = _padding(mask.get("full_attention") if isinstance(mask, dict) else mask, width)
    encoder = ("attention_mask",) if key == "decoder_input_ids" else ()
    batch = {n: v if n in encoder else _longer(n, v, width, position) for n, v in kwargs.items() if n != key}
    batch["ids"] = whole
    others = [_longer("", value, width, position) for value in (args[1:] if key is None else args)]
    place = row
    if rows > 1 and all(_by_row(v, rows) for v in (*batch.values(), *others)):  # else they are all run again
        place = 0
        batch, others = map_tensors([batch, others], lambda t: t[row : row + 1] if t.dim() and len(t) == rows else t)
    if "use_cache" in batch:
        batch["use_cache"] = False

    def call(model: nn.Module, given: dict[str, Any]) -> Tensor:
        given = dict(given)
        tokens = given.pop("ids")
        with torch.no_grad():
            out = model(tokens, *others, **given) if key is None else model(*others, **{key: tokens}, **given)
            logits = out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]
            return (logits[place, -1] if logits.dim() == 3 else logits[place]).amax()

    return call, batch


def _by_row(value: Any, rows: int) -> bool:
    """Whether a row of the argument is a row of the batch, or the argument is the same for all."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or len(value) in (1, rows)
    return not any(True for _ in tensors_in(value))


def _longer(name: str, value: Any, width: int, by: int) -> Any:
    """An argument of the prompt's length, for as many tokens more."""
    if not by or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != width:
        return value
    if name == "position_ids":
        ahead = torch.arange(1, by + 1, device=value.device, dtype=value.dtype)
        return torch.cat([value, value[..., -1:] + ahead], -1)
    if value.dim() == 2 and not value.is_floating_point():
        fill = 1 if name.endswith("attention_mask") else 0
        return torch.cat([value, value.new_full((len(value), by), fill)], -1)
    return value


def _padding(mask: Any, width: int) -> Any:
    """Which tokens of the prompt count, from a mask that says of each token which ones it sees: the last one sees them all."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError("an attention mask of this kind cannot be made longer")
    seen = mask[:, 0, -1, :width]
    return (seen if seen.dtype == torch.bool else seen == 0).long()


def _split(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other ranks (FSDP, tensor parallel, ZeRO-3). Those have no bad row, or another one,
    and would not come: the run would hang."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    gathered = not kinds.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})  # right after a forward no weight shows it
    return gathered or any(is_dtensor(p) or hasattr(p, "ds_id") for p in model.parameters())


def _versions(model: nn.Module) -> tuple[int, ...]:
    return tuple(0 if p.is_inference() else p._version for p in model.parameters())
