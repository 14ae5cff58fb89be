"""Checkpoints on the disk: what makes one good, what is kept, what is passed over, and what trouble with the disk does."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import zlib

import pytest
import torch

import forked
import nanproof
from nanproof import scan
from nanproof.recover.state._sealed import packed
from nanproof.recover.state._store import Store
from recover.runs import loader as rows
from recover.runs import made, once, poison_unused_moment, same, train, weights
from toys import batches, mse, net


def saved(folder, steps=50, every=10, prove=3, keep=3, **kwargs):
    """A finished run and its checkpoints, and the state at every checkpoint's step."""
    where = nanproof.Checkpoints(folder, every=every, prove=prove, keep=keep, background=False)
    guard = made(checkpoints=where, **kwargs)
    states = {}

    def look(guard):
        if guard.next_step % every == 0:
            states[guard.next_step] = weights(guard)

    train(guard, guard.wrap(rows()), steps, look)
    guard.parts.recovery.close(alone=False)
    return states


def good(folder):
    return sorted(int(path.parent.name[5:13]) for path in folder.glob("step-*/good.json"))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def resumed(folder, **kwargs):
    guard = made(checkpoints=nanproof.Checkpoints(folder, **kwargs))
    step = guard.resume()
    state = weights(guard)
    guard.parts.recovery.close(alone=False)
    return step, state


def test_a_candidate_becomes_good_after_enough_healthy_steps(tmp_path):
    states = saved(tmp_path, steps=43, prove=5)
    assert good(tmp_path) == [10, 20, 30]
    assert names(tmp_path)[-1] == "step-00000040"
    step, state = resumed(tmp_path)
    assert step == 30 and same(state, states[30]) == []


def test_nothing_counts_as_good_that_is_not_finite(tmp_path):
    """Infinite second moments leave loss and gradients as they are: the scan is what finds them, and no checkpoint has them."""
    where = nanproof.Checkpoints(tmp_path, every=10, prove=0, keep=9, background=False)
    guard = made(checkpoints=where, policy={"at_cap": "halt"})
    with pytest.raises(nanproof.TrainingHalted, match="state is broken"):
        train(guard, guard.wrap(rows()), 50, once(25, poison_unused_moment))
    assert good(tmp_path) == [10, 20] and names(tmp_path) == ["step-00000010", "step-00000020"]
    assert [i.kind for i in guard.incidents] == ["nonfinite-weight"]
    guard.close()


def test_the_last_good_ones_are_kept_and_no_other(tmp_path):
    saved(tmp_path, steps=100, keep=2)
    assert good(tmp_path) == [80, 90]
    assert names(tmp_path) == ["step-00000080", "step-00000090", "step-00000100"]


def test_the_last_good_one_is_never_deleted(tmp_path):
    """keep=1, and nothing after it is ever proven: it stays through any number of candidates."""
    saved(tmp_path, steps=25, keep=1, prove=3)
    assert good(tmp_path) == [20]
    where = nanproof.Checkpoints(tmp_path, every=5, prove=1000, keep=1, background=False)
    guard = made(checkpoints=where)
    assert guard.resume() == 20
    train(guard, guard.wrap(rows()), 60)
    assert good(tmp_path) == [20]
    guard.close()


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut short":
        data = data[: len(data) // 2]
    elif how == "a bit flipped":
        data[len(data) // 2] ^= 4
    elif how == "emptied":
        data = bytearray()
    path.write_bytes(data)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["cut short", "a bit flipped", "emptied", "gone"])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "host-0.pt", "manifest.json", "good.json"])
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(file, how, tmp_path, caplog):
    states = saved(tmp_path, steps=35)
    damage(tmp_path / "step-00000030" / file, how)
    step, state = resumed(tmp_path)
    assert step == 20 and same(state, states[20]) == []
    assert "passed over step-00000030" in caplog.text


def test_damage_below_a_sound_checkpoint_does_not_matter(tmp_path):
    states = saved(tmp_path, steps=35)
    damage(tmp_path / "step-00000020" / "__0_0.distcp", "cut short")
    step, state = resumed(tmp_path)
    assert step == 30 and same(state, states[30]) == []


def test_nothing_is_deleted_while_the_newest_is_damaged(tmp_path, caplog):
    """Before an old checkpoint goes, the newest good one is read back."""
    saved(tmp_path, steps=35, keep=2)
    ranks = made().parts.stepper.ranks
    store = Store(tmp_path, 1, ranks)
    damage(tmp_path / "step-00000030" / "__0_0.distcp", "a bit flipped")
    (tmp_path / "step-00000030" / "good.json").unlink()
    store.promote(30, 3)
    assert good(tmp_path) == [20, 30]
    assert "No older checkpoint is deleted" in caplog.text
    store.close()


