"""`Checkpoints(on_signal=True)`: SIGTERM and SIGUSR1 save at the next step boundary, and no step is lost."""

import json
import os
import signal

import pytest
import torch

import nanproof
from forked import python
from toys import batches, mse, net

RUN = """
import os, signal, sys, torch, nanproof
sys.path[:0] = {paths!r}
from toys import batches, mse, net
torch.set_num_threads(1)
torch.manual_seed(0)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
where = nanproof.Checkpoints({folder!r}, every=100, prove=1, on_signal=True, exit_status={status})
own = {own}
guard = nanproof.Guard(model, optimizer, loss_fn=None if own else mse, scheduler=schedule, checkpoints=where)
start = guard.resume()
print("start", start)
for step, batch in list(enumerate(batches(12)))[start:]:
    if step in {at} and not start:
        os.kill(os.getpid(), signal.{name})
    if own:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
        schedule.step()
    else:
        guard.train_step(batch)
guard.close()
sums = [p.double().sum().item() for p in model.state_dict().values()]
print("end", sums, schedule.get_last_lr(), torch.rand(1).item())
"""


def life(folder, *, name="SIGTERM", at=(), own=False, status=0, ends=0):
    paths = [os.path.dirname(os.path.dirname(__file__))]
    text = RUN.format(folder=str(folder), name=name, at=tuple(at), own=own, status=status, paths=paths)
    done = python("-c", text)
    assert done.returncode == ends, done.stderr
    return done


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_loses_no_step(tmp_path, name, own):
    whole = life(tmp_path / "a", own=own).stdout.splitlines()
    stopped = life(tmp_path / "b", own=own, name=name, at=[5])
    assert "end" not in stopped.stdout
    (mark,) = (tmp_path / "b").glob("step-*/good.json")
    assert mark.parent.name == "step-00000006" and json.loads(mark.read_text())["preempted"] is True
    resumed = life(tmp_path / "b", own=own, at=[99]).stdout.splitlines()
    assert resumed[0] == "start 6"
    assert resumed[1] == whole[1]


def test_the_exit_status_is_the_users(tmp_path):
    life(tmp_path, at=[2], status=75, ends=75)


def test_a_second_signal_ends_at_once(tmp_path):
    text = f"""
import os, signal, nanproof, torch
model = torch.nn.Linear(1, 1)
where = nanproof.Checkpoints({str(tmp_path)!r}, on_signal=True)
guard = nanproof.Guard(model, torch.optim.SGD(model.parameters()), checkpoints=where)
os.kill(os.getpid(), signal.SIGTERM)
assert guard.preempted == "SIGTERM"
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert python("-c", text).returncode == -signal.SIGTERM


def test_handlers_come_back_when_the_guard_closes(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    model = net()
    guard = nanproof.Guard(
        model, torch.optim.AdamW(model.parameters()), loss_fn=mse, checkpoints=nanproof.Checkpoints(tmp_path, on_signal=True)
    )
    assert signal.getsignal(signal.SIGTERM) != before
    guard.train_step(batches(1)[0])
    guard.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_data_worker_that_the_signal_killed_does_not_stand_in_the_way(tmp_path):
    """A scheduler may signal the whole group: the loader raises before the next step is reached."""
    model = net()
    where = nanproof.Checkpoints(tmp_path, every=100, on_signal=True, exit_status=3)
    with pytest.raises(SystemExit) as left:
        with nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, checkpoints=where) as guard:
            for batch in batches(3):
                guard.train_step(batch)
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated")
    assert left.value.code == 3
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, checkpoints=where)
    assert guard.resume() == 3
    guard.close()


@pytest.mark.parametrize("wrong", [{"on_signal": 1}, {"exit_status": 256}, {"exit_status": True}, {"exit_status": "0"}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(nanproof.UsageError, match=next(iter(wrong))):
        nanproof.Checkpoints("folder", **wrong)
