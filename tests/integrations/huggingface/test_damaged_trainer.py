"""`train(resume_from_checkpoint=True)` takes the newest checkpoint that is whole, readable and finite, and reports the others."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import nanproof
from integrations.tiny import Regression, feature_rows, make_trainer, token_rows
from nanproof import UsageError
from nanproof.integrations._saved import contents_faults

LAST = 3
"""The newest checkpoint's step. The one before it is whole."""


class Payload:
    """What a pickle must not get to call."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


KINDS = {"plain": Regression, "pretrained": tiny_llama, "peft": adapted}


def trainer_of(kind, folder, **settings):
    rows = feature_rows(16) if kind == "plain" else token_rows(16)
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": LAST, "logging_strategy": "no"} | settings
    return make_trainer(folder, KINDS[kind](), rows, eval_rows=rows[:4], **settings)


def save(kind, folder, **settings):
    trainer = trainer_of(kind, folder, **settings)
    nanproof.protect(trainer, run_dir=None)
    trainer.train()
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of each kind, saved once."""
    gc.freeze()  # every train() collects garbage, which takes longer than these trainings
    made = {}

    def get(kind="plain", **settings):
        key = (kind, *settings.items())
        if key not in made:
            made[key] = save(kind, tmp_path_factory.mktemp(kind), **settings)
        return made[key]

    yield get
    gc.unfreeze()


