"""Saver: writes checkpoints while training goes on. Trouble with the disk is a warning, never the end.

A thread does what is asked for, in order. Where there can be one, it has a process write (`_writer`). Otherwise it writes
itself, as it does when that process has not begun yet or was killed. With several ranks it always does: they write together,
over a process group.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from nanproof.core.support._files import finish, reason
from nanproof.recover.state._pipe import Odd
from nanproof.recover.state._snapshots import Snapshot
from nanproof.recover.state._store import Store
from nanproof.recover.state._writer import Gone, Writer

log = logging.getLogger("nanproof")

Jobs: TypeAlias = "queue.Queue[Callable[[], None] | None]"


class Saver:
    """Does what it is told in order: save, promote. Every rank tells its own the same."""

    def __init__(self, store: Store, background: bool, together: bool, apart: bool = False) -> None:
        """`apart`: in a process of its own."""
        self._store, self._background, self._together = store, background, together
        self._hurry = threading.Event()
        """Somebody waits for the disk: not for a process to begin."""
        self.writer: Writer | None = None
        if apart and background and not together:
            self.writer = Writer(store)
            weakref.finalize(self, self.writer.close)  # runs after `finish`, which is made later
        self._jobs: Jobs = queue.Queue()
        self._end: Callable[[], Any] | None = None
        self._slow = self._odd = False
        self.failed: set[int] = set()
        """Steps whose checkpoint could not be written."""

    def save(self, snapshot: Snapshot, written: Callable[[Snapshot], None]) -> None:
        """Write a snapshot to the disk; `written` is told afterwards, whether it worked or not."""
        if self._jobs.unfinished_tasks and not self._slow:
            self._slow = True
            log.warning("nanproof: the checkpoint before is still being written: training waits. Raise Checkpoints(every=...)")
        self.wait()

        snapshot.saving = True

        def job() -> None:
            try:
                snapshot.wait()
                self._write(snapshot)
                self.failed.discard(snapshot.step)  # a run that went back comes here a second time
            except Exception as error:
                self.failed.add(snapshot.step)
                log.warning(
                    "nanproof: the checkpoint of step %d was not written: %s. Training goes on; earlier ones are untouched",
                    snapshot.step,
                    reason(error),
                )
            finally:
                snapshot.saving = False
                written(snapshot)

        self._do(job)

    def promote(self, step: int, healthy: int, preempted: bool = False) -> None:
        def job() -> None:
            try:
                if step not in self.failed:
                    self._promote(step, healthy, preempted)
            except Exception as error:
                log.warning("nanproof: the checkpoint of step %d stays a candidate: %s", step, reason(error))

        self._do(job)

    def warm_up(self) -> None:
        """A save is due soon: what writes it takes seconds to begin."""
        if self.writer is not None:
            self.writer.start()

    def wait(self) -> None:
        """Until everything is on the disk."""
        self._hurry.set()
        self._jobs.join()
        self._hurry.clear()

    def close(self) -> None:
        if self._end is not None:
            self._end()
        if self.writer is not None:
            self.writer.close()

    def _write(self, snapshot: Snapshot) -> None:
        if self.writer is not None and self.writer.ready(self._hurry.is_set):
            try:
                self.writer.write(self._store, snapshot)
                return
            except Odd as what:
                if not self._odd:
                    self._odd = True
                    log.info("nanproof: checkpoints are written by a thread: the state holds %s", what)
            except Gone as how:
                self._lost(how)
        self._store.write(snapshot.step, snapshot.tensors(), snapshot.host, snapshot.own)

    def _promote(self, step: int, healthy: int, preempted: bool) -> None:
        if self.writer is not None and self.writer.ready(self._hurry.is_set):
            try:
                self.writer.promote(self._store, step, healthy, preempted)
                return
            except Gone as how:
                self._lost(how)
        self._store.promote(step, healthy, preempted)

    def _lost(self, how: Gone) -> None:
        log.warning("nanproof: the process that writes checkpoints %s: a thread does its work over again", how)
        self._store.clear()

    def _do(self, job: Callable[[], None]) -> None:
        if not self._background:
            job()
            return
        if self._end is None:
            worker = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="nanproof-checkpoints")
            worker.start()
            # Also when the program ends without close. Not with several ranks: another one may never come to write its part.
            self._end = weakref.finalize(self, _finish, self._hurry, self._jobs, worker, os.getpid())
            self._end.atexit = not self._together
        self._jobs.put(job)


def _finish(hurry: threading.Event, jobs: Jobs, worker: threading.Thread, pid: int) -> None:
    hurry.set()
    finish(jobs, worker, pid)


def _work(jobs: Jobs) -> None:
    while True:
        job = jobs.get()
        try:
            if job is None:
                return
            job()
        finally:
            job = None  # its snapshot is not kept until the next one comes
            jobs.task_done()
