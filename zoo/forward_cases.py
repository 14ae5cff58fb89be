"""The batch is fine and the forward pass is not: masks, half precision, log, exp, division, standard deviations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from zoo.registry import Training, case

Batch = dict[str, Tensor]
PAD = 0


def run(model: nn.Module, loss_fn: Callable[[nn.Module, Batch], Tensor], batches: list[Batch], lr: float = 3e-3) -> Training:
    """Adam on whatever is trainable: the ordinary script."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Training(model=model, optimizer=torch.optim.AdamW(trainable, lr), loss_fn=loss_fn, batches=batches)


def counting_text(rows: int, length: int, vocabulary: int = 16) -> Tensor:
    """Each row counts upwards from a random start, by one or by two; token 0 is kept for padding."""
    start, by = torch.randint(0, vocabulary - 1, (rows, 1)), torch.randint(1, 3, (rows, 1))
    return (start + by * torch.arange(length)) % (vocabulary - 1) + 1


class Attention(nn.Module):
    """Multi-head attention with the scores in the open; `biases` are added to them, `banned` overwrites them."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, *biases: Tensor, banned: tuple[Tensor, float] | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in self.kv(memory).chunk(2, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        for bias in biases:
            scores = scores + bias.to(scores.dtype)[:, None]
        if banned is not None:
            scores = scores.masked_fill(banned[0][:, None], banned[1])
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class SmallTransformer(nn.Module):
    """Token embedding, two layers of attention and MLP, logits."""

    def __init__(self, vocabulary: int = 16, width: int = 24) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.attention = nn.ModuleList(Attention(width) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, *biases: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norm, strict=True):
            h = norm(x)
            x = x + attention(h, h, *biases)
            x = x + mlp(x)
        return self.head(x)


# attention-row-fully-masked


@case("attention-row-fully-masked", step=3, sample=2, op="softmax", sources=("pytorch/pytorch#103749",))
def left_padding_under_a_causal_mask(fixed: bool) -> Training:
    """A decoder that always saw right padding gets one left-padded prompt: its first queries may look at nothing."""
    torch.manual_seed(0)
    batches = []
    for i in range(9):
        ids = counting_text(6, 10)
        ids[4, 7:] = PAD
        if i == 3:
            ids[2] = F.pad(ids[2, :6], (4, 0), value=PAD)
        batches.append({"ids": ids})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        ids = b["ids"]
        size = ids.shape[1]
        blocked = torch.ones(size, size, dtype=torch.bool).triu(1) | (ids == PAD)[:, None, :]
        if fixed:
            blocked = blocked & ~torch.eye(size, dtype=torch.bool)
        bias = torch.zeros(blocked.shape).masked_fill(blocked, -torch.inf)
        logits = m(ids, bias)
        known = (ids[:, :-1] != PAD) & (ids[:, 1:] != PAD)
        return F.cross_entropy(logits[:, :-1][known], ids[:, 1:][known])

    return run(SmallTransformer(), loss_fn, batches)


class SetReader(nn.Module):
    """Four learned queries read a set of elements through cross-attention."""

    def __init__(self, width: int = 16, outputs: int = 3) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, width) * 0.3)
        self.embed, self.attention, self.head = nn.Linear(5, width), Attention(width), nn.Linear(4 * width, outputs)

    def forward(self, elements: Tensor, *biases: Tensor, banned: tuple[Tensor, float] | None = None) -> Tensor:
        queries = self.queries.expand(len(elements), -1, -1)
        return self.head(self.attention(queries, self.embed(elements), *biases, banned=banned).flatten(1))


def labelled_sets(rows: int = 8, size: int = 5) -> Batch:
    """Sets whose label is the largest of their first three mean features; some elements are absent."""
    elements = torch.randn(rows, size, 5) + torch.randn(rows, 1, 5)
    present = torch.ones(rows, size, dtype=torch.bool)
    present[1, 3:] = False
    elements[~present] = 0.0
    return {"elements": elements, "present": present, "label": elements[..., :3].sum(1).argmax(-1)}


@case("attention-row-fully-masked", step=4, sample=3, op="softmax")
def cross_attention_over_an_empty_set(fixed: bool) -> Training:
    """One question came back from retrieval without a passage; cross-attention over its empty set is a softmax of -inf."""
    torch.manual_seed(1)
    batches = [labelled_sets() for _ in range(10)]
    batches[4]["present"][3] = False

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        absent = ~b["present"]
        if fixed:
            absent = absent & ~absent.all(1, keepdim=True)
        return F.cross_entropy(m(b["elements"], banned=(absent[:, None, :], -torch.inf)), b["label"])

    return run(SetReader(), loss_fn, batches)


class AttentivePool(nn.Module):
    """A GRU over visits, pooled by torch's own multi-head attention, which returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 16, batch_first=True)
        self.pool = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, visits: Tensor, missing: Tensor) -> Tensor:
        states = self.gru(visits)[0]
        pooled, _ = self.pool(states[:, -1:], states, states, key_padding_mask=missing)
        return self.head(pooled)[:, 0, 0]


