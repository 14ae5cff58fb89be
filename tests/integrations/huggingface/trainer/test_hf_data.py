"""Where the batches come from: loaders, streams, workers, and the number of items that the loss is divided by."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback

from integrations.huggingface.trainer.parts import (
    BATCH,
    POINTS,
    STEPS,
    Line,
    Points,
    Stream,
    Tokens,
    arguments,
    assert_same_weights,
    line_trainer,
    tiny_llama,
    trained,
    trained_plain,
    weights,
)
from integrations.huggingface.trainer.protection import UNPROTECTED


def test_the_loaders_have_the_batch_size_that_was_asked_for(tmp_path):
    """After `test_train_and_eval_dataloaders`: with the last batch, or without it."""
    sizes = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 32}
    trainer = line_trainer(tmp_path, points=66, eval_points=74, **sizes)
    assert trainer.get_train_dataloader().total_batch_size == 16
    assert (len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())) == (5, 3)
    trainer = line_trainer(tmp_path, points=66, eval_points=74, dataloader_drop_last=True, **sizes)
    assert (len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())) == (4, 2)
    assert len(trainer.get_eval_dataloader(Points(128))) == 4


class TwoLoaders:
    """A loader without a dataset: one after the other."""

    def __init__(self, one, other):
        self.loaders = (one, other)

    def __len__(self):
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self):
        for loader in self.loaders:
            yield from loader


class TwiceTheData(Trainer):
    def get_train_dataloader(self):
        return TwoLoaders(super().get_train_dataloader(), super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None):
        return TwoLoaders(super().get_eval_dataloader(eval_dataset), super().get_eval_dataloader(eval_dataset))


def test_a_loader_without_a_dataset(tmp_path):
    """After `test_dataloader_without_dataset`."""

    def build():
        return line_trainer(tmp_path, trainer=TwiceTheData, learning_rate=0.1, num_train_epochs=1)

    trainer = trained(build)
    trainer.evaluate()
    assert trainer.state.global_step == 2 * POINTS // BATCH
    assert_same_weights(trainer, trained_plain(build))


@pytest.mark.parametrize("ending", [False, True])
def test_a_stream_of_samples(tmp_path, ending):
    """After `test_training_iterable_dataset` and `test_training_finite_iterable_dataset`.

    A stream that begins again fills the steps that were asked for. One that ends early ends the training early.
    """

    def build():
        options = {"max_steps": 10 if ending else 4, "per_device_train_batch_size": 16, "learning_rate": 0.1}
        options["accelerator_config"] = {"dispatch_batches": False}
        return Trainer(Line(), arguments(tmp_path, **options), train_dataset=Stream(32 if ending else 64, once=ending))

    trainer = trained(build)
    assert trainer.state.global_step == (2 if ending else 4)
    assert_same_weights(trainer, trained_plain(build))


def test_batches_from_worker_processes(tmp_path):
    """`dataloader_num_workers`: the batches are the same, and so is what is trained."""

    def build(workers):
        return line_trainer(tmp_path, learning_rate=0.1, num_train_epochs=1, dataloader_num_workers=workers)

    assert_same_weights(trained(lambda: build(2)), trained_plain(lambda: build(0)))


@pytest.mark.parametrize("options", [{"train_sampling_strategy": "sequential"}, {"data_seed": 7}, {"full_determinism": False}])
def test_the_order_of_the_samples(tmp_path, options):
    """Seeds and orders that a user chooses: what the sampler draws is not moved by the guard's own use of random numbers."""

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, **options)

    assert_same_weights(trained(build), trained_plain(build))


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])


