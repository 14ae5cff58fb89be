"""Checkpoints of the Trainer: written, rotated, found best, and resumed from to the very same weights."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

from integrations.huggingface.trainer.parts import (
    BATCH,
    POINTS,
    STEPS,
    Line,
    LineConfig,
    Near,
    NoisyLine,
    Points,
    PretrainedLine,
    arguments,
    assert_same_weights,
    line_trainer,
    trained,
    trained_plain,
    weights,
)
from integrations.huggingface.trainer.protection import LAG, UNPROTECTED, plain


def checkpoints_in(folder):
    """Their steps; the folder also has nanproof's records, if there is a guard."""
    names = {path.name for path in folder.iterdir()}
    assert ("nanproof" in names) is not UNPROTECTED
    return sorted(int(name.removeprefix("checkpoint-")) for name in names - {"nanproof"})


def the_state(trainer):
    """What the Trainer knows of its run, without the times and without the mean loss, which a resumed run counts differently."""
    state = dataclasses.asdict(trainer.state)
    left_out = ("runtime", "per_second", "train_loss")
    state["log_history"] = [{k: v for k, v in e.items() if not k.endswith(left_out)} for e in state["log_history"]]
    return state


def split_in_shards(checkpoint):
    """One file a weight, and the index that says which is where."""
    whole = checkpoint / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files = {name: f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, checkpoint / file, metadata={"format": "pt"})
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("pretrained", [True, False])
def test_checkpoints_are_complete(tmp_path, pretrained):
    """After `test_save_checkpoints`: every file of every checkpoint; the guard adds its own two."""
    trained(lambda: line_trainer(tmp_path, save_steps=5, pretrained=pretrained))
    files = {"model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"}
    files |= {"config.json"} if pretrained else set()
    files |= set() if UNPROTECTED else {"nanproof.json", "nanproof.pt"}
    for step in range(5, STEPS, 5):
        assert {file.name for file in (tmp_path / f"checkpoint-{step}").iterdir()} == files
    assert checkpoints_in(tmp_path) == [5, 10, 15, 20, STEPS]


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("at", [5, 20])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path, pretrained, at):
    """After `test_can_resume_training`: within the first epoch and after it, to the last bit."""

    def build():
        options = {"points": 2 * POINTS, "save_steps": 5, "learning_rate": 0.1, "logging_steps": 5}
        return line_trainer(tmp_path, pretrained=pretrained, **options)

    whole, again = trained(build), build()
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same_weights(again, whole, rtol=0, atol=0)
    assert_same_weights(whole, trained_plain(build))
    assert the_state(again) == the_state(whole)


@pytest.mark.parametrize("first", ["protected", "plain"])
def test_protection_may_begin_or_end_at_a_checkpoint(tmp_path, first):
    """A run that was plain goes on protected, and the other way round: the checkpoints are the Trainer's own."""

    def build():
        return line_trainer(tmp_path, points=2 * POINTS, save_steps=5, learning_rate=0.1)

    whole, again = (trained if first == "protected" else trained_plain)(build), build()
    if first == "protected":
        with plain():
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    else:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_weights(again, whole)


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"optim": "adafactor"},
        {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 4},
        {"ignore_data_skip": False, "dataloader_drop_last": True},
    ],
    ids=["accumulation", "adafactor", "sgd and cosine", "drop last"],
)
def test_a_resumed_run_with_other_options(tmp_path, changed):
    """After `test_resume_training_with_gradient_accumulation`, and with the states of other optimizers."""

    def build():
        return line_trainer(tmp_path, **{"points": 2 * POINTS, "save_steps": 5, "learning_rate": 0.1, **changed})

    whole, again = trained(build), build()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_weights(again, whole, rtol=0, atol=0)
    assert the_state(again) == the_state(whole)


def test_a_resumed_run_from_shards(tmp_path):
    """After `test_resume_training_with_shard_checkpoint`."""

    def build():
        return line_trainer(tmp_path, points=2 * POINTS, save_steps=5, learning_rate=0.1)

    whole, again = trained(build), build()
    split_in_shards(tmp_path / "checkpoint-5")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_weights(again, whole, rtol=0, atol=0)


def test_a_resumed_run_with_frozen_weights(tmp_path):
    """After `test_resume_training_with_frozen_params`."""

    def build():
        trainer = line_trainer(tmp_path, points=2 * POINTS, per_device_train_batch_size=4, save_steps=5, learning_rate=0.1)
        trainer.model.a.requires_grad_(False)
        return trainer

    whole, again = trained(build), build()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert not again.model.a.requires_grad
    assert_same_weights(again, whole, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [{"save_steps": 5}, {"save_strategy": "epoch"}], ids=["steps", "epoch"])
