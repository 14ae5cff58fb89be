"""Signals: hold Ctrl-C back while the run is being changed, and notice a request to stop.

`shield` is the one `Shield` of a process. While it is down, Ctrl-C waits: an optimizer step, a rewind or a save is finished or
undone before KeyboardInterrupt is raised. Code that may run for long and can be undone, such as the forward of a user's model,
runs with the shield lifted. The first interrupt there lowers it again by itself, so that whatever undoes the step is not
interrupted.

`Preemption` notes SIGTERM and SIGUSR1, which schedulers send some time before they kill a job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_fast = sys.modules.get("_signal", signal)  # what `signal` wraps in functions that make enums of numbers, at ten times the cost
_set: Callable[[int, Any], Any] = _fast.signal
_get: Callable[[int], Any] = _fast.getsignal
_SIGINT = int(signal.SIGINT)

INSISTED = 3
"""The how many-th Ctrl-C of one wait is raised at once: what is being waited for may never end."""


class Shield:
    """Holds SIGINT back in the main thread. Other threads never see it; there, a shield does nothing.

    An interrupt may come between any two lines, those of this class included: each method leaves a consistent state at every one.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._lifted: list[bool] = []
        """Of each shield that is in force, innermost last, whether it is lifted."""
        self._before: Callable[[int, FrameType | None], Any] | None = None
        """The handler to call when the shield ends."""
        self._count = 0
        """Interrupts that wait."""
        self._handler = self._handle
        self._lift = _Lift(self)

    @property
    def pending(self) -> bool:
        """Whether an interrupt waits for the shield to end: end soon."""
        return self._count > 0

    @property
    def holds(self) -> bool:
        """Whether it is in force here and not lifted: another one inside would change nothing."""
        return bool(self._lifted) and not self._lifted[-1] and threading.get_ident() == self._main

    def lifted(self) -> _Lift:
        """Return a context in which Ctrl-C is raised at once. An interrupt that waits already is raised as it opens."""
        return self._lift

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if not self._lifted:
            before = _get(_SIGINT)
            if callable(before) and before is not self._handler:
                self._before, self._count = before, 0
                _set(_SIGINT, self._handler)  # a signal that came earlier is raised by this call, before it acts
        self._lifted.append(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.get_ident() != self._main:
            return
        self._lifted.pop()
        if self._lifted and self._lifted[-1] and self._count:
            self._raise(sys._getframe(1))
        if self._lifted or self._before is None:
            return
        before = self._before
        if _get(_SIGINT) is self._handler:
            _set(_SIGINT, before)
        if self._count:
            self._count = 0
            before(_SIGINT, sys._getframe(1))

    def lift(self, lifted: bool) -> None:
        """Lift the innermost shield, or lower it again."""
        if threading.get_ident() != self._main or not self._lifted:
            return
        self._lifted[-1] = lifted
        if lifted and self._count:
            self._raise(sys._getframe(2))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if (self._lifted and self._lifted[-1]) or self._count >= INSISTED:
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        """Let the handler of the user's program act. As a rule it raises KeyboardInterrupt: the shield is down again by then."""
        self._count, lifted = 0, self._lifted[-1:]
        self._lifted[-1:] = [False] * len(lifted)
        if self._before is not None:
            self._before(_SIGINT, frame)
        self._lifted[-1:] = lifted


class _Lift:
    def __init__(self, shield: Shield) -> None:
        self._shield = shield

    def __enter__(self) -> None:
        self._shield.lift(True)

    def __exit__(self, *error: object) -> None:
        self._shield.lift(False)


shield = Shield()


def shielded(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function under the shield."""

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        if shield.holds:
            return function(*args, **kwargs)
        with shield:
            return function(*args, **kwargs)

    return held


class Preemption:
    """A request to stop, by SIGTERM or SIGUSR1, from when this is made until it is closed.

    The first signal is noted; whoever runs the steps looks at `requested` between two of them. A second one ends the process at
    once, as it would have ended without this. Only the main thread can install handlers; elsewhere this notices nothing.
    """

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.requested = ""
        """The name of the signal that came, or ""."""
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGUSR1"):
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._note)

    @property
    def listens(self) -> bool:
        """Whether handlers are installed."""
        return bool(self._before)

    def leave(self) -> NoReturn:
        """End the program with the status that was chosen."""
        self.close()
        raise SystemExit(self.status)

    def close(self) -> None:
        """Put the handlers back that were there before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number != signal.SIGTERM:
                return  # sent to a whole group of processes: a data worker serves on until the run ends it
        elif not self.requested:
            self.requested = signal.Signals(number).name
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
