"""The process that writes checkpoints: the same bytes as without it, whoever is killed or interrupted; nothing stays behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict

import pytest
import torch

from forked import python
from nanproof.core.support._files import FolderLock
from nanproof.recover.state import _apart, _snapshots, _writer
from nanproof.recover.state._pipe import Odd, plain_bytes
from nanproof.recover.state._shared import SharedBlock
from nanproof.recover.state._snapshots import Arena, Plan
from zoo.kills.campaign import good_on_disk

pytestmark = pytest.mark.skipif(not _writer.possible(), reason="this system cannot hand memory to another process")

HEAD = """
import logging, os, resource, signal, subprocess, sys, time
from pathlib import Path
import torch, nanproof
from recover.runs import loader, made, same, train, weights
from zoo.kills.worker import Told, fork_writers, quiet

told = quiet()
fork_writers()
folder = Path(sys.argv[1])

def guarded(where=folder, wait=True, **kwargs):
    guard = made(checkpoints=nanproof.Checkpoints(where, **{"every": 10, "prove": 3, **kwargs}))
    saver = guard.parts.recovery.saver
    if wait:
        assert saver.writer.ready(lambda: False)
    return guard, saver, saver.writer

def stopped(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)

def warnings():
    return [line for line in told.lines if "process that writes" in line or "not written" in line]