@case("attention-row-fully-masked", step=5, sample=6, op="softmax", sources=("pytorch/pytorch#103749",))
def patient_without_visits(fixed: bool) -> Training:
    """nn.MultiheadAttention with a key_padding_mask that hides every visit of one patient."""
    torch.manual_seed(2)
    batches = []
    for i in range(10):
        visits = torch.randn(8, 6, 4)
        missing = torch.arange(6) >= torch.randint(2, 7, (8, 1))
        if i == 5 and not fixed:
            missing[6] = True
        batches.append({"visits": visits, "missing": missing, "risk": visits[:, :2, 0].mean(1)})
    return run(AttentivePool(), lambda m, b: F.mse_loss(m(b["visits"], b["missing"]), b["risk"]), batches)


# mask-overflow


@case("mask-overflow", step=4, sample=1, sources=("huggingface/transformers#17306",))
def padding_and_document_masks_added_up(fixed: bool) -> Training:
    """Packed documents in bf16: a padded row gets finfo.min from the padding mask and again from the document mask."""
    torch.manual_seed(3)
    batches = []
    for i in range(9):
        ids = counting_text(6, 12)
        document = (torch.arange(12) >= 6).long().expand(6, 12) + 1
        if i == 4:
            ids[1, 8:] = PAD
        batches.append({"ids": ids, "document": document * (ids != PAD)})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        ids, document = b["ids"], b["document"]
        real = ids != PAD
        padded = ~(real[:, None, :] & real[:, :, None])
        foreign = (document[:, None, :] != document[:, :, None]) | (document == 0)[:, None, :]
        hidden = [padded | foreign] if fixed else [padded, foreign]
        corrupted = ids.masked_fill(torch.arange(12) % 4 == 2, PAD)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = m(corrupted, *(torch.zeros(h.shape).masked_fill(h, torch.finfo(torch.bfloat16).min) for h in hidden))
        asked = real & (torch.arange(12) % 4 == 2)
        return F.cross_entropy(logits.float()[asked], ids[asked])

    return run(SmallTransformer(), loss_fn, batches)


@case("mask-overflow", step=5, sample=4, sources=("huggingface/transformers#17306",))
def mask_plus_time_decay(fixed: bool) -> Training:
    """A recommender in fp16 lowers old purchases' scores; finfo.min plus that decay is -inf for a customer with no purchase."""
    torch.manual_seed(4)
    batches = []
    for i in range(10):
        batch = labelled_sets()
        batch["hours"] = torch.rand(8, 5) * 4
        if i == 5:
            batch["present"][4] = False
        batch["hours"][~batch["present"]] = 72.0  # padding carries time stamp 0
        batches.append(batch)

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        decay, absent = -b["hours"][:, None, :], ~b["present"][:, None, :]
        floor = torch.finfo(torch.float16).min
        with torch.autocast("cpu", dtype=torch.float16):
            if fixed:
                logits = m(b["elements"], decay, banned=(absent, floor))
            else:
                logits = m(b["elements"], decay, torch.zeros(absent.shape).masked_fill(absent, floor))
        return F.cross_entropy(logits.float(), b["label"])

    return run(SetReader(), loss_fn, batches)


# fp16-activation-overflow


