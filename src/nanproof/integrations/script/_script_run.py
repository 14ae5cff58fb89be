"""ScriptRun: the face of the engine for one optimizer of a script that knows nothing of nanproof.

It is guarded from the first backward that could reach it.

Until then there may be no model yet. What cannot be guarded is left alone, with one line that says
why: nanproof is never the reason a script fails.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof._errors import NanproofError
from nanproof._policy import Policy
from nanproof._records import Forecast, Incident
from nanproof.core._under_way import UNKNOWN
from nanproof.core.judge._judge import Norms
from nanproof.core.judge._parameters import is_compiled, is_dtensor, local, unwrap
from nanproof.core.judge._stepper import Stepper, guarded
from nanproof.core.support._context import RandomState
from nanproof.core.support._hooks import Hook
from nanproof.core.support._tree import gradients_now
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations._recorded import OUTSIDE, RECORDED, RootRecorder
from nanproof.integrations.script._owners import called, model_of

_NUMBERS = itertools.count()


@dataclass(slots=True)
class Tally:
    """What is told at the end. It outlives the optimizer."""

    name: str
    model: str = ""
    """Class of the model that it trains; of several, all of them."""
    path: str = "never stepped"
    verdicts: str = ""
    """Where verdicts are read, in words."""
    guarded: bool = False
    calls: int = 0
    """Of `optimizer.step()` that were judged."""
    steps: int = 0
    refused: int = 0
    overflows: int = 0
    """Steps that a GradScaler left out while it looked for its scale."""
    incidents: list[Incident] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    run_dir: Path | None = None
    own: float = 0.0
    """Seconds in nanproof's own code, on the host, while all was well."""
    trouble: float = 0.0
    """Seconds in which bad steps were dealt with."""
    first: float = 0.0
    last: float = 0.0
    """When the first step ended, and the last."""


