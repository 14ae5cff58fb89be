"""Press Ctrl-C at thousands of moments: is the run whole afterwards, and does it go on as if nothing had happened?

python -m zoo.interrupts --interrupts 2000

Each trial trains a small model through a few calls of the guard and interrupts one of them with SIGINT: at a random line of
Python inside that call, or at a random moment of its time. The oracle is the same run undisturbed, with its state after every
call. After the interrupt the state must be that from before the call or that from after it, bit for bit: weights, buffers,
optimizer, schedule, random numbers, flags, incidents. Then the run goes on, and must end like the undisturbed one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof

CALLS = 7
"""Training steps of a trial. The guard's `close` is one more call."""
TRACED = (str(Path(nanproof.__file__).parent), str(Path(torch.optim.__file__).parent), __file__)
"""Where a line can be interrupted."""


@dataclass(frozen=True)
class Kind:
    """A run to interrupt."""

    name: str
    bad: tuple[int, ...] = ()
    """Calls whose batch holds a NaN."""
    breaks: tuple[int, ...] = ()
    """Calls before which a weight becomes NaN."""
    policy: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] | None = None
    run_dir: bool = False
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.AdamW(weights, lr=1e-2)
    loss: str = "mse"
    scaled: bool = False
    own_loop: bool = False
    parts: int = 1
    observe: bool = False
    resumes: bool = False
    """An earlier run has left checkpoints, and the first call is `resume`."""
    may_differ: bool = False
    """An interrupted diagnosis heals and salvages nothing: the step is then refused, and the run ends elsewhere."""


QUIET = {"diagnose": "never"}
ALWAYS = {"diagnose": "always"}
KINDS = (
    Kind("healthy", policy=QUIET),
    Kind("host path", policy=QUIET, optimizer=lambda weights: torch.optim.RMSprop(weights, lr=1e-3)),
    Kind("copied", policy=QUIET, bad=(2,), optimizer=lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=3)),
    Kind("scaled", policy=QUIET, bad=(2,), scaled=True),
    Kind("accumulated", policy=QUIET, bad=(3,), parts=2),
    Kind("refused", policy=QUIET, bad=(2, 4)),
    Kind("late", policy={"lag": 2, **QUIET}, bad=(2, 4)),
    Kind("own loop", policy=QUIET, bad=(2, 4), own_loop=True),
    Kind("diagnosed", policy=ALWAYS, bad=(2, 4)),
    Kind("diagnosed, late", policy={"lag": 2, **ALWAYS}, bad=(2,)),
    Kind("diagnosed, by trials", policy=ALWAYS, bad=(2,), loss="log of softmax", run_dir=True),
    Kind("observed", policy=ALWAYS, bad=(3,), observe=True),
    Kind("salvaged", policy={"salvage": True, **ALWAYS}, bad=(2,), may_differ=True),
    Kind("healed", policy={"heal": True}, bad=(2,), loss="log of softmax", may_differ=True),
    Kind("saved", policy=QUIET, checkpoints={"every": 2, "prove": 1, "background": False}),
    Kind("saved behind", policy=QUIET, checkpoints={"every": 2, "prove": 1}),
    Kind("resumed", policy=QUIET, bad=(2,), checkpoints={"every": 2, "prove": 1, "background": False}, resumes=True),
    Kind("rewound", policy={"snapshot_every": 2, **QUIET}, breaks=(5,)),
    Kind("rolled back", policy=QUIET, breaks=(5,), checkpoints={"every": 2, "prove": 1, "background": False}),
)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def log_of_softmax(model: nn.Module, batch: Any) -> Tensor:
    hidden = model[:-1](batch[0])
    chosen = torch.log(torch.softmax(hidden * batch[2], dim=-1)).mean()
    return F.mse_loss(model[-1](hidden).squeeze(-1), batch[1]) - 0.1 * chosen


LOSSES = {"mse": mse, "log of softmax": log_of_softmax}


