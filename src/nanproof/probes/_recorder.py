"""Note what a forward pass does: embedding lookups, the outputs of the model, what the loss compares.

The recorder stands between the user's code and torch, so it works with any batch, model and loss.
It can also change lookups: the model then sees other tokens while masks, labels and lengths stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.explain.locate._calls import tensors_of

_CLASSES = ("cross_entropy", "nll_loss", "gather")
_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
MIXERS = frozenset(("multi_head_attention_forward", "scaled_dot_product_attention", "softmax", *RECURRENT))
_DRAWS = frozenset(
    "rand randn rand_like randn_like randint randperm bernoulli bernoulli_ normal normal_ uniform_ multinomial".split()
)


@dataclass(frozen=True, slots=True)
class Lookup:
    """One call of `embedding`."""

    ids: Tensor
    output: Tensor
    padding: int | None = None
    """The id of padding that the table has (`padding_idx`)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What a loss compares: predictions with the classes last, and targets."""

    predictions: Tensor
    """In the graph of the loss."""
    values: Tensor
    """The same numbers, as they were at that moment."""
    targets: Tensor | None
    """None for an output of the model of which no loss was seen."""
    ignored: int = -100
    split: bool = False
    """Whether the loss was given (samples, classes, positions)."""

    @property
    def classes(self) -> bool:
        """Whether the targets are classes or tokens."""
        return self.targets is not None and not self.targets.is_floating_point()


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module, or of an operation in it."""

    path: str
    caller: str | None
    """The module that called it; None for the loss function."""
    inputs: list[Tensor]
    outputs: list[Tensor]


Swap = Callable[[Tensor], Tensor | None]
"""Other ids for a lookup; None leaves it as it is."""


