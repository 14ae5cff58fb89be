"""What `tools.optimizers` checks of one optimizer, each against a run that never sees anything bad.

Exact means equal bit for bit: every weight, buffer and number of the optimizer, including its
attributes and the parts of tensor subclasses, with no NaN among them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

import nanproof
from tools.optimizer_list import LR, Entry, small_llama, training_arguments

STEPS, BAD, POISONED, KILLED = 12, 5, 7, 10
"""Good batches of a run, and the steps before which a bad batch, a poisoning and a kill come."""

Batch = dict[str, Tensor]
Numbers = dict[str, Any]


class Training:
    """A model and its optimizer, trained with or without a guard."""

    def __init__(self, entry: Entry, seed: int = 0, **size: int) -> None:
        self.kind = entry.kind
        self.model = small_llama(seed=seed, **size)
        self.optimizer = entry.build(self.model)
        layers = getattr(self.optimizer, "optimizer_dict", None)  # transformers' stand-in for one optimizer per layer
        self.members = list(layers.values()) if layers else _as_list(self.optimizer)
        for member in self.members:
            if hasattr(member, "train"):
                member.train()  # schedule-free optimizers refuse to step otherwise

    def guard(self, **settings: Any) -> nanproof.Guard:
        given = self.members if len(self.members) > 1 else self.members[0]
        policy = settings.pop("policy", nanproof.Policy())
        if self.kind == "fused_backward":  # nothing shows that weights move, so it must be said
            policy = dataclasses.replace(policy, copy=True)
        return nanproof.Guard(self.model, given, loss_fn=loss_fn, policy=policy, **settings)

    def backward(self, batch: Batch) -> Tensor:
        """Clear the gradients, then compute new ones."""
        for member in self.members:
            member.zero_grad()
        loss = loss_fn(self.model, batch)
        if self.kind == "fused_backward":
            self.members[0].fused_backward(loss, LR)
        else:
            loss.backward()
        return loss

    def step(self, batch: Batch, guard: nanproof.Guard | None = None) -> None:
        """Take one step in your own loop."""
        if "closure" in self.kind:
            if self.kind == "gradient, then closure":
                self.backward(batch)
            take = self.members[0].step if guard is None else guard.step
            take(closure=lambda: self.backward(batch))
            return
        loss = self.backward(batch)
        if guard is not None:
            guard.step(loss)
        elif self.kind == "plain":
            for member in self.members:
                member.step()

    def run(self, guard: nanproof.Guard, batches: Iterable[Batch], whole: bool = False) -> None:
        """Train on all batches: with `train_step` if `whole`, else with `guard.step`."""
        for batch in batches:
            if whole and "backward" not in self.kind:
                guard.train_step(batch)
            else:
                self.step(batch, guard)

    def numbers(self) -> Numbers:
        return numbers_of(self.model, [self.optimizer, self.members])


def _as_list(item: Any) -> list[Any]:
    return item if isinstance(item, list) else [item]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def batches(bad: bool = False) -> list[Batch]:
    """Return the good batches, with one whose loss is NaN among them if `bad`."""
    tokens = torch.randint(0, 64, (STEPS + 1, 2, 8), generator=torch.Generator().manual_seed(1))
    every = [{"input_ids": t, "labels": t, "scale": torch.ones(2)} for t in tokens]
    every[BAD]["scale"] = torch.full((2,), math.nan)
    return every if bad else every[:BAD] + every[BAD + 1 :]


def numbers_of(model: nn.Module, optimizers: Any) -> Numbers:
    names = {id(p): name for name, p in model.named_parameters()}
    return dict(walk({"weights": model.state_dict(), "optimizer": optimizers}, "", names, set()))


def walk(item: Any, path: str, names: Mapping[int, str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield every tensor, number and setting below an item, with its path."""
    if isinstance(item, Tensor):
        if hasattr(item, "__tensor_flatten__"):
            for inner in item.__tensor_flatten__()[0]:
                yield from walk(getattr(item, inner), f"{path}.{inner}", names, seen)
        else:
            yield path, item.detach()
    elif isinstance(item, (bool, int, float, str, torch.dtype, torch.device, type(None))):
        yield path, item
    elif isinstance(item, (nn.Module, type)) or callable(item) or id(item) in seen:
        return
    elif isinstance(item, Mapping):
        for key, value in item.items():
            if key != "params":  # those are the model's
                name = names.get(id(key), "tensor") if isinstance(key, Tensor) else key
                yield from walk(value, f"{path}.{name}", names, seen)
    elif isinstance(item, (list, tuple, set, frozenset)) or hasattr(item, "popleft"):
        for i, value in enumerate(item):
            yield from walk(value, f"{path}[{i}]", names, seen)
    elif hasattr(item, "__dict__"):
        seen.add(id(item))
        # Not hooks and warnings given, nor the registries of bitsandbytes, which are keyed by addresses of parameters.
        own = {k: v for k, v in vars(item).items() if not re.search(r"hook|profile|warned|_opt_called|^(page_)?mng$", k)}
        yield from walk(own, path, names, seen)


