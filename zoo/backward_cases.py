"""Finite loss, bad gradient: what only the backward pass shows.

In most of these cases one sample of one batch meets a point where a derivative does not exist. The batches before it are healthy,
so a person sees a normal loss, and then NaN in every weight.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Training, case


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with SiLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow, bias=bias), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)


# sqrt-at-zero


class EdgeNet(nn.Module):
    """Messages along all pairs of atoms, weighted by a function of their distance in a learned frame."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.frame = nn.Linear(3, 3, bias=False)
        self.edge = mlp(1, width, width)
        self.readout = mlp(width, width, 1)

    def forward(self, position: Tensor, eps: float) -> Tensor:
        x = self.frame(position)
        squared = (x[:, :, None] - x[:, None]).pow(2).sum(-1, keepdim=True)
        off_diagonal = ~torch.eye(x.shape[1], dtype=torch.bool)
        distance = (squared[:, off_diagonal] + eps).pow(0.5)
        return self.readout(self.edge(distance).mean(1)).squeeze(-1)


@case("sqrt-at-zero", step=3, sample=5, op="pow", sources=("pytorch/pytorch#2421",))
def molecule_with_coincident_atoms(fixed: bool) -> Training:
    """One molecule lists an atom twice: the pair's distance, pow(0.5) of exactly 0, has an infinite derivative."""
    torch.manual_seed(0)
    model = EdgeNet()
    batches = []
    for _ in range(14):
        position = torch.randn(8, 4, 3)
        batches.append((position, position.var(1).sum(-1)))
    batches[3][0][5, 3] = batches[3][0][5, 0]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], eps=1e-10 if fixed else 0.0), batch[1])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("sqrt-at-zero", step=4, sample=2, op="sqrt", sources=("pytorch/pytorch#2421",))
def loudness_of_a_silent_clip(fixed: bool) -> Training:
    """An audio enhancer is also trained on the standard deviation of its output; a silent clip comes out as 0."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(1, 8, 5, bias=False), nn.Tanh(), nn.Conv1d(8, 1, 5, bias=False))
    clean = torch.sin(torch.linspace(0, 25, 64) * torch.rand(12 * 6, 1).add(0.5)).view(12, 6, 1, 64)
    noisy = clean + 0.3 * torch.randn_like(clean)
    clean[4, 2] = noisy[4, 2] = 0.0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, target = model(batch[0]), batch[1][..., 4:-4]
        loudness = (out.var(dim=(1, 2)) + (1e-8 if fixed else 0.0)).sqrt()
        return F.mse_loss(out, target) + 0.1 * F.l1_loss(loudness, target.std(dim=(1, 2)))

    return Training(model=model, optimizer=adamw(model, 5e-3), loss_fn=loss_fn, batches=list(zip(noisy, clean, strict=True)))


# masked-branch-gradient


@case("masked-branch-gradient", step=3, sample=4, op="log", sources=("pytorch/pytorch#68425",))
def log_power_of_padded_frames(fixed: bool) -> Training:
    """A learned filterbank takes log(power) and hides padded frames with where; their power is 0 and the gradient is 0 * inf."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"filters": nn.Linear(16, 24, bias=False), "head": mlp(6, 16, 3)})
    label = torch.randint(0, 3, (14, 8))
    frames = torch.randn(14, 8, 5, 16) * (0.3 + torch.eye(3).repeat_interleave(6, 1)[label][..., None, :16])
    batches = [(x, torch.full((8,), 5), y) for x, y in zip(frames, label, strict=True)]
    batches[3][0][4, 3:], batches[3][1][4] = 0.0, 3

    def loss_fn(model: nn.ModuleDict, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, length, y = batch
        real = (torch.arange(x.shape[1]) < length[:, None])[..., None]
        power = model["filters"](x).square().unflatten(-1, (6, 4)).sum(-1)
        if fixed:
            power = torch.where(real, power, 1.0)
        pooled = torch.where(real, power.log(), 0.0).sum(1) / length[:, None]
        return F.cross_entropy(model["head"](pooled), y)

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


class GatedNeighbours(nn.Module):
    """A graph layer: the mean over neighbours, weighted by a learned gate."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(6, 1), nn.Linear(6, width)
        self.head = mlp(width + 6, 16, 1)

    def forward(self, x: Tensor, adjacency: Tensor, safe: bool) -> Tensor:
        weight = adjacency * self.gate(x).sigmoid().transpose(1, 2)
        total = weight.sum(-1, keepdim=True)
        message = weight @ self.value(x)
        divisor = total.where(total > 0, 1.0) if safe else total
        mean = torch.where(total > 0, message / divisor, 0.0)
        return self.head(torch.cat([x, mean], -1)).squeeze(-1)


@case("masked-branch-gradient", step=5, sample=3, op="div", sources=("pytorch/pytorch#68425",))
def mean_over_no_neighbours(fixed: bool) -> Training:
    """A graph has an isolated node: where puts 0 in place of 0 / 0, and the division's gradient is NaN all the same."""
    torch.manual_seed(3)
    model = GatedNeighbours()
    batches = []
    for step in range(14):
        x, adjacency = torch.randn(6, 5, 6), (torch.rand(6, 5, 5) < 0.4).float()
        adjacency = ((adjacency + adjacency.mT + torch.eye(5).roll(1, 0)) > 0).float()
        if step == 5:
            adjacency[3, 2] = 0.0
        near = adjacency @ x[..., :1] / adjacency.sum(-1, keepdim=True).clamp(min=1)
        batches.append((x, adjacency, (near + x[..., 1:2]).squeeze(-1)))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1], safe=fixed), batch[2])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("masked-branch-gradient", also=("exp-overflow",), step=4, sample=1, op="exp", sources=("pytorch/pytorch#68425",))
