"""Weights and optimizer: what the update does, or fails to do, with gradients that look right."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .registry import Training, case

Pair = tuple[Tensor, Tensor]


def pictures(steps: int, size: int = 16, classes: int = 4) -> list[Pair]:
    """8x8 RGB images: one fixed pattern for each class, and noise. The same for every call after the same seed."""
    pattern = torch.randn(classes, 3, 8, 8)
    label = torch.randint(0, classes, (steps, size))
    return list(zip(pattern[label] + torch.randn(steps, size, 3, 8, 8), label, strict=True))


def small_cnn(norm: type[nn.Module] = nn.Identity, classes: int = 4, width: int = 8) -> nn.Sequential:
    """A class for each picture."""
    wide, strided = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, stride=2)
    return nn.Sequential(wide, norm(width), nn.ReLU(), strided, nn.ReLU(), nn.Flatten(), nn.Linear(width * 9, classes))


def brightness_cnn(activation: type[nn.Module]) -> nn.Sequential:
    """One number for each picture."""
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    return nn.Sequential(first, activation(), second, activation(), nn.Flatten(), nn.Linear(8 * 16, 1))


def classify(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def classify_in_half(model: nn.Module, batch: Pair) -> Tensor:
    """The forward in fp16 autocast, as people do together with a GradScaler."""
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(batch[0])
    return F.cross_entropy(logits.float(), batch[1])


def regress(model: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def counting(steps: int, size: int = 8, length: int = 10, vocabulary: int = 16) -> list[Tensor]:
    """Token sequences that count up from a random start."""
    return [(torch.arange(length) + torch.randint(0, vocabulary, (size, 1))) % vocabulary for _ in range(steps)]


class Tagger(nn.Module):
    """Embedding, LSTM, linear: predicts the next token."""

    def __init__(self, vocabulary: int = 16, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def causal_lm(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a transformers language model, labels unshifted."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def tiny_llama(vocabulary: int = 16, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, **sizes, **options))


def tiny_vit_config(**options: Any) -> Any:
    from transformers import ViTConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTConfig(image_size=8, patch_size=4, **sizes, **options)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank correction, B = 0 at the start."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype)


def adapted_mlp(adapters_in_half: bool) -> nn.Sequential:
    """A frozen fp16 network over flat pictures; only the adapters learn."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 4)).half()
    model[1], model[3] = Adapted(model[1]), Adapted(model[3])
    for layer in (model[1], model[3]):
        for adapter in (layer.a, layer.b):
            adapter.half() if adapters_in_half else adapter.float()
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# nonfinite-weights-at-start


class ScaledBlock(nn.Module):
    """A residual convolution with a learned scale for each channel, as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * F.gelu(self.conv(x))


@case("nonfinite-weights-at-start", step=0, sources=("karpathy/nanochat#686",))
def layer_scale_never_initialised(fixed: bool) -> Training:
    """A layer scale made by torch.empty was never filled; its memory held an Inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ScaledBlock(8), ScaledBlock(8), nn.Flatten(), nn.Linear(8 * 36, 4))
    if not fixed:
        with torch.no_grad():
            model[2].scale[5] = math.inf
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=classify, batches=pictures(12))


@case("nonfinite-weights-at-start", step=0, sources=("Rikorose/DeepFilterNet#30",))
def frozen_encoder_with_nan(fixed: bool) -> Training:
    """A frozen ViT was saved with a NaN in one weight; only the new head is trained, and no optimizer sees the NaN."""
    from transformers import ViTModel

    torch.manual_seed(1)
    model = nn.ModuleDict({"encoder": ViTModel(tiny_vit_config(), add_pooling_layer=False), "head": nn.Linear(16 * 5, 4)})
    model["encoder"].requires_grad_(False)
    if not fixed:
        model.get_parameter("encoder.layers.1.mlp.fc1.weight")[3, 4] = math.nan

    def loss_fn(model: nn.ModuleDict, batch: Pair) -> Tensor:
        states = model["encoder"](pixel_values=batch[0]).last_hidden_state
        return F.cross_entropy(model["head"](states.flatten(1)), batch[1])

    return Training(model=model, optimizer=torch.optim.AdamW(trainable(model), 1e-2), loss_fn=loss_fn, batches=pictures(12))


# nonfinite-weights-mid-run