class ScriptRun:
    """One optimizer of a script: its run, and what is known since the last step."""

    def __init__(
        self,
        optimizer: Optimizer,
        say: Callable[[str], None],
        inside: Callable[[Optimizer | None], AbstractContextManager[None]],
    ) -> None:
        """`say` tells the user something, once; `inside` is opened while the guard works outside of
        the script's steps."""
        self.number = next(_NUMBERS)
        self.reached = 0
        """The last backward that reached its parameters, or came before a step of it."""
        self._optimizer = weakref.ref(optimizer)
        self._say, self._inside = say, inside
        self.tally = Tally(type(optimizer).__name__)
        self.guard: ProtectedRun | None = None
        self.left_alone = False
        self._recorders: list[RootRecorder] = []
        self._norms: dict[int, tuple[Tensor, int, Tensor]] = {}
        """By parameter: its gradient, how often that had been written after clipping, and its norm
        before."""
        self._max_norm: float | None = None
        self._whole = False
        self._unclaimed: list[Tensor] = []
        self._left: list[tuple[int, int]] = []
        """The gradients as backward left them: which, and how often they had been written."""
        self._clean: bool | None = None
        """Clipping found them so; None before clipping."""
        self._busy = False
        self._spent = 0.0

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer()

    # -- beginning and end -----------------------------------------------------------------------------------------------------

    def start(self, policy: Policy, run_dir: Path | None, fused: str, loss: Tensor | None, observe: bool = False) -> None:
        """Look for the model and put the guard around it; once. `loss`: it is at a step already,
        and this was the last."""
        optimizer = self.optimizer
        if self.guard is not None or self.left_alone or not getattr(optimizer, "param_groups", None):
            return
        assert optimizer is not None
        if optimizer in guarded:
            self.leave_alone("the script guards it itself")
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            self.leave_alone("LBFGS evaluates the loss several times inside one step")
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.requires_grad for p in parameters):
            return
        if loss is None and any(is_dtensor(p) for p in parameters):
            return  # during backward, modules under fully_shard hold other tensors
        model = model_of(optimizer)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _together(model, parameters):
            self.leave_alone(
                "there are several ranks, and its model is neither in DistributedDataParallel nor in fully_shard, so it is not "
                "known whether all ranks would decide alike"
            )
            return
        if fused == "own" or (fused == "auto" and all(p.device.type == "cpu" for p in parameters)):
            policy = replace(policy, switch_to_fused=False)
        places = {id(p): i for i, p in enumerate(parameters)}
        roots = sorted(called(model), key=lambda root: min(places.get(id(p), len(places)) for p in root.parameters()))
        self.tally.model = " and ".join(dict.fromkeys(type(unwrap(root)).__name__ for root in roots))
        loop = replace(RECORDED, why_not_again=_why_not_again(roots))
        guard = ProtectedRun(policy=policy, run_dir=run_dir, observe=observe, loop=loop)
        # Not on a compiled model itself: hooks become part of what is compiled.
        self._recorders = [RootRecorder(root, self._begin) for root in roots if not is_compiled(root)]
        alone = len(self._recorders) == 1 and roots[0] is model
        try:
            guard.start(model, optimizer, loss_fn=self._recorders[0].loss_fn if alone else None, max_norm=None)
        except NanproofError as error:
            self.leave_alone(str(error))
            return
        self._unclaimed = [] if loss is None else [local(loss)]
        weakref.finalize(guard, guard.engine.tell.close)
        self.guard, self.tally.guarded = guard, True
        self.tally.path, self.tally.verdicts, self.tally.run_dir = guard.path, guard.verdicts, run_dir
        self.tally.incidents, self.tally.forecasts = guard.incidents, guard.forecasts
        if guard.late:
            for root in roots:
                root.register_state_dict_pre_hook(Hook(self, self.settle))

    def leave_alone(self, why: str) -> None:
        self._stop_recording()
        self.left_alone, self.tally.guarded = True, False
        self.tally.path = f"not guarded: {why}"
        self._say(f"{self.tally.name} is not guarded: {why}")

    def close(self, error: BaseException | None) -> None:
        self._stop_recording()
        if self.guard is not None:
            self._note()
            alone = error is not None and not isinstance(error, SystemExit)
            ranks = self.guard.engine.judge.ranks
            gone = ranks.together and not dist.is_initialized()
            with self._inside(self.optimizer):
                self.guard.close(alone=(alone or gone) and ranks.several)
            self._note()

    def _stop_recording(self) -> None:
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []

    def settle(self, *_: Any) -> None:
        """Wait for the verdicts under way: the state is about to be saved."""
        if self.guard is not None and not self.guard.open and not self._busy:
            self._busy = True
            try:
                with self._inside(self.optimizer):
                    self.guard.sync()
            finally:
                self._busy = False

    @property
    def _stepper(self) -> Stepper:
        assert self.guard is not None and self.guard.parts is not None
        return self.guard.parts.stepper

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def _begin(self, call: Any) -> None:
        if self.guard is not None:
            self.guard.engine.begin(call)

    def before_backward(self, loss: Tensor, alone: bool) -> Tensor | None:
        """Note the loss. Return the gradient that backward has to start from on several ranks.
        `alone`: this is the only optimizer. With another one and late verdicts, running the step
        again would add to gradients that belong to the other."""
        guard = self.guard
        if guard is None:
            return None
        known = [recorder.recognise(loss) for recorder in self._recorders]
        if known != [True] or not guard.open:
            guard.engine.begin(UNKNOWN)
        elif guard.late and not alone:
            self._cannot_again(guard, "there are several optimizers, and verdicts come late, so the step cannot be run again")
        return guard.engine.loss(local(loss), self._calls())

    def _calls(self) -> list[dict[str, Any]]:
        """What the model was called with for this backward; of several models, which."""
        if len(self._recorders) == 1:
            return self._recorders[0].calls
        return [{**call, "of": recorder.name} for recorder in self._recorders for call in recorder.calls]

    def after_backward(self, before: int, loss: Tensor, alone: bool, late: bool) -> None:
        """Where there are several optimizers, the loss is this one's if backward reached its
        parameters. `late`: it was not expected to, so nothing was noted before."""
        if self.guard is None or self.left_alone:
            return
        stepper = self._stepper
        if late:
            if stepper.backwards != before:
                self.guard.engine.begin(UNKNOWN)
                self.guard.engine.loss(local(loss))
            return
        if stepper.lag:
            self._left, self._clean = self._gradients_now(), None
        if alone:
            return
        if stepper.backwards == before:
            self.guard.engine.drop_loss()
            self._unclaimed = [*self._unclaimed[-15:], local(loss.detach())]

    @property
    def backwards(self) -> int:
        """Since the last step."""
        return 0 if self.guard is None else self._stepper.backwards

    @contextmanager
    def unconcerned(self) -> Iterator[None]:
        """While another optimizer's step is taken: what its guard runs again to look at it is no
        business of this one."""
        count = self.backwards
        for recorder in self._recorders:
            recorder.paused = True
        try:
            yield
        finally:
            for recorder in self._recorders:
                recorder.paused = False
            if self.guard is not None:
                self._stepper.only_backwards(count)

    def before_clipping(self) -> list[tuple[int, int]]:
        """The gradients as clipping finds them, where that is of interest."""
        return self._gradients_now() if self.guard is not None and self.guard.late else []

    def clipped(self, norms: dict[int, tuple[Tensor, int, Tensor]], max_norm: float, before: list[tuple[int, int]]) -> None:
        """The script clipped; these were the norms before, and these the gradients."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        if self.guard is not None and self.guard.late:
            self._clean = before == self._left
        mine = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        there = mine & norms.keys()
        if there:
            self._whole = there == mine and not self._norms
            self._max_norm = max_norm if self._whole and len(norms) == len(mine) else None
            self._norms.update({key: norms[key] for key in there if key not in self._norms})

    def take(self) -> None:
        """In place of the optimizer's step."""
        guard = self.guard
        assert guard is not None
        stepper = self._stepper
        if not guard.open:
            guard.engine.begin(UNKNOWN)
        if not stepper.noted:
            if not self._unclaimed:
                self._say(f"no backward was seen before a step of {self.tally.name}: its loss is taken to be 0")
            for loss in self._unclaimed or [torch.zeros((), device=stepper.parameters.device)]:
                guard.engine.loss(loss)
        self._unclaimed = []
        norms = self._before_clipping(stepper.parameters.present())
        self._prepare_to_hold(guard, norms)
        self._norms, self._max_norm = {}, None
        self._busy = True
        self.tally.calls += 1
        try:
            guard.engine.step(norms)
            self._finish(guard)
        finally:
            self._busy = False
            self._note()

    def stepped(self, began: float, others: float) -> None:
        """After a step: what of its time was nanproof's."""
        tally, now = self.tally, time.perf_counter()
        tally.own += now - began - others - self._spent
        tally.trouble += self._spent
        self._spent = 0.0
        tally.first, tally.last = tally.first or now, now

    def left_out(self, scale: float) -> None:
        """A GradScaler did not call the optimizer, because of gradients that are non-finite. While
        it looks for its scale that is healthy; with a bad loss, or at a scale below 1, it is not,
        and becomes an incident."""
        guard = self.guard
        assert guard is not None
        if scale < 1 or guard.engine.judge.loss_is_bad():
            self.take()
            return
        self.tally.overflows += 1
        self._norms, self._max_norm, self._unclaimed = {}, None, []
        guard.engine.abandon(keep_gradients=True, counts=True)

    def _finish(self, guard: ProtectedRun) -> None:
        """Deal with the verdict. What a refused step is examined with must not show: random numbers
        and gradients are the script's, whose next batch may have been drawn already, and whose
        other optimizers have still to step."""
        began, incidents = time.perf_counter(), len(guard.incidents)
        bad = guard.engine.refused_at_once()
        with self._unseen(guard) if bad else nullcontext():
            guard.engine.end()
        if bad or len(guard.incidents) > incidents:
            self._spent = time.perf_counter() - began

    @contextmanager
    def _unseen(self, guard: ProtectedRun) -> Iterator[None]:
        random = RandomState.now(guard.engine.under_way.devices)
        holders = {id(p): p for p in (*guard.model.parameters(), *guard.engine.trained)}
        gradients = [(p, p.grad) for p in holders.values()]
        mine = {id(p) for p in guard.engine.trained}
        for p in holders.values():
            if id(p) not in mine:
                p.grad = None
        try:
            yield
        finally:
            random.restore()
            for p, gradient in gradients:
                p.grad = gradient

    def _before_clipping(self, present: list[int]) -> Norms | None:
        """The norms that were read when the script clipped, if every gradient is still what
        clipping left."""
        assert self.guard is not None
        parameters = self._stepper.parameters
        norms: list[Tensor] = []
        if not self._norms:
            return None
        missing: list[tuple[int, Tensor]] = []
        for i in present:
            p = parameters.tensors[i]
            gradient, version, norm = self._norms.get(id(p), (None, 0, None))
            if norm is None or p.grad is None:
                missing.append((len(norms), p.grad))  # type: ignore[arg-type]
                norms.append(torch.zeros(()))
            elif p.grad is not gradient or p.grad._version != version:
                return None
            else:
                norms.append(norm.to(parameters.device, parameters.dtype, non_blocking=True))
        if missing:
            more = parameters.norms([g for _, g in missing])
            for (place, _), norm in zip(missing, more.unbind(), strict=True):
                norms[place] = norm
        gradients = [g for i in present if (g := parameters.tensors[i].grad) is not None]
        return Norms.of(torch.stack(norms), gradients, clipped=True, max_norm=self._max_norm)

    def _prepare_to_hold(self, guard: ProtectedRun, clipped: Norms | None) -> None:
        """Where verdicts come late, a step may be held and taken again by the guard: then it has to
        be clipped as the script does. What else the script does to gradients cannot be done again,
        so such a step is judged by itself."""
        if not guard.late:
            return
        guard.clip_to(None if clipped is None else clipped.max_norm)
        if (clipped is not None and clipped.max_norm is None) or self._touched(after_clipping=clipped is not None):
            self._cannot_again(guard, "the script changes gradients in its own way, so the step cannot be run again")

    def _cannot_again(self, guard: ProtectedRun, why: str) -> None:
        guard.engine.begin(UNKNOWN, why)

    def _touched(self, after_clipping: bool) -> bool:
        """Somebody wrote into gradients between backward and clipping, or the step."""
        left, self._left = self._left, []
        return self._clean is False or (not after_clipping and left != self._gradients_now())

    def _gradients_now(self) -> list[tuple[int, int]]:
        assert self.guard is not None
        return gradients_now(self.guard.engine.trained)

    def _note(self) -> None:
        if self.guard is not None:
            self.tally.steps = self.guard.next_step - self.guard.open
            self.tally.refused = self.guard.refused_so_far


def _why_not_again(roots: list[nn.Module]) -> str:
    if any(is_compiled(root) for root in roots):
        return "the calls of a compiled model are not followed, so the step cannot be run again; run it without torch.compile"
    if len(roots) > 1:
        return f"the optimizer trains {len(roots)} models, so the step cannot be run again; use guard.train_step"
    return OUTSIDE


def _together(model: nn.Module, parameters: Iterable[Tensor]) -> bool:
    """Every gradient is reduced over the ranks before the step."""
    if all(is_dtensor(p) for p in parameters):
        return True
    reduced = {id(p) for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel) for p in m.parameters()}
    return all(id(p) in reduced for p in parameters if p.requires_grad)
