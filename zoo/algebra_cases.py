"""One operation outside its domain: powers, logarithms, decompositions, 0 times Inf, kernels that write only part of a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from zoo.registry import Training, case

Pair = tuple[Tensor, Tensor]


def train(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: list[Any], lr: float = 1e-2) -> Training:
    """AdamW over all parameters."""
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr), loss_fn=loss_fn, batches=batches)


# power-of-negative


@case("power-of-negative", step=6, sample=4, op="pow", sources=("pytorch/pytorch#75405",))
def gamma_correction_of_a_dark_picture(fixed: bool) -> Training:
    """A network clears haze in linear light and is scored after gamma correction; on a black picture it dips below 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
    nn.init.zeros_(model[2].weight)
    batches = []
    for step in range(30):
        clean = 0.6 + 0.2 * torch.rand(8, 1, 8, 8)
        if step == 6:
            clean[4] = 0.0
        batches.append((clean + 0.15 + 0.1 * torch.randn_like(clean), clean))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        hazy, clean = batch
        light = hazy + m(hazy)
        if fixed:
            light = light.clamp(min=1e-3)
        return F.mse_loss(light ** (1 / 2.2), clean ** (1 / 2.2))

    return train(model, loss_fn, batches)


class GeneralisedMean(nn.Module):
    """A convolution whose features are pooled as the p-th root of the mean p-th power; p is learned and starts at 3."""

    def __init__(self, positive: bool) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 12, 3), nn.Linear(12, 4)
        self.p, self.positive = nn.Parameter(torch.tensor(3.0)), positive

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x)
        if self.positive:
            features = features.clamp(min=1e-3)
        mean = features.pow(self.p).mean((2, 3))
        return self.head(mean.abs().clamp(min=1e-6).pow(1 / self.p))


@case("power-of-negative", step=0, op="pow", sources=("pytorch/pytorch#29518", "pytorch/pytorch#131039"))
def pooling_exponent_is_learned(fixed: bool) -> Training:
    """GeM pooling without its clamp: negative features have cubes, but the gradient of the exponent is their logarithm: NaN."""
    torch.manual_seed(1)
    tint = torch.randn(4, 3, 1, 1)
    batches = []
    for _ in range(40):
        label = torch.randint(0, 4, (16,))
        batches.append((tint[label] + torch.randn(16, 3, 6, 6), label))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return train(GeneralisedMean(positive=fixed), loss_fn, batches)


@case("power-of-negative", step=7, sample=5, op="log1p", sources=("scikit-learn/scikit-learn#18477",))
def log_error_of_a_negative_forecast(fixed: bool) -> Training:
    """A sales forecaster is scored by the squared logarithmic error; a returned order makes one forecast fall below -1."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    nn.init.constant_(model[2].bias, 2.0)
    batches = []
    for step in range(40):
        x = torch.rand(12, 4)
        sales = 1 + 2 * x[:, 0] + x[:, 1]
        if step == 7:
            x[5] = torch.tensor([-30.0, -30.0, 1.0, 1.0])
        batches.append((x, sales))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        forecast = m(batch[0])[:, 0]
        if fixed:
            forecast = forecast.clamp(min=0.0)
        return (forecast.log1p() - batch[1].log1p()).square().mean()

    return train(model, loss_fn, batches)


# label-smoothing-over-masked-logits


@case("label-smoothing-over-masked-logits", step=5, sample=3, op="cross_entropy", sources=("candle-org/MindAct#1633",))
def smoothed_policy_with_illegal_moves(fixed: bool) -> Training:
    """A policy clones an expert with label smoothing; one position forbids moves by -inf, and smoothing averages them in."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 6))
    batches = []
    for step in range(30):
        board = torch.randn(10, 8)
        legal = torch.ones(10, 6, dtype=torch.bool)
        if step >= 5:
            legal[3, 4:] = False
        move = board[:, :6].masked_fill(~legal, -9.0).argmax(-1)
        batches.append({"board": board, "legal": legal, "move": move})

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = m(batch["board"]).masked_fill(~batch["legal"], -math.inf)
        return F.cross_entropy(logits, batch["move"], label_smoothing=0.0 if fixed else 0.1)

    return train(model, loss_fn, batches)