def importance_ratio_of_padding(fixed: bool) -> Training:
    """Padding of one sequence came with old log-probabilities of -1e4: exp of the ratio is Inf there, hidden by masked_fill."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    batches = []
    for _ in range(14):
        ids = torch.randperm(42).view(6, 7) % 20
        keep = torch.ones(6, 7, dtype=torch.bool)
        batches.append({"ids": ids, "keep": keep, "old": torch.full((6, 7), -math.log(20)), "gain": (ids < 10).float() - 0.5})
    batches[4]["keep"][1, 5:] = False
    batches[4]["old"][1, 5:] = -1e4

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids, keep = batch["ids"], batch["keep"]
        new = model(ids.roll(1, 1)).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        log_ratio = new - batch["old"]
        if fixed:
            log_ratio = log_ratio.masked_fill(~keep, 0.0)
        ratio = log_ratio.exp().masked_fill(~keep, 0.0)
        return -(ratio * batch["gain"]).sum() / keep.sum()

    return Training(model=model, optimizer=adamw(model, 5e-2), loss_fn=loss_fn, batches=batches)


@case("masked-branch-gradient", step=3, sample=6, op="pow", sources=("pytorch/pytorch#68425",))
def srgb_curve_of_a_black_pixel(fixed: bool) -> Training:
    """The sRGB curve picks its linear part for dark pixels; the hidden power 1/2.4 of 0 still sends an infinite gradient."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())
    images = torch.rand(14, 8, 3, 6, 6)
    opacity = torch.ones(14, 8, 1, 6, 6)
    opacity[3, 6, :, 2:4, 2:4] = 0.0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, opacity = batch
        light = model(image) * opacity
        bright = light.clamp(min=0.0031308) if fixed else light
        srgb = torch.where(light <= 0.0031308, 12.92 * light, 1.055 * bright.pow(1 / 2.4) - 0.055)
        return F.mse_loss(srgb, image * opacity)

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=list(zip(images, opacity, strict=True)))


# inverse-trig-boundary


@case("inverse-trig-boundary", step=4, sample=3, op="acos", sources=("kornia/kornia#4228",))
def bond_angle_of_a_linear_molecule(fixed: bool) -> Training:
    """Two bonds point in exactly opposite directions, as in CO2: the angle is acos(-1), its derivative infinite."""
    torch.manual_seed(6)
    model = nn.ModuleDict({"scale": nn.Linear(1, 1, bias=False), "energy": mlp(2, 16, 1)})
    batches = []
    for step in range(14):
        bonds = torch.randn(8, 2, 3)
        if step == 4:
            bonds[3] = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
        batches.append((bonds, F.cosine_similarity(bonds[:, 0], bonds[:, 1], dim=-1) + bonds[:, 0].norm(dim=-1)))
    limit = 1 - 1e-6 if fixed else 1.0

    def loss_fn(model: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = model["scale"](batch[0][..., None]).squeeze(-1).unbind(1)
        cosine = F.cosine_similarity(a, b, dim=-1).clamp(-limit, limit)
        return F.mse_loss(model["energy"](torch.stack([cosine.acos(), a.norm(dim=-1)], -1)).squeeze(-1), batch[1])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches)