def test_a_step_that_is_saved_again_does_not_touch_the_good_one(tmp_path):
    """A resumed run that passed over a damaged checkpoint comes to its step again."""
    states = saved(tmp_path, steps=35)
    damage(tmp_path / "step-00000030" / "host-0.pt", "cut short")
    where = nanproof.Checkpoints(tmp_path, every=10, prove=3, background=False)
    guard = made(checkpoints=where)
    data = guard.wrap(rows())
    assert guard.resume() == 20
    train(guard, data, 36)
    guard.parts.recovery.close(alone=False)
    assert "step-00000030-2" in names(tmp_path)
    step, state = resumed(tmp_path)
    assert step == 30 and same(state, states[30]) == []


def test_checkpoints_of_another_model_are_refused_before_anything_is_touched(tmp_path):
    saved(tmp_path, steps=25)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 2))
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, checkpoints=nanproof.Checkpoints(tmp_path))
    before = weights(guard)
    with pytest.raises(nanproof.UsageError, match=r"of another model: the model has no 4.weight.*is \(2, 16\) in the model"):
        guard.resume()
    assert same(weights(guard), before) == []
    guard.parts.recovery.close(alone=False)


def test_a_scan_reads_what_was_written(tmp_path):
    """nanproof's own checkpoints, healthy and not: files without torch's checksums inside are whole all the same."""
    saved(tmp_path, steps=25)
    report = scan([tmp_path])
    assert report.status == "clean"
    assert sum(len(file.tensors) for c in report.checkpoints for file in c.files) > 40
    assert [path.name for path in (good.path for good in report.last_good.values() if good)] == ["step-00000020"]


def test_another_optimizer_or_scheduler_is_refused_before_anything_is_touched(tmp_path):
    saved(tmp_path, steps=25)
    for kwargs, says in (
        ({"optimizer": "SGD-fused"}, "optimizer AdamW, and the guard has SGD"),
        ({"scheduler": True}, "no scheduler"),
    ):
        guard = made(checkpoints=nanproof.Checkpoints(tmp_path), **kwargs)
        before = weights(guard)
        with pytest.raises(nanproof.UsageError, match=says):
            guard.resume()
        assert same(weights(guard), before) == []
        guard.parts.recovery.close(alone=False)


def test_a_run_that_begins_anew_among_the_checkpoints_of_another_is_refused(tmp_path):
    saved(tmp_path, steps=25)
    guard = made(checkpoints=nanproof.Checkpoints(tmp_path))
    with pytest.raises(nanproof.UsageError, match=r"earlier run: call guard\.resume"):
        guard.train_step(batches(1)[0])
    guard.parts.recovery.close(alone=False)


def test_folders_that_are_somebody_elses_are_left_alone(tmp_path):
    for step in (5, 10):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "model.pt").write_text("precious")
    saved(tmp_path, steps=60, keep=1, prove=1)
    assert len(list(tmp_path.glob("*/model.pt"))) == 2


def test_two_guards_of_one_process_do_not_share_a_folder(tmp_path):
    guard = made(checkpoints=nanproof.Checkpoints(tmp_path))
    with pytest.raises(nanproof.UsageError, match="another guard of this process"):
        made(checkpoints=nanproof.Checkpoints(tmp_path))
    guard.close()
    made(checkpoints=nanproof.Checkpoints(tmp_path)).close()


def test_where_nothing_can_be_used_the_run_says_that_it_starts_anew(tmp_path, caplog):
    saved(tmp_path, steps=25)
    for path in tmp_path.glob("step-*/good.json"):
        path.unlink()
    assert resumed(tmp_path)[0] == 0
    assert "can be used: the run starts from step 0" in caplog.text


def test_checksums_are_those_of_zlib(tmp_path):
    """An independent reader of the manifest agrees."""
    saved(tmp_path, steps=25)
    for folder in tmp_path.glob("step-*"):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json", "good.json"}
        for name, facts in manifest["files"].items():
            data = (folder / name).read_bytes()
            assert facts == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def test_half_written_and_half_deleted_ones_are_cleared_away(tmp_path):
    saved(tmp_path, steps=25)
    for name in (".step-00000030.partial", ".step-00000010.old"):
        shutil.copytree(tmp_path / "step-00000020", tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert resumed(tmp_path)[0] == 20
    assert names(tmp_path) == ["notes", "step-00000010", "step-00000020"]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(nanproof.UsageError, match="cannot be written"):
        made(checkpoints=nanproof.Checkpoints(tmp_path / "file"))


OTHER = textwrap.dedent(
    """
    import sys, nanproof, torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    kwargs = {"run_dir": sys.argv[1]} if sys.argv[2] == "run" else {"checkpoints": nanproof.Checkpoints(sys.argv[1])}
    try:
        nanproof.Guard(model, optimizer, **kwargs).close()
    except nanproof.UsageError as error:
        print(error)
    """
)


@pytest.mark.parametrize("what", ["run", "checkpoints"])
def test_a_second_process_in_the_same_folder_is_turned_away(what, tmp_path):
    def other():
        done = forked.python("-c", OTHER, tmp_path, what)
        assert done.returncode == 0, done.stderr
        return done.stdout

    model = net()
    kwargs = {"run_dir": tmp_path} if what == "run" else {"checkpoints": nanproof.Checkpoints(tmp_path)}
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse, **kwargs)
    assert f"in use by another process (process {os.getpid()} on" in other()
    guard.close()
    assert other() == ""


