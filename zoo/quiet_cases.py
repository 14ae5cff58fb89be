"""Little or nothing is learned, or it is thrown away, mostly without a NaN: losses, buffers, inputs, rates, clipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.registry import Training, case

Pair = tuple[Tensor, Tensor]


def train(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: list[Any], lr: float = 1e-2) -> Training:
    """AdamW over all parameters."""
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr), loss_fn=loss_fn, batches=batches)


def classify(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def regress(model: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def textures(steps: int, size: int = 16, classes: int = 4, noise: float = 1.0) -> list[Pair]:
    """One-channel 8x8 pictures: a fixed texture for each class, and noise."""
    texture = torch.randn(classes, 1, 8, 8)
    label = torch.randint(0, classes, (steps, size))
    return list(zip(texture[label] + noise * torch.randn(steps, size, 1, 8, 8), label, strict=True))


def small_cnn(classes: int = 4, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    first, second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
    return nn.Sequential(first, activation(), second, activation(), nn.Flatten(), nn.Linear(8 * 16, classes))


class Writer(nn.Module):
    """Logits of the next letter from a GRU."""

    def __init__(self, letters: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(letters, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(ids))[0])


def alphabet(rows: int, length: int = 9, letters: int = 12) -> Tensor:
    """Rows that run through the alphabet from a random letter."""
    return (torch.randint(0, letters, (rows, 1)) + torch.arange(length)) % letters


def next_letter(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


# loss-broadcast


@case("loss-broadcast", sources=("pytorch/pytorch#16045", "pytorch/pytorch#19699"))
def pulse_rate_with_a_spare_dimension(fixed: bool) -> Training:
    """A convolution predicts a pulse rate of shape (N, 1), the targets have shape (N): mse_loss averages over N x N pairs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 1))
    batches = []
    for _ in range(80):
        rate = torch.rand(16) * 2 - 1
        wave = torch.sin((1.5 + rate[:, None]) * torch.arange(32) + 6.3 * torch.rand(16, 1))
        batches.append((wave[:, None], rate))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        predicted = m(batch[0])
        return F.mse_loss(predicted[:, 0] if fixed else predicted, batch[1])

    return train(model, loss_fn, batches)


@case("loss-broadcast", sources=("pytorch/pytorch#16413", "Photon-AI-Research/NeuralSolvers#20"))
def temporal_difference_of_all_pairs(fixed: bool) -> Training:
    """Q-learning: gather leaves values of shape (N, 1), the targets are (N), and the squared error by hand compares all pairs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    frozen = copy.deepcopy(model)
    batches = []
    for _ in range(80):
        state, action = torch.randn(24, 6), torch.randint(0, 3, (24, 1))
        reward = 2 * state.gather(1, action)[:, 0] - 1
        with torch.no_grad():
            target = reward + 0.9 * frozen(torch.randn(24, 6)).amax(-1)
        batches.append((state, action, target))

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, action, target = batch
        value = m(state).gather(1, action)
        return (target - (value[:, 0] if fixed else value)).square().mean()

    return train(model, loss_fn, batches)


# activation-applied-twice


@case("activation-applied-twice", sources=("ariecattan/SciCo#2", "bowang-lab/Transformer-GCN-QA#32"))
def softmax_inside_the_classifier(fixed: bool) -> Training:
    """A CNN ends in a softmax and is trained with cross_entropy, which applies another: the loss cannot fall below 0.74."""
    torch.manual_seed(2)
    model = small_cnn()
    if not fixed:
        model.append(nn.Softmax(-1))
    return train(model, classify, textures(80), lr=3e-3)


class Matcher(nn.Module):
    """How well a listener and a song fit: the product of two rows, and a bias."""

    def __init__(self, squash: bool) -> None:
        super().__init__()
        self.listener, self.song, self.squash = nn.Embedding(20, 8), nn.Embedding(30, 8), squash

    def forward(self, pair: Tensor) -> Tensor:
        fit = (self.listener(pair[:, 0]) * self.song(pair[:, 1])).sum(-1)
        return fit.sigmoid() if self.squash else fit


@case("activation-applied-twice", sources=("yudi-mars/daisyRec#15", "NVIDIA-Merlin/models#1175"))
def sigmoid_before_a_loss_of_logits(fixed: bool) -> Training:
    """A recommender returns sigmoid(score) to binary_cross_entropy_with_logits: no song can be scored below one half."""
    torch.manual_seed(3)
    likes = (torch.randn(20, 3) @ torch.randn(3, 30) > 0).float()
    batches = []
    for _ in range(80):
        pair = torch.stack([torch.randint(0, 20, (64,)), torch.randint(0, 30, (64,))], -1)
        batches.append((pair, likes[pair[:, 0], pair[:, 1]]))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(batch[0]), batch[1])

    return train(Matcher(squash=not fixed), loss_fn, batches, lr=5e-2)


# accumulation-not-averaged


@case("accumulation-not-averaged", sources=("agokrani/distillKitPlus#5", "karpathy/nanoGPT#206"))
def micro_batch_losses_summed(fixed: bool) -> Training:
    """The losses of 16 micro-batches are added up and never divided: the effective rate of SGD is 16 times the written one."""
    torch.manual_seed(4)
    model = Writer()
    batches = [[alphabet(4) for _ in range(16)] for _ in range(30)]

    def loss_fn(m: nn.Module, micro: list[Tensor]) -> Tensor:
        total = sum(next_letter(m, ids) for ids in micro)
        return total / len(micro) if fixed else total

    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches)


class EveryEighth(torch.optim.SGD):
    """Steps and clears at every eighth call, as wrappers for gradient accumulation do; the calls between do nothing."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 8 == 0:
            super().step(closure)
            super().zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