def next_token(outputs, labels, num_items_in_batch=None, heed_items=True):
    """The mean over the tokens of the whole step, or (wrongly, under accumulation) over those of the micro-batch."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    if not heed_items or num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def language_losses(tmp_path, protected=True, accepts=True, **options):
    extras = {"compute_loss_func": options.pop("loss")} if "loss" in options else {}
    losses = Losses()

    def build():
        torch.manual_seed(0)
        settings = {"logging_steps": 1, "max_steps": 5, "learning_rate": 3e-3, "train_sampling_strategy": "sequential", **options}
        data = Tokens(length=64, ragged=True)
        trainer = Trainer(tiny_llama(), arguments(tmp_path, **settings), train_dataset=data, callbacks=[losses], **extras)
        assert trainer.model_accepts_loss_kwargs
        trainer.model_accepts_loss_kwargs = accepts
        return trainer

    trainer = (trained if protected else trained_plain)(build)
    return trainer, losses.values


HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


def furthest(one, other):
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


def test_accumulation_divides_by_the_tokens_of_the_step(tmp_path):
    """After `test_gradient_accumulation_loss_alignment_with_model_loss`: right with the number of items, wrong without."""
    _, whole = language_losses(tmp_path)
    right, halves = language_losses(tmp_path, **HALVES)
    expected, _ = language_losses(tmp_path, protected=False, **HALVES)
    _, broken = language_losses(tmp_path, accepts=False, **HALVES)
    assert furthest(whole, halves) < 1e-5 < 1e-3 < furthest(whole, broken)
    assert_same_weights(right, expected)


def test_accumulation_with_a_loss_of_the_users_own(tmp_path):
    """After `test_gradient_accumulation_loss_alignment_with_loss_func`: the function gets the number of items of the step."""
    _, whole = language_losses(tmp_path, loss=next_token)
    right, halves = language_losses(tmp_path, loss=next_token, **HALVES)
    expected, _ = language_losses(tmp_path, protected=False, loss=next_token, **HALVES)
    _, broken = language_losses(tmp_path, loss=partial(next_token, heed_items=False), **HALVES)
    assert furthest(whole, halves) < 0.01 < 3 < furthest(whole, broken)
    assert_same_weights(right, expected)


def test_a_trainer_with_a_loss_of_its_own(tmp_path):
    """`compute_loss` overridden in a subclass, the usual way to another loss."""

    class Absolute(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            y = model(**inputs)[0]
            loss = (y - labels).abs().mean()
            return (loss, {"loss": loss, "y": y}) if return_outputs else loss

    def build():
        return line_trainer(tmp_path, trainer=Absolute, learning_rate=0.1)

    trainer = trained(build)
    assert_same_weights(trainer, trained_plain(build))
    assert not torch.allclose(trainer.model.a, trained_plain(lambda: line_trainer(tmp_path, learning_rate=0.1)).model.a)


def test_a_trainer_with_a_training_step_of_its_own(tmp_path):
    """A subclass that overrides `training_step` and calls it of the base: what it does before and after is kept."""

    class Counts(Trainer):
        count = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.count += 1
            inputs = {**inputs, "x": inputs["x"] * 0.5}
            return super().training_step(model, inputs, num_items_in_batch)

    def build():
        return line_trainer(tmp_path, trainer=Counts, learning_rate=0.1)

    trainer = trained(build)
    assert trainer.count == trainer.state.global_step
    assert_same_weights(trainer, trained_plain(build))


def test_adapters_train_and_resume(tmp_path):
    """After `test_multiple_peft_adapters`: two adapters, one of them trained; the base model stays as it was."""
    peft = pytest.importorskip("peft")

    def build():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, lora_alpha=16, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM", target_modules=["q_proj"]
        )
        model = peft.get_peft_model(tiny_llama(), config, "one")
        model.add_adapter("two", config)
        options = {"per_device_train_batch_size": 1, "learning_rate": 1e-3, "save_steps": 5, "max_steps": 10, "logging_steps": 5}
        return Trainer(model, arguments(tmp_path, **options), train_dataset=Tokens())

    whole, again = trained(build), build()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_weights(again, whole, rtol=0, atol=0)
    assert_same_weights(whole, trained_plain(build))


class OwnStep(Trainer):
    """A `training_step` written anew, as in many a script: with as much of the Trainer's as its author thought of."""

    prepares, own_backward = True, False

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        if self.prepares:
            inputs = self._prepare_inputs(inputs)
        loss = model(**inputs)[0] / self.current_gradient_accumulation_steps
        if self.own_backward:
            loss.backward()
        else:
            self.accelerator.backward(loss)
        return loss.detach()


class TwoBackwards(Trainer):
    """Two losses, each with a backward of its own."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = 0.0
        for _ in range(2):
            loss = model(**inputs)[0] / (2 * self.current_gradient_accumulation_steps)
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


def own_step(prepares, own_backward):
    return type("OwnStep", (OwnStep,), {"prepares": prepares, "own_backward": own_backward})


OWN_STEPS = [own_step(True, False), own_step(False, False), own_step(True, True), own_step(False, True), TwoBackwards]
OWN_NAMES = ["usual", "prepares nothing", "own backward", "neither", "two backwards"]


@pytest.mark.parametrize("kind", OWN_STEPS, ids=OWN_NAMES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_written_anew(tmp_path, kind, accumulate):
    """As many a script does: the schedule goes on, the weights are the same, every step is recorded."""

    def build():
        return line_trainer(tmp_path, trainer=kind, learning_rate=0.1, gradient_accumulation_steps=accumulate)

    assert_same_weights(trained(build), trained_plain(build))


@pytest.mark.incidents
@pytest.mark.skipif(UNPROTECTED, reason="nobody is protected in this run")
@pytest.mark.parametrize("kind", OWN_STEPS, ids=OWN_NAMES)
def test_a_training_step_written_anew_is_protected(tmp_path, guards, kind):
    """However the step is written, a bad batch does not reach the weights, and the schedule waits for it."""
    data = Points()
    data.ys[0][20] = math.nan
    options = {"train_sampling_strategy": "sequential", "learning_rate": 0.1}
    trainer = kind(Line(), arguments(tmp_path, **options), train_dataset=data)
    trainer.train()
    assert [record.step for record in guards[0].guard.history if record.action == "skipped"] == [2, 10, 18]
    assert trainer.lr_scheduler.last_epoch == STEPS - 3
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_trains(tmp_path):
    """After `test_torch_compile_loss_func_compatibility`: the first step compiles; needs a C++ compiler and its minute."""

    def build():
        torch.manual_seed(0)
        options = {"per_device_train_batch_size": 2, "torch_compile": True, "max_steps": 2}
        return Trainer(tiny_llama(), arguments(tmp_path, **options), train_dataset=Tokens())

    assert_same_weights(trained(build), trained_plain(build), rtol=1e-4, atol=1e-5)