class Run:
    """A run of one kind, and everything that an interrupt could leave half done."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        if kind.resumes:
            for call in Run(replace(kind, resumes=False), folder).calls():
                call()
        torch.set_grad_enabled(True)  # an interrupt in an earlier trial may have left it off: that one was counted
        torch.manual_seed(7)
        random.seed(7)
        self.kind, self.folder = kind, folder
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = kind.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if kind.scaled else None
        self.loss = LOSSES[kind.loss]
        where = kind.checkpoints
        self.guard = nanproof.Guard(
            self.model,
            self.optimizer,
            loss_fn=None if kind.own_loop else self.loss,
            scheduler=None if kind.own_loop else self.schedule,
            scaler=self.scaler,
            policy=nanproof.Policy(**kind.policy),
            run_dir=folder / "run" if kind.run_dir else None,
            checkpoints=nanproof.Checkpoints(folder / "kept", **where) if where is not None else None,
            observe=kind.observe or None,
        )
        g = torch.Generator().manual_seed(1)
        self.batches = []
        for call in range(CALLS):
            x = torch.randn(8 * kind.parts, 6, generator=g)
            scale = torch.ones(8 * kind.parts, 1)
            if call in kind.bad:
                if kind.loss == "mse":
                    x[2, 1] = float("nan")
                else:
                    scale[2] = 1e4
            self.batches.append([x, x.sum(-1), scale])

    def calls(self) -> Iterator[Callable[[], Any]]:
        """What is done to the run, one call of the guard after the other. Each can be called again if it was interrupted."""
        if self.kind.resumes:
            yield self.guard.resume
        for call, batch in enumerate(self.batches):
            if call in self.kind.breaks:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = float("nan")
            if self.kind.own_loop:
                self.optimizer.zero_grad()
                value = self.loss(self.model, batch)
                value.backward()
                yield lambda value=value: self.guard.step(value)
                self.schedule.step()
            else:
                parts = [[part[i :: self.kind.parts] for part in batch] for i in range(self.kind.parts)]
                yield lambda parts=parts: self.guard.train_step(*parts)
        yield self.guard.close

    def state(self) -> dict[str, Any]:
        """Everything, without asking the guard for more than its counters."""
        return {
            "model": _plain(self.model.state_dict()),
            "optimizer": _plain(self.optimizer.state_dict()),
            "schedule": _plain(self.schedule.state_dict()),
            "scale": _plain(self.scaler.state_dict()) if self.scaler is not None else None,
            "random": _plain([torch.get_rng_state(), random.getstate()]),
            "step": self.guard.next_step,
            "incidents": [(i.step, i.kind, i.action) for i in self.guard.incidents],
            "flags": [p.requires_grad for p in self.model.parameters()] + [m.training for m in self.model.modules()],
            "hooks": 0 if self.guard.engine.closed else sum(_hooks(m) for m in self.model.modules()),
            "torch": [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), len(_modes()), torch.is_anomaly_enabled()],
            "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        }

    def resumed(self) -> dict[str, Any]:
        """What a new process would start from."""
        run = Run(replace(self.kind, resumes=False), self.folder)
        run.guard.resume()
        try:
            return {name: run.state()[name] for name in ("model", "optimizer", "schedule", "random", "step")}
        finally:
            run.guard.close()


def _hooks(module: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for name in names)


def _modes() -> list[Any]:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def _plain(value: Any) -> str:
    """A digest of tensors and plain values."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(str(part.dtype).encode() + part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                digest.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            digest.update(str(len(part)).encode())
            for item in part:
                add(item)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


@dataclass
class Reference:
    """The run that nobody interrupts."""

    states: list[dict[str, Any]]
    """Before the first call, then after each."""
    before: list[dict[str, Any]]
    """Just before each call: a loop of its own has run its forward by then."""
    seconds: list[float]
    lines: list[int]
    resumed: dict[str, Any] | None

    @classmethod
    def of(cls, kind: Kind) -> Reference:
        made = cls([], [], [], [], None)
        for traced in (False, False, True):  # the first warms up
            with tempfile.TemporaryDirectory() as name:
                run = Run(kind, Path(name))
                made.states, made.before, made.seconds = [run.state()], [], []
                for call in run.calls():
                    made.before.append(run.state())
                    began = time.perf_counter()
                    if traced:
                        with counting() as count:
                            call()
                        made.lines.append(count[0])
                    else:
                        call()
                    made.seconds.append(time.perf_counter() - began)
                    made.states.append(run.state())
                made.resumed = run.resumed() if kind.checkpoints is not None else None
        return made


