"""`Checkpoints(on_signal=True)` under Lightning: a fit that gets a signal saves `last.ckpt`, and ends the program."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as L

from integrations.lightning_toys import BATCH, LIGHTNINGS_OWN_WARNINGS, STEPS, same, samples, toy, trainer_of, weights
from nanproof import Checkpoints, Policy
from nanproof.integrations.lightning._trainer import protect_trainer

pytestmark = [
    LIGHTNINGS_OWN_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*", "ignore:.*before the epoch ended.*"),
]
AT = 4


class Signal(L.Callback):
    def __init__(self, number=signal.SIGTERM, raises=False):
        self.number, self.raises = number, raises

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == AT:
            os.kill(os.getpid(), self.number)
            if self.raises:
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")


def fit(folder, *callbacks, path=None, epochs=1):
    saver = L.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=100)
    trainer = trainer_of("lightning.pytorch", callbacks=[*callbacks, saver], enable_checkpointing=True, max_epochs=epochs)
    where = Checkpoints(folder / "own", every=1000, on_signal=True, exit_status=75)
    protect_trainer(trainer, policy=Policy(diagnose="never"), checkpoints=where)
    module = toy("lightning.pytorch", dropout=0.0)
    try:
        trainer.fit(module, DataLoader(samples(False), batch_size=BATCH), ckpt_path=path)
    finally:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the handlers are the program's own again"
    return trainer, module


@pytest.mark.parametrize(
    ("how", "steps"),
    [({"number": signal.SIGTERM}, AT + 1), ({"number": signal.SIGUSR1}, AT + 1), ({"raises": True}, AT)],
    ids=["SIGTERM", "SIGUSR1", "the data workers end too"],
)
def test_a_signal_loses_no_step(tmp_path, how, steps):
    """What was saved is the state after the last step, and `ckpt_path="last"` goes on from it."""
    with pytest.raises(SystemExit) as left:
        fit(tmp_path, Signal(**how))
    assert left.value.code == 75
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == steps
    assert saved["callbacks"]["NanproofCallback"]["guards"][0]["step"] == steps

    class Short(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step == steps

    _, whole = fit(tmp_path / "whole", Short())
    assert same(saved["state_dict"], weights(whole))
    trainer, _ = fit(tmp_path, path="last")
    assert trainer.global_step == STEPS


def test_a_fit_without_a_signal_ends_as_ever(tmp_path):
    trainer, _ = fit(tmp_path)
    assert trainer.global_step == STEPS
