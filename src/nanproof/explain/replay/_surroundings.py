"""Changes to what surrounds the operations: checkpointing, autocast, distributions, the weights themselves.

They stand for a fix as those of `_interventions` do, but most of them look at no operation, so a run under them costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from nanproof.explain.replay._interventions import Intervention


class Attached(Intervention):
    """detach and .data do nothing, reentrant checkpointing is left out: the path of the gradient is whole. no_grad stays: who
    writes it means it."""

    names = frozenset({"detach"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            self.acted += 1
            return args[0] * 1
        return super().__torch_function__(func, types, args, kwargs)

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.acted += 1
        return args[0] * 1

    def __enter__(self) -> Any:
        import torch.utils.checkpoint as checkpointing

        checkpointing.CheckpointFunction.apply = self._through  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        import torch.utils.checkpoint as checkpointing

        super().__exit__(*exc)
        del checkpointing.CheckpointFunction.apply  # the inherited one shows again

    def _through(self, function: Any, _preserve: Any, *args: Any) -> Any:
        self.acted += 1
        return function(*args)


class GradEnabled(Intervention):
    """torch.no_grad does nothing. Looks at no operation."""

    def __enter__(self) -> Any:
        no_grad: Any = torch.no_grad
        self._enter = no_grad.__enter__

        def enter(opened: Any) -> None:
            self.acted += 1
            opened.prev = torch.is_grad_enabled()

        no_grad.__enter__ = enter
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.no_grad.__enter__ = self._enter  # type: ignore[method-assign]


class NonReentrant(Intervention):
    """Reentrant checkpointing replaced by the other kind, which needs no input with a gradient. Looks at no operation."""

    lived = "gradient checkpointing runs with use_reentrant=False"

    def __enter__(self) -> Any:
        import torch.utils.checkpoint as checkpointing

        checkpointing.CheckpointFunction.apply = self._through  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: Any) -> None:
        import torch.utils.checkpoint as checkpointing

        del checkpointing.CheckpointFunction.apply  # the inherited one shows again

    def _through(self, function: Any, preserve: Any, *args: Any) -> Any:
        import torch.utils.checkpoint as checkpointing

        self.acted += 1
        return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


class Bf16Autocast(Intervention):
    """Autocast to fp16 becomes autocast to bf16, which has the range of fp32. Looks at no operation."""

    lived = "autocast runs in bf16 instead of fp16"

    def __enter__(self) -> Any:
        autocast: Any = torch.autocast
        self._enter, self._stack = autocast.__enter__, ExitStack()
        enter = self._enter

        def wider(opened: Any) -> Any:
            if opened.fast_dtype != torch.float16:
                return enter(opened)
            self.acted += 1
            opened.fast_dtype = torch.bfloat16
            try:
                return enter(opened)
            finally:
                opened.fast_dtype = torch.float16  # the object may be used again, without this

        autocast.__enter__ = wider
        for kind in ("cpu", "cuda"):  # opened before, around the whole step
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
                self.acted += 1
                # Weights that were cast already are kept until the outermost autocast ends.
                self._stack.callback(torch.clear_autocast_cache)
                self._stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
                torch.clear_autocast_cache()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()
        torch.autocast.__enter__ = self._enter  # type: ignore[method-assign]


class PositiveScale(Intervention):
    """Distributions get a scale of at least 1e-3."""

    names = frozenset({"normal"})
    lived = "the scale of a distribution is at least 1e-3"

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(self._clamped(a) if i == 1 else a for i, a in enumerate(args))
        return func(*args, **{k: self._clamped(v) if k == "std" else v for k, v in kwargs.items()})

    def _clamped(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not bool((value.detach() < 1e-3).any()):
            return value
        self.acted += 1
        return value.clamp(min=1e-3)

    def __enter__(self) -> Any:
        from torch.distributions import Distribution

        self._init = original = Distribution.__init__

        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            for name in ("scale", "stddev_", "concentration", "rate", "df"):
                if name in made.__dict__:
                    setattr(made, name, self._clamped(made.__dict__[name]))
            original(made, *args, **kwargs)

        Distribution.__init__ = init  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        from torch.distributions import Distribution

        super().__exit__(*exc)
        Distribution.__init__ = self._init  # type: ignore[method-assign]


@contextmanager
def weights_as(values: dict[Tensor, Tensor]) -> Iterator[None]:
    """For a while, these parameters or buffers hold other numbers."""
    saved = {p: p.detach().clone() for p in values}
    try:
        with torch.no_grad():
            for p, value in values.items():
                p.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for p, value in saved.items():
                p.copy_(value)