@contextmanager
def counting(strike_at: int = 0) -> Iterator[list[int]]:
    """Count the lines of Python that are run inside; at the given one, send this process a SIGINT."""
    count = [0]

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == strike_at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return local

    def entered(frame: Any, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(TRACED) else None

    sys.settrace(entered)
    try:
        yield count
    finally:
        sys.settrace(None)


@contextmanager
def alarm(seconds: float) -> Iterator[list[int]]:
    """After so many seconds, send this process a SIGINT, wherever it is."""
    fired = [0]

    def ring(*_: Any) -> None:
        fired[0] = 1
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Outcome:
    """What one interrupt led to."""

    struck: bool
    """The interrupt arrived within the call."""
    problem: str = ""
    where: str = ""
    seconds: float = 0.0
    """From the call's begin to its end, if it was interrupted."""


def trial(kind: Kind, reference: Reference, target: int, share: float, by_line: bool) -> Outcome:
    """Interrupt one call of a run at a share of its lines or of its time, check the state, and go on to the end."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run = Run(kind, Path(name))
        stack.callback(run.guard.close)
        outcome = Outcome(False)
        differs = False
        for number, call in enumerate(run.calls()):
            if number != target:
                call()
            else:
                how = counting(1 + int(share * reference.lines[number])) if by_line else alarm(share * reference.seconds[number])
                began = time.perf_counter()
                try:
                    with how:
                        call()
                        time.sleep(0)
                except KeyboardInterrupt as error:
                    outcome.struck = True
                    outcome.seconds = time.perf_counter() - began
                    outcome.where = _where(error)
                if not outcome.struck:
                    return outcome
                now = run.state()
                changed = {key for key in now if now[key] != reference.states[number + 1][key]}
                unchanged = {key for key in now if now[key] != reference.before[number][key]}
                if changed and not unchanged:
                    call()  # it did not happen
                    changed = {key for key, value in run.state().items() if value != reference.states[number + 1][key]}
                if changed:
                    differs = kind.may_differ and _refused(now, reference.before[number])
                    if not differs:
                        outcome.problem = f"neither before ({sorted(unchanged)}) nor after ({sorted(changed)})"
                        return outcome
        if differs:
            return outcome
        now = run.state()
        wrong = sorted(key for key in now if now[key] != reference.states[-1][key])
        if wrong:
            outcome.problem = f"it ends elsewhere: {wrong}"
        elif reference.resumed is not None and (resumed := run.resumed()) != reference.resumed:
            outcome.problem = f"it resumes elsewhere: {sorted(key for key in resumed if resumed[key] != reference.resumed[key])}"
        return outcome


def _refused(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """The step was refused, told of, and left no trace."""
    same = ("model", "optimizer", "schedule", "scale", "flags", "hooks", "torch", "handler")
    told = len(now["incidents"]) > len(before["incidents"])
    return all(now[key] == before[key] for key in same) and told and now["step"] == before["step"] + 1


def _where(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(TRACED[0]):
            place = f"{Path(code.co_filename).name}:{code.co_name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def campaign(count: int, seed: int = 0, kinds: tuple[Kind, ...] = KINDS) -> dict[str, Any]:
    """So many interrupts, spread over the kinds, half of them by line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(seed)
    problems: list[str] = []
    struck: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    slowest = 0.0
    references = {kind.name: Reference.of(kind) for kind in kinds}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        reference = references[kind.name]
        outcome = Outcome(False)
        for _ in range(20):
            steps = [*range(len(reference.seconds)), *(call + kind.resumes for call in kind.bad * 4 + kind.breaks * 4)]
            steps += [0] * (4 * kind.resumes)
            target, by_line, share = draw.choice(steps), draw.random() < 0.5, draw.random()
            try:
                outcome = trial(kind, reference, target, share, by_line)
            except KeyboardInterrupt:  # it came just after the call
                continue
            except BaseException as error:  # torch's checkpoints raise a kind of their own
                outcome = Outcome(True, f"then it raised {type(error).__name__}: {error}")
            if outcome.struck:
                break
        struck[kind.name] += outcome.struck
        whole[kind.name] += outcome.struck and not outcome.problem
        slowest = max(slowest, outcome.seconds)
        if outcome.problem:
            how = "line" if by_line else "time"
            problems.append(f"{kind.name}, call {target}, {share:.4f} by {how} [{outcome.where}]: {outcome.problem}"[:400])
    return {
        "interrupts": sum(struck.values()),
        "whole": sum(whole.values()),
        "slowest_s": round(slowest, 3),
        "by_kind": {kind.name: [whole[kind.name], struck[kind.name]] for kind in kinds},
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only kinds whose name contains this")
    parser.add_argument("--save", action="store_true", help="record the figures in benchmarks/results")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    began = time.monotonic()
    found = campaign(given.interrupts, given.seed, tuple(kind for kind in KINDS if given.kinds in kind.name))
    found["minutes"] = round((time.monotonic() - began) / 60, 1)
    for problem in found["problems"]:
        print(problem)
    for name, (whole, struck) in found["by_kind"].items():
        print(f"{name:24} {whole:5} of {struck}")
    print(f"{found['whole']} of {found['interrupts']} whole; longest wait {found['slowest_s']} s; {found['minutes']} minutes")
    if given.save:
        from tools.results import RESULTS, cpu_name, save

        earlier = json.loads((RESULTS / "interrupts.json").read_text())
        print(save("interrupts", cpu_name(), {**found, "first": earlier["first"]}))


if __name__ == "__main__":
    main()