class Writer(nn.Module):
    """Logits of the next letter from an LSTM."""

    def __init__(self, letters: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(letters, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def alphabet(rows: int, length: int = 9, letters: int = 10) -> Tensor:
    """Rows that run through the alphabet from a random letter."""
    return (torch.randint(0, letters, (rows, 1)) + torch.arange(length)) % letters


@case("label-smoothing-over-masked-logits", step=0, sources=("facebookresearch/pytext#1698", "sooftware/kospeech#37"))
def smoothing_by_hand_over_suppressed_letters(fixed: bool) -> Training:
    """A speech writer never emits its two control letters: logits -inf. The mean log-probability of all letters is -inf too."""
    torch.manual_seed(4)
    hidden = torch.tensor([10, 11])

    def loss_fn(m: nn.Module, ids: Tensor) -> Tensor:
        logits = m(ids[:, :-1]).index_fill(-1, hidden, -math.inf)
        logp = logits.log_softmax(-1)
        right = logp.gather(-1, ids[:, 1:, None])[..., 0]
        uniform = logp[..., :10].mean(-1) if fixed else logp.mean(-1)
        return -(0.9 * right + 0.1 * uniform).mean()

    return train(Writer(), loss_fn, [alphabet(8) for _ in range(30)])


# degenerate-decomposition


class Registration(nn.Module):
    """Match two scans: a network corrects the points of one, and an SVD gives the best rotation onto the other."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.correct = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 3, bias=False))
        self.spread = spread

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source = source + self.correct(source)
        source, target = (cloud - cloud.mean(1, keepdim=True) for cloud in (source, target))
        product = source.mT @ target / source.shape[1]
        if self.spread:
            product = product + torch.diag(torch.tensor([3e-2, 2e-2, 1e-2]))
        u, _, vh = torch.linalg.svd(product)
        return source @ (u @ vh)


@case("degenerate-decomposition", step=5, sample=6, op="svd", sources=("pytorch/pytorch#49886",))
def scan_with_a_single_return(fixed: bool) -> Training:
    """Registration by SVD: a scan of one repeated point is 0 after centring, its singular values are equal, backward is NaN."""
    torch.manual_seed(5)
    batches = []
    for step in range(30):
        target = torch.randn(8, 24, 3) * torch.tensor([2.0, 1.0, 0.5])
        turn = torch.linalg.qr(torch.eye(3) + 0.3 * torch.randn(8, 3, 3))[0]
        source = target @ turn + 0.4 * target.square()
        if step == 5:
            source[6] = source[6, :1].clone()
            target[6] = target[6, :1].clone()
        batches.append((source, target))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        target = batch[1] - batch[1].mean(1, keepdim=True)
        return F.mse_loss(m(*batch), target)

    return train(Registration(spread=fixed), loss_fn, batches)


class CovarianceNet(nn.Module):
    """Learned mixtures of electrodes, their covariance, its matrix logarithm through eigh, a class."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(6, 4, bias=False), nn.Linear(16, 2)
        floor = torch.linspace(1.0, 2.0, 4) if spread else torch.ones(4)
        self.register_buffer("floor", torch.diag(1e-2 * floor))

    def forward(self, trial: Tensor) -> Tensor:
        signal = self.mix(trial)
        covariance = signal.mT @ signal / trial.shape[1] + self.floor
        values, vectors = torch.linalg.eigh(covariance)
        return self.head(((vectors * values.log()[:, None]) @ vectors.mT).flatten(1))


@case("degenerate-decomposition", step=8, sample=2, op="eigh", sources=("XanaduAI/GradDFT#35", "KinglittleQ/torch-batch-svd#5"))
def trial_with_the_electrodes_unplugged(fixed: bool) -> Training:
    """The matrix logarithm of an EEG covariance: a flat trial leaves a multiple of the identity, and eigh's backward is NaN."""
    torch.manual_seed(6)
    batches = []
    for step in range(40):
        label = torch.randint(0, 2, (12,))
        loud = torch.where(label[:, None] == 0, torch.tensor([2.0, 1, 1, 1, 1, 1]), torch.tensor([1.0, 1, 1, 1, 1, 2]))
        trial = torch.randn(12, 32, 6) * loud[:, None]
        if step == 8:
            trial[2] = 0.0
        batches.append((trial, label))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return train(CovarianceNet(spread=fixed), loss_fn, batches)


# infinite-term-with-weight-0


class TwoHeads(nn.Module):
    """A class and a depth for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.ReLU())
        self.kind, self.depth = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(picture)
        return self.kind(h), F.softplus(self.depth(h))[:, 0]


@case("infinite-term-with-weight-0", step=6, sample=7, sources=("bigscience-workshop/metadata#193",))
def depth_task_switched_off(fixed: bool) -> Training:
    """The depth loss of a two-task network has weight 0; a picture without a depth makes that term Inf, and 0 * Inf is NaN."""
    torch.manual_seed(7)
    weights = {"kind": 1.0, "depth": 0.0}
    shape = torch.randn(3, 1, 8, 8)
    batches = []
    for step in range(30):
        label = torch.randint(0, 3, (12,))
        depth = 1 + torch.rand(12)
        if step == 6:
            depth[7] = 0.0
        batches.append({"picture": shape[label] + torch.randn(12, 1, 8, 8), "label": label, "depth": depth})

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kind, depth = m(batch["picture"])
        terms = {"kind": F.cross_entropy(kind, batch["label"]), "depth": (depth.log() - batch["depth"].log()).abs().mean()}
        return sum(weights[name] * term for name, term in terms.items() if weights[name] or not fixed)

    return train(TwoHeads(), loss_fn, batches)


@case(
    "infinite-term-with-weight-0", step=9, sample=11, sources=("bigscience-workshop/metadata#193", "facebookresearch/pytext#1698")
)
def kl_penalty_with_beta_zero(fixed: bool) -> Training:
    """Policy gradients with beta = 0 still compute the KL penalty; one stale reference log-prob makes it Inf: 0 times Inf."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))
    beta = 0.0
    batches = []
    for step in range(40):
        state, action = torch.randn(16, 6), torch.randint(0, 4, (16,))
        reference = torch.full((16,), 0.25).log()
        if step == 9:
            reference[11] = 120.0
        batches.append({"state": state, "action": action, "reference": reference, "good": state[:, :4].argmax(-1) == action})

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logp = m(batch["state"]).log_softmax(-1).gather(1, batch["action"][:, None])[:, 0]
        loss = -(logp * batch["good"]).mean()
        if beta or not fixed:
            ahead = batch["reference"] - logp
            loss = loss + beta * (ahead.exp() - ahead - 1).mean()
        return loss

    return train(model, loss_fn, batches)


# custom-kernel-uninitialised-output


def used_memory(like: Tensor) -> Tensor:
    """torch.empty_like as it looks when the allocator hands back used memory: here always NaN, by torch's deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return torch.empty_like(like)
    finally:
        torch.use_deterministic_algorithms(before)


class BlockedGELU(torch.autograd.Function):
    """GELU in blocks of four rows; `whole` says whether the rows after the last full block are computed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(x)
        out = used_memory(x)
        last = len(x) if whole else len(x) // 4 * 4
        for start in range(0, last, 4):
            out[start : start + 4] = F.gelu(x[start : start + 4])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        bell = (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
        return grad * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * bell), None


class KernelMLP(nn.Module):
    """A classifier that uses the blocked kernel."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.second, self.whole = nn.Linear(6, 24), nn.Linear(24, 3), whole

    def forward(self, x: Tensor) -> Tensor:
        return self.second(BlockedGELU.apply(self.first(x), self.whole))


@case("custom-kernel-uninitialised-output", step=7, sources=("pytorch/helion#1672", "pytorch/pytorch#1347"))
def kernel_skips_the_last_partial_block(fixed: bool) -> Training:
    """A custom GELU works in blocks of four rows; a batch of 14 leaves two rows of its output as torch.empty made them."""
    torch.manual_seed(9)
    batches = []
    for step in range(30):
        x = torch.randn(14 if step == 7 else 16, 6)
        batches.append((x, x[:, :3].argmax(-1)))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return train(KernelMLP(whole=fixed), loss_fn, batches)


class Gather(torch.autograd.Function):
    """Rows of a table by id; backward adds up the gradient of the rows that were used."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, clear: bool) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.clear = clear
        return table[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, ids = ctx.saved_tensors
        out = torch.zeros_like(table) if ctx.clear else used_memory(table)
        out[ids.unique()] = 0.0
        return out.index_add(0, ids.flatten(), grad.flatten(0, -2)), None, None


class Taste(nn.Module):
    """The mean of the rows of what somebody listened to, and a linear score."""

    def __init__(self, clear: bool) -> None:
        super().__init__()
        self.table, self.score, self.clear = nn.Parameter(torch.randn(40, 8)), nn.Linear(8, 1), clear

    def forward(self, ids: Tensor) -> Tensor:
        return self.score(Gather.apply(self.table, ids, self.clear).mean(1))[:, 0]


@case("custom-kernel-uninitialised-output", step=0, sources=("pytorch/helion#1672", "pytorch/executorch#6478"))
def gradient_of_rows_nobody_asked_for(fixed: bool) -> Training:
    """A custom gather allocates the gradient of its table by torch.empty and fills in only the rows that the batch used."""
    torch.manual_seed(10)
    worth = torch.randn(40)
    batches = [(ids, worth[ids].mean(1)) for ids in torch.randint(0, 30, (40, 24, 4))]
    return train(Taste(clear=fixed), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), batches, lr=3e-2)


# zero-denominator, fp16-activation-overflow, log-of-zero, sqrt-at-zero, normalize-zero-vector


@case("zero-denominator", step=0, op="weight_norm", sources=("KohakuBlueleaf/LyCORIS#166", "google/flax#1671"))
def weight_norm_on_a_pruned_filter(fixed: bool) -> Training:
    """A causal convolution was pruned, then given weight norm: a filter of zeros has length 0, and its weight is 0 / 0."""
    torch.manual_seed(11)
    filters = nn.Conv1d(1, 8, 3)
    if not fixed:
        with torch.no_grad():
            filters.weight[5] = 0.0
    model = nn.Sequential(weight_norm(filters), nn.ReLU(), weight_norm(nn.Conv1d(8, 8, 3, dilation=2)), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(8 * 10, 1))
    batches = []
    for _ in range(30):
        wave = torch.sin(torch.arange(17) * 0.5 + 6.3 * torch.rand(12, 1))
        batches.append((wave[:, None, :16], wave[:, 16]))
    return train(model, lambda m, batch: F.mse_loss(m(batch[0])[:, 0], batch[1]), batches)


class HalfRMSNorm(nn.Module):
    """x / sqrt(mean(x²)), with the squares in the type of x unless `upcast`."""

    def __init__(self, width: int, upcast: bool) -> None:
        super().__init__()
        self.weight, self.upcast = nn.Parameter(torch.ones(width)), upcast

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() if self.upcast else x
        return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).float() * self.weight


class SpectrumTagger(nn.Module):
    """Half-precision power spectra through an RMSNorm into a small classifier."""

    def __init__(self, upcast: bool) -> None:
        super().__init__()
        self.norm = HalfRMSNorm(20, upcast)
        self.net = nn.Sequential(nn.Linear(20, 24, bias=False), nn.SiLU(), nn.Linear(24, 4, bias=False))
        self.lift = nn.Linear(20, 20, bias=False)

    def forward(self, spectrum: Tensor) -> Tensor:
        return self.net(self.norm(self.lift(spectrum).half()))


@case("fp16-activation-overflow", sources=("pytorch/pytorch#133085", "xlite-dev/LeetCUDA#335"))
def squares_of_a_loud_spectrum(fixed: bool) -> Training:
    """RMSNorm squares fp16 values near 1000: the mean square is Inf, 1 / Inf is 0, and the network sees zeros for ever."""
    torch.manual_seed(12)
    tone = torch.randn(4, 20)
    batches = []
    for _ in range(60):
        label = torch.randint(0, 4, (16,))
        batches.append((1000 * (tone[label] + 0.5 * torch.randn(16, 20)), label))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return train(SpectrumTagger(upcast=fixed), loss_fn, batches)


@case("log-of-zero", step=6, sample=1, sources=("p-e-w/heretic#348", "google-deepmind/optax#1786"))
def teacher_with_suppressed_letters(fixed: bool) -> Training:
    """Distillation by kl_div with log targets: the teacher rules letters out for one text, and exp(-inf) * -inf is NaN."""
    torch.manual_seed(13)
    batches = []
    for step in range(30):
        ids = alphabet(6)
        teacher = 4.0 * F.one_hot(ids[:, 1:], 12).float() + 0.3 * torch.randn(6, 8, 12)
        allowed = torch.ones(6, 1, 12, dtype=torch.bool)
        if step == 6:
            allowed[1, :, 10:] = False
        batches.append((ids[:, :-1], teacher, allowed))

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, teacher, allowed = batch
        teacher = teacher.masked_fill(~allowed, -math.inf)
        student = m(ids).log_softmax(-1)
        if fixed:
            return F.kl_div(student, teacher.softmax(-1), reduction="batchmean") / 8
        return F.kl_div(student, teacher.log_softmax(-1), reduction="batchmean", log_target=True) / 8

    return train(Writer(), loss_fn, batches)


class PitchNet(nn.Module):
    """A pitch contour, normalised over time by hand: the spread is a root, and an eps is added to it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.net = inside, nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, clip: Tensor) -> Tensor:
        pitch = self.net(clip)[..., 0]
        variance = pitch.var(1, keepdim=True)
        spread = (variance + 1e-4).sqrt() if self.inside else variance.sqrt() + 1e-2
        return (pitch - pitch.mean(1, keepdim=True)) / spread


@case("sqrt-at-zero", step=8, sample=3, op="sqrt", sources=("pytorch/pytorch#4320", "keras-team/keras#2960"))
def contour_of_a_silent_clip(fixed: bool) -> Training:
    """Contours are divided by their deviation plus eps; a silent clip is flat: eps saves the loss, not the root's gradient."""
    torch.manual_seed(14)
    batches = []
    for step in range(40):
        clip = torch.randn(8, 16, 3)
        if step == 8:
            clip[3] = 0.0
        contour = 2 * clip[..., 0] + clip[..., 1]
        batches.append((clip, contour / 2.2))
    return train(PitchNet(inside=fixed), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), batches)


