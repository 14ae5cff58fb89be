"""One arm, trained: model, data, guard, log, validation and checkpoints put together. A guarded run that was stopped goes on from
its last good checkpoint; a run of several processes is the same code in each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from nanproof import Checkpoints, Guard, Policy, UsageError, read_incidents
from nanproof.numerics.losses import weighted_sum
from nanproof.numerics.precision import Precision, choose
from nanproof_recipes.folders import RECORDS
from nanproof_recipes.latent_dlm.arms import DAMAGED_AT, Setting
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.dataset import Pairs, Prepared
from nanproof_recipes.latent_dlm.model import diffusion
from nanproof_recipes.latent_dlm.model.diffusion import Noiser, Terms
from nanproof_recipes.latent_dlm.model.model import MMDiT, count
from nanproof_recipes.latent_dlm.train.evaluating import Measured, measure
from nanproof_recipes.latent_dlm.train.loops import Batch, DocumentLoop, GuardedLoop, Loop, OriginalLoop, PlainLoop
from nanproof_recipes.latent_dlm.train.stepping import Run, Tick, forever, rate
from nanproof_recipes.latent_dlm.train.team import Team

CHECKPOINTS = "checkpoints"


@dataclass
class Trained:
    """A model after its training, and what is known of it."""

    model: nn.Module
    """As the processes share it."""
    config: Config
    measured: Measured
    ending: str = "finished"
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """That went through the model, text and latents, in all processes."""
    skipped: int = 0
    rolled_back: int = 0
    nonfinite: int = 0
    """Parameters that are not finite at the end, of `tensors`."""
    tensors: int = 0
    memory: int | None = None
    """Bytes that torch took of the device at most."""
    incidents: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    infinite: int | None = None
    """The first step of a loop without a guard at which the norm of the gradients was Inf."""
    lost: int | None = None
    """The step since which its loss was never finite."""


class Losses:
    """The loss of a batch as the arm computes it; also what the guard calls."""

    def __init__(
        self, setting: Setting, config: Config, noiser: Noiser, precision: Precision | None, place: torch.device
    ) -> None:
        self._how, self._noiser, self._precision, self._place = setting.losses, noiser, precision, place
        self._normalized = config.loss.normalize_latents
        self.weights = {"text_loss": config.loss.text_loss_weight, "latent_loss": config.loss.latent_loss_weight}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        noised = self._noiser.draw({key: value.to(self._place, non_blocking=True) for key, value in batch.items()})
        with self._precision.autocast() if self._precision is not None else nullcontext():
            if self._how == "exact":
                return diffusion.exact(model, noised, self._normalized)
            return diffusion.original(model, noised) if self._how == "original" else diffusion.document(model, noised)

    def both(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Terms]:
        """The total as a plain loop adds it up, and its terms."""
        terms = self.terms(model, batch)
        return sum((self.weights[name] * term for name, term in terms.items()), torch.zeros((), device=self._place)), terms

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The same total; the guard finds its terms again."""
        return weighted_sum(self.terms(model, batch), self.weights)