"""


def run(folder, text, status=0):
    done = python("-c", HEAD + textwrap.dedent(text), folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.splitlines()


def gone(pid):
    """Whether a process has ended, soon."""
    for _ in range(500):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True  # ended, and waiting for a process that is no child of ours to notice
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_the_bytes_are_those_of_a_save_that_training_waits_for(tmp_path):
    """Tensors and host part bit for bit, single numbers and buffers among them, over several saves and rotations."""
    run(
        tmp_path,
        """
        guard, saver, writer = guarded(folder / "a")
        pid = writer.pid
        train(guard, guard.wrap(loader()), 50)
        saver.wait()
        assert writer.pid == pid and not warnings(), told.lines
        plain, _, no_writer = guarded(folder / "b", wait=False, background=False)
        assert no_writer is None
        train(plain, plain.wrap(loader()), 50)
        names = [sorted(p.name for p in (folder / x).iterdir()) for x in "ab"]
        assert names[0] == names[1] and len(names[0]) == 5, names
        for one in (folder / "a").glob("step-*"):
            other = folder / "b" / one.name
            assert [p.name for p in sorted(one.iterdir())] == [p.name for p in sorted(other.iterdir())]
            assert (one / "__0_0.distcp").read_bytes() == (other / "__0_0.distcp").read_bytes()
            hosts = [torch.load(x / "host-0.pt", weights_only=True) for x in (one, other)]
            assert same(*(host.pop("numbers") for host in hosts)) == [] and repr(hosts[0]) == repr(hosts[1])
        """,
    )


def test_a_copy_on_a_device_goes_through_memory_that_is_shared(tmp_path):
    """Stood in for by memory that the other process cannot read: it gets a twin of it, the same one each time."""
    run(
        tmp_path,
        """
        guard, saver, writer = guarded(folder / "a")
        guard.parts.recovery.snapshots._shared = False
        train(guard, guard.wrap(loader()), 50)
        saver.wait()
        assert len(writer._twins) == 1 and len(writer._known) == 1
        assert not warnings() and not any("thread" in line for line in told.lines), told.lines
        plain, _, _ = guarded(folder / "b", wait=False, background=False)
        train(plain, plain.wrap(loader()), 50)
        for one in (folder / "a").glob("step-*"):
            assert (one / "__0_0.distcp").read_bytes() == (folder / "b" / one.name / "__0_0.distcp").read_bytes()
        """,
    )


def test_frozen_weights_and_other_kinds_of_numbers_are_the_same_too(tmp_path):
    """Most of the model is frozen, and copied once; one frozen weight is written later on. Half precision and integers."""
    run(
        tmp_path,
        """
        def build(where, **kwargs):
            torch.manual_seed(0)
            parts = torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64).requires_grad_(False)
            model = torch.nn.Sequential(*parts, torch.nn.Linear(64, 1))
            model.register_buffer("short", torch.randn(3, 5).bfloat16())
            model.register_buffer("nothing", torch.randn(0, 5))
            model.register_buffer("waves", torch.randn(7, dtype=torch.complex64))
            checkpoints = nanproof.Checkpoints(where, every=10, prove=3, **kwargs)
            mse = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean()
            trained = [p for p in model.parameters() if p.requires_grad]
            return nanproof.Guard(model, torch.optim.AdamW(trained), loss_fn=mse, checkpoints=checkpoints)

        def go(guard):
            train(guard, guard.wrap(loader()), 25)
            with torch.no_grad():
                guard.model[2].bias[0] = 5.0
            train(guard, guard.wrap(loader()), 35)
            guard.parts.recovery.saver.wait()

        one = build(folder / "a")
        assert one.parts.recovery.saver.writer.ready(lambda: False)
        go(one)
        go(build(folder / "b", background=False))
        assert one.parts.recovery.saver.writer.pid and not warnings()
        for path in (folder / "a").glob("step-*"):
            assert (path / "__0_0.distcp").read_bytes() == (folder / "b" / path.name / "__0_0.distcp").read_bytes()
        assert len(list((folder / "a").glob("step-*"))) == 3
        """,
    )


def test_a_writer_that_is_killed_in_the_middle_of_a_save_loses_nothing(tmp_path):
    """The thread writes that checkpoint, a new process the ones after it; with the third death it is the thread for good."""
    run(
        tmp_path,
        """
        guard, saver, writer = guarded()
        data = guard.wrap(loader())
        for turn in range(1, 5):
            train(guard, data, 10 * turn - 1)
            saver.wait()
            pid = writer.pid
            if turn < 4:
                os.kill(pid, signal.SIGSTOP)
                stopped(pid)
            train(guard, data, 10 * turn)
            if turn < 4:
                time.sleep(0.02)
                os.kill(pid, signal.SIGKILL)
            saver.wait()
            assert (folder / f"step-{10 * turn:08d}" / "manifest.json").is_file()
            assert len(warnings()) == min(turn, 3), told.lines
            assert writer.ready(lambda: False) == (turn < 3) and (writer.pid != pid or turn == 4)
        assert "was killed by signal 9: a thread does its work over again" in warnings()[0]
        guard.close()
        assert sorted(p.name for p in folder.iterdir()) == ["lock", *(f"step-000000{n}" for n in (10, 20, 30, 40))]
        """,
    )
    assert sorted(good_on_disk(tmp_path).values()) == [10, 20, 30]


def test_a_run_that_is_killed_takes_its_writer_along(tmp_path):
    """A data worker that was forked from it lives on, with a copy of everything the run had open. The folder is free at once."""
    out = run(
        tmp_path,
        """
        guard, saver, writer = guarded()
        train(guard, guard.wrap(loader()), 19)
        other = os.fork()
        if not other:
            time.sleep(60)
        train(guard, guard.wrap(loader()), 20)  # a save begins
        print(writer.pid, other, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        status=-9,
    )
    pid, other = map(int, out[0].split())
    try:
        FolderLock(tmp_path, "the folder").release()
        assert gone(pid)
        assert list(good_on_disk(tmp_path).values()) == [10]
    finally:
        os.kill(other, 9)


def test_signals_to_the_whole_group_do_not_reach_a_save(tmp_path):
    run(
        tmp_path,
        """
        guard, saver, writer = guarded()
        os.kill(writer.pid, signal.SIGSTOP)
        stopped(writer.pid)
        train(guard, guard.wrap(loader()), 10)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(writer.pid, number)
        os.kill(writer.pid, signal.SIGCONT)
        saver.wait()
        assert not warnings() and writer.ready(lambda: False)
        assert (folder / "step-00000010").is_dir()
        guard.close()
        """,
    )


