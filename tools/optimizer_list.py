"""The optimizers that `tools.optimizers` surveys, and how each is built over a small Llama.

A package is imported only when one of its optimizers is built, so a missing one costs one row.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

LR = 1e-3
LOW_RANK = {"rank": 8, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
"""A new projection every 4 steps, so that a run refreshes it more than once."""

ABSENT = {
    "adamw_torch_xla": "needs torch_xla and a TPU",
    "adamw_torch_npu_fused": "needs torch_npu and an Ascend NPU",
    "adamw_anyprecision": "torchdistx is not on PyPI",
    "adalomo": "lomo-optim puts its state on CUDA",
    "torchao CPUOffloadOptimizer": "needs CUDA or XPU",
    "galore_adamw_8bit": "its 8-bit step runs on CUDA only",
    "galore_adamw_8bit_layerwise": "its 8-bit step runs on CUDA only",
    "galore_adafactor_layerwise": "transformers leaves relative_step on, which excludes a learning rate",
}
"""Names that cannot be built, or cannot take one step without a guard, on a CPU. The first five were
written before the first run, like the expectation that every other cell is a yes."""

Kind = Literal["plain", "closure", "gradient, then closure", "in backward", "fused_backward"]


@dataclass(frozen=True)
class Entry:
    """An optimizer of the survey."""

    name: str
    section: str
    build: Callable[[nn.Module], Any]
    """Return the optimizer of a model, or a list of them."""

    kind: Kind = "plain"
    """How a loop steps it: `step()`, `step(closure)`, or inside the backward pass."""

    compiled: bool = False
    """Let the optimizer use torch.compile. That takes a minute on a CPU, so most run eagerly."""


class SmallLlama(LlamaForCausalLM):
    """A Llama whose batches carry a factor for the loss. A batch is bad when the factor is NaN."""

    def forward(self, input_ids: Tensor, labels: Tensor, scale: Tensor, **rest: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **rest)
        output.loss = output.loss * scale.mean()
        return output


def small_llama(hidden: int = 64, intermediate: int = 128, layers: int = 1, seed: int = 0) -> SmallLlama:
    """Return the model. Its matrices have 4096 numbers or more: 8-bit optimizers quantize their moments."""
    torch.manual_seed(seed)
    return SmallLlama(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=hidden,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ).train()


def training_arguments(name: str, folder: str, **more: Any) -> TrainingArguments:
    low_rank = name.startswith(("galore", "apollo"))
    return TrainingArguments(
        output_dir=folder,
        optim=name,
        optim_target_modules=["q_proj", "down_proj"] if low_rank else None,
        optim_args=",".join(f"{key}={value}" for key, value in LOW_RANK.items()) if low_rank else None,
        learning_rate=LR,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def of_trainer(name: str) -> Callable[[nn.Module], Any]:
    """Build an optimizer as transformers' Trainer does for `TrainingArguments(optim=name)`."""

    def build(model: nn.Module) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return Trainer(model=model, args=training_arguments(name, folder)).create_optimizer()

    return build


def of(module: str, name: str, **settings: Any) -> Callable[[nn.Module], Any]:
    """Build a class over all parameters. A learning rate of 0 means that the class is not given one."""
    if settings.setdefault("lr", LR) == 0:
        del settings["lr"]
    return lambda model: getattr(importlib.import_module(module), name)(model.parameters(), **settings)


def of_model(module: str, name: str) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(importlib.import_module(module), name)(model, lr=LR)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": matrices(model), "use_muon": True}, {"params": vectors(model), "use_muon": False}]


def muon(model: nn.Module) -> Optimizer:
    """Muon alone: only the matrices are trained."""
    for p in vectors(model):
        p.requires_grad_(False)
    return torch.optim.Muon(matrices(model), lr=LR)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=LR), torch.optim.AdamW(vectors(model), lr=LR)]


def muon_of_pytorch_optimizer(model: nn.Module) -> Optimizer:
    return importlib.import_module("pytorch_optimizer").Muon(muon_groups(model), lr=LR)


def sparse_adam(model: nn.Module) -> Optimizer:
    """Only the embedding is trained, with sparse gradients."""
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.sparse = True
    return torch.optim.SparseAdam([embedding.weight.requires_grad_()], lr=LR)


