"""`trainer.fit(ckpt_path=...)` of a protected Lightning Trainer: a damaged file gives way to the newest good one beside it."""

from __future__ import annotations

import argparse
import logging
import math
import os
import pickle
import shutil
import zipfile

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as L

from integrations.lightning_toys import BATCH, LIGHTNINGS_OWN_WARNINGS, STEPS, samples, toy, trainer_of
from nanproof import UsageError
from nanproof.integrations.lightning._trainer import NanproofCallback, protect_trainer

pytestmark = [
    LIGHTNINGS_OWN_WARNINGS,
    pytest.mark.filterwarnings(
        "ignore:.*Checkpoint directory.*", "ignore:.*before the epoch ended.*", "ignore:.*dirpath has changed.*"
    ),
]
NEWEST, OLDER = STEPS, 8


class Payload:
    """What a pickle must not get to call."""

    def __reduce__(self):
        return os.system, ("touch owned",)


class Began(L.Callback):
    """Ends the fit when it begins: where it resumed is known by then."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step = trainer.global_step
        raise RuntimeError("enough")


def saver(folder):
    return L.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    trainer = trainer_of("lightning.pytorch", callbacks=[saver(folder)], enable_checkpointing=True)
    protect_trainer(trainer)
    trainer.fit(toy("lightning.pytorch"), DataLoader(samples(False), batch_size=BATCH))
    for number, name in enumerate(("step=4.ckpt", "step=8.ckpt", "step=12.ckpt", "last.ckpt")):
        os.utime(folder / name, (10**9 + number, 10**9 + number))
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "checkpoints")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "checkpoints"


def resume(folder, path="last", callback=False, **how):
    """The step that training goes on from."""
    began = Began()
    callbacks = [began, saver(folder)] + ([NanproofCallback()] if callback else [])
    trainer = trainer_of(
        "lightning.pytorch", callbacks=callbacks, enable_checkpointing=True, max_epochs=3, default_root_dir=folder.parent
    )
    if not callback:
        protect_trainer(trainer)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(toy("lightning.pytorch"), DataLoader(samples(False), batch_size=BATCH), ckpt_path=path, **how)
    return began.step


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nanproof" and r.levelno >= logging.WARNING]


def rewritten(change):
    def damage(path):
        state = torch.load(path, weights_only=True)
        time = path.stat().st_mtime
        torch.save(change(state), path)
        os.utime(path, (time, time))

    return damage


def with_nan(state):
    next(iter(state["state_dict"].values())).view(-1)[0] = math.nan
    return state


def with_inf_moment(state):
    state["optimizer_states"][0]["state"][0]["exp_avg"].view(-1)[0] = math.inf
    return state


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def compressed(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 22))


DAMAGE = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last byte lost": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("see the other folder"),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Payload())),
    "a payload": rewritten(lambda state: {**state, "extra": Payload()}),
    "packed": compressed,
    "NaN in the weights": rewritten(with_nan),
    "Inf in a moment": rewritten(with_inf_moment),
    "weights only": rewritten(lambda state: {k: v for k, v in state.items() if k not in ("optimizer_states", "lr_schedulers")}),
    "a list": rewritten(lambda state: list(state)),
    "no weights": rewritten(lambda state: {k: v for k, v in state.items() if k != "state_dict"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_gives_way_to_the_newest_good_one(folder, caplog, name):
    """It is named in a warning, as is each one passed over; nothing in it is executed."""
    for damaged in ("last.ckpt", "step=12.ckpt"):
        DAMAGE[name](folder / damaged)
    caplog.clear()
    assert resume(folder) == OLDER
    told = warnings_of(caplog)
    assert any("last.ckpt" in line for line in told) and any("step=12.ckpt" in line for line in told)
    assert not os.path.exists("owned")


@pytest.mark.parametrize("callback", [False, True], ids=["protect", "callback"])
@pytest.mark.parametrize("how", ["last", "path", "hpc"])
def test_however_it_was_chosen(folder, caplog, how, callback):
    if how == "hpc":
        shutil.copy(folder / "step=12.ckpt", folder.parent / "hpc_ckpt_2.ckpt")
        shutil.copy(folder / "step=8.ckpt", folder.parent / "hpc_ckpt_1.ckpt")
        DAMAGE["half"](folder.parent / "hpc_ckpt_2.ckpt")
    else:
        DAMAGE["half"](folder / "last.ckpt")
        DAMAGE["half"](folder / "step=12.ckpt")
    caplog.clear()
    assert resume(folder, folder / "last.ckpt" if how == "path" else how, callback) == OLDER
    assert warnings_of(caplog)


def test_where_no_file_is_good_one_error_says_what_to_do(folder):
    for path in folder.glob("*.ckpt"):
        DAMAGE["half"](path)
    trainer = trainer_of("lightning.pytorch")
    protect_trainer(trainer)
    with pytest.raises(UsageError, match=r"last\.ckpt.*\nhint: "):
        trainer.fit(toy("lightning.pytorch"), DataLoader(samples(False), batch_size=BATCH), ckpt_path=folder / "last.ckpt")


# -- what is whole, whatever it looks like -------------------------------------------------------------------------------------


def inf_score(state):
    for callback in state["callbacks"].values():
        if "best_model_score" in callback:
            callback["best_model_score"] = torch.tensor(math.inf)
    return state


WHOLE = {
    "as saved": lambda path: None,
    "an infinite score": rewritten(inf_score),
    "plain hyperparameters": rewritten(lambda state: {**state, "hyper_parameters": {"lr": 0.1, "betas": (0.9, math.nan)}}),
    "saved without nanproof": rewritten(
        lambda state: {**state, "callbacks": {k: v for k, v in state["callbacks"].items() if "Nanproof" not in k}}
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_taken_without_a_word(folder, caplog, name):
    WHOLE[name](folder / "last.ckpt")
    caplog.clear()
    assert resume(folder) == NEWEST
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("path", ["last", "path"])
def test_objects_of_the_users_own_are_loaded_where_the_user_allows_it(folder, caplog, path):
    """`save_hyperparameters` with an argparse.Namespace, and `fit(weights_only=False)`."""
    rewritten(lambda state: {**state, "hyper_parameters": argparse.Namespace(lr=0.1)})(folder / "last.ckpt")
    caplog.clear()
    assert resume(folder, folder / "last.ckpt" if path == "path" else path, weights_only=False) == NEWEST
    assert warnings_of(caplog) == []


def test_objects_that_are_registered_as_safe_are_loaded(folder, caplog):
    rewritten(lambda state: {**state, "hyper_parameters": argparse.Namespace(lr=0.1)})(folder / "last.ckpt")
    caplog.clear()
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert resume(folder) == NEWEST
    assert warnings_of(caplog) == []


def test_testing_is_left_alone(folder):
    """Another file than the one asked for would be another model."""
    DAMAGE["half"](folder / "last.ckpt")
    trainer = trainer_of("lightning.pytorch")
    protect_trainer(trainer)
    module = toy("lightning.pytorch")
    type(module).test_step = lambda self, batch, batch_idx: None
    with pytest.raises((RuntimeError, OSError), match=r"zip archive|Invalid argument"):
        trainer.test(module, DataLoader(samples(False), batch_size=BATCH), ckpt_path=folder / "last.ckpt")


def test_a_path_that_is_not_there_is_lightnings_to_report(folder):
    trainer = trainer_of("lightning.pytorch")
    protect_trainer(trainer)
    with pytest.raises(FileNotFoundError):
        trainer.fit(toy("lightning.pytorch"), DataLoader(samples(False), batch_size=BATCH), ckpt_path=folder / "none.ckpt")


def test_nothing_of_lightning_stays_replaced(folder):
    trainer = trainer_of("lightning.pytorch", max_epochs=2)
    protect_trainer(trainer)
    before = set(vars(trainer._checkpoint_connector))
    trainer.fit(toy("lightning.pytorch"), DataLoader(samples(False), batch_size=BATCH), ckpt_path=folder / "last.ckpt")
    assert set(vars(trainer._checkpoint_connector)) == before


@pytest.mark.parametrize("path", ["last", "last.ckpt"])
def test_a_pipe_keeps_nobody_waiting(folder, caplog, path):
    pipe(folder / "last.ckpt")
    assert resume(folder, path if path == "last" else str(folder / path)) == NEWEST
    assert "pipe" in warnings_of(caplog)[0]