def test_a_forked_child_leaves_the_writer_alone(tmp_path):
    run(
        tmp_path,
        """
        guard, saver, writer = guarded()
        data = guard.wrap(loader())
        train(guard, data, 10)
        saver.wait()
        child = os.fork()
        if not child:
            guard.train_step(next(iter(loader())))
            guard.close()
            saver.close()
            del guard, saver, writer
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pid = writer.pid
        train(guard, data, 20)
        saver.wait()
        assert writer.pid == pid and not warnings() and (folder / "step-00000020").is_dir()
        """,
    )


def test_a_full_disk_is_the_same_warning(tmp_path):
    run(
        tmp_path,
        """
        guard, saver, writer = guarded()
        data = guard.wrap(loader())
        train(guard, data, 10)
        saver.wait()
        before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        train(guard, data, 20)
        saver.wait()
        assert [line.partition(" (")[0] for line in warnings()] == [
            "nanproof: the checkpoint of step 20 was not written: File too large. Training goes on; earlier ones are untouched"
        ], warnings()
        assert sorted(p.name for p in folder.iterdir()) == ["lock", "step-00000010"]
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, before)
        train(guard, data, 35)
        guard.close()
        assert sorted(p.name for p in folder.iterdir()) == ["lock", "step-00000010", "step-00000030"]
        """,
    )


def test_what_rotation_finds_is_logged_and_remembered_by_the_run(tmp_path):
    """A good checkpoint is damaged: the process reads it back, the run says so, and it counts no more."""
    run(
        tmp_path,
        """
        guard, saver, writer = guarded(keep=1, every=10)
        train(guard, guard.wrap(loader()), 15)
        saver.wait()
        store = guard.parts.recovery.store
        train(guard, guard.wrap(loader()), 20)
        saver.wait()
        (folder / "step-00000020" / "host-0.pt").write_bytes(b"")
        train(guard, guard.wrap(loader()), 25)
        saver.wait()
        said = [line for line in told.lines if "No older checkpoint is deleted" in line]
        assert said and "host-0.pt has 0 bytes" in said[0], told.lines
        assert store.findings[0] == {folder / "step-00000020"}
        assert (folder / "step-00000010").is_dir()
        guard.close()
        """,
    )


def test_nothing_is_left_after_close(tmp_path):
    """No process, dead or alive, no open memory, nothing under /dev/shm."""
    run(
        tmp_path,
        """
        shm = set(os.listdir("/dev/shm"))
        guard, saver, writer = guarded()
        train(guard, guard.wrap(loader()), 12)
        pid = writer.pid
        guard.close()
        try:
            os.waitpid(-1, os.WNOHANG)
            raise SystemExit("there is a child")
        except ChildProcessError:
            pass
        assert not Path(f"/proc/{pid}").exists()
        del guard, saver, writer
        import gc
        gc.collect()
        for file in Path("/proc/self/fd").iterdir():
            assert not file.is_symlink() or "nanproof-checkpoints" not in os.readlink(file)
        assert set(os.listdir("/dev/shm")) == shm
        """,
    )


@pytest.mark.parametrize("forbidden", ["process", "memory"])
def test_where_no_process_can_be_had_the_thread_writes(tmp_path, forbidden):
    run(
        tmp_path,
        f"""
        from nanproof.recover.state import _shared, _writer

        def refused(*args):
            raise PermissionError(1, "Operation not permitted")

        if {forbidden!r} == "process":
            _writer.launch = refused
        else:
            os.memfd_create = refused
        guard, saver, writer = guarded(wait=False)
        train(guard, guard.wrap(loader()), 45)
        guard.close()
        (line,) = [line for line in told.lines if "by a thread" in line]
        assert "Operation not permitted" in line or "memory that cannot be shared" in line
        assert not warnings()
        """,
    )
    assert sorted(good_on_disk(tmp_path).values()) == [20, 30, 40]