class Stop(TrainerCallback):
    """Ends the training when it begins: where it resumed is known by then."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = state.global_step
        raise KeyboardInterrupt


def resume(kind, folder, path=True, **settings):
    """The step that training goes on from."""
    trainer, stop = trainer_of(kind, folder, **{"max_steps": LAST + 1, **settings}), Stop()
    trainer.add_callback(stop)
    nanproof.protect(trainer, run_dir=None)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=path)
    return stop.began


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nanproof" and r.levelno >= logging.WARNING]


# -- damage --------------------------------------------------------------------------------------------------------------------


def without(name):
    return lambda folder: (folder / name).unlink()


def cut(name, share=0.5):
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def pickled(name):
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Payload()))


def pickled_by_torch(name):
    return lambda folder: torch.save({"state": Payload()}, folder / name)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def pipe(name):
    def damage(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def endless(name):
    def damage(folder):
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return damage


def a_folder(name):
    def damage(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


def first_files_only(folder):
    for path in folder.iterdir():
        if path.name not in ("model.safetensors", "nanproof.json"):
            path.unlink()


def nan_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def inf_moment(folder):
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"].view(-1)[0] = math.inf
    torch.save(state, folder / "optimizer.pt")


def torch_weights(then=None):
    """The weights in `pytorch_model.bin`, as older versions save them."""

    def change(folder):
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        if then is not None:
            then(folder)

    return change


def sharded(then=None):
    """One file a weight, and the index that says which is where."""

    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        files = {name: f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i, name in enumerate(tensors)}
        for name, file in files.items():
            save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        if then is not None:
            then(folder)

    return change


def compressed(name):
    """A record that unpacks to far more than the file: torch never writes one."""

    def damage(folder):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(1 << 22))

    return damage


def unmarked(then=None):
    """As written without nanproof."""

    def change(folder):
        (folder / "nanproof.json").unlink()
        (folder / "nanproof.pt").unlink()
        if then is not None:
            then(folder)

    return change


def other_step(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 1}))


STATE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
UNPICKLED = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
DAMAGE = {
    **{f"no {name}": without(name) for name in STATE},
    **{f"unmarked, no {name}": unmarked(without(name)) for name in STATE},
    **{f"half of {name}": cut(name) for name in STATE},
    **{f"empty {name}": cut(name, 0) for name in STATE},
    **{f"last tenth of {name} lost": unmarked(cut(name, 0.9)) for name in STATE},
    **{f"a pickle in {name}": pickled(name) for name in UNPICKLED},
    **{f"a payload in {name}": pickled_by_torch(name) for name in UNPICKLED},
    "a pickle in pytorch_model.bin": torch_weights(pickled("pytorch_model.bin")),
    "a payload in pytorch_model.bin": torch_weights(pickled_by_torch("pytorch_model.bin")),
    "half of pytorch_model.bin": torch_weights(cut("pytorch_model.bin")),
    "a packed optimizer.pt": compressed("optimizer.pt"),
    "emptied": emptied,
    "first file only": first_files_only,
    "unmarked, first file only": unmarked(first_files_only),
    "marked as being saved": text("nanproof.json", '{"version": 1, "state": "saving"}'),
    "transformers' own sign of a partial save": text("checkpoint-is-incomplete.txt", "Checkpoint started at step 3"),
    "a NaN in the weights": nan_weight,
    "an Inf in a moment": inf_moment,
    "trainer_state.json is a list": text("trainer_state.json", "[]"),
    "trainer_state.json is nested too deep": text("trainer_state.json", "[" * 200_000),
    "trainer_state.json of another step": other_step,
    "trainer_state.json is not UTF-8": lambda folder: (folder / "trainer_state.json").write_bytes(b"\xff\xfe{}"),
    **{f"{name} is a pipe": pipe(name) for name in STATE},
    **{f"{name} is endless": endless(name) for name in ("optimizer.pt", "trainer_state.json")},
    "trainer_state.json of a step with 400 digits": text("trainer_state.json", '{"global_step": 1' + 400 * "0" + "}"),
    **{f"{name} is a folder": a_folder(name) for name in ("optimizer.pt", "trainer_state.json")},
    "a shard is missing": sharded(without("model-00002-of-00009.safetensors")),
    "unmarked, a shard is missing": unmarked(sharded(without("model-00002-of-00009.safetensors"))),
    "a shard is cut": sharded(cut("model-00002-of-00009.safetensors")),
    "the index is cut": sharded(cut("model.safetensors.index.json")),
}
DAMAGE_ELSEWHERE = {
    "config.json is cut": ("pretrained", cut("config.json")),
    "no adapter weights": ("peft", without("adapter_model.safetensors")),
    "adapter weights are cut": ("peft", cut("adapter_model.safetensors")),
    "no adapter_config.json": ("peft", without("adapter_config.json")),
    "adapter_config.json is cut": ("peft", cut("adapter_config.json")),
}
ALL_DAMAGE = {name: ("plain", damage) for name, damage in DAMAGE.items()} | DAMAGE_ELSEWHERE


@pytest.mark.parametrize("name", ALL_DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(saved, tmp_path, caplog, monkeypatch, name):
    """Training goes on from the one before it, and one warning names the folder; nothing in it is executed."""
    kind, damage = ALL_DAMAGE[name]
    folder = tmp_path / "out"
    shutil.copytree(saved(kind), folder)
    damage(folder / f"checkpoint-{LAST}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    caplog.clear()
    assert resume(kind, folder) == LAST - 1
    told = warnings_of(caplog)
    assert len(told) == 1 and f"checkpoint-{LAST}" in told[0] and len(told[0]) < 400
    assert not (tmp_path / "here" / "owned").exists()


# -- what is whole, whatever it looks like -------------------------------------------------------------------------------------


def nan_in_the_log(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"] = [{"loss": math.nan, "grad_norm": math.inf, "step": 1}]
    (folder / "trainer_state.json").write_text(json.dumps(state))


def users_files(folder):
    (folder / "README.md").write_text("mine")
    torch.save({"mine": Payload()}, folder / "ema.pt")
    (folder / "tokens.bin").write_bytes(bytes(100))
    (folder / "notes").mkdir()


def of_two_ranks(folder):
    for rank in (0, 1):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{rank}.pth")
    (folder / "rng_state.pth").unlink()


def marked_by_0_1_0(folder):
    (folder / "nanproof.json").write_text('{"version": 1, "state": "candidate", "step": 3}')


def linked(folder):
    shutil.move(folder, folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def never_whole_one_behind_it(folder):
    partial = folder.parent / f"checkpoint-{LAST + 5}-tmp"
    partial.mkdir()


WHOLE = {
    "as saved": lambda folder: None,
    "as saved without nanproof": unmarked(),
    "NaN in the log": nan_in_the_log,
    "the user's own files": users_files,
    "no training_args.bin": without("training_args.bin"),
    "saved on two ranks": unmarked(of_two_ranks),
    "saved on two ranks, marked": of_two_ranks,
    "pytorch_model.bin": torch_weights(),
    "pytorch_model.bin without nanproof": unmarked(torch_weights()),
    "shards": sharded(),
    "shards, without nanproof": unmarked(sharded()),
    "a mark of 0.1.0": marked_by_0_1_0,
    "a damaged mark": text("nanproof.json", "{"),
    "a mark that is a pipe": pipe("nanproof.json"),
    "an endless mark": endless("nanproof.json"),
    "a mark with odd names": text("nanproof.json", '{"state": "candidate", "files": [3, null], "ranks": "x"}'),
    "a link": linked,
    "a folder of another name": never_whole_one_behind_it,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_checkpoint_is_taken_without_a_word(saved, tmp_path, caplog, name):
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    WHOLE[name](folder / f"checkpoint-{LAST}")
    caplog.clear()
    assert resume("plain", folder) == LAST
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("kind", ["pretrained", "peft"])
@pytest.mark.parametrize("change", [None, unmarked()], ids=["marked", "unmarked"])
def test_a_whole_checkpoint_of_a_pretrained_model_is_taken(saved, tmp_path, caplog, kind, change):
    folder = tmp_path / "out"
    shutil.copytree(saved(kind), folder)
    if change is not None:
        change(folder / f"checkpoint-{LAST}")
    caplog.clear()
    assert resume(kind, folder) == LAST
    assert warnings_of(caplog) == []


SETTINGS = {
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
    "cosine": {"lr_scheduler_type": "cosine"},
    "accumulating": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_other_settings_save_is_taken(tmp_path, caplog, name):
    settings = SETTINGS[name]

    save("plain", tmp_path, **settings)
    caplog.clear()
    assert resume("plain", tmp_path, **settings) == LAST
    assert warnings_of(caplog) == []


class Packed(torch.Tensor):
    """A tensor that computes nothing, as those of quantised optimizers may."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __reduce_ex__(self, protocol):
        return Packed, (self.inner,)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function}")


