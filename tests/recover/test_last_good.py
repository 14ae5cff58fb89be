"""Checkpoints that are damaged, or lie on a way that was given up: which is loaded, which is kept, which goes."""

from __future__ import annotations

import nanproof
from test_recovery import loader, made, train


def saved(tmp_path, steps, **kwargs):
    """A run of so many steps, as the end of its process leaves it on the disk."""
    where = nanproof.Checkpoints(tmp_path, **{"every": 10, "prove": 3, "background": False, **kwargs})
    guard = made(scheduler=True, checkpoints=where)
    train(guard, guard.wrap(loader()), steps)
    guard._recovery.close()
    return where


def good(tmp_path):
    return sorted(path.parent.name for path in tmp_path.glob("step-*/good.json"))


def test_a_checkpoint_under_another_name_is_passed_over(tmp_path, caplog):
    """Its files agree with each other, but it is not the state of the step it is named after."""
    where = saved(tmp_path, 35)
    old, new = tmp_path / "step-00000010", tmp_path / "step-00000030"
    old.rename(tmp_path / "aside")
    new.rename(old)
    (tmp_path / "aside").rename(new)
    fresh = made(scheduler=True, checkpoints=where)
    assert fresh.resume() == 20
    assert "passed over step-00000030: it is the checkpoint of step 10 under another name" in caplog.text


def test_damaged_checkpoints_take_no_place_of_good_ones(tmp_path):
    """One that was passed over is not among the `keep` good ones, and goes as soon as there is a newer one."""
    where = saved(tmp_path, 35, keep=2)
    assert good(tmp_path) == ["step-00000020", "step-00000030"]
    (tmp_path / "step-00000030" / "host-0.pt").write_bytes(b"")
    fresh = made(scheduler=True, checkpoints=where)
    data = fresh.wrap(loader())
    assert fresh.resume() == 20
    train(fresh, data, 35)
    assert good(tmp_path) == ["step-00000020", "step-00000030-2"]
    train(fresh, data, 45)
    assert good(tmp_path) == ["step-00000030-2", "step-00000040"]
    fresh.close()