@case(
    "accumulation-not-averaged",
    also=("learning-rate-too-high",),
    sources=("ApolloResearch/e2e_sae#70", "hirofumi0810/neural_sp#168"),
)
def loop_accumulates_eight_whole_losses(fixed: bool) -> Training:
    """The optimizer steps at every eighth micro-batch; the losses are not divided by 8, and the regression diverges."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    batches = [(x, x[:, :4].sum(-1)) for x in torch.randn(96, 8, 8)]

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        loss = regress(m, batch)
        return loss / 8 if fixed else loss

    return Training(model=model, optimizer=EveryEighth(model.parameters(), 0.1), loss_fn=loss_fn, batches=batches)


# uninitialized-buffer


class PlacedEncoder(nn.Module):
    """A transformer layer over a series; the table of positions is a buffer that no checkpoint holds."""

    def __init__(self, length: int = 12, width: int = 16) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        angle = torch.arange(length)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("place", torch.cat([angle.sin(), angle.cos()], -1), persistent=False)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(F.layer_norm(self.layer(self.lift(series[..., None]) + self.place), (16,)).mean(1))


@case("uninitialized-buffer", sources=("huggingface/transformers#45902", "macwiatrak/Bacformer#33"))
def position_table_left_by_to_empty(fixed: bool) -> Training:
    """A forecaster was built on the meta device: its position table holds old memory, finite and huge, and hides the series."""
    torch.manual_seed(6)
    model = PlacedEncoder()
    if not fixed:
        model.place.copy_(torch.randn(12, 16).sign() * 10 ** (torch.rand(12, 16) * 60 - 40))
    batches = []
    for _ in range(60):
        series = torch.randn(16, 12)
        batches.append((series, series[:, :4].mean(1) * 2))
    return train(model, regress, batches)


class FrozenNorm(nn.Module):
    """BatchNorm as detectors use it: stored statistics, nothing learned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, 1, 1))
        self.register_buffer("var", torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * (self.var + 1e-5).rsqrt()


@case("uninitialized-buffer", sources=("huggingface/transformers#34234", "pytorch/torchtitan#4783"))
def frozen_variance_of_old_memory(fixed: bool) -> Training:
    """The variances of a frozen norm were never loaded and are near 1e30: every feature behind it is 0; nothing is learned."""
    torch.manual_seed(7)
    model = small_cnn()
    model.insert(1, FrozenNorm(8))
    if not fixed:
        model[1].var.copy_(10 ** (28 + 4 * torch.rand(8, 1, 1)))
    return train(model, classify, textures(60), lr=3e-3)


class Rotary(nn.Module):
    """One head of attention with rotated queries and keys; predicts the letter two places back, in pieces of long texts."""

    def __init__(self, letters: int = 8, width: int = 32) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(letters, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, letters)
        self.register_buffer("inv_freq", 10 ** -torch.linspace(0, 2, width // 2), persistent=False)

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        angle = (start[:, None] + torch.arange(x.shape[1]))[..., None] * self.inv_freq
        left, right = x.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(self.rotate(q, start), self.rotate(k, start), v, is_causal=True))


@case("uninitialized-buffer", sources=("Synthyra/FastPLMs#47", "pytorch/torchtitan#4783"))
def rotary_frequencies_of_old_memory(fixed: bool) -> Training:
    """inv_freq is not in the checkpoint and was left by to_empty, at 1e-10 and far below: no position turns at all."""
    torch.manual_seed(8)
    model = Rotary()
    if not fixed:
        model.inv_freq.copy_(10 ** (30 * torch.rand(16) - 40))

    batches = [(torch.randint(0, 8, (16, 24)), torch.randint(0, 400, (16,))) for _ in range(100)]

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        ids, start = batch
        return F.cross_entropy(m(ids, start)[:, 2:].flatten(0, 1), ids[:, :-2].flatten())

    return train(model, loss_fn, batches)


# inputs-not-normalised


@case("inputs-not-normalised", sources=("www0wwwjs1/Matrix-Capsules-EM-Tensorflow#51",))
def pictures_in_bytes(fixed: bool) -> Training:
    """A CNN gets pictures as bytes, 0 to 255, at the usual rate of 1e-2: its loss is 25 at first and soon NaN."""
    torch.manual_seed(9)
    model = small_cnn(activation=nn.LeakyReLU)
    batches = []
    for picture, label in textures(60, noise=0.5):
        pixels = (128 + 40 * picture).clamp(0, 255).round()
        batches.append((pixels / 127.5 - 1 if fixed else pixels, label))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    return Training(model=model, optimizer=optimizer, loss_fn=classify, batches=batches)


@case("inputs-not-normalised", sources=("jaredleekatzman/DeepSurv#14", "alexeygrigorev/libffm-python#5"))
def income_in_whole_currency_units(fixed: bool) -> Training:
    """One column of a table is an income in the millions; with Adam at 3e-3 it drowns the other columns and the loss is huge."""
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    batches = []
    for _ in range(100):
        income = 2e6 + 1e6 * torch.randn(32, 1)
        others = torch.randn(32, 5)
        wanted = (income[:, 0] - 2e6) / 1e6 + others[:, 0]
        batches.append((torch.cat([(income - 2e6) / 1e6 if fixed else income, others], -1), wanted))
    return train(model, regress, batches, lr=3e-3)


# identical-pair


def log_prob(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of each row."""
    logp = model(ids[:, :-1]).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


@case("identical-pair")
def rejected_answers_filled_from_the_chosen_column(fixed: bool) -> Training:
    """DPO on a GRU writer: the collator reads one column twice, chosen and rejected are equal, the loss is ln 2 for ever."""
    torch.manual_seed(11)
    model = Writer()
    reference = copy.deepcopy(model).requires_grad_(False)
    batches = []
    for _ in range(40):
        chosen = alphabet(8)
        rejected = alphabet(8).flip(1)
        batches.append({"chosen": chosen, "rejected": rejected if fixed else chosen.clone()})

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        gain = {name: log_prob(m, ids) - log_prob(reference, ids) for name, ids in batch.items()}
        return -F.logsigmoid(0.5 * (gain["chosen"] - gain["rejected"])).mean()

    return train(model, loss_fn, batches, lr=3e-3)


class Judge(nn.Module):
    """A score for a text: the mean of its letters through an MLP."""

    def __init__(self, letters: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(letters, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)[:, 0]


@case("identical-pair", sources=("hamishivi/EasyLM#7",))
def answers_cut_off_by_max_length(fixed: bool) -> Training:
    """A reward model sees the first 8 letters only, which is the prompt: both answers of a pair are cut to the same text."""
    torch.manual_seed(12)
    longest = 14 if fixed else 8
    batches = []
    for _ in range(40):
        prompt = torch.randint(0, 12, (16, 8))
        good, bad = torch.randint(0, 7, (16, 6)), torch.randint(5, 12, (16, 6))
        batches.append(tuple(torch.cat([prompt, answer], 1)[:, :longest] for answer in (good, bad)))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return -F.logsigmoid(m(batch[0]) - m(batch[1])).mean()

    return train(Judge(), loss_fn, batches)


# clipping-starves


class Seasonal(nn.Module):
    """Learned waves of the time of day beside the weather; `unit` is how many seconds the clock counts as one."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        day = 2 * math.pi / 86400 * unit
        self.unit, self.frequency = unit, nn.Parameter(day * torch.arange(1.0, 5.0))
        self.net = nn.Sequential(nn.Linear(8 + 3, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, seconds: Tensor, weather: Tensor) -> Tensor:
        angle = (seconds / self.unit)[:, None] * self.frequency
        return self.net(torch.cat([angle.sin(), angle.cos(), weather], -1))[:, 0]


@case("clipping-starves", sources=("NVIDIA/Megatron-LM#5431",))
def frequencies_per_second_under_a_global_norm(fixed: bool) -> Training:
    """Learned frequencies see a clock in seconds; their gradient is 1e4 times all others, clipping to 1 leaves those none."""
    torch.manual_seed(13)
    model = Seasonal(unit=604800.0 if fixed else 1.0)
    batches = []
    for _ in range(80):
        seconds, weather = 604800 * torch.rand(32), torch.randn(32, 3)
        batches.append((seconds, weather, (2 * math.pi / 86400 * seconds).sin() + weather[:, 0]))

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0], batch[1]), batch[2])

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, max_norm=1.0)