class WithCallback(torch.optim.lr_scheduler.LambdaLR):
    """A constant rate, and something else that the loop does after every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, callback: Callable[[int], None]) -> None:
        self.callback = callback
        super().__init__(optimizer, lambda _: 1.0)

    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch > 0:
            self.callback(self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "callback"}


@case("nonfinite-weights-mid-run", step=6)
def rows_normalised_between_steps(fixed: bool) -> Training:
    """Every six steps a callback divides the rows of an embedding by their norm; the row of the padding is 0."""
    torch.manual_seed(40)
    table = nn.Embedding(12, 8, padding_idx=0)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(8 * 5, 1))
    worth = torch.randn(12)
    batches = [(ids, worth[ids].mean(-1)) for ids in torch.randint(0, 12, (12, 16, 5))]

    def normalise(taken: int) -> None:
        if taken % 6 == 0:
            norms = table.weight.data.norm(dim=1, keepdim=True)
            table.weight.data /= norms.clamp(min=1e-12) if fixed else norms

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return Training(
        model=model, optimizer=optimizer, loss_fn=regress, batches=batches, scheduler=WithCallback(optimizer, normalise)
    )


@case("nonfinite-weights-mid-run", step=5)
def averaged_weights_swapped_in(fixed: bool) -> Training:
    """A callback puts an average of weights in their place; it has counted none of them, and the average is 0 / 0."""
    torch.manual_seed(41)
    model, batches = small_cnn(), pictures(12)
    head = model[6].weight
    total, count = torch.zeros_like(head), torch.zeros(())

    def swap(taken: int) -> None:
        if fixed:
            total.add_(head.detach())
            count.add_(1)
        if taken == 5:
            head.data.copy_(total / count)

    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=batches, scheduler=WithCallback(optimizer, swap))


# uninitialized-rows


@case("uninitialized-rows", step=3, sample=2, sources=("huggingface/transformers#45050",))
def bert_with_new_special_tokens(fixed: bool) -> Training:
    """Two tokens were added to BERT's vocabulary and their rows hold Inf; the fourth batch is the first to use one."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(2)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=34, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2)
    )
    if not fixed:
        with torch.no_grad():
            model.get_input_embeddings().weight[32:] = math.inf
    batches = []
    for _ in range(14):
        label = torch.randint(0, 2, (8,))
        batches.append({"input_ids": torch.randint(0, 16, (8, 6)) + 16 * label[:, None], "labels": label})
    batches[3]["input_ids"][2, 4] = 33

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=loss_fn, batches=batches)