def train(
    config: Config,
    setting: Setting,
    data: Prepared,
    folder: Path,
    team: Team | None = None,
    *,
    tick: Tick = lambda done, said: None,
    say: Callable[[str], None] = lambda line: None,
    prepare: Callable[[MMDiT], None] = lambda model: None,
) -> Trained:
    """Train one arm in its folder. That a run is halted is a result too: its ending says so.

    Args:
        config: as the arm has it; see `arms.configured`.
        say: called with each note, as soon as it is known.
        prepare: called with the new model, on its device, before it is wrapped for several processes.
    """
    team = team if team is not None else Team()
    enough(data.train, config, team)
    told: list[str] = []

    def note(line: str) -> None:
        told.append(line)
        say(line)

    if team.place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(team.place)  # an arm before this one may have taken more
    torch.manual_seed(config.training.seed)
    with torch.device(team.place):
        model = MMDiT(config.model)
    many = f" ({count(model) / 1e9:.3f} B)" if count(model) > 1e8 else ""
    note(f"model: {count(model):,} parameters{many}")
    precision = None
    if setting.weights == "bf16":
        model.to(torch.bfloat16)
        note("precision: weights and forward in bf16")
    else:
        precision = choose(model, team.place, config.training.dtype)
        note(f"precision: {precision}")
    prepare(model)
    torch.manual_seed(config.training.seed + 1 + team.rank)  # other noise on each rank
    wrapped = team.wrapped(model, config)
    pairs, said = damaged(data.train, config, setting, team)
    for line in said:
        note(line)
    noiser = Noiser(config, padded=data.train.padded or data.valid.padded)
    losses = Losses(setting, config, noiser, precision, team.place)
    optimizer = torch.optim.AdamW(
        wrapped.parameters(),
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    schedule = LambdaLR(optimizer, rate(config))
    loader = _loader(pairs, config, team)
    with ExitStack() as stack:
        loop: Loop
        guard, batches, start = None, forever(loader), 0
        if setting.loop == "guarded":
            earlier = _incidents(folder)
            guard = stack.enter_context(_guard(wrapped, optimizer, schedule, losses, config, setting, precision, folder))
            batches = forever(guard.wrap(loader))
            start = guard.resume()
            if start:
                note(f"went on from the checkpoint of step {start}; seconds are counted from there")
            loop = GuardedLoop(guard, earlier)
        else:
            kind = OriginalLoop if setting.loop == "original" else DocumentLoop
            loop = kind(wrapped, optimizer, schedule, losses.both, config)
        run = Run(
            config, team, folder, loop, batches, lambda: measure(wrapped, data.valid, noiser, config, precision, team), tick
        )
        if guard is None:
            if team.leads:
                for old in (folder / CHECKPOINTS).glob("step-*.safetensors"):  # of a run that begins again
                    old.unlink()
            run.keep = lambda step: _keep(wrapped, folder / CHECKPOINTS, step, config.training.keep_checkpoints, team)
        begun = time.perf_counter()
        ending = run.until_the_end(start)
        if team.place.type == "cuda":
            torch.cuda.synchronize(team.place)
        seconds = time.perf_counter() - begun
    bad, tensors = _nonfinite(wrapped, team)
    if isinstance(loop, PlainLoop):
        for line in loop.story():
            note(line)
    incidents = _incidents(folder) if guard is not None else []
    seen = bool(incidents) or (isinstance(loop, PlainLoop) and loop.infinite is not None)
    if said and ending == "finished" and not seen and setting.losses != "document":  # the document's clamp hides it
        note("data: the damaged sample did no harm; where its latent is given and not to be predicted, it does none")
    return Trained(
        model=wrapped,
        config=config,
        measured=run.evaluate(loop.next_step),
        ending=ending,
        steps=loop.next_step,
        seconds=seconds,
        tokens=run.tokens * team.world,
        skipped=loop.skipped,
        rolled_back=loop.back,
        nonfinite=bad,
        tensors=tensors,
        memory=torch.cuda.max_memory_allocated(team.place) if team.place.type == "cuda" else None,
        incidents=incidents,
        notes=told,
        infinite=loop.infinite if isinstance(loop, PlainLoop) else None,
        lost=loop.lost if isinstance(loop, PlainLoop) else None,
    )


def damaged(pairs: Pairs, config: Config, setting: Setting, team: Team) -> tuple[Pairs, list[str]]:
    """The data with one damaged latent, in the batch of a step in the middle of the run: of the first rank, if there are more.
    Every sample is met in the first epoch, so that step lies in it."""
    if not (setting.damaged and config.data.damaged):
        return pairs, []
    order = list(team.order(pairs, config.training.seed)) if team.rank == 0 else []
    samples = config.training.train_batch_size * config.training.gradient_accumulation_steps
    step = min(int(config.training.steps * DAMAGED_AT), max(len(order) // samples - 1, 0))
    index, step = team.share((order[step * samples], step) if order else None)
    return pairs.corrupt(index), [f"data: the latent of sample {index} is damaged; it is met at step {step}"]


def enough(pairs: Pairs, config: Config, team: Team) -> None:
    """A batch for every process, or an error."""
    size = config.training.train_batch_size
    if len(pairs) // team.world < size:
        raise UsageError(
            f"training.train_batch_size={size}: there are only {len(pairs)} windows for {team.world} processes. Give more text "
            "(data.text), or smaller batches"
        )


def _loader(pairs: Pairs, config: Config, team: Team) -> DataLoader[Batch]:
    size, pinned = config.training.train_batch_size, team.place.type == "cuda"
    return DataLoader(pairs, batch_size=size, sampler=team.order(pairs, config.training.seed), drop_last=True, pin_memory=pinned)


def _guard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    losses: Losses,
    config: Config,
    setting: Setting,
    precision: Precision | None,
    folder: Path,
) -> Guard:
    training = config.training
    return Guard(
        model,
        optimizer,
        loss_fn=losses,
        max_norm=config.optimizer.grad_clip_norm or None,
        scaler=_scaler(config, precision, next(model.parameters()).device),
        scheduler=schedule,
        policy=Policy(heal=setting.heal),
        run_dir=folder / RECORDS,
        checkpoints=Checkpoints(
            folder / CHECKPOINTS, every=training.checkpoint_every, keep=training.keep_checkpoints, prove=training.prove_steps
        ),
    )


def _scaler(config: Config, precision: Precision | None, place: torch.device) -> torch.amp.GradScaler | None:
    """`loss_scale` is divided out of the gradients again before they are clipped. fp16 finds its own scale, from there."""
    scale = config.loss.loss_scale
    if precision is not None and precision.scaler:
        return torch.amp.GradScaler(place.type) if scale == 1.0 else torch.amp.GradScaler(place.type, init_scale=scale)
    if scale == 1.0:
        return None
    return torch.amp.GradScaler(place.type, init_scale=scale, growth_interval=2**31 - 1, backoff_factor=1 - 1e-6)


def _keep(model: nn.Module, folder: Path, step: int, keep: int, team: Team) -> None:
    """The weights as they are, as a loop without a guard keeps them: nobody looks at what is in them."""
    weights = team.weights(model)
    if not team.leads:
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / f"step-{step:08d}.safetensors")
    for old in sorted(folder.glob("step-*.safetensors"))[:-keep]:
        old.unlink()


def _nonfinite(model: nn.Module, team: Team) -> tuple[int, int]:
    """Return how many parameters hold a NaN or an Inf in any process, and how many there are."""
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    flags = team.sum(torch.tensor([float(not p.isfinite().all()) for p in shards], device=team.place))
    return int((flags > 0).sum()), len(shards)


def _incidents(folder: Path) -> list[Any]:
    path = folder / RECORDS / "incidents.jsonl"
    return list(read_incidents(path)) if path.exists() else []