def difference(got: Numbers, wanted: Numbers) -> str:
    """Return "yes" if both are equal bit for bit and finite, else "no: " and the first difference."""
    for path in sorted(got.keys() ^ wanted.keys()):
        return f"no: {path} is {'not expected' if path in got else 'missing'}"
    for path, value in got.items():
        other = wanted[path]
        if not isinstance(value, Tensor):
            if value != other:
                return f"no: {path} is {value!r}, expected {other!r}"
        elif value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
            return f"no: {path} is not finite"
        elif not isinstance(other, Tensor) or not torch.equal(_plain(value), _plain(other)):
            return f"no: {path} differs"
    return "yes"


def _plain(value: Tensor) -> Tensor:
    """Return the bytes of an 8-bit float, which `torch.equal` does not compare."""
    return value.view(torch.uint8) if value.is_floating_point() and value.element_size() == 1 else value


def healthy(entry: Entry) -> Numbers:
    """Return the end of a guarded run that never sees anything bad: the oracle."""
    training = Training(entry)
    start = {name: p.clone() for name, p in training.model.state_dict().items()}
    with training.guard() as guard:
        training.run(guard, batches())
    if all(torch.equal(start[name], p) for name, p in training.model.state_dict().items()):
        raise RuntimeError("the guarded run changed no weight")
    return training.numbers()


def unchanged(entry: Entry, oracle: Numbers) -> str:
    """Does a healthy run that is not clipped end as it does without a guard, with no incident?"""
    plain, training = Training(entry), Training(entry)
    for batch in batches():
        plain.step(batch)
    with training.guard(max_norm=None, policy=nanproof.Policy(switch_to_fused=False)) as guard:
        training.run(guard, batches())
    if guard.incidents:
        return f"no: incident in a healthy run: {guard.incidents[0]}"
    return difference(_without_form(training.numbers()), _without_form(plain.numbers()))


def _without_form(numbers: Numbers) -> Numbers:
    """Drop the flags for the form of the optimizer, which the guard fills in where they are unset."""
    return {path: value for path, value in numbers.items() if not path.endswith((".fused", ".foreach", "_amp_scaling"))}


def refused(entry: Entry, oracle: Numbers) -> str:
    """Does a run over a bad batch end as if it had never seen it, with `step` and with `train_step`?"""
    for whole in (False, True):
        training = Training(entry)
        with training.guard() as guard:
            training.run(guard, batches(bad=True), whole)
        skipped = [i.step for i in guard.incidents if i.action == "skipped"]
        if skipped != [BAD]:
            return f"no: skipped steps {skipped}, expected [{BAD}]"
        if (verdict := difference(training.numbers(), oracle)) != "yes":
            return verdict
    return "yes"


def poison_weight(training: Training) -> bool:
    next(p for p in training.model.parameters() if p.requires_grad).data.view(-1)[0] = math.nan
    return True