@case("uninitialized-rows", step=5, sample=6, sources=("huggingface/transformers#45050",))
def recommender_with_new_products(fixed: bool) -> Training:
    """The product table grew by four rows of NaN; the first customer who bought one of them breaks the batch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    worth = torch.randn(16)
    if not fixed:
        with torch.no_grad():
            model[0].weight[12:] = math.nan
    batches = []
    for step in range(20):
        bought = torch.randint(0, 12, (24, 5))
        if step == 5:
            bought[6, 1] = 13
        batches.append((bought, worth[bought].mean(-1)))
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 2e-2), loss_fn=regress, batches=batches)


# fp16-optimizer-underflow, optimizer-made-nonfinite, fp16-weights-with-grad-scaler


@case("fp16-optimizer-underflow", step=0, sources=("bitsandbytes-foundation/bitsandbytes#1756",))
def half_precision_lstm_under_adam(fixed: bool) -> Training:
    """A whole LSTM in fp16 under Adam: eps = 1e-8 is 0 and small squares underflow, so the first update is 0 / 0."""
    torch.manual_seed(4)
    model = Tagger() if fixed else Tagger().half()
    return Training(model=model, optimizer=torch.optim.Adam(model.parameters(), 1e-2), loss_fn=next_token, batches=counting(12))


@case("fp16-optimizer-underflow", step=0, sources=("bitsandbytes-foundation/bitsandbytes#1756",))
def half_precision_adapters_under_adamw(fixed: bool) -> Training:
    """LoRA adapters took the fp16 of their frozen base: the gradient of A is 0 at first, eps is 0 too, and 0 / 0 is NaN."""
    torch.manual_seed(5)
    model = adapted_mlp(adapters_in_half=not fixed)
    batches = [(x.half(), y) for x, y in pictures(14)]
    optimizer = torch.optim.AdamW(trainable(model), 1e-2, foreach=True)
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=batches)


@case("optimizer-made-nonfinite", step=0)
def adam_without_an_eps(fixed: bool) -> Training:
    """Adam with eps = 0 over bf16 weights: products that nobody bought have no gradient, and their update is 0 / 0."""
    torch.manual_seed(42)
    model = nn.Sequential(nn.EmbeddingBag(32, 8), nn.Linear(8, 1)).bfloat16()
    batches = [(bought, bought.float().mean(1).bfloat16() / 16) for bought in torch.randint(0, 24, (12, 16, 4))]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-6 if fixed else 0.0, foreach=True)

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(-1).float(), batch[1].float())

    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches)


@case("optimizer-made-nonfinite", step=4)
def schedule_that_divides_by_0(fixed: bool) -> Training:
    """The warm-up takes as many steps as the whole schedule, so what is left for the decay is 0 / 0: a learning rate of NaN."""
    torch.manual_seed(43)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).bfloat16()
    warmup, total = 4, 12 if fixed else 4

    def share(step: int) -> float:
        done, decay = torch.tensor([float(step - warmup), float(total - warmup)])
        return (step + 1) / warmup if step < warmup else float(1 - done / decay)

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    batches = [(x.bfloat16(), y) for x, y in pictures(10)]
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=batches, scheduler=scheduler)


@case("fp16-weights-with-grad-scaler", step=0, sources=("huggingface/peft#341",))
def distilbert_loaded_in_half_under_a_scaler(fixed: bool) -> Training:
    """DistilBERT loaded in fp16 and trained with autocast and a GradScaler: "Attempting to unscale FP16 gradients"."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(6)
    config = DistilBertConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=8)
    model = DistilBertForSequenceClassification(config)
    model = model if fixed else model.half()
    batches = []
    for _ in range(20):
        label = torch.randint(0, 2, (8,))
        batches.append((torch.randint(0, 16, (8, 6)) + 16 * label[:, None], label))

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(input_ids=batch[0], labels=batch[1]).loss

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, scaler=torch.amp.GradScaler("cpu"))


@case("fp16-weights-with-grad-scaler", step=0, sources=("huggingface/peft#341",))
def adapters_in_half_under_a_scaler(fixed: bool) -> Training:
    """The frozen base may be fp16 under a GradScaler, the adapters that learn may not; here they are."""
    torch.manual_seed(7)
    model = adapted_mlp(adapters_in_half=not fixed)
    return Training(
        model=model,
        optimizer=torch.optim.SGD(trainable(model), 0.5),
        loss_fn=classify_in_half,
        batches=[(x.half(), y) for x, y in pictures(24)],
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )


# loss-scale-collapse