class SoilMap(nn.Module):
    """Learned waves over a map beside a soil sample; `unit` is how many metres the coordinates count as one."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit, self.waves = unit, nn.Linear(2, 12)
        with torch.no_grad():
            self.waves.weight.mul_(6e-5 * unit)
        self.net = nn.Sequential(nn.Linear(12 + 5, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, place: Tensor, sample: Tensor) -> Tensor:
        return self.net(torch.cat([self.waves(place / self.unit).sin(), sample], -1))


@case("clipping-starves", sources=("NVIDIA/Megatron-LM#5431", "wandb/senpai#1038"))
def map_coordinates_in_metres(fixed: bool) -> Training:
    """Waves over a map of 100 km in metres: one weight's gradient owns the norm that is clipped, and the classifier starves."""
    torch.manual_seed(14)
    model = SoilMap(unit=1e5 if fixed else 1.0)
    batches = []
    for _ in range(80):
        place, sample = 1e5 * torch.rand(32, 2), torch.randn(32, 5)
        north = (place[:, 0] > 5e4).long()
        batches.append((place, sample, north + (sample[:, 0] > 0).long()))

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0], batch[1]), batch[2])

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, max_norm=1.0)


# nonfinite-weights-at-start, no-gradient-path, learning-rate-zero, learning-rate-too-high