def test_a_resumed_run_draws_the_same_random_numbers(tmp_path, strategy):
    """After `test_resume_training_with_randomness`, at its tolerance: the guard puts back each generator that it moved."""

    def build():
        model = NoisyLine(LineConfig(a=0.0, b=2.0))
        return line_trainer(tmp_path, model=model, points=2 * POINTS, learning_rate=0.1, **strategy)

    whole, again = trained(build), build()
    at = 15 if "save_steps" in strategy else 2 * POINTS // BATCH
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same_weights(again, whole, rtol=0, atol=1e-5)
    assert_same_weights(whole, trained_plain(build), rtol=0, atol=0)


def test_a_run_resumes_with_another_batch_size(tmp_path):
    """After `test_resume_training_with_different_batch_size`: the new one counts."""
    options = {"save_steps": 1, "learning_rate": 0.1}
    trained(lambda: line_trainer(tmp_path, max_steps=2, per_device_train_batch_size=2, **options))
    assert TrainerState.load_from_json(str(tmp_path / "checkpoint-1" / "trainer_state.json")).train_batch_size == 2
    trainer = line_trainer(tmp_path, max_steps=4, per_device_train_batch_size=4, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer._train_batch_size == 4 and trainer.state.global_step == 4


def test_not_resuming_is_starting(tmp_path):
    """After `test_training_with_resume_from_checkpoint_false`."""
    trainer = line_trainer(tmp_path, save_steps=5, learning_rate=0.1)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == STEPS


def test_what_is_not_there_cannot_be_resumed(tmp_path, caplog):
    """After `test_can_resume_training`, its failures: the Trainer's own messages come through, and no other."""
    with pytest.raises(Exception, match="Can't find a valid checkpoint at"):
        line_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "bogus"))
    with pytest.raises(Exception, match="No valid checkpoint found in output directory"):
        line_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert [record.message for record in caplog.records if record.name == "nanproof"] == []


def test_an_interrupted_run_is_finished(tmp_path):
    """After `test_resume_from_interrupted_training`: steps of three micro-batches, the last of them smaller."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "save_steps": 1, "num_train_epochs": 1}
    trained(lambda: line_trainer(tmp_path / "first", points=100, max_steps=2, pretrained=False, **options))
    rest = line_trainer(tmp_path / "second", points=100, pretrained=False, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert rest.state.global_step == math.ceil(100 / 6)
    assert (tmp_path / "second" / f"checkpoint-{rest.state.global_step}" / "model.safetensors").is_file()


class Diary(nn.Module):
    """Writes down, in a buffer that grows, which samples it was shown."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.register_buffer("seen", torch.empty(0, dtype=torch.long))

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(self, rows, labels):
        self.seen = torch.cat([self.seen, rows[:, 0].long()])
        logits = self.fc(rows / 10)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_resumed_run_sees_the_batches_in_the_same_order(tmp_path):
    """After `test_resume_batch_order`: by a buffer of the model that grows with every forward pass."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(10, 4, generator=draw)
    rows[:, 0] = torch.arange(10)
    data = [{"rows": row, "labels": i % 4} for i, row in enumerate(rows)]
    options = {"per_device_train_batch_size": 2, "save_steps": 1, "num_train_epochs": 3, "optim": "sgd", "learning_rate": 0.1}

    def build(folder):
        torch.manual_seed(0)
        return Trainer(Diary(), arguments(tmp_path / folder, **options), train_dataset=data)

    whole, again = build("whole"), build("again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    seen, seen_again = (
        load_file(tmp_path / folder / "checkpoint-15" / "model.safetensors")["seen"] for folder in ("whole", "again")
    )
    assert len(seen) == 30 and sorted(seen.tolist()) == sorted(list(range(10)) * 3)
    assert torch.equal(seen, seen_again)


class OutOfMemory(TrainerCallback):
    """A step of 16 samples or more does not fit."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.train_batch_size >= 16:
            raise RuntimeError("CUDA out of memory.")