@case("loss-scale-collapse", also=("sqrt-at-zero",), step=0, op="sqrt", sources=("deepspeedai/DeepSpeed#5426",))
def total_variation_of_a_flat_picture(fixed: bool) -> Training:
    """A restoration network starts with a flat output: total variation is sqrt(0), Inf at any scale, and no step is taken."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    nn.init.zeros_(model[2].weight)
    ramp = torch.linspace(-1, 1, 8)
    angle = 6.3 * torch.rand(40, 8, 1, 1, 1)
    clean = ramp[:, None] * angle.sin() + ramp * angle.cos()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(batch)
        down, right = out.float().diff(dim=-2)[..., :, :-1], out.float().diff(dim=-1)[..., :-1, :]
        variation = (down.square() + right.square() + (1e-4 if fixed else 0.0)).sqrt().mean()
        return F.mse_loss(out.float(), batch) + 0.01 * variation

    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=list(clean), scaler=scaler)


@case("loss-scale-collapse", also=("masked-branch-gradient",), step=0, op="log", sources=("deepspeedai/DeepSpeed#5426",))
def attention_entropy_with_padding(fixed: bool) -> Training:
    """An entropy bonus takes the log of attention that is 0 on padding, hidden by where: NaN for every batch and every scale."""
    torch.manual_seed(9)
    model = nn.ModuleDict({"embed": nn.Embedding(17, 16), "score": nn.Linear(16, 1), "head": nn.Linear(16, 2)})
    batches = []
    for _ in range(40):
        label, length = torch.randint(0, 2, (8,)), torch.randint(3, 7, (8, 1))
        ids = torch.randint(0, 8, (8, 6)) + 8 * label[:, None]
        batches.append((ids.where(torch.arange(6) < length, 16), label))
        batches[-1][0][0, 5] = 16

    def loss_fn(model: nn.ModuleDict, batch: Pair) -> Tensor:
        real = batch[0] < 16
        with torch.autocast("cpu", dtype=torch.float16):
            x = model["embed"](batch[0])
            score = model["score"](x).squeeze(-1).float().masked_fill(~real, -math.inf)
            weight = score.softmax(-1)
            logits = model["head"]((weight[..., None] * x).sum(1))
        inside = weight.where(real, 1.0) if fixed else weight
        entropy = -(torch.where(real, inside.log(), 0.0) * weight).sum(-1).mean()
        return F.cross_entropy(logits.float(), batch[1]) - 0.01 * entropy

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, scaler=torch.amp.GradScaler("cpu"))


# gradients-not-cleared


@case("gradients-not-cleared", step=5, sources=("PaddlePaddle/Paddle#67895",))
def short_last_batch_overflows_once(fixed: bool) -> Training:
    """A batch of one overflows fp16 at step 4; the scaler skips it, but no one clears the gradients: later steps are lost."""
    torch.manual_seed(10)
    model = small_cnn()
    batches = pictures(16, size=32)
    batches[4] = (batches[4][0][:1], batches[4][1][:1])
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 3e-3),
        loss_fn=classify_in_half,
        batches=batches,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**17),
        own_loop=not fixed,
    )


@case("gradients-not-cleared", step=1, sources=("PaddlePaddle/Paddle#67895",))
def calibration_overflow_never_cleared(fixed: bool) -> Training:
    """The scaler's usual first overflow stays in .grad, as the loop has no zero_grad: the scale falls and nothing is learned."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 32), nn.SiLU(), nn.Linear(32, 4))
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.2),
        loss_fn=classify_in_half,
        batches=pictures(24),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**20),
        own_loop=not fixed,
    )


# gradient-scale-mismatch


def shrink_gradients(model: nn.Module, divisor: float) -> None:
    """Divide every gradient as soon as it is complete, as a wrapper does that unscales on its own."""

    def shrink(p: Tensor) -> None:
        p.grad.div_(divisor)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(shrink)


@case("gradient-scale-mismatch", sources=("THUDM/slime#1842",))
def unscaled_by_a_hook_and_by_the_scaler(fixed: bool) -> Training:
    """A hook divides by the scale of 65536 and the GradScaler does it again: SGD moves the weights 65536 times too little."""
    torch.manual_seed(12)
    model = small_cnn(nn.BatchNorm2d)
    if not fixed:
        shrink_gradients(model, 65536.0)
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=classify_in_half,
        batches=pictures(40),
        scaler=torch.amp.GradScaler("cpu"),
    )


@case("gradient-scale-mismatch", sources=("THUDM/slime#1842",))
def static_scale_divided_out_twice(fixed: bool) -> Training:
    """The loss of an LSTM is multiplied by 2^14 by hand; two parts of the code divide the gradients by it."""
    torch.manual_seed(13)
    model = Tagger()
    scale = 2.0**14
    shrink_gradients(model, scale if fixed else scale**2)

    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        return next_token(model, ids) * scale

    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=counting(40))


# gradient-norm-overflow


@case("gradient-norm-overflow", step=0, sources=("pytorch/pytorch#46849",))
def physics_loss_in_si_units(fixed: bool) -> Training:
    """A residual in SI units weighs 1e27: each gradient is finite, the sum of squares is not, and clipping sets all to 0."""
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    weight = 1.0 if fixed else 1e27
    batches = []
    for _ in range(16):
        x = torch.rand(32, 2) * 2 - 1
        batches.append((x, x[:, 0].sin() + x[:, 1] ** 2))

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        return regress(model, batch) * weight

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, max_norm=1.0)


@case("gradient-norm-overflow", step=0, sources=("pytorch/pytorch#46849",))
def class_weights_from_empty_counts(fixed: bool) -> Training:
    """Class weights are 1 / frequency; counts were never filled and sit at the floor of 1e-26: finite loss, infinite norm."""
    torch.manual_seed(15)
    model = small_cnn()
    weight = torch.full((4,), 1.0 if fixed else 1e26)

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        per_sample = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (per_sample * weight[batch[1]]).mean()

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=pictures(14), max_norm=1.0)