@case("fp16-activation-overflow", step=4, sample=3, op="conv", sources=("huggingface/transformers#9295",))
def bright_image_in_an_autocast_cnn(fixed: bool) -> Training:
    """A CNN under fp16 autocast sees one image in sensor counts; a convolution leaves the range, GroupNorm makes NaN."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)
    )
    with torch.no_grad():
        model[0].weight.mul_(3)
        model[2].weight.mul_(3)
    batches = []
    for i in range(10):
        label = torch.arange(8) % 3
        image = torch.rand(8, 1, 8, 8)
        image += torch.linspace(-1, 1, 8) * (label - 1.0)[:, None, None, None]
        if i == 4:
            image[3] *= 2e4
        batches.append({"image": image, "label": label})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16 if fixed else torch.float16):
            logits = m(b["image"])
        return F.cross_entropy(logits.float(), b["label"])

    return run(model, loss_fn, batches)


class LatentDenoiser(nn.Module):
    """A small denoiser in fp32 on the latents of a frozen encoder in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 4, 1),
        )
        with torch.no_grad():
            self.encoder[2].weight.mul_(2000)
        self.encoder.requires_grad_(False).to(dtype)
        self.dtype = dtype
        self.denoise = nn.Sequential(nn.Conv2d(5, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, image: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        latent = self.encoder(image.to(self.dtype)).float()
        level = level[:, None, None, None]
        noisy = (1 - level) * latent + level * noise
        return self.denoise(torch.cat([noisy, level.expand(-1, 1, *noisy.shape[2:])], 1))


@case("fp16-activation-overflow", step=3, sample=5, op="conv", sources=("kohya-ss/sd-scripts#653",))
def frozen_half_precision_encoder(fixed: bool) -> Training:
    """The frozen fp16 image encoder of a latent diffusion model overflows inside on one high-contrast image."""
    torch.manual_seed(6)
    batches = []
    for i in range(9):
        image, noise = torch.randn(8, 3, 8, 8), torch.randn(8, 4, 4, 4)
        if i == 3:
            image[5] *= 80
        batches.append({"image": image, "noise": noise, "level": torch.rand(8) * 0.6 + 0.3})
    model = LatentDenoiser(torch.float32 if fixed else torch.float16)
    return run(model, lambda m, b: F.mse_loss(m(b["image"], b["noise"], b["level"]), b["noise"]), batches, lr=1e-2)


class GatedBlock(nn.Module):
    """T5's feed-forward layer: RMS norm, gelu(wi_0 x) * wi_1 x, wo, residual."""

    def __init__(self, width: int, wo_in_fp32: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.wi_0, self.wi_1, self.wo = (nn.Linear(a, b, bias=False) for a, b in ((width, 48), (width, 48), (48, width)))
        self.wo_in_fp32 = wo_in_fp32

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = F.gelu(self.wi_0(h)) * self.wi_1(h)
        with torch.autocast("cpu", enabled=not self.wo_in_fp32):
            return x + self.wo(h.float() if self.wo_in_fp32 else h)


class GatedLM(nn.Module):
    """A recurrent token mixer between two of T5's feed-forward blocks."""

    def __init__(self, wo_in_fp32: bool, vocabulary: int = 20, width: int = 24) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.first, self.second = GatedBlock(width, wo_in_fp32), GatedBlock(width, wo_in_fp32)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        x = x + self.mix(F.rms_norm(x, x.shape[-1:]))[0]
        return self.head(F.rms_norm(self.second(x).float(), x.shape[-1:]))


@case("fp16-activation-overflow", step=4, sample=6, op="mm", sources=("huggingface/transformers#9295",))
def gated_mlp_output_projection(fixed: bool) -> Training:
    """The sentence delimiter drives T5's gated feed-forward layer past 65504 in `wo`; only one row of the batch holds it."""
    torch.manual_seed(7)
    model = GatedLM(wo_in_fp32=fixed)
    with torch.no_grad():
        model.embed.weight[:, 0] = 0.0
        model.embed.weight[19] = 0.0
        model.embed.weight[19, 0] = 4.0
        for projection, gain in ((model.first.wi_0, 30.0), (model.first.wi_1, 30.0)):
            projection.weight[5] = 0.0
            projection.weight[5, 0] = gain
        model.first.wo.weight[7, 5] = 6.0
    batches = []
    for i in range(10):
        ids = counting_text(8, 10)
        if i >= 4:
            ids[6, 4] = 19
        batches.append({"ids": ids})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = m(b["ids"]).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())

    return run(model, loss_fn, batches)


# log-of-zero


@case("log-of-zero", step=4, sample=5, op="log", sources=("NVIDIA/apex#358",))
def one_hot_times_log_of_softmax(fixed: bool) -> Training:
    """A bag-of-words classifier is so sure of one very long document that the softmax of the other classes is exactly 0."""
    torch.manual_seed(8)
    taste = torch.randn(30, 3)
    taste[0] = 0.0
    model = nn.Sequential(nn.EmbeddingBag(30, 3, mode="sum", padding_idx=0), nn.Linear(3, 3))
    with torch.no_grad():
        model[0].weight.copy_(taste * 0.4)
        model[1].weight.copy_(torch.eye(3))
    batches = []
    for i in range(9):
        words = torch.randint(1, 30, (8, 400))
        words[:, 12:] = 0
        if i == 4:
            words[5] = int(taste[:, 1].sub(taste[:, 0]).argmax())
        batches.append({"words": words, "label": taste[words].sum(1).argmax(-1)})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        logits = m(b["words"])
        logp = logits.log_softmax(-1) if fixed else logits.softmax(-1).log()
        return -(F.one_hot(b["label"], 3) * logp).sum(-1).mean()

    return run(model, loss_fn, batches)


class ActorCritic(nn.Module):
    """Logits of five actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 5), nn.Linear(24, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(obs)
        return self.actor(h), self.critic(h)[:, 0]


def rollout(rows: int = 10) -> Batch:
    """Random actions in a task where the largest of the first five features is the right one."""
    obs, action = torch.randn(rows, 6), torch.randint(0, 5, (rows,))
    reward = (action == obs[:, :5].argmax(-1)).float()
    return {"obs": obs, "action": action, "ret": reward, "logp": torch.full((rows,), 0.2).log()}


@case("log-of-zero", step=3, sample=7, op="log", sources=("tensorflow/agents#562",))
def entropy_bonus_with_illegal_actions(fixed: bool) -> Training:
    """The entropy bonus of an actor-critic is 0 * log 0 in the one state where some actions are illegal."""
    torch.manual_seed(9)
    batches = []
    for i in range(10):
        batch = rollout()
        batch["legal"] = torch.ones(10, 5, dtype=torch.bool)
        if i == 3:
            batch["legal"][7, (batch["action"][7] + 1) % 5] = False
        batches.append(batch)

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        logits, value = m(b["obs"])
        p = logits.masked_fill(~b["legal"], -1e9).softmax(-1)
        logp = (p.where(b["legal"], 1.0) if fixed else p).log()
        advantage = (b["ret"] - value).detach()
        chosen = logp.gather(1, b["action"][:, None])[:, 0]
        return F.mse_loss(value, b["ret"]) - (chosen * advantage).mean() + 0.01 * (p * logp).sum(-1).mean()

    return run(ActorCritic(), loss_fn, batches)


@case("log-of-zero", step=5, sample=2, op="log")
def handwritten_binary_cross_entropy(fixed: bool) -> Training:
    """A segmentation network is certain about an over-exposed patch: sigmoid is exactly 1 and (1 - y) log(1 - p) is 0 * -inf."""
    torch.manual_seed(10)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 1))
    with torch.no_grad():
        model[0].weight.abs_()
        model[2].weight.abs_()
    batches = []
    for i in range(10):
        image = torch.randn(8, 1, 8, 8)
        if i == 5:
            image[2, 0, 2:6, 2:6] = 80.0
        batches.append({"image": image, "mask": (F.avg_pool2d(image, 3, 1, 1) > 0).float()})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        logits, y = m(b["image"]), b["mask"]
        if fixed:
            return F.binary_cross_entropy_with_logits(logits, y)
        p = logits.sigmoid()
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    return run(model, loss_fn, batches, lr=1e-2)


# exp-overflow


@case("exp-overflow", step=4, sample=6, op="exp", sources=("OpenRLHF/OpenRLHF#1314",))
def stale_log_prob_in_ppo(fixed: bool) -> Training:
    """PPO's ratio overflows for one stale action; the clipped branch is chosen, so the loss is finite and the gradient NaN."""
    torch.manual_seed(11)
    batches = [rollout(12) for _ in range(9)]
    batches[4]["logp"][6] = -130.0
    batches[4]["action"][6] = batches[4]["obs"][6, :5].argmax()
    batches[4]["ret"][6] = 1.0

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        logits, value = m(b["obs"])
        logp = logits.log_softmax(-1).gather(1, b["action"][:, None])[:, 0]
        difference = logp - b["logp"]
        ratio = (difference.clamp(-20, 20) if fixed else difference).exp()
        advantage = b["ret"] - 0.2
        return F.mse_loss(value, b["ret"]) - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return run(ActorCritic(), loss_fn, batches)


@case("exp-overflow", step=3, sample=2, op="exp", sources=("huggingface/trl#3015",))
def kl_estimate_on_padding(fixed: bool) -> Training:
    """The k3 estimate of the KL of a Llama policy overflows at padding, where the policy's own log-prob is -1e4, then times 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    batches = []
    for i in range(8):
        ids = counting_text(6, 8)
        if i == 3:
            ids[2, 5:] = PAD
        batches.append({"ids": ids, "ref": torch.where(ids[:, 1:] == PAD, 0.0, -2.7), "reward": torch.rand(6) - 0.3})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        ids, mask = b["ids"], b["ids"][:, 1:] != PAD
        logits = m(input_ids=ids).logits[:, :-1]
        never_pad = torch.zeros(16).index_fill(0, torch.tensor([PAD]), -1e4)
        logp = (logits + never_pad).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        difference = b["ref"] - logp
        if fixed:
            difference = difference.where(mask, 0.0)
        kl = difference.exp() - difference - 1
        return ((0.1 * kl - logp.where(mask, 0.0) * b["reward"][:, None]) * mask).sum() / mask.sum()

    return run(LlamaForCausalLM(config), loss_fn, batches)


class NoisyForecaster(nn.Module):
    """A mean from an LSTM and a log-variance that may also look at the log-energy of the channel."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 12, batch_first=True)
        self.mean, self.log_variance = nn.Linear(12, 1), nn.Linear(13, 1)
        nn.init.ones_(self.log_variance.weight[:, 12:])

    def forward(self, series: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lstm(series)[0][:, -1]
        return self.mean(h)[:, 0], self.log_variance(torch.cat([h, energy[:, None]], 1))[:, 0]


@case("exp-overflow", step=5, sample=4, op="exp")
def log_variance_of_a_dead_channel(fixed: bool) -> Training:
    """A Gaussian likelihood divides by exp(log-variance); a dead channel's log-energy of -110 makes exp(-log-variance) Inf."""
    torch.manual_seed(13)
    batches = []
    for i in range(10):
        wave = torch.sin(torch.rand(10, 1) * 6.28 + torch.arange(7) * 0.7)
        energy = torch.rand(10) - 0.5
        if i == 5:
            energy[4] = -110.0
        batches.append({"series": wave[:, :6, None], "energy": energy, "target": wave[:, 6]})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        mean, log_variance = m(b["series"], b["energy"])
        if fixed:
            log_variance = log_variance.clamp(-2, 4)
        return 0.5 * ((b["target"] - mean) ** 2 * torch.exp(-log_variance) + log_variance).mean()

    return run(NoisyForecaster(), loss_fn, batches, lr=1e-2)


@case("exp-overflow", step=4, sample=3, op="exp")
def box_size_clamped_after_exp(fixed: bool) -> Training:
    """A detector decodes box sizes with exp(...).clamp(max=...): the loss stays finite, the gradient of exp is 0 * Inf."""
    torch.manual_seed(14)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    batches = []
    for i in range(10):
        size = torch.rand(8, 2) + 0.5
        image = torch.randn(8, 2, 6, 6) * 0.2 + size.log()[:, :, None, None]
        if i == 4:
            image[3] = 3000.0
        batches.append({"image": image, "size": size})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        raw = m(b["image"])
        size = raw.clamp(-4, 4).exp() if fixed else raw.exp().clamp(max=54.6)
        both = torch.minimum(size, b["size"]).prod(-1)
        return (1 - both / (size.prod(-1) + b["size"].prod(-1) - both)).mean()

    return run(model, loss_fn, batches, lr=1e-2)


# zero-denominator


class KeywordSpotter(nn.Module):
    """Standardises each utterance over time, then two convolutions."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.net = nn.Sequential(
            nn.Conv1d(4, 12, 3),
            nn.GELU(),
            nn.Conv1d(12, 12, 3),
            nn.GELU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    def forward(self, frames: Tensor) -> Tensor:
        centred = frames - frames.mean(-1, keepdim=True)
        return self.net(centred / (frames.std(-1, keepdim=True) + self.eps))


@case("zero-denominator", step=3, sample=4, op="div")
def silence_has_no_variance(fixed: bool) -> Training:
    """A keyword spotter standardises each utterance; digital silence has standard deviation 0, and 0 / 0 is NaN."""
    torch.manual_seed(15)
    batches = []
    for i in range(9):
        label = torch.arange(8) % 3
        frames = torch.sin(torch.arange(16) * (label[:, None, None] + 1) * 0.6) + 0.3 * torch.randn(8, 4, 16)
        if i == 3:
            frames[4] = 0.0
        batches.append({"frames": frames, "label": label})
    return run(KeywordSpotter(1e-5 if fixed else 0.0), lambda m, b: F.cross_entropy(m(b["frames"]), b["label"]), batches)


class SentenceClassifier(nn.Module):
    """BERT and the mean of the unpadded states."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        self.bert, self.head, self.floor = BertModel(config, add_pooling_layer=False), nn.Linear(16, 2), floor

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return self.head((states * mask).sum(1) / mask.sum(1).clamp(min=self.floor))


@case("zero-denominator", step=4, sample=5, op="div")
def mean_pooling_of_an_empty_sentence(fixed: bool) -> Training:
    """Mean pooling over BERT's states divides by the number of tokens; one sentence was empty after cleaning."""
    torch.manual_seed(16)
    batches = []
    for i in range(9):
        label = torch.arange(8) % 2
        ids = torch.randint(0, 10, (8, 9)) + 10 * label[:, None]
        mask = (torch.arange(9) < torch.randint(3, 10, (8, 1))).long()
        if i == 4:
            mask[5] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "label": label})
    model = SentenceClassifier(1.0 if fixed else 0.0)
    return run(model, lambda m, b: F.cross_entropy(m(b["input_ids"], b["attention_mask"]), b["label"]), batches)


@case("zero-denominator", step=5, sample=3, op="div", sources=("huggingface/diffusers#13425", "kohya-ss/sd-scripts#934"))
def min_snr_weight_at_the_last_timestep(fixed: bool) -> Training:
    """A diffusion model with zero terminal SNR weighs its loss by min(SNR, 5) / SNR; one sample drew the last timestep."""
    torch.manual_seed(17)
    alpha = torch.linspace(1, 0, 51)[1:].square()  # the share of signal that is left; exactly 0 at the end
    model = nn.Sequential(nn.Linear(5, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 4))
    batches = []
    for i in range(10):
        t = torch.randint(5, 45, (12,))
        if i == 5:
            t[3] = 49
        batches.append({"x": torch.randn(12, 1).expand(12, 4) + 0.1 * torch.randn(12, 4), "noise": torch.randn(12, 4), "t": t})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        a = alpha[b["t"], None]
        noisy = a.sqrt() * b["x"] + (1 - a).sqrt() * b["noise"]
        off = (m(torch.cat([noisy, b["t"][:, None] / 50], 1)) - b["noise"]).square().mean(1)
        snr = (a / (1 - a))[:, 0]
        weight = snr.clamp(max=5) / (snr.clamp(min=1e-8) if fixed else snr)
        return (weight * off).mean()

    return run(model, loss_fn, batches)


# std-of-one-sample


def quiet_std(x: Tensor) -> Tensor:
    """torch warns about the degrees of freedom; the scripts in question had warnings off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.std()


class SequencePolicy(nn.Module):
    """Log-probability of a sequence of tokens under a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(16, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logp = self.out(self.gru(self.embed(ids[:, :-1]))[0]).log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None])[..., 0].mean(1)


