"""Checkpoints that are damaged, or lie on a way that was given up: which is loaded, which is kept, which goes."""

from __future__ import annotations

import nanproof
from recover.test_recovery import loader, made, once, poison_weight, same, train, weights


def saved(tmp_path, steps, **kwargs):
    """A run of so many steps, as the end of its process leaves it on the disk."""
    where = nanproof.Checkpoints(tmp_path, **{"every": 10, "prove": 3, "background": False, **kwargs})
    guard = made(scheduler=True, checkpoints=where)
    train(guard, guard.wrap(loader()), steps)
    guard.parts.recovery.close(alone=False)
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


def test_older_checkpoints_are_read_before_they_are_relied_on(tmp_path, caplog):
    """One in the middle was damaged while nobody looked: the one behind it stays as long as it is needed."""
    where = saved(tmp_path, 45, keep=3)
    assert good(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]
    (tmp_path / "step-00000030" / "host-0.pt").write_bytes(b"")
    fresh = made(scheduler=True, checkpoints=where)
    data = fresh.wrap(loader())
    assert fresh.resume() == 40
    train(fresh, data, 55)
    assert good(tmp_path) == ["step-00000020", "step-00000030", "step-00000040", "step-00000050"]
    assert "step-00000030: host-0.pt has 0 bytes" in caplog.text and "does not count as good" in caplog.text
    train(fresh, data, 65)
    assert good(tmp_path) == ["step-00000040", "step-00000050", "step-00000060"]
    fresh.close()


def test_going_back_in_memory_leaves_the_last_good_checkpoint(tmp_path):
    """The copy in memory is older than every checkpoint. A process that is killed right after going back must find one."""
    undisturbed = made(scheduler=True)
    train(undisturbed, loader(), 60)
    where = nanproof.Checkpoints(tmp_path, every=5, keep=2, prove=2, background=False)
    guard = made(scheduler=True, checkpoints=where, policy={"snapshot_every": 30})
    seen = []

    def look(guard):
        once_poisoned(guard)
        seen.append((guard.next_step, good(tmp_path)))

    once_poisoned = once(44, poison_weight)
    train(guard, guard.wrap(loader()), 60, look)
    back = [step for step, _ in seen].index(30, 31)
    assert seen[back - 1] == (44, ["step-00000035", "step-00000040"])
    assert seen[back] == (30, ["step-00000035"])  # 30 itself went by rotation
    assert all(names for step, names in seen[10:])
    assert seen[back + 2] == (32, ["step-00000030"])  # saved again and proven: the spare one is gone
    assert same(weights(guard), weights(undisturbed)) == []
    guard.close()


def test_a_step_that_could_not_be_saved_once_can_become_good_later(tmp_path):
    """The disk was full, the run went back, and came to the same step again."""
    where = nanproof.Checkpoints(tmp_path, every=10, prove=2, background=False)
    guard = made(checkpoints=where, policy={"snapshot_every": 10})
    in_the_way = tmp_path / ".step-00000040.partial"
    in_the_way.write_text("not a folder")
    poisoned = once(43, poison_weight)

    def look(guard):
        poisoned(guard)
        if guard.next_step == 42 and in_the_way.exists():
            assert good(tmp_path)[-1] == "step-00000030"
            in_the_way.unlink()

    train(guard, guard.wrap(loader()), 44, look)
    assert [(i.action, i.step, i.restored_step) for i in guard.incidents] == [("rewound", 43, 40)]
    assert good(tmp_path)[-1] == "step-00000040"
    guard.close()


def test_steps_that_were_given_up_prove_nothing(tmp_path):
    """The run goes back in the middle of a proof: steps count once, and only those that were not given up."""
    where = nanproof.Checkpoints(tmp_path, every=20, prove=8, background=False)
    guard = made(checkpoints=where, policy={"snapshot_every": 5})
    poisoned, seen = once(27, poison_weight), []

    def look(guard):
        poisoned(guard)
        seen.append((guard.next_step, len(good(tmp_path))))

    train(guard, guard.wrap(loader()), 30, look)
    assert [step for step, _ in seen].count(26) == 2  # back to 25
    assert [step for step, number in seen if number] == [28, 29, 30]
    guard.close()


def test_memory_of_a_copy_is_given_back_once(tmp_path):
    """Training lets go of a copy, its memory is used again, and then the thread that wrote it lets go of it too: two copies must
    not share memory, or the older good state becomes the newer one."""
    guard = made(policy={"snapshot_every": 5})
    train(guard, guard.wrap(loader()), 12)
    snapshots = guard.parts.recovery.snapshots
    first = snapshots.kept[0]
    snapshots.drop(lambda s: s is first)
    second = snapshots.take(12, {})
    assert second.arena is first.arena
    snapshots.release(first)
    assert snapshots.take(13, {}).arena is not second.arena
    guard.close()