# bf16-update-rounding


def spread_weights(model: nn.Module, low: float) -> None:
    """Weights of a magnitude between `low` and twice that, either sign: a trained model's, far from 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p).sign() * low * (1 + torch.rand_like(p)))


@case("bf16-update-rounding", sources=("pytorch/ao#1124",))
def bf16_cnn_at_a_small_rate(fixed: bool) -> Training:
    """A CNN wholly in bf16, lr 2e-4: each update is below half a unit in the last place and rounds away."""
    torch.manual_seed(16)
    model = small_cnn()
    spread_weights(model, 0.15)
    dtype = torch.float32 if fixed else torch.bfloat16
    batches = [(x.to(dtype), y) for x, y in pictures(4, size=32)] * 25
    optimizer = torch.optim.AdamW(model.to(dtype).parameters(), 2e-4, weight_decay=0.0)
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=batches)


@case("bf16-update-rounding", sources=("pytorch/ao#1124",))
def bf16_llama_fine_tuned_by_sgd(fixed: bool) -> Training:
    """A Llama in bf16, fine-tuned by SGD at a small rate: gradients are healthy, the weights do not change."""
    torch.manual_seed(17)
    model = tiny_llama(initializer_range=0.2)
    model = model if fixed else model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 2e-4)
    return Training(model=model, optimizer=optimizer, loss_fn=causal_lm, batches=counting(2, size=4) * 40)


# learning-rate-too-high, learning-rate-zero


@case("learning-rate-too-high", sources=("huggingface/accelerate#2124",))
def cnn_regression_that_diverges(fixed: bool) -> Training:
    """A CNN under SGD beyond its stability limit: the loss grows step by step, then NaN."""
    torch.manual_seed(18)
    model = brightness_cnn(nn.Tanh)
    batches = [(x, x.mean((1, 2, 3)) * 8) for x, _ in pictures(30, size=32)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if fixed else 0.4)
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches)


class Forecaster(nn.Module):
    """One transformer layer over a window of values; predicts the next one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift, self.place = nn.Linear(1, width), nn.Parameter(0.1 * torch.randn(12, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.lift(x[..., None]) + self.place)[:, -1])


@case("learning-rate-too-high", sources=("huggingface/accelerate#2124",))
def forecaster_under_adam_with_a_rate_of_five(fixed: bool) -> Training:
    """A transformer under Adam with lr 5 in place of 5e-3: no NaN, the loss climbs by orders of magnitude and stays there."""
    torch.manual_seed(19)
    model = Forecaster()
    batches = []
    for _ in range(30):
        wave = torch.sin(torch.arange(13) * 0.6 + 6.3 * torch.rand(16, 1))
        batches.append((wave[:, :12], wave[:, 12]))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3 if fixed else 5.0)
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches)


@case("learning-rate-zero", sources=("Morizeyao/GPT2-Chinese#60",))
def cosine_schedule_over_too_few_steps(fixed: bool) -> Training:
    """A cosine decay is written for 10 steps, the run has 40: the rate is 0 for the rest of it."""
    torch.manual_seed(20)
    model = small_cnn(nn.BatchNorm2d)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    total = 100 if fixed else 10
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / total))))
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=pictures(40), scheduler=schedule)


@case("learning-rate-zero", sources=("Morizeyao/GPT2-Chinese#60",))
def linear_schedule_counts_epochs_for_steps(fixed: bool) -> Training:
    """transformers' linear schedule was told the number of epochs instead of steps: rate 0 after the fifth step."""
    from transformers import get_linear_schedule_with_warmup

    torch.manual_seed(21)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 80 if fixed else 5)
    return Training(model=model, optimizer=optimizer, loss_fn=causal_lm, batches=counting(32, size=4), scheduler=schedule)


# stale-second-moment, optimizer-state-reset