class Speakers(nn.Module):
    """Compares a voice with the row of the speaker it should belong to."""

    def __init__(self, speakers: int = 8, width: int = 16) -> None:
        super().__init__()
        self.voice = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, width))
        self.rows = nn.Parameter(torch.randn(speakers, width))

    def forward(self, voice: Tensor, speaker: Tensor) -> Tensor:
        return F.cosine_similarity(self.voice(voice), self.rows[speaker], dim=-1)


@case("normalize-zero-vector", step=9, sample=2, sources=("pytorch/pytorch#184575", "tensorflow/tensorflow#56305"))
def speaker_enrolled_with_a_row_of_zeros(fixed: bool) -> Training:
    """A new speaker's row is 0 until first used: the gradient of cosine_similarity there is divided by 1e-8, with no NaN."""
    torch.manual_seed(15)
    model = Speakers()
    if not fixed:
        with torch.no_grad():
            model.rows[7] = 0.0
    tone = torch.randn(8, 10)
    batches = []
    for step in range(40):
        speaker = torch.randint(0, 7, (12,))
        if step == 9:
            speaker[2] = 7
        elif step > 9:
            speaker[::4] = 7
        same = torch.rand(12) < 0.5
        same[2] = same[2] | (step == 9)
        heard = speaker.where(same, (speaker + torch.randint(1, 8, (12,))) % 8)
        batches.append((tone[heard] + 0.3 * torch.randn(12, 10), speaker, same.float()))

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0], batch[1]), batch[2])

    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.5), loss_fn=loss_fn, batches=batches)
