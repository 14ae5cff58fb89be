"""Faults of the machine, and healthy runs that only look ill.

A "benign" case is healthy with `fixed` and without: nothing may be reported. Where `fixed` matters, it picks a second form.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Training, case

Pair = tuple[Tensor, Tensor]


def blobs(steps: int, size: int = 16, width: int = 8, classes: int = 4, spread: float = 1.0) -> list[Pair]:
    """Points around one centre for each class."""
    centre = 1.5 * torch.randn(classes, width)
    label = torch.randint(0, classes, (steps, size))
    return list(zip(centre[label] + spread * torch.randn(steps, size, width), label, strict=True))


def classify(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)


# transient-fault


class OneFault:
    """Strikes the first time that one batch is seen, and never again: a replay of the same batch is clean."""

    def __init__(self, batch: Tensor, broken: bool) -> None:
        self.batch, self.left = batch, 1 if broken else 0
        self.armed = False

    def watch(self, batch: Tensor) -> None:
        self.armed = self.left > 0 and torch.equal(batch, self.batch)

    def strikes(self) -> bool:
        if not self.armed:
            return False
        self.armed, self.left = False, self.left - 1
        return True


@case("transient-fault", step=4, sources=("deepspeedai/DeepSpeed#8061",))
def attention_output_read_too_early(fixed: bool) -> Training:
    """A buffer is read before a copy has ended: the attention output of an ELECTRA holds Inf, once; a replay is clean."""
    from transformers import ElectraConfig, ElectraForTokenClassification

    torch.manual_seed(0)
    config = ElectraConfig(
        vocab_size=20,
        embedding_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    model = ElectraForTokenClassification(config)
    batches = [torch.randint(0, 20, (8, 7)) for _ in range(20)]
    fault = OneFault(batches[4], broken=not fixed)

    def corrupt(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if fault.strikes():
            out = out.clone()
            out[:, 2] = math.inf
        return out

    model.electra.encoder.layer[0].attention.output.register_forward_hook(corrupt)

    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        fault.watch(ids)
        return model(input_ids=ids, labels=(ids > 9).long()).loss

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("transient-fault", step=6, sources=("pytorch/torchtitan#951",))
def gradient_bucket_corrupted_once(fixed: bool) -> Training:
    """The gradient of one GRU weight arrives with a NaN at one step, as from a damaged message; forward and loss are fine."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"gru": nn.GRU(3, 16, batch_first=True), "head": nn.Linear(16, 1)})
    batches = [torch.randn(32, 6, 3) for _ in range(20)]
    fault = OneFault(batches[6], broken=not fixed)

    def corrupt(gradient: Tensor) -> Tensor:
        if not fault.strikes():
            return gradient
        gradient = gradient.clone()
        gradient[5, 1] = math.nan
        return gradient

    model["gru"].weight_hh_l0.register_hook(corrupt)

    def loss_fn(model: nn.ModuleDict, x: Tensor) -> Tensor:
        fault.watch(x)
        return F.mse_loss(model["head"](model["gru"](x)[0][:, -1]).squeeze(-1), x[:, -2:, 0].sum(-1))

    return Training(model=model, optimizer=adamw(model, 2e-2), loss_fn=loss_fn, batches=batches)


# benign