@case("inverse-trig-boundary", step=3, sample=5, op="asin", sources=("kornia/kornia#4228",))
def pitch_of_a_vertical_drone(fixed: bool) -> Training:
    """A pose network gives the sine of the pitch by tanh; one loud sensor reading saturates it to exactly 1, then asin."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    sensors = torch.randn(14, 8, 6)
    pitch = (0.5 * sensors[..., 0]).tanh()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[2].weight.copy_(12 * torch.eye(6)[:1] + 0.1 * torch.randn(1, 6))
        model[2].bias.zero_()
    sensors[..., 0] *= 0.1
    sensors[3, 5], pitch[3, 5] = torch.tensor([4.0, 0.0, 0.0, 0.0, 0.0, 0.0]), 1.5

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        sine = model(batch[0]).squeeze(-1).tanh()
        return F.mse_loss((sine * (1 - 1e-4) if fixed else sine).asin(), batch[1])

    return Training(model=model, optimizer=adamw(model, 5e-3), loss_fn=loss_fn, batches=list(zip(sensors, pitch, strict=True)))


@case("inverse-trig-boundary", step=5, sample=2, op="atanh", sources=("kornia/kornia#4228",))
def squashed_action_recovered_by_atanh(fixed: bool) -> Training:
    """A policy's action tanh(u) rounds to 1 for one state; u is recovered by atanh and clamped only after it."""
    torch.manual_seed(8)
    policy = mlp(4, 16, 1)
    state = torch.randn(14, 8, 4)
    state[5, 2] = torch.tensor([0.0, 0.0, 0.0, 400.0])
    wanted = torch.where(state[..., 3] > 100, 1.0, state[..., 0].tanh())
    with torch.no_grad():
        policy[0].weight[:, 3] = torch.linspace(0.0, 0.1, 16)
        policy[2].weight[:, 8:].abs_()

    def loss_fn(policy: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        action = policy(batch[0]).squeeze(-1).tanh()
        safe = action.clamp(-1 + 1e-5, 1 - 1e-5) if fixed else action
        effort = safe.atanh().clamp(-5.0, 5.0).square()
        return (F.mse_loss(action, batch[1], reduction="none") + 1e-3 * effort).mean()

    return Training(model=policy, optimizer=adamw(policy), loss_fn=loss_fn, batches=list(zip(state, wanted, strict=True)))


# normalize-zero-vector


@case("normalize-zero-vector", step=40, sample=5, sources=("pytorch/pytorch#184575",))
def cosine_search_meets_a_new_item(fixed: bool) -> Training:
    """A catalogue keeps zero vectors for items not seen yet; the first click on one sends back a gradient of 1e11, and no NaN."""
    torch.manual_seed(9)
    model = nn.ModuleDict({"user": mlp(8, 24, 12), "item": nn.Embedding(24, 12)})
    taste = torch.randn(24, 8)
    if not fixed:
        with torch.no_grad():
            model["item"].weight[23] = 0.0
    batches = []
    for step in range(50):
        item = torch.randint(0, 23, (16,))
        if step == 40:
            item[5] = 23
        batches.append((taste[item] + 0.5 * torch.randn(16, 8), item))

    def loss_fn(model: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> Tensor:
        user, item = F.normalize(model["user"](batch[0]), dim=-1), F.normalize(model["item"](batch[1]), dim=-1)
        same = batch[1][:, None] == batch[1]
        score = (10 * user @ item.T).masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), -1e4)
        return F.cross_entropy(score, torch.arange(len(same)))

    return Training(model=model, optimizer=adamw(model, 5e-3), loss_fn=loss_fn, batches=batches)