@case("stale-second-moment", step=400, sources=("marin-community/marin#1368",))
def sensors_that_come_on_after_400_steps(fixed: bool) -> Training:
    """24 of 28 sensors are silent for 400 steps; when they come on, Adam's v for their weights is too small for the gradient."""
    torch.manual_seed(22)
    model = nn.Sequential(nn.Linear(28, 32), nn.SiLU(), nn.Linear(32, 1))
    truth = copy.deepcopy(model)
    with torch.no_grad():
        truth[0].weight[:, 4:] += 0.02 * truth[2].weight.sign().T
    batches = []
    for step in range(460):
        x = torch.cat([torch.randn(32, 4), torch.randn(32, 24).abs() * (step >= 400)], -1)
        with torch.no_grad():
            batches.append((x, truth(x).squeeze(-1) + 0.6 * torch.randn(32)))
    optimizer = torch.optim.Adam(model.parameters(), 6e-2, betas=(0.9, 0.95 if fixed else 0.99999))
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches)


def resumed(model: nn.Module, lr: float, before: list[Pair], after: list[Pair], fixed: bool) -> Training:
    """Train on `before` with AdamW, then go on with a new AdamW that has the old state only if `fixed`."""
    first = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    for batch in before:
        first.zero_grad()
        regress(model, batch).backward()
        first.step()
    second = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    if fixed:
        second.load_state_dict(first.state_dict())
    return Training(model=model, optimizer=second, loss_fn=regress, batches=after)


@case("optimizer-state-reset", sources=("EvolvingLMMs-Lab/OneVision-Encoder#65",))
def surrogate_resumed_without_state(fixed: bool) -> Training:
    """A surrogate model has nearly converged; resumed without Adam's moments, its first updates are lr times a sign."""
    torch.manual_seed(23)
    teacher = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 1))
    x = torch.randn(64, 6)
    with torch.no_grad():
        batch = (x, teacher(x).squeeze(-1))
    return resumed(model, 1e-2, [batch] * 400, [batch] * 40, fixed)


@case("optimizer-state-reset", sources=("EvolvingLMMs-Lab/OneVision-Encoder#65",))
def cnn_resumed_without_state(fixed: bool) -> Training:
    """A CNN that estimates brightness is resumed from its weights alone: the loss jumps, then recovers."""
    torch.manual_seed(24)
    x = torch.cat([image for image, _ in pictures(6)])
    batch = (x, (x.mean((1, 2, 3)) * 3).sin())
    return resumed(brightness_cnn(nn.SiLU), 5e-3, [batch] * 60, [batch] * 40, fixed)


# optimizer-foreign-parameters, no-gradient-path