def test_a_batch_size_that_fits_is_found_and_kept(tmp_path):
    """After `test_auto_batch_size_with_resume_from_checkpoint`: the loop begins again within one `train()`, with a new loader."""
    options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 16, "auto_find_batch_size": True}
    data = Points(2 * POINTS)
    trainer = Trainer(Line(b=2.0), arguments(tmp_path, **options), train_dataset=data, callbacks=[OutOfMemory()])
    trainer.train()
    found = trainer._train_batch_size
    assert found < 16 and trainer.state.global_step == 2
    trainer = Trainer(Line(b=2.0), arguments(tmp_path, **options), train_dataset=data)
    assert trainer._train_batch_size == 16
    trainer.train(resume_from_checkpoint=True)
    assert trainer._train_batch_size == found


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_total_limit": 3}, [15, 20, 24] if UNPROTECTED else [5, 20, 24]),
        ({"save_total_limit": 2}, [20, 24] if UNPROTECTED else [5, 24]),
        ({"save_total_limit": 1}, [24] if UNPROTECTED else [5, 24]),
        ({"save_strategy": "epoch"}, [8, 16, 24]),
        ({"save_strategy": "no"}, []),
        ({"save_steps": 0.5}, [12, 24]),
    ],
)
def test_old_checkpoints_make_room(tmp_path, options, kept):
    """After `test_checkpoint_rotation`, through a training, with a deliberate change.

    Protected, the oldest checkpoint that may yet prove good is kept: if every one is deleted before 20 healthy steps have
    followed it, there is never one to trust.
    """
    trained(lambda: line_trainer(tmp_path, **{"save_steps": 5, **options}))
    assert checkpoints_in(tmp_path) == kept


def test_the_newest_checkpoint_that_proved_good_is_kept_over_the_limit(tmp_path):
    """After `test_checkpoint_rotation`, with a deliberate change: a limit of 1 keeps the newest, the newest that proved good, and
    the one that is next to prove good. The one at 5 proved good at 25, that at 20 at 40; that at 35 would at 55.
    """
    trained(lambda: line_trainer(tmp_path, save_steps=5, save_total_limit=1, num_train_epochs=6))
    late = [25, 45, 48] if LAG else [20, 35, 48]
    assert checkpoints_in(tmp_path) == ([48] if UNPROTECTED else late)


def test_the_best_checkpoint_is_never_thrown_away(tmp_path):
    """After `test_checkpoint_sorting` and `test_checkpoint_rotation`: oldest first, the best just before the newest."""
    folders = {step: tmp_path / f"checkpoint-{step}" for step in (20, 5, 15, 25, 10)}
    for folder in folders.values():
        folder.mkdir()

    def order(best=None):
        found = sort_checkpoints(str(tmp_path), best_model_checkpoint=best and str(folders[best]))
        return [int(path.split("-")[-1]) for path in found]

    assert order() == [5, 10, 15, 20, 25] == order(best=25)
    assert order(best=5) == [10, 15, 20, 5, 25]
    rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=1, best_model_checkpoint=str(folders[5]))
    assert order() == [5, 25]


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(
    ("metric", "greater", "strategy"),
    [("eval_loss", False, "steps"), ("eval_accuracy", True, "steps"), ("eval_loss", False, "epoch")],
)
def test_the_best_weights_come_back_at_the_end(tmp_path, pretrained, metric, greater, strategy):
    """After `test_load_best_model_at_end`: the weights and the metric of the best checkpoint, by the logs."""
    options = {"eval_steps": 5, "save_steps": 5} if strategy == "steps" else {}
    trainer = line_trainer(
        tmp_path,
        a=1.5,
        b=2.5,
        pretrained=pretrained,
        learning_rate=0.1,
        eval_strategy=strategy,
        save_strategy=strategy,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=greater,
        extras={"compute_metrics": Near()},
        **options,
    )
    trainer.train()
    measured = [(entry[metric], entry["step"]) for entry in trainer.state.log_history if metric in entry]
    value = (max if greater else min)(value for value, _ in measured)
    step = next(step for measure, step in measured if measure == value)
    saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    for name, p in weights(trainer).items():
        torch.testing.assert_close(p, saved[name])
    assert trainer.evaluate()[metric] == value


def test_only_better_models_are_saved(tmp_path):
    """`save_strategy="best"`: one checkpoint for each evaluation that was the best so far."""
    options = {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    trainer = trained(lambda: line_trainer(tmp_path, learning_rate=0.1, **options))
    best, expected = math.inf, []
    for entry in trainer.state.log_history:
        if entry.get("eval_loss", math.inf) < best:
            best = entry["eval_loss"]
            expected.append(entry["step"])
    assert checkpoints_in(tmp_path) == expected


def test_a_saved_model_is_the_trained_one(tmp_path):
    """After `save_model` at the end of a script: what `from_pretrained` reads is what was trained, and nothing of the guard."""
    trainer = trained(lambda: line_trainer(tmp_path / "run", learning_rate=0.1))
    trainer.save_model(str(tmp_path / "final"))
    loaded = PretrainedLine.from_pretrained(tmp_path / "final")
    assert {name: p.item() for name, p in loaded.named_parameters()} == {name: p.item() for name, p in weights(trainer).items()}
    assert set(load_file(tmp_path / "final" / "model.safetensors")) == {"a", "b"}