def test_trouble_with_the_disk_is_a_warning_and_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    """The third checkpoint finds the disk full. Training goes on, the others are whole, and the fourth is written again."""
    import resource
    import signal

    where = nanproof.Checkpoints(tmp_path, every=10, prove=3, background=False)
    guard = made(checkpoints=where)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []

    def look(guard):
        if guard.next_step == 25:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        if guard.next_step == 35:
            seen.extend(names(tmp_path))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    try:
        train(guard, guard.wrap(rows()), 55, look)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert seen == ["step-00000010", "step-00000020"]
    assert "the checkpoint of step 30 was not written: File too large" in caplog.text
    assert good(tmp_path) == [20, 40, 50]
    guard.close()


def test_a_folder_that_disappears_does_not_end_the_run(tmp_path, caplog):
    where = nanproof.Checkpoints(tmp_path / "c", every=10, prove=3, background=False)
    guard = made(checkpoints=where)
    train(guard, guard.wrap(rows()), 50, once(25, lambda g: shutil.rmtree(tmp_path / "c")))
    assert "was not written" in caplog.text
    guard.close()


def test_state_that_could_only_be_read_by_executing_it_is_not_saved():
    """A scheduler with objects of its own in its state: said by name, when it is saved, not when it is needed."""

    class Odd:
        pass

    with pytest.raises(nanproof.UsageError, match=r"schedule\.what \(Odd\)"):
        packed({"version": 1, "schedule": {"what": Odd()}})


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """In the background: the same files, the same state."""
    where = nanproof.Checkpoints(tmp_path / "a", every=10, prove=3)
    guard = made(checkpoints=where)
    data = guard.wrap(rows())
    train(guard, data, 50)
    guard.close()
    states = saved(tmp_path / "b", steps=50)
    for step in (20, 30, 40):
        for folder in ("a", "b"):
            shutil.copytree(tmp_path / folder / f"step-{step:08d}", tmp_path / f"{folder}{step}" / f"step-{step:08d}")
            found, state = resumed(tmp_path / f"{folder}{step}")
            assert found == step and same(state, states[step]) == []


def test_optimizer_state_that_is_no_tensor_survives(tmp_path):
    """Step counts as plain numbers, as older optimizers have them."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["taken"] = self.state[p].get("taken", 0) + 1
            return super().step(closure)

    def build():
        torch.manual_seed(0)
        model = net()
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        where = nanproof.Checkpoints(tmp_path, every=5, prove=1, background=False)
        return nanproof.Guard(model, optimizer, loss_fn=mse, checkpoints=where)

    guard = build()
    for batch in batches(8):
        guard.train_step(batch)
    guard.parts.recovery.close(alone=False)
    fresh = build()
    assert fresh.resume() == 5
    assert [fresh.optimizer.state[p]["taken"] for p in fresh.model.parameters()] == [5] * 6
    fresh.close()


def sealed_again(folder):
    """Sizes and checksums of what is there now, as somebody who tampers with a checkpoint would write them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    good = json.loads((folder / "good.json").read_text())
    good["manifest"] = f"{zlib.crc32(text.encode()):08x}"
    (folder / "good.json").write_text(json.dumps(good))


def change_host(folder, change):
    host = torch.load(folder / "host-0.pt", weights_only=True)
    change(host)
    torch.save(host, folder / "host-0.pt")


def poison_weights(folder):
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    load(tensors, checkpoint_id=folder, no_dist=True)
    next(t for name, t in tensors.items() if name.endswith("weight"))[0, 0] = float("nan")
    save(tensors, storage_writer=FileSystemWriter(folder, overwrite=True), no_dist=True)


def change_ranks(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "ranks": 2}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (poison_weights, "holds NaN or Inf"),
        (lambda folder: change_host(folder, lambda host: host.update(step=3)), "its host part is that of step 3"),
        (change_ranks, "a host part for each of its ranks"),
    ],
    ids=["nan", "step", "ranks"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_whose_checksums_hold_and_whose_content_does_not_is_passed_over(tmp_path, caplog, damage, why):
    saved(tmp_path)
    newest = tmp_path / f"step-{good(tmp_path)[-1]:08d}"
    damage(newest)
    sealed_again(newest)
    step, _ = resumed(tmp_path)
    assert step == good(tmp_path)[-2]
    assert any(newest.name in text and why in text for text in caplog.messages)