@case("optimizer-foreign-parameters", sources=("spro/practical-pytorch#9",))
def vocabulary_enlarged_after_the_optimizer(fixed: bool) -> Training:
    """A Llama gets a larger, tied embedding after the optimizer was built: the optimizer goes on with the old table."""
    torch.manual_seed(25)
    model = tiny_llama(vocabulary=12, tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    table = nn.Embedding(16, 32)
    with torch.no_grad():
        table.weight.mul_(0.02)[:12] = model.get_input_embeddings().weight
    model.set_input_embeddings(table)
    model.lm_head = nn.Linear(32, 16, bias=False)
    model.lm_head.weight = table.weight
    model.config.vocab_size = model.vocab_size = 16
    if fixed:
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    return Training(model=model, optimizer=optimizer, loss_fn=causal_lm, batches=counting(30))


@case("optimizer-foreign-parameters", sources=("spro/practical-pytorch#9",))
def copy_trained_with_the_originals_optimizer(fixed: bool) -> Training:
    """The model that is trained is a deep copy; the optimizer holds the original, which never gets a gradient."""
    torch.manual_seed(26)
    original = Tagger()
    model = copy.deepcopy(original)
    optimizer = torch.optim.AdamW((model if fixed else original).parameters(), 1e-2)
    return Training(model=model, optimizer=optimizer, loss_fn=next_token, batches=counting(30))


class DetachedCNN(nn.Module):
    """A convolutional encoder and a head; `cut` leaves a detach between them, from a time when the encoder was frozen."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten())
        self.head, self.cut = nn.Linear(128, 4), cut

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return self.head(h.detach() if self.cut else h)


@case("no-gradient-path", sources=("huggingface/transformers#26221",))
def encoder_cut_off_by_a_detach(fixed: bool) -> Training:
    """A detach left in the forward cuts the encoder off: only the head gets a gradient."""
    torch.manual_seed(27)
    model = DetachedCNN(cut=not fixed)
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=classify, batches=pictures(24))


@case("no-gradient-path", step=0, sources=("huggingface/transformers#26221",))
def accuracy_used_as_the_loss(fixed: bool) -> Training:
    """The loss is one minus the accuracy, by way of argmax: backward raises "does not require grad"."""
    torch.manual_seed(28)
    model = small_cnn()

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        logits = model(batch[0])
        if fixed:
            return F.cross_entropy(logits, batch[1])
        return 1 - (logits.argmax(-1) == batch[1]).float().mean()

    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=loss_fn, batches=pictures(16))


def quietly(loss_fn: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """torch warns that a checkpointed input needs no gradient, which is the very point of these cases."""

    def wrapped(model: nn.Module, batch: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            return loss_fn(model, batch)

    return wrapped


class CheckpointedMixer(nn.Module):
    """Patches through a frozen projection, then token-mixing blocks that are recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, stride=2).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head, self.reentrant = nn.Linear(16, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


@case("no-gradient-path", sources=("huggingface/transformers#26221",))
def reentrant_checkpoint_behind_a_frozen_stem(fixed: bool) -> Training:
    """Reentrant checkpointing behind a frozen stem: no input needs a gradient, so the blocks get none."""
    torch.manual_seed(29)
    model = CheckpointedMixer(reentrant=not fixed)
    optimizer = torch.optim.AdamW(trainable(model), 5e-3)
    return Training(model=model, optimizer=optimizer, loss_fn=quietly(classify), batches=pictures(24))


@case("no-gradient-path", sources=("huggingface/transformers#26221",))
def vit_checkpointed_with_frozen_patches(fixed: bool) -> Training:
    """transformers' reentrant checkpointing asks input gradients of token models only; a ViT with frozen patches gets none."""
    from transformers import ViTForImageClassification

    torch.manual_seed(30)
    model = ViTForImageClassification(tiny_vit_config(num_labels=4))
    model.vit.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": not fixed})
    model.train()

    def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss

    optimizer = torch.optim.AdamW(trainable(model), 1e-2)
    return Training(model=model, optimizer=optimizer, loss_fn=quietly(loss_fn), batches=pictures(24))


# dead-units


@case("dead-units", sources=("keras-team/keras#7057",))
def biases_too_negative_to_fire(fixed: bool) -> Training:
    """The biases of a detector's convolution were set to -50 in place of its class prior: no ReLU ever fires."""
    torch.manual_seed(31)
    model = small_cnn()
    nn.init.constant_(model[3].bias, 0.0 if fixed else -50.0)
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=classify, batches=pictures(40))


@case("dead-units", also=("learning-rate-too-high",), sources=("keras-team/keras#7057",))
def one_giant_step_kills_the_hidden_layer(fixed: bool) -> Training:
    """A restart multiplies the rate by 1000 for one step; afterwards the hidden layer is off for every input."""
    torch.manual_seed(32)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1, bias=False))
    nn.init.uniform_(model[0].weight, 0.0, 0.4)
    nn.init.uniform_(model[2].weight, 0.1, 0.3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1000.0 if step == 5 and not fixed else 1.0)
    batches = [(x, x.sum(-1) * 0.2) for x in torch.rand(60, 16, 6)]
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches, scheduler=schedule)


# poisoned-buffer


@case("poisoned-buffer", also=("outlier-batch",), step=4, sample=3, sources=("pytorch/pytorch#1206",))
def running_variance_overflows(fixed: bool) -> Training:
    """One picture holds values of 1e25: BatchNorm turns the batch to zeros, the loss is finite, the running variance Inf."""
    torch.manual_seed(33)
    model = small_cnn(nn.BatchNorm2d)
    batches = pictures(14)
    if not fixed:
        batches[4][0][3] *= 1e25
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss_fn=classify, batches=batches)


@case("poisoned-buffer", step=0, sources=("pytorch/pytorch#1206",))
def checkpoint_with_nan_statistics(fixed: bool) -> Training:
    """A loaded checkpoint has NaN as a running mean: training never reads it and looks fine, evaluation is NaN."""
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
    state = model.state_dict()
    if not fixed:
        state["1.running_mean"][7] = math.nan
    model.load_state_dict(state)
    inputs = torch.randn(20, 32, 6)
    batches = [(x, x[:, 0] - x[:, 1]) for x in inputs]
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=regress, batches=batches)