@case("benign", sources=("microsoft/unilm#598",))
def scaler_finds_its_scale(fixed: bool) -> Training:
    """A GradScaler that starts far too high skips a few steps; then a small denoiser learns as it should."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.SiLU(), nn.Conv1d(12, 1, 5, padding=2))
    phase = 6.3 * torch.rand(40, 8, 1, 1)
    clean = torch.sin(torch.linspace(0, 6, 32) + phase)

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            noise = model(batch[0])
        return F.mse_loss(noise.float(), batch[1])

    noise = torch.randn_like(clean)
    return Training(
        model=model,
        optimizer=adamw(model, 5e-3),
        loss_fn=loss_fn,
        batches=list(zip(clean + 0.5 * noise, noise, strict=True)),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** (22 if fixed else 26)),
    )


@case("benign", sources=("huggingface/open-r1#239",))
def grpo_loss_of_zero(fixed: bool) -> Training:
    """On policy, GRPO's ratio is 1 and the advantages of a group sum to 0: the loss is 0 at every step, its gradient is not."""
    torch.manual_seed(3)
    policy = nn.Sequential(nn.Embedding(12, 16), nn.Tanh(), nn.Linear(16, 12))
    batches = []
    for _ in range(30):
        prompt, answer = torch.randint(0, 12, (4, 1)).expand(4, 6), torch.stack([torch.randperm(12)[:6] for _ in range(4)])
        reward = -((answer - prompt).abs()).float()
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        batches.append((prompt, answer, advantage))

    def loss_fn(policy: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        prompt, answer, advantage = batch
        log_prob = policy(prompt).log_softmax(-1).gather(-1, answer[..., None]).squeeze(-1)
        return -((log_prob - log_prob.detach()).exp() * advantage).mean()

    return Training(model=policy, optimizer=adamw(policy), loss_fn=loss_fn, batches=batches)


@case("benign")
def warm_up_from_zero(fixed: bool) -> Training:
    """A linear warm-up has a rate of exactly 0 at the first step, and only there."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / (5 if fixed else 15)))
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=blobs(40), scheduler=schedule)


class LowRank(nn.Module):
    """A frozen projection and a trainable correction B A, with B = 0 at the start."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@case("benign")
def adapters_that_start_at_zero(fixed: bool) -> Training:
    """LoRA on a frozen Qwen2: with B = 0, the gradient of every A is exactly 0 at the first step."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=12, initializer_range=0.2, max_position_embeddings=16, **sizes))
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.v_proj, layer.mlp.down_proj = LowRank(layer.self_attn.v_proj), LowRank(layer.mlp.down_proj)
        if fixed:
            layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    batches = [(torch.arange(8) * 5 + torch.randint(0, 12, (8, 1))) % 12 for _ in range(24)]

    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("benign")
def a_head_that_is_not_used(fixed: bool) -> Training:
    """A model has a second, trainable head for another task: it never gets a gradient in this run, and need not."""
    torch.manual_seed(6)
    trunk = nn.Sequential(nn.Linear(8, 24), nn.GELU())
    model = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(24, 4), "other": nn.Linear(24, 10 if fixed else 2)})

    def loss_fn(model: nn.ModuleDict, batch: Pair) -> Tensor:
        return F.cross_entropy(model["head"](model["trunk"](batch[0])), batch[1])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=blobs(30))


@case("benign")
def some_relus_are_off(fixed: bool) -> Training:
    """A wide ReLU layer in which a quarter or a half of the units never fire; the others learn."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        model[2].bias[: 16 if fixed else 32] = -20.0
    return Training(model=model, optimizer=adamw(model, 5e-3), loss_fn=classify, batches=blobs(30))


@case("benign")
def hinge_satisfied_on_easy_batches(fixed: bool) -> Training:
    """A triplet loss: every third batch holds easy triplets that already keep the margin, so loss and gradient are exactly 0."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    centre = torch.randn(6, 8)
    batches = []
    for step in range(36):
        label = torch.randint(0, 6, (24,))
        other = (label + torch.randint(1, 6, (24,))) % 6
        anchor = centre[label] + 0.9 * torch.randn(24, 8)
        easy = step % 3 == (1 if fixed else 2)
        near = anchor + 1e-3 if easy else centre[label] + 0.9 * torch.randn(24, 8)
        batches.append((anchor, near, -anchor if easy else centre[other] + 0.9 * torch.randn(24, 8)))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.triplet_margin_loss(*(model(x) for x in batch), margin=0.3)

    return Training(model=model, optimizer=adamw(model, 3e-3), loss_fn=loss_fn, batches=batches)


class Experts(nn.Module):
    """Each sample goes to the one expert its router likes best; an expert without samples is not called."""

    def __init__(self, width: int, experts: int, classes: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, classes)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = x.new_zeros(x.shape[0], self.experts[0][2].out_features)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_copy(0, rows, weight[rows, None] * expert(x[rows]))
        return out


@case("benign")
def an_expert_without_tokens(fixed: bool) -> Training:
    """A mixture of experts on small batches: in many steps one expert or another gets no sample, and so no gradient."""
    torch.manual_seed(9)
    model = Experts(8, 8 if fixed else 5, 4)
    return Training(model=model, optimizer=adamw(model), loss_fn=classify, batches=blobs(40, size=12))


class MaskedAttention(nn.Module):
    """One layer of scaled_dot_product_attention over the tokens of a sentence, padding masked."""

    def __init__(self, vocabulary: int, width: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocabulary, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(ids)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=real[:, None] & real[:, :, None])
        return self.head(mixed.sum(1) / real.sum(1, keepdim=True).clamp(min=1))


@case("benign", sources=("pytorch/pytorch#103749",))
def sdpa_over_padding_rows(fixed: bool) -> Training:
    """Every padding position is a row that may attend to nothing, and one sentence is empty: SDPA returns 0 there, not NaN."""
    torch.manual_seed(10)
    model = MaskedAttention(16)
    batches = []
    for step in range(30):
        label, length = torch.randint(0, 2, (8,)), torch.randint(2, 7, (8, 1))
        if step % 4 == 3 and not fixed:
            length[5] = 0
        ids = torch.randint(0, 8, (8, 6)) + 8 * label[:, None]
        batches.append((ids, torch.arange(6) < length, label))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("benign", sources=("pytorch/pytorch#2421",))
def norm_of_a_zero_difference(fixed: bool) -> Training:
    """A pair holds the same input twice; torch's own norm and std have a gradient of 0 there, unlike a sqrt written by hand."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))
    pairs = list(zip(blobs(30), blobs(30), strict=True))
    for (left, left_label), (right, right_label) in pairs:
        right[3], right_label[3] = left[3], left_label[3]

    def loss_fn(model: nn.Module, batch: tuple[Pair, Pair]) -> Tensor:
        (left, left_label), (right, right_label) = batch
        difference = model(left) - model(right)
        distance = difference.std(dim=-1) if fixed else difference.norm(dim=-1)
        return torch.where(left_label == right_label, distance, (1 - distance).relu()).mean()

    return Training(model=model, optimizer=adamw(model, 5e-3), loss_fn=loss_fn, batches=pairs)
