"""GuardedLoop: a loop that calls `guard.step(loss)`, so that its refused steps can be run again from its own lines."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core._engine import Engine
from nanproof.core._under_way import UNKNOWN, Again, Begun
from nanproof.core.judge._parameters import is_compiled
from nanproof.core.support._context import RandomState
from nanproof.explain.lines._recorded import NUMERICAL, RootRecorder

SEVERAL = "the step adds up several backward passes; call guard.backward(loss) for each, so that all of them can be run again"


class GuardedLoop:
    """What is known of the step under way in such a loop."""

    def __init__(self, model: nn.Module) -> None:
        self._recorder = RootRecorder([] if is_compiled(model) else [model], self._called)
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._random: RandomState | None = None
        """Before the step's first forward."""
        self._again: list[Again] = []
        self._calls: list[tuple[Any, ...]] = []

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Do again what the loop did."""
        return self._recorder.loss_fn(model, batch)

    loss_fn.weighted = True  # type: ignore[attr-defined]

    def _called(self, call: Any) -> None:
        """The model is called for the first time since the last backward."""
        if self._devices and torch.cuda.is_current_stream_capturing():
            return  # the generators must not be asked
        now = RandomState.now(self._devices)
        if not self._again:  # also after a forward that was interrupted
            self._random, self._recorder.random = now, None
        else:
            self._recorder.random = now

    def at_backward(self, loss: Tensor, frame: FrameType | None = None) -> None:
        """Just before backward."""
        self._again.append(self._recorder.source_of(loss, frame=frame or sys._getframe(1), argument="loss"))
        self._calls.append(tuple(self._recorder.calls))

    def at_step(self, loss: Tensor | None, engine: Engine, backwards: int) -> Begun:
        """Return what is known of the step that is about to be judged. `backwards`: how many passes it adds up."""
        noted = len(engine.judge.noted)
        if noted:  # the gradients of earlier backwards were cleared
            self._again, self._calls = self._again[-noted:], self._calls[-noted:]
        elif loss is not None:
            self._again, self._calls = [], []
            self.at_backward(loss, sys._getframe(1))
        if backwards > len(self._again):
            self._again = [Again(UNKNOWN, whole=False, why_not=SEVERAL)]
        random = self._random or RandomState.now(self._devices)
        return Begun(self._again, self._calls, random, engine.under_way.mode())

    def stepped(self, devices: list[torch.device]) -> None:
        """The step is over."""
        self._random, self._again, self._calls = None, [], []
        self._recorder.forget()
        self._recorder.lines.mark(devices)

    def raised(self, error: Exception, engine: Engine) -> None:
        """The loop ends with this: an incident, where a step had begun."""
        if self._random is None or not isinstance(error, NUMERICAL):
            return
        again = self._recorder.source_of_error(error)
        engine.begin(UNKNOWN, random=self._random)
        engine.raised(error, self._recorder.calls, again)

    def close(self) -> None:
        self._recorder.close()