@case("std-of-one-sample", step=4, sample=7, op="std", sources=("StarsfieldAI/R1-V#69",))
def group_with_one_survivor(fixed: bool) -> Training:
    """Length filtering left a single completion of one prompt; the standard deviation of its group is NaN."""
    torch.manual_seed(18)
    batches = []
    for i in range(9):
        group = torch.arange(8) // 4
        if i == 4:
            group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
        batches.append({"ids": counting_text(8, 7), "group": group, "reward": torch.rand(8)})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        advantage = torch.zeros(len(b["reward"]))
        for k in b["group"].unique():
            mine = b["group"] == k
            rewards = b["reward"][mine]
            spread = rewards.std(unbiased=False) if fixed else quiet_std(rewards)
            advantage[mine] = (rewards - rewards.mean()) / (spread + 1e-4)
        logp = m(b["ids"])
        return -((logp - logp.detach()).exp() * advantage).mean() - 0.1 * logp.mean()

    return run(SequencePolicy(), loss_fn, batches)


@case("std-of-one-sample", step=6, op="std")
def last_minibatch_of_one_transition(fixed: bool) -> Training:
    """An actor-critic normalises advantages per minibatch, and 61 transitions in tens leave a last minibatch of one."""
    torch.manual_seed(19)
    memory = rollout(61)
    batches = [{k: v[i : i + 10] for k, v in memory.items()} for i in range(0, 61, 10)]

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        logits, value = m(b["obs"])
        advantage = (b["ret"] - value).detach()
        advantage = (advantage - advantage.mean()) / (quiet_std(advantage) + 1e-8)
        chosen = logits.log_softmax(-1).gather(1, b["action"][:, None])[:, 0]
        return F.mse_loss(value, b["ret"]) - (chosen * advantage).mean()

    return run(ActorCritic(), loss_fn, (batches[:6] if fixed else batches) * 2)


