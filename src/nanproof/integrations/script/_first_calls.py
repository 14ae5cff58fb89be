"""FirstCalls: which modules a script calls before anything is guarded.

A script is guarded from its first backward on, which is too late to see the forward before it. So from the moment an optimizer is
made until its first backward, every module's call is noticed. It shows which module is the model, and lets the first step be
explained like any other. torch.compile would compile these hooks into its code: once a script calls it, nothing is noticed.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack

import torch
from torch import nn

from nanproof.core.support._context import RandomState
from nanproof.explain.lines._lines import Lines
from nanproof.explain.locate._calls import Call, CallStack
from nanproof.integrations._groups import RECENT

_MOST = 10_000
"""Calls after which there is hardly going to be a backward."""


class FirstCalls:
    """The modules that are called by the script itself, not by other modules."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.random: RandomState | None = None
        """Before the first call since the last backward."""
        self._modules: list[weakref.ref[nn.Module]] = []
        self._watching: ExitStack | None = None
        self._count = self._backwards = 0

    @property
    def modules(self) -> list[nn.Module]:
        """In the order in which they were first called."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def watch(self) -> None:
        """Notice calls from now on."""
        if self._watching is None:
            self._watching = ExitStack()
            self._watching.enter_context(CallStack(nn.Module()).following(on_enter=self._on_call))

    def stop(self) -> None:
        self.lines.forget()
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def backward(self) -> None:
        """A backward begins, and whoever it belongs to has what it needs."""
        self.lines.forget()
        self.random = None
        self._backwards += 1
        if self._backwards > RECENT:
            self.stop()

    def hand_over(self) -> tuple[Lines, RandomState | None]:
        """Return what is known of the step whose backward begins, and start anew."""
        lines, self.lines = self.lines, Lines()
        random, self.random = self.random, None
        return lines, random

    def _on_call(self, call: Call) -> None:
        if call.parent is not None or not torch.is_grad_enabled():
            return
        self._count += 1
        if self._count > _MOST:
            self.stop()
        if self.random is None:
            devices = {p.device for p in call.module.parameters() if p.device.type == "cuda"}
            self.random = RandomState.now(sorted(devices, key=str))
        if all(ref() is not call.module for ref in self._modules[-64:]):
            self._modules.append(weakref.ref(call.module))
        self.lines.model_called(sys._getframe(1))