def poison_moment(training: Training) -> bool:
    """Overwrite one number of the optimizer's state with NaN. Returns False if it has no state."""
    for path, value in walk(training.members, "", {}, set()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1 and "qmap" not in path:
            value.view(-1)[:1] = torch.full((1,), math.nan).to(value.dtype)
            return True
    return False


def rolled_back(entry: Entry, oracle: Numbers, poison: Callable[[Training], bool]) -> str:
    """Does a run whose state is poisoned between two steps end as if that had never happened?"""
    training, poisoned = Training(entry), None
    with training.guard(policy=nanproof.Policy(snapshot_every=3)) as guard:
        for batch in guard.wrap(batches()):
            if guard.next_step == POISONED and poisoned is None:
                poisoned = poison(training)
            training.run(guard, [batch], whole=True)
    if not poisoned:
        return "no state"
    verdict = difference(training.numbers(), oracle)
    went_back = any(i.action == "rewound" for i in guard.incidents)
    return verdict if verdict == "yes" or went_back else f"{verdict}; the run did not go back"


def rolled_back_weight(entry: Entry, oracle: Numbers) -> str:
    return rolled_back(entry, oracle, poison_weight)


def rolled_back_moment(entry: Entry, oracle: Numbers) -> str:
    return rolled_back(entry, oracle, poison_moment)


class Warnings(logging.Handler):
    """Keeps the last warning."""

    last = "no warning"

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.last = record.getMessage()


def resumed(entry: Entry, oracle: Numbers) -> str:
    """Does a new process continue a killed run as if it had never stopped?"""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = nanproof.Checkpoints(folder, every=3, prove=2, background=False)

        def killed_run() -> None:
            log = Warnings()
            logging.getLogger("nanproof").addHandler(log)
            try:
                training = Training(entry)
                guard = training.guard(checkpoints=checkpoints)
                for batch in guard.wrap(batches()):
                    if guard.next_step < KILLED:
                        training.run(guard, [batch], whole=True)
                writer.send(("", log.last))
            except BaseException as error:
                writer.send((line_of(error), ""))
            os.kill(os.getpid(), signal.SIGKILL)

        process = multiprocessing.get_context("fork").Process(target=killed_run)
        process.start()
        process.join()
        crash, warning = reader.recv() if reader.poll() else (f"crash: exit status {process.exitcode}", "")
        if crash:
            return crash
        training = Training(entry, seed=1)  # other weights: all of them have to come from the checkpoint
        with training.guard(checkpoints=checkpoints) as guard:
            loader = guard.wrap(batches())
            if guard.resume() == 0:
                return f"no: no good checkpoint was saved; {warning}"
            training.run(guard, loader, whole=True)
        return difference(training.numbers(), oracle)


def train_protected(entry: Entry, bad: bool) -> tuple[Numbers, list[str]]:
    """Run a real Trainer under `protect`. Return how it ends, and what was done about each incident."""
    rows = [{key: value[i] for key, value in batch.items()} for batch in batches(bad) for i in range(2)]
    model = small_llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(
            entry.name,
            folder,
            max_steps=len(rows) // 2,
            per_device_train_batch_size=2,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=BAD + 3,  # the bad batch comes while the learning rate climbs
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        run = nanproof.protect(trainer)
        trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return numbers_of(model, optimizer), [incident.action for incident in run.incidents]


def protected(entry: Entry, oracle: Numbers) -> str:
    """Is the bad batch refused exactly in a real Trainer under `protect`?"""
    wanted, quiet = train_protected(entry, bad=False)
    got, actions = train_protected(entry, bad=True)
    if quiet or actions != ["skipped"]:
        return f"no: incidents {actions}, in the healthy run {quiet}"
    return difference(got, wanted)


def cost(entry: Entry, rounds: int = 9, seconds: float = 15.0) -> float:
    """Return the median ratio of `guard.step` to `clip_grad_norm_` and `optimizer.step`.

    If the optimizer computes gradients itself, or steps inside backward, both sides include
    forward and backward, and only the guarded side clips.
    """
    size = {"hidden": 256, "intermediate": 256, "layers": 8}
    plain, guarded = Training(entry, **size), Training(entry, **size)
    guard = guarded.guard()
    batch, loss = batches()[0], torch.tensor(2.0)
    gradients: list[Tensor | None] = [None] * len(list(plain.model.parameters()))
    if entry.kind == "plain":
        plain.backward(batch)
        gradients = [p.grad for p in plain.model.parameters()]
    sparse = any(gradient is not None and gradient.is_sparse for gradient in gradients)

    def clip_and_step() -> None:
        if entry.kind == "plain":
            if not sparse:  # clip_grad_norm_ refuses sparse gradients
                clip_grad_norm_(plain.model.parameters(), 1.0)
            for member in plain.members:
                member.step()
        else:
            plain.step(batch)

    def guarded_step() -> None:
        if entry.kind == "plain":
            guard.step(loss)
        else:
            guarded.step(batch, guard)

    def seconds_of(training: Training, take: Callable[[], None]) -> float:
        for p, gradient in zip(training.model.parameters(), gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        begin = time.perf_counter()
        take()
        return time.perf_counter() - begin

    ratios, start = [], time.perf_counter()
    for i in range(rounds + 2):
        before = seconds_of(guarded, guarded_step) if i % 2 else None
        base = seconds_of(plain, clip_and_step)
        measured = before if before is not None else seconds_of(guarded, guarded_step)
        if i >= 2:  # the first two create state, and compile where the optimizer does
            ratios.append(measured / base)
        if len(ratios) >= 3 and time.perf_counter() - start > seconds:
            break
    guard.close()
    return round(statistics.median(ratios), 2)


def line_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"crash: {type(error).__name__}: {lines[0] if lines else ''}"[:300]