# nonpositive-std


class GaussianActor(nn.Module):
    """A mean from the state, and a standard deviation that is a parameter by itself or the exponential of one."""

    def __init__(self, log_scale: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 2))
        self.std = nn.Parameter(torch.full((2,), 0.5))
        self.log_scale = log_scale
        if log_scale:
            nn.init.constant_(self.std, -0.7)

    def forward(self, obs: Tensor) -> Normal:
        scale = self.std.exp() if self.log_scale else self.std
        return Normal(self.mean(obs), scale, validate_args=True)  # some libraries turn the check off for the whole process


@case("nonpositive-std", step=5, sources=("leggedrobotics/rsl_rl#190",))
def learned_std_crosses_zero(fixed: bool) -> Training:
    """The exploration noise of a robot policy is a bare parameter; the penalty on it pushes it below 0 and Normal raises."""
    torch.manual_seed(20)
    model = GaussianActor(log_scale=fixed)

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        policy = m(b["obs"])
        return (policy.mean - b["target"]).square().mean() + 1.1 * policy.stddev.mean()

    batches = []
    for _ in range(12):
        obs = torch.randn(16, 4)
        batches.append({"obs": obs, "target": obs[:, :2] * 0.5})
    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.2), loss_fn=loss_fn, batches=batches)