class Recorder(TorchFunctionMode):
    """One forward pass, noted while this context is open."""

    def __init__(
        self,
        model: nn.Module,
        *,
        swap: Swap | None = None,
        no_dropout: bool = False,
        on_module: Callable[[ModuleCall], None] | None = None,
        on_call: Callable[[str, ModuleCall], None] | None = None,
    ) -> None:
        super().__init__()
        self.lookups: list[Lookup] = []
        self.compared: list[Compared] = []
        self.outputs: list[Compared] = []
        """Of the modules that the loss function calls itself."""
        self.dropouts: list[str] = []
        """Modules that called an active dropout."""
        self.marked: list[tuple[Tensor, float]] = []
        """Ids that the model compares with a number, as it does to find its padding."""
        self.normalised = False
        """Whether a layer normalised over positions or samples: their numbers reach each other on purpose."""
        self.convolved = False
        """Whether there are convolutions."""
        self.mixers: set[str] = set()
        """Operations that mix positions: attention and recurrent layers."""
        self.draws = False
        """Whether random numbers were drawn, other than by dropout."""
        self.loss = float("nan")
        self._swap, self._no_dropout, self._on_module, self._on_call = swap, no_dropout, on_module, on_call
        self._paths = {id(m): clean_name(name) or type(m).__name__ for name, m in unwrap(model).named_modules()}
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        """The module that is running."""
        for module in reversed(self._inside):
            if id(module) in self._paths:
                return self._paths[id(module)]
        return "the loss function"

    def results(self) -> list[Compared]:
        """What is known of the model's results: what the loss compares, then the outputs."""
        return [*self.compared, *self.outputs]

    def let_go(self) -> None:
        """Free the graph."""
        self.lookups = [Lookup(x.ids, x.output.detach(), x.padding) for x in self.lookups]
        for name in ("compared", "outputs"):
            setattr(self, name, [Compared(x.values, x.values, x.targets, x.ignored, x.split) for x in getattr(self, name)])

    def __enter__(self) -> Recorder:
        self._handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._inside.append(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._inside and self._inside.pop() is not module:
            pass
        found = [t for t in tensors_of(output) if t.is_floating_point() and t.dim()]
        if self._on_module is not None and id(module) in self._paths:
            given = [t for t in tensors_of(inputs) if t.is_floating_point() and t.dim()]
            self._on_module(ModuleCall(self._paths[id(module)], self.path if self._inside else None, given, found))
        if not self._inside:
            self.outputs += [Compared(t, t.detach().clone(), None) for t in found]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "embedding":
            return self._embedding(func, args, kwargs)
        if name in _CLASSES or name in _NUMBERS:
            self._compare(name, args, kwargs)
        elif name in DROPOUTS or name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            args = self._dropout(name, args, kwargs)
        elif name in _DRAWS:
            self.draws = True
        elif name in ("group_norm", "instance_norm") or (name == "batch_norm" and _from_batch(args, kwargs)):
            self.normalised = True
        elif name in ("eq", "ne", "__eq__", "__ne__"):
            self._mark(*args[:2])
        if name in MIXERS:
            self.mixers.add(name)
        elif name in ("conv1d", "conv2d", "conv3d"):
            self.convolved = True
        result = func(*args, **kwargs)
        if self._on_call is not None and name != "__get__":
            found = [t for t in tensors_of(result) if t.is_floating_point() and t.dim()]
            given = [t for t in tensors_of(args) if t.is_floating_point() and t.dim()]
            if found:
                self._on_call(name, ModuleCall(self.path, None, given, found))
        return result

    def _embedding(self, func: Any, args: Any, kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.pop("input")
        given = ids
        if self._swap is not None and (other := self._swap(ids)) is not None:
            given = other
        output = func(given, *args[1:], **kwargs)
        if torch.is_grad_enabled() and output.is_floating_point() and not output.requires_grad:
            output.requires_grad_()  # a frozen table: the results depend on it all the same
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        self.lookups.append(Lookup(given.detach(), output, padding))
        return output

    def _compare(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        predictions = args[0] if args else kwargs.get("input")
        if name == "gather":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            targets = args[2] if len(args) > 2 else kwargs.get("index")
            if not isinstance(targets, Tensor) or targets.shape[-1:] != (1,) or dim not in (-1, targets.dim() - 1):
                return
            if len(self._inside) > 1:
                return  # a layer's own affair, such as a router's
            targets = targets.squeeze(-1)
        else:
            targets = args[1] if len(args) > 1 else kwargs.get("target")
        if not (isinstance(predictions, Tensor) and isinstance(targets, Tensor) and predictions.is_floating_point()):
            return
        split = name in ("cross_entropy", "nll_loss") and predictions.dim() == targets.dim() + 1 > 2
        if split:
            predictions = predictions.movedim(1, -1)
        ignored = kwargs.get("ignore_index", args[4] if name == "cross_entropy" and len(args) > 4 else -100)
        self.compared.append(Compared(predictions, predictions.detach().clone(), targets.detach(), int(ignored), split))

    def _mark(self, ids: Any, number: Any = None) -> None:
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() and isinstance(number, (int, float)):
            self.marked.append((ids.detach(), number))

    def _dropout(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note an active dropout, or turn it off."""
        place = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}.get(name, 1)
        key = "p" if name in DROPOUTS else "dropout_p"
        share = args[place] if len(args) > place else kwargs.get(key, 0.5 if name in DROPOUTS else 0.0)
        training = True
        if name in DROPOUTS:
            training = (
                args[2] if len(args) > 2 else kwargs.get("training", name not in ("alpha_dropout", "feature_alpha_dropout"))
            )
        elif name == "multi_head_attention_forward":
            training = kwargs.get("training", True)
        if not training or not share:
            return args
        if self._no_dropout:
            if len(args) > place:
                return (*args[:place], 0.0, *args[place + 1 :])
            kwargs[key] = 0.0
        else:
            self.dropouts.append(self.path)
        return args


def _from_batch(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether batch norm takes the statistics of this batch."""
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False)) or (args[1] if len(args) > 1 else None) is None
