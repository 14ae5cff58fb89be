"""The optimizer's part of a step as one CUDA graph: norms, verdict, statistics and optimizer in a single launch.

A graph reads and writes fixed addresses. It is captured when the addresses of a step come a second time, and replayed whenever
they come again: with gradients that are kept, under `torch.compile(mode="reduce-overhead")`, and mostly under the caching
allocator. It reads the loss and the learning rate from tensors of its own; any other setting is part of its key. A step that
fits no graph takes the usual path, with the same kernels and the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from nanproof.core.judge._verdict import Verdict

log = logging.getLogger("nanproof")

Body: TypeAlias = Callable[[Sequence[Tensor | None]], Verdict]
"""The optimizer's part of a step, over a graph's own copies of what differs from step to step."""
Prepare: TypeAlias = Callable[[], tuple[Body, object]]
"""Makes a body, and what must live as long as its graph. What it does is not captured."""


class Graph(Protocol):
    """Something that records a function over tensors once, without effect, and runs it again."""

    def capture(self, body: Callable[[], Verdict]) -> Verdict: ...
    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph, captured on a stream of its own. Nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where all of it runs. It need not be the current one."""
        self._graph, self._device = torch.cuda.CUDAGraph(), device

    def capture(self, body: Callable[[], Verdict]) -> Verdict:
        with torch.cuda.device(self._device):
            return self._captured(body)

    def _captured(self, body: Callable[[], Verdict]) -> Verdict:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            # Threads that load data may pin memory meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                verdict = body()
            finally:
                self._graph.capture_end()
        current.wait_stream(aside)
        return verdict

    def replay(self) -> None:
        self._graph.replay()


@dataclass(slots=True)
class _Captured:
    graph: Graph
    kept: object
    """What the graph reads, and nobody else keeps alive. Not the gradients: held here, their memory could not come again, and
    a graph is replayed only over gradients that lie where they lay."""
    inputs: list[Tensor | None]
    verdict: Verdict


class Captures:
    """The graphs of a run, by what they were captured over."""

    MOST = 4
    """Graphs that are kept: an allocator alternates between a few patterns of addresses, if they repeat at all."""
    PATIENCE = 64
    """Steps without a replay after which no more graphs are looked for."""

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._graphs: dict[Hashable, _Captured] = {}
        self._met: dict[Hashable, None] = {}
        """Keys that came once, oldest first."""
        self._missed = 0
        self.replays = 0
        self.why_not = ""
        """Why nothing is captured any more."""

    @property
    def description(self) -> str:
        if self.why_not:
            return f"not captured: {self.why_not}"
        return "captured as a CUDA graph" if self.replays else "to be captured as a CUDA graph"

    def take(self, key: Hashable, inputs: Sequence[Tensor | None], prepare: Prepare) -> Verdict | None:
        """Replay the graph for this key over these inputs. None, with nothing done, where there is none yet."""
        if self.why_not:
            return None
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._met:
                self._meet(key)
                return None
            captured = self._capture(key, inputs, prepare)
            if captured is None:
                return None
        else:
            self._missed = 0
        for own, value in zip(captured.inputs, inputs, strict=True):
            if own is not None and value is not None:
                own.copy_(value)
        captured.graph.replay()
        self.replays += 1
        return captured.verdict

    def _meet(self, key: Hashable) -> None:
        self._missed += 1
        self._met[key] = None
        if len(self._met) > 2 * self.MOST:
            del self._met[next(iter(self._met))]
        if self._missed > self.PATIENCE:
            self._stop("the addresses of gradients do not repeat")

    def _capture(self, key: Hashable, inputs: Sequence[Tensor | None], prepare: Prepare) -> _Captured | None:
        own = [None if value is None else value.clone() for value in inputs]
        try:
            graph, (body, kept) = self._make(), prepare()
            verdict = graph.capture(lambda: body(own))
        except Exception as error:
            self._stop(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None
        while len(self._graphs) >= self.MOST:
            del self._graphs[next(iter(self._graphs))]
        del self._met[key]
        captured = self._graphs[key] = _Captured(graph, kept, own, verdict)
        return captured

    def close(self) -> None:
        """Free the memory of the graphs."""
        self._graphs.clear()
        self._met.clear()

    def _stop(self, why: str) -> None:
        self.why_not = why
        self.close()
        log.info("nanproof: the optimizer's part of a step is not captured: %s", why)