def test_tensors_that_cannot_be_measured_are_not_refused(tmp_path):
    """transformers loads them, and nothing speaks against them."""
    path = tmp_path / "optimizer.pt"
    torch.save({"state": {0: {"exp_avg": Packed(torch.zeros(3))}}}, path)
    with torch.serialization.safe_globals([Packed]):
        assert list(contents_faults([path])) == []
    assert [fault.loads for fault in contents_faults([path])] == [False]


@pytest.mark.parametrize("damage", [cut("nanproof.pt"), pipe("nanproof.pt")], ids=["cut", "pipe"])
def test_a_damaged_guard_state_does_not_cost_the_checkpoint(saved, tmp_path, caplog, damage):
    """What the guard knew is lost, which is reported; the Trainer's own state is whole."""
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    damage(folder / f"checkpoint-{LAST}")
    caplog.clear()
    assert resume("plain", folder) == LAST
    [line] = warnings_of(caplog)
    assert "nanproof.pt" in line


@pytest.mark.parametrize("now", [True, False], ids=["same settings", "settings changed"])
def test_weights_without_optimizer_are_taken_where_they_were_saved_so(saved, tmp_path, caplog, now):
    """`save_only_model=True`: there is no optimizer to resume, and one line says so."""
    folder = tmp_path / "out"
    shutil.copytree(saved(save_only_model=True), folder)
    caplog.clear()
    assert resume("plain", folder, save_only_model=now) == LAST
    [line] = warnings_of(caplog)
    assert f"checkpoint-{LAST}" in line and "optimizer" in line


def test_weights_without_optimizer_are_taken_unmarked_where_the_settings_say_so(saved, tmp_path, caplog):
    folder = tmp_path / "out"
    shutil.copytree(saved(save_only_model=True), folder)
    for path in folder.glob("checkpoint-*"):
        unmarked()(path)
    caplog.clear()
    assert resume("plain", folder, save_only_model=True) == LAST
    assert len(warnings_of(caplog)) == 1


def test_several_damaged_checkpoints_are_passed_over_one_by_one(saved, tmp_path, caplog):
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    without("trainer_state.json")(folder / "checkpoint-3")
    pickled("optimizer.pt")(folder / "checkpoint-2")
    caplog.clear()
    assert resume("plain", folder) == 1
    told = warnings_of(caplog)
    assert [name in line for name, line in zip(("checkpoint-3", "checkpoint-2"), told, strict=True)] == [True, True]


