"""`nanproof run`: somebody's training script, unchanged, protected.

While the script runs, torch is changed underneath it (`_torch_patches`): every optimizer gets a guard with the first backward,
and a step that would do harm is not taken. Trainers that have an adapter of their own are protected with that. Nothing is
imported that the script does not import; nothing is written where no folder was named.

What users may expect of an unchanged script: while nothing is wrong, its weights are those of a run without nanproof. On CPU
they are so to the last bit: the optimizer keeps the form it has, and clipping is torch's own arithmetic. On CUDA an optimizer
that was left to choose its form is switched to fused, as `Guard` does, which costs no host read and differs by a rounding error
an update (below 2e-7 of the update's size); `optimizer="own"` keeps it there too, at one host read a step.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from nanproof._errors import TrainingHalted, UsageError
from nanproof._text import shown
from nanproof.core.support._files import FolderLock, not_writable
from nanproof.integrations._patches import Patches
from nanproof.integrations.script._imports import AfterImport, Then
from nanproof.integrations.script._session import Options, Session
from nanproof.integrations.script._summary import Summary, summary_of
from nanproof.integrations.script._trainers import ENGINES, TRAINERS, follow, follow_engine


def autorun(script: str, args: Sequence[str], *, module: bool, options: Options) -> tuple[int | str | None, Summary]:
    """Run a script (or, with `module`, what `python -m` would) as Python does, protected. Returns its exit status, which may be
    what `sys.exit` was called with, and what happened."""
    session = Session(options)
    changed: list[Patches] = []

    def change_torch(_: types.ModuleType) -> None:
        from nanproof.integrations.script._torch_patches import install

        changed.append(install(session))

    then: dict[str, Then] = {"torch": change_torch}
    for name in TRAINERS:
        then[name] = follow(session, name)
    for name in ENGINES:
        then[name] = follow_engine(session, name)
    finder = AfterImport(then)
    run = _prepared(script, args, module)
    folder = None if options.run_dir is None else _writable(options.run_dir, session.rank)
    finder.install()
    began = time.perf_counter()
    error: BaseException | None = None
    status: int | str | None = None
    try:
        run()
    except SystemExit as exit:
        error, status = exit, exit.code
    except BaseException as raised:
        error, status = raised, _told(raised)
    if not session.mine:  # a fork of the script that came back here
        sys.stdout.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)
    session.close(error)
    finder.remove()
    for patches in changed:
        patches.undo()
    if folder is not None:
        folder.release()
    return status, summary_of(session, " ".join([script, *args]), time.perf_counter() - began, error)


def _writable(run_dir: Path, rank: int) -> FolderLock | None:
    """Make the folder and hold it, before the script begins: it would be too late to say afterwards that nothing was guarded."""
    what = f"--run-dir {run_dir}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        return FolderLock(run_dir, what) if rank == 0 else None
    except OSError as error:
        raise not_writable(f"the script was not started: {what}", error) from error


def _prepared(script: str, args: Sequence[str], module: bool) -> Callable[[], object]:
    """`sys.argv`, `sys.path[0]` and `__main__` as Python sets them."""
    safe = getattr(sys.flags, "safe_path", False)
    if module:
        sys.argv = [script, *args]
        if not safe:
            sys.path[0] = os.getcwd()
        return lambda: runpy.run_module(script, run_name="__main__", alter_sys=True)
    if not os.path.exists(script):
        raise UsageError(f"there is no file {script}. Name the script after the options, or a module with -m")
    sys.argv = [script, *args]
    if os.path.isdir(script) or (not script.endswith((".py", ".pyw")) and zipfile.is_zipfile(script)):
        return lambda: runpy.run_path(script, run_name="__main__")
    if not safe:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    return lambda: _run_file(os.path.abspath(script))


def _run_file(path: str) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __package__=None, __loader__=SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        source = file.read()
    sys.modules["__main__"] = main  # and it stays: threads and exit handlers of the script may look there
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _told(error: BaseException) -> int:
    """Print what Python would have printed, without the frames of the way here; returns the exit status."""
    if isinstance(error, TrainingHalted):
        sys.stdout.flush()
        print(f"nanproof: training was halted: {shown(error)}", file=sys.stderr, flush=True)
        return 1
    trace = error.__traceback__
    here = (str(Path(__file__).parents[1]), runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    sys.stdout.flush()
    if trace is None and isinstance(error, ImportError):  # no such module, or a folder without __main__: no line of the script
        print(f"nanproof: {shown(error)}", file=sys.stderr, flush=True)
        return 1
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
