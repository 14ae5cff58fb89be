"""`Checkpoints(on_signal=True)` under a Trainer: it saves its own checkpoint at the next step boundary, and no step is lost."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from transformers import TrainerCallback

import forked
import nanproof
from integrations.tiny import Regression, feature_rows, make_trainer, same, weights
from nanproof import Checkpoints, Policy

STEPS, AT = 6, 2
"""Steps of a run, and the one within which the signal comes."""


class Signal(TrainerCallback):
    def __init__(self, number=signal.SIGTERM, at=AT):
        self.number, self.at = number, at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            os.kill(os.getpid(), self.number)


def trainer_of(folder, *callbacks, rows=None, **settings):
    settings = {"max_steps": STEPS, "train_sampling_strategy": "random", "logging_strategy": "no"} | settings
    rows = feature_rows(16) if rows is None else rows
    trainer = make_trainer(folder, Regression(), rows, callbacks=list(callbacks), eval_rows=feature_rows(4), **settings)
    where = Checkpoints(folder / "own", every=1000, on_signal=True, exit_status=75)
    nanproof.protect(trainer, run_dir=None, policy=Policy(diagnose="never"), checkpoints=where)
    return trainer


def stop(trainer, **how):
    with pytest.raises(SystemExit) as left:
        trainer.train(**how)
    assert left.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the handlers are the program's own again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_next_step_and_nothing_is_lost(tmp_path, number):
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    stop(trainer_of(tmp_path / "out", Signal(number)))
    [folder] = (tmp_path / "out").glob("checkpoint-*")
    mark = json.loads((folder / "nanproof.json").read_text())
    assert folder.name == f"checkpoint-{AT + 1}" and mark["preempted"] is True and mark["state"] == "candidate"
    again = trainer_of(tmp_path / "out")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS and same(weights(again.model), weights(whole.model))


def test_no_evaluation_and_no_best_model_delay_the_end(tmp_path):
    """A scheduler gives seconds: what is not needed to resume is left out, and the saved checkpoint is not rotated away."""

    class Counted(TrainerCallback):
        def __init__(self):
            self.evaluated = []

        def on_evaluate(self, args, state, control, **kwargs):
            self.evaluated.append(state.global_step)

    counted = Counted()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = trainer_of(tmp_path, Signal(), counted, load_best_model_at_end=True, metric_for_best_model="loss", **settings)
    kept, loaded = trainer.args.load_best_model_at_end, []
    trainer._load_best_model = lambda: loaded.append(1)
    stop(trainer)
    assert loaded == [] and counted.evaluated == [1, 2] and (tmp_path / f"checkpoint-{AT + 1}" / "trainer_state.json").exists()
    assert trainer.args.load_best_model_at_end is kept is True
    saved = torch.load(tmp_path / f"checkpoint-{AT + 1}" / "training_args.bin", weights_only=False)
    assert saved.load_best_model_at_end is True


def test_a_signal_that_ends_the_data_workers_too_still_saves(tmp_path):
    """Sent to a whole group of processes, it ends a worker, and the loader raises before the next step."""
    whole = trainer_of(tmp_path / "whole")
    whole.train()

    class Dying(list):
        reads = 0

        def __getitem__(self, i):
            Dying.reads += 1
            if Dying.reads == 4 * (AT + 1) + 1:
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")
            return super().__getitem__(i)

    stop(trainer_of(tmp_path / "out", rows=Dying(feature_rows(16))))
    steps = [int(path.name.partition("-")[2]) for path in (tmp_path / "out").glob("checkpoint-*")]
    assert len(steps) == 1 and steps[0] >= AT
    again = trainer_of(tmp_path / "out")
    again.train(resume_from_checkpoint=True)
    assert same(weights(again.model), weights(whole.model))


def test_an_error_without_a_signal_stays_an_error(tmp_path):
    class Raises(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == AT:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer_of(tmp_path, Raises()).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_transformers_own_handler_is_left_in_place(tmp_path):
    """`enable_jit_checkpoint=True`: the Trainer saves on SIGTERM itself."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(signal.getsignal(signal.SIGTERM))

    try:
        trainer = trainer_of(tmp_path, Looks(), enable_jit_checkpoint=True)
        installed = signal.getsignal(signal.SIGTERM)
        trainer.train()
        assert seen == [installed] * STEPS and installed != before
    finally:
        signal.signal(signal.SIGTERM, before)


RANKS = """
import os, signal, sys, torch
from pathlib import Path
from transformers import TrainerCallback
from integrations.tiny import Regression, feature_rows, make_trainer
import nanproof
rank, home = int(os.environ["RANK"]), Path(sys.argv[1])
class Began(TrainerCallback):
    def __init__(self, term):
        self.first, self.term = None, term
    def on_step_begin(self, args, state, control, **kwargs):
        if self.first is None:
            self.first = state.global_step
            if self.term:
                os.kill(os.getpid(), signal.SIGTERM)
def run(name, steps, term=False, resume=None):
    began = Began(term)
    settings = {"ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer = make_trainer(home / name, Regression(), feature_rows(48), callbacks=[began], **settings)
    where = nanproof.Checkpoints(home / name / "own", every=1000, on_signal=True)
    nanproof.protect(trainer, policy=nanproof.Policy(diagnose="never"), checkpoints=where)
    if steps < 6:
        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop |= state.global_step == steps
        trainer.add_callback(Stop())
    try:
        trainer.train(resume_from_checkpoint=resume)
        left = None
    except SystemExit as error:
        left = error.code
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return began.first, trainer.state.global_step, left, weights
whole = run("whole", 6)
assert whole[:3] == (0, 6, None), whole[:3]
stopped = run("out", 6, term=rank == 1)                # a signal to one rank: both stop after the same step
assert stopped[:3] == (0, 1, 0), stopped[:3]
assert run("out", 4, resume=True)[:3] == (1, 4, None)
torch.distributed.barrier()
if rank == 0:
    (home / "out" / "checkpoint-4" / "rng_state_1.pth").unlink()
torch.distributed.barrier()
last = run("out", 6, resume=True)                      # what one rank needs is missing: both take the one before
assert last[:3] == (3, 6, None), last[:3]
assert torch.equal(last[3], whole[3])
torch.distributed.barrier()
print("rank", rank, "done", flush=True)
os._exit(0)
"""


def test_two_ranks_stop_and_resume_alike(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for done in forked.two_ranks_of(script, tmp_path):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        assert done.stdout.count("done") == 1