def wrapped(module: str, name: str, base: type[Optimizer], **settings: Any) -> Callable[[nn.Module], Any]:
    """Build a wrapper around an optimizer of torch."""
    return lambda model: getattr(importlib.import_module(module), name)(base(model.parameters(), lr=LR), **settings)


def sam(model: nn.Module) -> Optimizer:
    package = importlib.import_module("pytorch_optimizer")
    return package.SAM(model.parameters(), base_optimizer=torch.optim.AdamW, lr=LR)


def one_per_parameter(model: nn.Module) -> list[Optimizer]:
    """PyTorch's tutorial on stepping inside backward: an optimizer and a hook for each parameter."""
    owners = {p: torch.optim.AdamW([p], lr=LR, foreach=False) for p in model.parameters()}

    def step(p: Tensor) -> None:
        owners[p].step()
        owners[p].zero_grad()

    for p in owners:
        p.register_post_accumulate_grad_hook(step)
    return list(owners.values())


class MuonWithAdam(Optimizer):
    """Muon for matrices and Adam for the rest in one class, as the reference code of Muon has it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.setdefault("lr", LR)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["use_muon"]:
                    self._muon(p, group["lr"], state)
                else:
                    self._adam(p, group["lr"], state)

    def _muon(self, p: Tensor, lr: float, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.05)
        update = p.grad.lerp(momentum, 0.95)
        x = update / (update.norm() + 1e-7)
        for _ in range(5):  # Newton-Schulz, towards the nearest orthogonal matrix
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        p.add_(x, alpha=-lr * max(1, p.size(0) / p.size(1)) ** 0.5)

    def _adam(self, p: Tensor, lr: float, state: dict[str, Any]) -> None:
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), step=0)
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 0.1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 0.05)
        mean, square = state["exp_avg"] / (1 - 0.9 ** state["step"]), state["exp_avg_sq"] / (1 - 0.95 ** state["step"])
        p.add_(mean / (square.sqrt() + 1e-10), alpha=-lr)


class OptimizersContainer(Optimizer):
    """torchtitan's container, without its configuration and its pipeline stages.

    It is an Optimizer over all parameters whose own `state` stays empty. The states are those of
    `optimizers`, and `state_dict` returns them flat, by the names of parameters.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[tuple[str, type[Optimizer], dict[str, Any]]]) -> None:
        groups: dict[type[Optimizer], list[dict[str, Any]]] = defaultdict(list)
        claimed: dict[str, nn.Parameter] = {}
        for pattern, kind, settings in patterns:
            found = {n: p for n, p in model.named_parameters() if n not in claimed and re.search(pattern, n)}
            claimed.update(found)
            groups[kind].append({"params": list(found.values()), "param_names": list(found), **settings})
        self.model_parts = [model]
        self.optimizers = [kind(of_kind) for kind, of_kind in groups.items()]
        super().__init__(list(claimed.values()), {})

    def step(self, closure: Any = None) -> None:
        assert closure is None, "OptimizersContainer does not support closures"
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for optimizer in self.optimizers:
            self._init_state(optimizer)
            for group in optimizer.param_groups:
                settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    flat.update({f"state.{name}.{key}": value for key, value in optimizer.state[p].items()})
                    flat.update({f"param_groups.{name}.{key}": value for key, value in settings.items()})
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            self._init_state(optimizer)
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            loaded = optimizer.state_dict()
            for i, of_parameter in loaded["state"].items():
                loaded["state"][i] = {key: state_dict[f"state.{names[i]}.{key}"] for key in of_parameter}
            for group in loaded["param_groups"]:
                for key in group.keys() - {"params", "param_names"}:
                    group[key] = state_dict[f"param_groups.{group['param_names'][0]}.{key}"]
            optimizer.load_state_dict(loaded)

    @staticmethod
    def _init_state(optimizer: Optimizer) -> None:
        """Make the state with a step of zero gradients and a learning rate of zero."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.state or any(p.grad is not None for p in parameters):
            return
        for p in parameters:
            p.grad = torch.zeros_like(p)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def container(model: nn.Module) -> Optimizer:
    """Adam for norms and embeddings, AdamW for the rest. The first pattern that matches wins."""
    settings: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "fused": True, "foreach": False}
    return OptimizersContainer(
        model,
        [
            (r"norm|embed", torch.optim.Adam, settings),
            (r".*", torch.optim.AdamW, {**settings, "weight_decay": 0.1}),
        ],
    )


def _kind(name: str) -> Kind:
    if name in ("lomo", "adalomo"):
        return "fused_backward"
    return "in backward" if name.endswith("layerwise") else "plain"


def _named(section: str, prefix: str, module: str, **classes: dict[str, Any]) -> list[Entry]:
    return [Entry(f"{prefix} {name}", section, of(module, name, **settings)) for name, settings in classes.items()]


TRANSFORMERS, TORCH, OTHERS = "`TrainingArguments(optim=...)`", "torch", "Other packages, and optimizers written by hand"

ENTRIES = [
    *(Entry(str(name.value), TRANSFORMERS, of_trainer(name.value), _kind(name.value)) for name in OptimizerNames),
    *(
        Entry(f"torch {name}", TORCH, of("torch.optim", name))
        for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
    ),
    Entry("torch AdamW, fused", TORCH, of("torch.optim", "AdamW", fused=True)),
    Entry("torch AdamW, foreach, amsgrad", TORCH, of("torch.optim", "AdamW", foreach=True, amsgrad=True)),
    Entry("torch SGD, momentum", TORCH, of("torch.optim", "SGD", momentum=0.9)),
    Entry("torch SparseAdam", TORCH, sparse_adam),
    Entry("torch Muon", TORCH, muon),
    Entry("torch LBFGS", TORCH, of("torch.optim", "LBFGS", lr=0.1, max_iter=4), "closure"),
    *(
        Entry(f"torchao {name}", "torchao", of("torchao.optim", name))
        for name in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW", "CPUOffloadOptimizer")
    ),
    Entry("torchao AdamW8bit, compiled", "torchao", of("torchao.optim", "AdamW8bit"), compiled=True),
    *_named(
        "bitsandbytes",
        "bitsandbytes",
        "bitsandbytes.optim",
        **{name: {} for name in "Adam Adam8bit AdamW AdamW8bit PagedAdamW8bit Lion Lion8bit LAMB LAMB8bit".split()},
        **{name: {"momentum": 0.9} for name in ("SGD", "SGD8bit", "LARS", "LARS8bit")},
        **{name: {} for name in "RMSprop RMSprop8bit Adagrad Adagrad8bit AdEMAMix AdEMAMix8bit".split()},
    ),
    Entry("schedulefree AdamWScheduleFreeClosure", OTHERS, of("schedulefree", "AdamWScheduleFreeClosure"), "closure"),
    Entry(
        "schedulefree ScheduleFreeWrapper(SGD)",
        OTHERS,
        wrapped("schedulefree", "ScheduleFreeWrapper", torch.optim.SGD, momentum=0.9),
    ),
    Entry("lion-pytorch Lion", OTHERS, of("lion_pytorch", "Lion")),
    Entry("prodigyopt Prodigy", OTHERS, of("prodigyopt", "Prodigy", lr=1.0)),
    *_named(OTHERS, "optimi", "optimi", StableAdamW={}, Ranger={}, Adan={}),
    *_named(
        OTHERS,
        "pytorch_optimizer",
        "pytorch_optimizer",
        **{name: {} for name in "SOAP Shampoo ScalableShampoo AdaFactor Prodigy StableAdamW GaLore APOLLO".split()},
    ),
    Entry("pytorch_optimizer Muon", OTHERS, muon_of_pytorch_optimizer),
    Entry("pytorch_optimizer Lookahead(AdamW)", OTHERS, wrapped("pytorch_optimizer", "Lookahead", torch.optim.AdamW, k=3)),
    Entry("pytorch_optimizer SAM(AdamW)", OTHERS, sam, "gradient, then closure"),
    Entry("pytorch_optimizer LOMO", OTHERS, of_model("pytorch_optimizer", "LOMO"), "fused_backward"),
    Entry("pytorch_optimizer AdaLOMO", OTHERS, of_model("pytorch_optimizer", "AdaLOMO"), "fused_backward"),
    Entry("[Muon, AdamW]", OTHERS, muon_and_adamw),
    Entry("Muon and Adam in one class", OTHERS, lambda model: MuonWithAdam(muon_groups(model))),
    Entry("torchtitan's OptimizersContainer", OTHERS, container),
    Entry("AdamW per parameter, in backward", OTHERS, one_per_parameter, "in backward"),
]