class NoisyCode(nn.Module):
    """A variational autoencoder whose scale comes straight from a linear layer, or through softplus."""

    def __init__(self, positive: bool) -> None:
        super().__init__()
        self.mean, self.scale, self.decode = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)
        with torch.no_grad():
            self.scale.weight.mul_(0.17)
            self.scale.bias.fill_(0.3)
        self.positive = positive

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale = self.mean(x), self.scale(x)
        if self.positive:
            scale = F.softplus(scale)
        noise = torch.normal(torch.zeros_like(scale), scale.detach())
        return self.decode(mean + noise), mean, scale


@case("nonpositive-std", step=4, sample=5, op="normal")
def negative_scale_of_one_record(fixed: bool) -> Training:
    """A variational autoencoder takes its scale from a linear layer; for one odd record it is negative, torch.normal raises."""
    torch.manual_seed(21)
    model = NoisyCode(positive=fixed)
    batches = []
    for i in range(10):
        x = torch.randn(8, 2) @ torch.randn(2, 6, generator=torch.Generator().manual_seed(0)) * 0.5
        if i == 4:
            x[5] = -2.5 * model.scale.weight[0].sign()
        batches.append({"x": x.detach()})

    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        x, mean, scale = m(b["x"])
        return F.huber_loss(x, b["x"]) + 0.01 * (mean.square() + scale.square() - 2 * scale.log()).mean()

    return run(model, loss_fn, batches, lr=3e-3)