@case("nonfinite-weights-at-start", step=0, sources=("huggingface/transformers#30953", "huggingface/transformers#30374"))
def decoder_of_old_memory(fixed: bool) -> Training:
    """The decoder of an autoencoder is missing from the checkpoint and holds old memory: finite values up to 1e37."""
    torch.manual_seed(15)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2), nn.ReLU())
    model.append(nn.ConvTranspose2d(8, 1, 2, stride=2))
    if not fixed:
        with torch.no_grad():
            garbage = torch.where(torch.rand(8, 8, 2, 2) < 0.3, 2.9e37, 0.0)
            model[2].weight.copy_(garbage * torch.randn(8, 8, 2, 2).sign())
    batches = [picture for picture, _ in textures(40, noise=0.1)]
    return train(model, lambda m, picture: F.mse_loss(m(picture), picture), batches)


class CaptionMatcher(nn.Module):
    """Two towers, pictures and words, trained to agree; `frozen` leaves the picture tower under no_grad."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.picture = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16))
        self.words = nn.EmbeddingBag(12, 16)

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        with torch.no_grad() if self.frozen else nullcontext():
            seen = self.picture(picture)
        return seen @ self.words(words).mT


@case("no-gradient-path", sources=("coqui-ai/TTS#2348",))
def picture_tower_left_under_no_grad(fixed: bool) -> Training:
    """no_grad around the picture tower is left over from an experiment; the tower is in the optimizer and never moves."""
    torch.manual_seed(16)
    model = CaptionMatcher(frozen=not fixed)
    texture = torch.randn(12, 1, 8, 8)
    batches = []
    for _ in range(60):
        thing = torch.randperm(12)[:8]
        batches.append((texture[thing] + 0.5 * torch.randn(8, 1, 8, 8), thing[:, None].expand(-1, 2)))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(m(*batch), torch.arange(8))

    return train(model, loss_fn, batches, lr=3e-3)


@case("learning-rate-zero", sources=("novioleo/FOTS#13", "amoudgl/pygoturn#16"))
def decay_per_epoch_applied_per_step(fixed: bool) -> Training:
    """A decay by 0.2 is meant for each epoch of 40 steps and happens at every step: after 25 steps the rate is 1e-20."""
    torch.manual_seed(17)
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40 if fixed else 1, gamma=0.2)
    batches = [alphabet(8) for _ in range(80)]
    return Training(model=model, optimizer=optimizer, loss_fn=next_letter, batches=batches, scheduler=schedule)


@case("learning-rate-too-high", sources=("keras-team/keras#18919", "tensorflow/tensorflow#38796"))
def regression_gone_in_ten_steps(fixed: bool) -> Training:
    """An MLP under SGD with momentum at a rate of 0.3: the loss climbs from step 5 and is Inf at step 10."""
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    batches = [(x, x[:, 0] * 2 + x[:, 1]) for x in torch.randn(40, 16, 8)]
    optimizer = torch.optim.SGD(model.parameters(), 0.02 if fixed else 0.3, momentum=0.9)
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches)


class TopicReader(nn.Module):
    """Two transformer layers over a text, and a topic."""

    def __init__(self, words: int = 20, topics: int = 4, width: int = 16) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(words, width), nn.Linear(width, topics)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.token(ids)).mean(1))


@case("learning-rate-too-high", sources=("yhenon/pytorch-retinanet#41", "BVLC/caffe#826"))
def classifier_that_settles_at_chance(fixed: bool) -> Training:
    """A transformer under AdamW at 0.3 in place of 3e-3: after some wild steps it says the same for all texts, loss ln 4."""
    torch.manual_seed(19)
    model = TopicReader()
    batches = []
    for _ in range(80):
        topic = torch.randint(0, 4, (16,))
        batches.append((torch.randint(0, 8, (16, 10)) + 4 * topic[:, None], topic))
    return train(model, classify, batches, lr=3e-3 if fixed else 0.3)


# optimizer-state-reset, tiny-std-amplification, gradients-not-cleared


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


@case("optimizer-state-reset", sources=("EvolvingLMMs-Lab/OneVision-Encoder#65", "NVlabs/stylegan2-ada-pytorch#108"))
def moments_lost_when_the_job_moved(fixed: bool) -> Training:
    """The job moves to another node after 50 steps; the weights come along, Adam's moments do not, and the loss jumps."""
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    x = torch.randn(64, 4)
    batch = (x, (x[:, 0] * x[:, 1]).tanh())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        regress(model, batch).backward()
        optimizer.step()

    def move(taken: int) -> None:
        if taken == 50 and not fixed:
            optimizer.state.clear()

    schedule = WithCallback(optimizer, move)
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=[batch] * 100, scheduler=schedule)