def test_where_every_checkpoint_is_damaged_one_error_says_what_to_do(saved, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    for path in folder.glob("checkpoint-*"):
        without("optimizer.pt")(path)
    trainer = trainer_of("plain", folder)
    nanproof.protect(trainer, run_dir=None)
    with pytest.raises(UsageError, match=r"none of the 3 checkpoints.*\n?.*hint: "):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("damage", [text("nanproof.json", '{"version": 1, "state": "saving"}'), emptied], ids=["marked", "empty"])
def test_a_run_that_never_finished_a_save_starts_from_the_beginning(saved, tmp_path, caplog, damage):
    """Killed in its first save: there is nothing to lose, and a job that is restarted must not fail forever."""
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoint-{step}")
    damage(folder / "checkpoint-1")
    caplog.clear()
    assert resume("plain", folder) == 0
    assert any("beginning" in line for line in warnings_of(caplog))


# -- a path the user gives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [nan_weight, unmarked(without("optimizer.pt"))], ids=["NaN", "no optimizer"])
def test_a_path_is_the_users_choice_and_one_warning_says_what_is_wrong(saved, tmp_path, caplog, damage):
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    damage(folder / "checkpoint-3")
    caplog.clear()
    assert resume("plain", folder, str(folder / "checkpoint-3")) == 3
    [line] = [line for line in warnings_of(caplog) if "checkpoint-3" in line]
    assert "as asked" in line


def test_a_path_to_a_whole_checkpoint_gives_no_warning(saved, tmp_path, caplog):
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    shutil.copytree(folder / "checkpoint-2", tmp_path / "mine")
    caplog.clear()
    assert resume("plain", folder, tmp_path / "mine") == 2
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("damage", [without("trainer_state.json"), first_files_only, cut("optimizer.pt")])
def test_a_path_that_cannot_be_loaded_gives_way_to_the_newest_good_one(saved, tmp_path, caplog, damage):
    """`get_last_checkpoint(output_dir)`, as the examples of transformers use it, returns a partial folder after a kill."""
    from transformers.trainer_utils import get_last_checkpoint

    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    damage(folder / "checkpoint-3")
    caplog.clear()
    assert resume("plain", folder, get_last_checkpoint(str(folder))) == 2
    assert any("checkpoint-3" in line for line in warnings_of(caplog))


# -- saving --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["_save", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_fails_half_way_is_not_resumed_from(tmp_path, caplog, part):
    """The folder says that it is being saved until all of it is there."""
    trainer = trainer_of("plain", tmp_path)
    nanproof.protect(trainer, run_dir=None)
    original = getattr(trainer, part)

    def fails(folder, *args, **kwargs):
        if str(folder).endswith(f"-{LAST}"):
            raise OSError(28, "No space left on device")
        return original(folder, *args, **kwargs)

    setattr(trainer, part, fails)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    caplog.clear()
    assert resume("plain", tmp_path) == LAST - 1
    assert any(f"checkpoint-{LAST}" in line for line in warnings_of(caplog))


def test_rotation_counts_no_partial_checkpoint_and_keeps_what_was_just_saved(saved, tmp_path):
    """After a kill: a partial checkpoint of a later step must not push out the whole ones."""
    folder = tmp_path / "out"
    shutil.copytree(saved(), folder)
    shutil.copytree(folder / "checkpoint-3", folder / "checkpoint-9")
    text("nanproof.json", '{"version": 1, "state": "saving"}')(folder / "checkpoint-9")
    shutil.rmtree(folder / "checkpoint-1")
    trainer = trainer_of("plain", folder, max_steps=4, save_total_limit=2)
    nanproof.protect(trainer, run_dir=None)
    trainer.train(resume_from_checkpoint=True)
    there = {path.name for path in folder.glob("checkpoint-*")}
    assert "checkpoint-4" in there and "checkpoint-9" not in there and len(there) <= 3


def test_a_checkpoint_half_deleted_by_rotation_is_not_taken_for_a_whole_one(saved, tmp_path, monkeypatch):
    """Killed while it deletes: whichever files are left, the folder is known to be going."""
    folder = tmp_path / "out"
    trainer = trainer_of("plain", folder, max_steps=6, save_total_limit=1)
    nanproof.protect(trainer, run_dir=None)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **kwargs: None)  # as if killed before the first file went
    trainer.train()
    left = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    assert len(left) <= 3 < len(list(folder.glob("checkpoint-*")))
