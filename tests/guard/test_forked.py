"""A guard in a forked process: it touches nothing of the run's own process."""

import logging
import os
import signal

import pytest
import torch

import nanproof
from toys import batches, mse, net, poison


def in_a_fork(work):
    """Run something in a forked process, for ten seconds at most. Returns what it wrote and its exit status."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(10)
        status = 1
        try:
            os.write(writes, str(work()).encode())
            status = 0
        except BaseException as error:
            os.write(writes, repr(error).encode())
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def guard(tmp_path):
    model = net(batch_norm=False)
    made = nanproof.Guard(
        model,
        torch.optim.AdamW(model.parameters()),
        loss_fn=mse,
        run_dir=tmp_path / "run",
        checkpoints=nanproof.Checkpoints(tmp_path / "kept", every=1, prove=1),
        policy=nanproof.Policy(snapshot_every=1),
    )
    for batch in batches(4):
        made.train_step(batch)
    yield made
    made.close()


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_steps_in_a_forked_process_leave_no_trace_in_the_runs_files(guard, tmp_path):
    guard.parts.recovery.saver.wait()
    guard.engine.tell.flush()
    before = contents(tmp_path)

    def child():
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("nanproof").addHandler(handler)
        weight = next(guard.model.parameters()).clone()
        for batch in batches(3):
            guard.train_step(batch)
        moved = next(guard.model.parameters()).clone()
        guard.train_step(poison(batches(1)[0]))
        kept = torch.equal(moved, next(guard.model.parameters()))
        guard.close()
        return len(told), f"process {os.getppid()}" in told[0], not torch.equal(weight, moved), kept

    assert in_a_fork(child) == ("(1, True, True, True)", 0)
    assert contents(tmp_path) == before
    guard.train_step(batches(1)[0])
    assert guard.next_step == 5 and guard.incidents == []


def test_a_forked_process_that_ends_takes_nothing_along(guard, tmp_path):
    assert in_a_fork(lambda: 0) == ("0", 0)
    with pytest.raises(nanproof.UsageError, match="in use by another"):
        nanproof.Checkpoints(tmp_path / "kept")
        nanproof.Guard(net(), torch.optim.SGD(net().parameters()), checkpoints=nanproof.Checkpoints(tmp_path / "kept"))


def test_resume_in_a_forked_process_is_refused(guard):
    text, status = in_a_fork(guard.resume)
    assert status == 1 and "belongs to another process" in text


def test_a_guard_made_in_a_forked_process_works(tmp_path):
    def child():
        model = net()
        with nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, run_dir=tmp_path) as guard:
            guard.train_step(poison(batches(1)[0]))
        return len(list(nanproof.read_incidents(tmp_path)))

    assert in_a_fork(child) == ("1", 0)