@case("tiny-std-amplification", step=40, sources=("NVIDIA-NeMo/RL#4158", "thinking-machines-lab/tinker-cookbook#579"))
def nearly_equal_rewards_far_from_the_baseline(fixed: bool) -> Training:
    """Advantages are taken from the batch mean and divided by each group's deviation; one group's rewards differ by 1e-6."""
    torch.manual_seed(21)
    model = Writer()
    batches = []
    for step in range(80):
        ids = alphabet(16)
        ids = torch.where(torch.rand(16, 9) < 0.5 * torch.rand(16, 1), torch.randint(0, 12, (16, 9)), ids)
        reward = (ids.diff(dim=1) % 12 == 1).float().mean(1)
        if step == 40:
            reward[4:8] = torch.tensor([0.05, 0.050001, 0.05, 0.049999])
        batches.append({"ids": ids, "reward": reward})

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        reward = batch["reward"].view(4, 4)
        spread = reward.std(1, keepdim=True)
        spread = spread.clamp(min=0.05) if fixed else spread + 1e-6
        advantage = ((reward - reward.mean()) / spread).flatten()
        logp = log_prob(m, batch["ids"]) / 8
        return -(logp * advantage).mean() - 0.5 * logp.mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Training(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=batches, max_norm=20.0)


@case("gradients-not-cleared", sources=("pytorch/pytorch#47175", "IDEA-Research/DN-DETR#19"))
def gradients_of_all_steps_added_up(fixed: bool) -> Training:
    """The loop has no zero_grad: each update carries the gradients of all steps before it, the loss swings ever higher."""
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    batches = [(x, x[:, 0] - 0.5 * x[:, 1]) for x in torch.randn(60, 16, 6)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Training(model=model, optimizer=optimizer, loss_fn=regress, batches=batches, own_loop=not fixed)