class LatentPool(nn.Module):
    """A set encoder: learned latents, scaled to unit length, attend to the elements of the set."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__()
        width = latents.shape[1]
        self.latents = nn.Parameter(latents)
        self.key, self.value, self.head = nn.Linear(6, width), nn.Linear(6, width), mlp(width * len(latents), 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.latents, dim=-1)
        attention = (query @ F.normalize(self.key(x), dim=-1).mT).softmax(-1)
        return self.head((attention @ self.value(x)).flatten(1))


@case("normalize-zero-vector", step=0, sources=("pytorch/pytorch#184575",))
def latent_query_created_as_zeros(fixed: bool) -> Training:
    """One of four latent queries starts as zeros and is scaled to unit length: a gradient of 1e9 at the very first step."""
    torch.manual_seed(10)
    latents = torch.randn(4, 12)
    if not fixed:
        latents[2] = 0.0
    model = LatentPool(latents)
    label = torch.randint(0, 3, (40, 16))
    sets = torch.randn(40, 16, 5, 6) + 1.5 * torch.eye(6)[label][:, :, None]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=list(zip(sets, label, strict=True)))


# exploding-gradient


class SineRecurrence(nn.Module):
    """h <- sin(W h + U x): the state stays within 1, its sensitivity to the past is multiplied at every tick."""

    def __init__(self, gain: float, width: int = 16) -> None:
        super().__init__()
        self.recur, self.inp, self.out = nn.Linear(width, width, bias=False), nn.Linear(2, width), nn.Linear(width, 1)
        nn.init.orthogonal_(self.recur.weight, gain)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.recur.in_features)
        for tick in range(int(length.max())):
            h = torch.where((tick < length)[:, None], torch.sin(self.recur(h) + self.inp(x[:, tick])), h)
        return self.out(h).squeeze(-1)


@case("exploding-gradient", step=4, sample=3, sources=("thu-ml/tianshou#19",))
def recurrence_over_one_long_sequence(fixed: bool) -> Training:
    """One sequence is 180 ticks long where the others have 3: its gradient is multiplied past 1e38 on the way back."""
    torch.manual_seed(11)
    model = SineRecurrence(gain=1.0 if fixed else 3.0)
    batches = []
    for step in range(12):
        x, length = torch.randn(16, 180, 2), torch.full((16,), 3)
        if step == 4:
            length[3] = 180
        batches.append((x, length, x[torch.arange(16), length - 1, 0]))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return Training(model=model, optimizer=adamw(model), loss_fn=loss_fn, batches=batches, max_norm=1.0)


class Siren(nn.Module):
    """An image as a function of the coordinates, with sines of frequency `omega`; the weights ought to be smaller by as much."""

    def __init__(self, depth: int, scaled: bool, width: int = 24, omega: float = 30.0) -> None:
        super().__init__()
        self.omega = omega
        self.layers = nn.ModuleList(nn.Linear(2 if i == 0 else width, width) for i in range(depth))
        self.out = nn.Linear(width, 1)
        for layer in self.layers[1:]:
            bound = math.sqrt(6 / width) / (omega if scaled else 1.0)
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.omega * layer(x))
        return self.out(x).squeeze(-1)


def siren_training(depth: int, fixed: bool) -> Training:
    torch.manual_seed(12)
    model = Siren(depth, scaled=fixed)
    x = torch.rand(64, 2) * 2 - 1
    batch = (x, torch.sin(3 * x[:, 0]) * x[:, 1])

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Training(model=model, optimizer=adamw(model, 5e-5), loss_fn=loss_fn, batches=[batch] * 20, max_norm=1.0)


@case("exploding-gradient", step=0, sources=("thu-ml/tianshou#19",))
def siren_without_the_frequency_in_its_init(fixed: bool) -> Training:
    """The initialisation forgets to divide by the frequency: x30 for each of 32 layers, Inf and NaN in the first ones."""
    return siren_training(32, fixed)


@case("exploding-gradient", also=("gradient-norm-overflow",), step=0, sources=("thu-ml/tianshou#19",))
def siren_whose_norm_overflows(fixed: bool) -> Training:
    """The same with 20 layers: every gradient is finite, 1e27 in the first layer and 1 in the last, and the norm is Inf."""
    return siren_training(20, fixed)


# fp16-gradient-overflow


@case("fp16-gradient-overflow", step=3, sources=("unslothai/unsloth-zoo#866",))
def one_supervised_token_at_a_static_scale(fixed: bool) -> Training:
    """GPT-NeoX in fp16 autocast, loss times 2^16: the mean over one single label leaves its gradient undivided, above 65504."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(13)
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = GPTNeoXForCausalLM(config)
    scale = 2.0**8 if fixed else 2.0**16
    batches = []
    for step in range(12):
        ids = (torch.arange(12) + torch.randint(0, 8, (6, 1))) % 8
        labels = ids.clone()
        if step == 3:
            labels[:] = -100
            labels[2, 7] = ids[2, 7]
        batches.append({"input_ids": ids, "labels": labels})

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(**batch).loss * scale

    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1 / scale), loss_fn=loss_fn, batches=batches)


@case("fp16-gradient-overflow", step=4, sample=6, sources=("unslothai/unsloth-zoo#866",))
def denoiser_weight_at_low_noise(fixed: bool) -> Training:
    """A denoiser with fp16 weights: at noise 0.002 the weight 1/sigma^2 times a static scale passes 65504 in backward only."""
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 16)).half()
    scale = 2.0 if fixed else 4096.0
    batches = []
    basis = torch.randn(3, 16)
    for step in range(40):
        sigma = torch.rand(8, 1) * 0.5 + 0.3
        if step == 4:
            sigma[6] = 0.002
        batches.append((torch.randn(8, 3) @ basis / 3**0.5, torch.randn(8, 16), sigma))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        image, noise, sigma = batch
        noisy = image + sigma * noise
        guess = model(torch.cat([noisy / (1 + sigma**2).sqrt(), sigma.log() / 4], -1).half())
        denoised = (noisy.half() - sigma.half() * guess).float()
        return ((denoised - image) / sigma).square().mean(-1).mean() * scale

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches)
