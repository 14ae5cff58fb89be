"""What a healthy step pays for being able to run the loop's own lines again: `python -m benchmarks.lines [--save]`.

Times the two places where something is noted, in a loop whose loss is computed outside the model: the model's call and backward.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.support._context import RandomState
from nanproof.explain.lines._recorded import RootRecorder
from tools.results import cpu_name, save

STEPS = 2000


def measured() -> dict[str, float]:
    """Medians in microseconds."""
    torch.set_num_threads(1)
    model, criterion = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), nn.MSELoss()
    recorder = RootRecorder(model, lambda call: None)
    spent: dict[str, list[float]] = {"backward": [], "call": [], "graph alone": [], "random state": []}
    note, recognise = recorder.note, recorder.recognise

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            spent[name].append(time.perf_counter() - began)
            return result

        return run

    def backward(loss: Tensor) -> None:
        began = time.perf_counter()
        recorder.source_of(loss, frame=sys._getframe(1), argument="loss")
        spent["backward"].append(time.perf_counter() - began)
        loss.backward()

    recorder.note = timed("call", note)  # type: ignore[method-assign]
    for _ in range(STEPS):
        x, y = torch.randn(8, 16), torch.randn(8, 16)
        out = model(x)
        loss = criterion(out, y)
        backward(loss)
    recorder.note, look = note, timed("graph alone", recognise)  # type: ignore[method-assign]
    read = timed("random state", RandomState.now)
    for _ in range(STEPS):  # what was noted before there were lines
        loss = criterion(model(torch.randn(8, 16)), torch.randn(8, 16))
        look(loss)
        read([])
    return {name: statistics.median(times) * 1e6 for name, times in spent.items()}


def main() -> None:
    figures = measured()
    for name, microseconds in figures.items():
        print(f"{name}: {microseconds:.1f} µs")
    if "--save" in sys.argv:
        save("lines", cpu_name(), {"microseconds": figures})


if __name__ == "__main__":
    main()