def test_nobody_waits_for_a_process_to_begin(tmp_path):
    """A run that ends before the process has imported torch: the thread writes."""
    run(
        tmp_path,
        """
        from nanproof.recover.state import _writer
        _writer.launch = lambda channel, folder, keep: subprocess.Popen(["sleep", "100"], pass_fds=[channel.fileno()])
        guard, saver, writer = guarded(wait=False)
        train(guard, guard.wrap(loader()), 10)
        pid = writer.pid
        assert pid
        start = time.monotonic()
        guard.close()
        assert time.monotonic() - start < 30 and (folder / "step-00000010").is_dir() and not Path(f"/proc/{pid}").exists()
        """,
    )


SCRIPT = """
import os, sys, torch, nanproof
print("once", flush=True)  # would come twice if the other process ran this file
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
mse = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
where = nanproof.Checkpoints(sys.argv[1], every=10, prove=3)
guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, checkpoints=where)
os.chdir("/")
def step():
    guard.train_step((torch.randn(8, 4), torch.randn(8, 1)))
for _ in range(9):
    step()
writer = guard.parts.recovery.saver.writer
assert writer.ready(lambda: False), writer
step()
print(writer.pid, flush=True)
os.killpg(0, 2)
"""


def test_a_script_without_a_main_guard_interrupted_and_ended_without_close(tmp_path):
    """The real process, started by a script that reads its program from stdin. Ctrl-C while the checkpoint is written: it is
    written to its end, as the interpreter ends, and counts."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-", str(tmp_path)],
        input=SCRIPT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
    )
    assert done.returncode in (-2, 130, 1) and "KeyboardInterrupt" in done.stderr, done.stderr
    once, pid = done.stdout.split()
    assert once == "once" and gone(int(pid))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000010"]
    assert "not written" not in done.stderr and "was killed" not in done.stderr


def test_a_value_of_the_users_own_class_is_not_sent():
    """Its class may not be there in the other process. The thread then writes, and says what cannot be saved."""

    class Own(OrderedDict):
        pass

    class Number(float):
        pass

    fine = [1, 2.5, "x", None, True, b"y", OrderedDict(c=torch.ones(2, 3).T), torch.float16, torch.Size([1])]
    assert repr(pickle.loads(plain_bytes({"fine": fine}))) == repr({"fine": fine})
    for odd in (Own(), Number(1.0), Own, torch.nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(), print):
        with pytest.raises(Odd):
            plain_bytes({"schedule": {"what": odd}})


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stretch_of_neighbours_is_finite_if_each_of_them_is(dtype):
    """Against looking at each tensor by itself, with holes for those that are not asked about."""
    shapes = [(3, 5), (), (70,), (0, 4), (64,), (1,)]
    live = {f"{i}": torch.ones(shape).to(dtype) for i, shape in enumerate(shapes)}
    live["whole"] = torch.ones(3, dtype=torch.int64)
    arena = Arena(Plan.of(live), False)
    for name, tensor in live.items():
        arena.views[name].copy_(tensor)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for name in [name for name, t in live.items() if t.numel() and name != "whole"]:
            arena.views[name].view(-1)[-1:].copy_(torch.tensor([bad]).to(dtype))
            for asked in ({*live}, {*live} - {name}, {*live} - {"2"}, {name}):
                found = _snapshots.nonfinite(("", t) for t in arena.stretches(asked))
                assert bool(found) == (name in asked and not bool(torch.isfinite(arena.views[name].to(torch.complex64)).all()))
            arena.views[name].copy_(live[name])


def test_memory_that_came_with_a_write_that_failed_is_not_kept():
    """The run sends it again, or never says that it is gone."""

    class Full:
        def write(self, *given):
            raise OSError("No space left on device")

    block, states = SharedBlock(8), {1: {}}
    layout = {2: [(block.size, [("a", 0, torch.float32, (2,))])]}
    with pytest.raises(OSError, match="No space"):
        _apart._write(Full(), states, [os.dup(block.handle)], 0, layout, [], [(1, None), (2, ["a"])], pickle.dumps({}), [])
    assert set(states) == {1}
