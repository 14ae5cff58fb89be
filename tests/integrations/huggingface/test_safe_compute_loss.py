"""`safe_compute_loss` over a real Trainer: it names the term and the sample of a bad loss, to the guard or to the log, and
returns what the trainer's own function returns."""

from __future__ import annotations

import copy
import inspect
import math
import os

import pytest
import torch
from torch import nn
from transformers import Trainer

import forked
import nanproof
from integrations import tiny
from nanproof import UsageError
from nanproof.core._inquest import remarked
from nanproof.core._under_way import Attempt, Remark
from nanproof.integrations.huggingface._loss_checks import Facts, LossCheck, shifts_labels, vocabulary
from nanproof.integrations.transformers import safe_compute_loss

NAN = math.nan
FLAG = 5
"""The token that makes the auxiliary loss NaN."""


class WithTerms(nn.Module):
    """A Llama with an auxiliary loss, which is NaN in a batch that holds the flag."""

    def __init__(self):
        super().__init__()
        self.llama = tiny.llama(dropout=0.0)

    def forward(self, input_ids, labels):
        out = self.llama(input_ids=input_ids, labels=labels)
        gate = self.llama.lm_head.weight.square().mean()
        aux = gate * torch.where((input_ids == FLAG).any(), NAN, 1.0)
        return {
            "loss": out.loss + aux,
            "aux_loss": aux,
            "loss_dict": {"z": gate * 2, "rows": aux.expand(3)},
            "logits": out.logits,
        }


def flagged(count, bad=()):
    rows = tiny.token_rows(count)
    for row in rows:
        row["input_ids"][row["input_ids"] == FLAG] = FLAG + 1
    for i in bad:
        rows[i]["input_ids"][3] = FLAG
    return rows


def wrapped(trainer, way, **settings):
    if way == "trainer":
        function = safe_compute_loss(trainer, **settings)
        assert trainer.compute_loss is function
    else:
        trainer.compute_loss = safe_compute_loss(trainer.compute_loss, **settings)
    return trainer


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nanproof"]


@pytest.mark.parametrize("way", ["trainer", "method"])
def test_a_healthy_run_is_the_same_run(tmp_path, way, caplog):
    """Bit for bit, with a guard and without; nothing is said."""
    ends = []
    for name, safe, protected in (("a", False, False), ("b", True, False), ("c", True, True)):
        trainer = tiny.make_trainer(tmp_path / name, tiny.llama(), tiny.token_rows(24), gradient_accumulation_steps=2)
        if safe:
            wrapped(trainer, way)
        if protected:
            nanproof.protect(trainer)
        trainer.train()
        ends.append((tiny.weights(trainer.model), [e["loss"] for e in trainer.state.log_history if "loss" in e]))
    assert tiny.same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]
    assert ends[0][1] == pytest.approx(ends[2][1], rel=1e-5)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_the_guard_is_told_that_no_token_is_supervised(tmp_path, lag):
    """Steps 2 and 3 have no label. Also where verdicts come late, and the second of them was held behind the first."""
    rows = tiny.token_rows(32, range(8, 16))
    trainer = wrapped(tiny.make_trainer(tmp_path, tiny.llama(), rows, optim="adamw_torch_fused"), "trainer")
    guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=lag))
    trainer.train()
    assert [i.step for i in guard.incidents] == [2, 3] and tiny.all_finite(trainer.model)
    for incident in guard.incidents:
        assert incident.kind == "nonfinite-loss"
        assert incident.message.endswith("; no sample has a supervised token (0, 1, 2, 3)")
    assert guard.incidents[0].diagnosis.cause == "no-supervised-targets"


@pytest.mark.parametrize("lag", [0, 2])
def test_the_guard_is_told_which_term_is_nan(tmp_path, lag):
    """Micro-batch 1 of step 1: the others' remarks stay out of it. What is run again to be looked at is not remarked on."""
    trainer = tiny.make_trainer(
        tmp_path, WithTerms(), flagged(24, bad=[13]), gradient_accumulation_steps=2, optim="adamw_torch_fused"
    )
    guard = nanproof.protect(wrapped(trainer, "method"), policy=nanproof.Policy(lag=lag))
    trainer.train()
    [incident] = guard.incidents
    assert (incident.step, incident.micro_batch) == (1, 1)
    said = incident.message.split("; micro-batch 1; ")[1]
    assert said.startswith("of the terms aux_loss is nan, loss_dict.z is ") and "sample" not in said
    assert tiny.all_finite(trainer.model)


def test_the_guard_is_told_whose_logits_are_bad(tmp_path):
    """The embedding of one token is Inf, and it stands in sample 2: the others' logits are finite."""
    model, rows = tiny.llama(), flagged(8, bad=[6])
    with torch.no_grad():
        model.model.embed_tokens.weight[FLAG] = math.inf
    trainer = tiny.make_trainer(tmp_path, model, rows)
    guard = nanproof.protect(wrapped(trainer, "trainer"))
    trainer.train()
    assert any(i.message.endswith("; logits that are not finite in sample 2") for i in guard.incidents)


@pytest.mark.parametrize("check", ["log", "step"])
def test_without_a_guard_it_is_logged(tmp_path, caplog, check):
    """At the first of a row of bad steps, and how many there were at the end. Nothing is put in place of the NaN: the weights
    are what they would be, NaN from the bad step on."""
    trainer = wrapped(tiny.make_trainer(tmp_path, WithTerms(), flagged(16, bad=[8])), "method", check=check)
    trainer.train()
    first, last = warnings_of(caplog)
    assert first.startswith("nanproof: step 2: the loss is nan, of the terms aux_loss is nan, loss_dict.z is ")
    assert "nanproof.protect(trainer)" in first
    assert last == "nanproof: 2 steps had a loss that is not finite"
    assert not tiny.all_finite(trainer.model)


def test_a_sample_without_a_token_among_others_is_said_once(tmp_path, caplog):
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(16, (1, 6, 7)))
    wrapped(trainer, "trainer").train()
    assert warnings_of(caplog) == [
        "nanproof: step 0: 1 of 4 samples have no supervised token (1); such samples teach nothing (said once)"
    ]


def test_a_batch_without_a_token_without_a_guard(tmp_path, caplog):
    """The Trainer shows such a loss as 0."""
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(16, range(8, 12)))
    wrapped(trainer, "trainer").train()
    [said] = warnings_of(caplog)
    assert said.startswith("nanproof: step 2: the loss is nan, no sample has a supervised token (0, 1, 2, 3); the trainer goes")
    assert [entry["loss"] for entry in trainer.state.log_history[2:3]] == [0.0]


@pytest.mark.parametrize("protected", [False, True])
def test_labels_out_of_range(tmp_path, protected):
    """Before the forward, with the sample and the label. Without it torch says neither which sample nor why."""
    rows = tiny.token_rows(16)
    rows[6]["labels"][4] = tiny.VOCABULARY + 3
    trainer = wrapped(tiny.make_trainer(tmp_path, tiny.llama(), rows), "trainer")
    if protected:
        nanproof.protect(trainer)
    with pytest.raises(UsageError, match=r"step 1: 1 labels.*knows 0 to 63: 67 in sample 2; samples 2\. Check the tokenizer"):
        trainer.train()


@pytest.mark.parametrize(
    ("returned", "says"),
    [(None, "returned None: the model made no loss"), (1.5, "returned a float"), (torch.ones(4), r"the shape \[4\]; reduce it")],
)
def test_what_is_no_loss(tmp_path, returned, says):
    class Odd(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return (returned, {}) if return_outputs else returned

    trainer = wrapped(tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(8), cls=Odd), "trainer")
    with pytest.raises(UsageError, match=says):
        trainer.train()


@pytest.mark.parametrize("value", [NAN, math.inf, 0.0, 2.5])
def test_the_same_tensor_comes_back(tmp_path, value):
    """With outputs and without them, in training and in evaluation; a compute_loss that cannot return outputs is not asked to."""
    loss, outputs = torch.tensor(value, requires_grad=True), {"logits": torch.zeros(2, 3)}
    asked = []

    class Fixed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            asked.append((model.training, return_outputs, num_items_in_batch))
            return (loss, outputs) if return_outputs else loss

    class OfTrl(Fixed):
        """Known by where it comes from."""

    OfTrl.__module__ = "trl.trainer.grpo_trainer"
    for cls, gives in ((Fixed, True), (OfTrl, False)):
        model = tiny.llama()
        safe = safe_compute_loss(tiny.make_trainer(tmp_path, model, tiny.token_rows(8), cls=cls))
        asked.clear()
        assert safe(model.train(), {}, num_items_in_batch=7) is loss
        assert safe(model, {}, return_outputs=True) == (loss, outputs)
        assert safe(model.eval(), {}) is loss
        assert safe(model, {}, return_outputs=True)[1] is outputs
        assert asked == [(True, gives, 7), (True, True, None), (False, False, None), (False, True, None)]
    assert list(inspect.signature(safe).parameters) == ["model", "inputs", "return_outputs", "num_items_in_batch"]


def test_wrapped_twice_it_looks_once(tmp_path):
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(8))
    first = safe_compute_loss(trainer)
    assert safe_compute_loss(trainer) is first and safe_compute_loss(trainer.compute_loss) is first


def test_what_it_can_be_given(tmp_path):
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(8))
    with pytest.raises(UsageError, match="a Trainer is needed, or its method"):
        safe_compute_loss(lambda model, inputs: None)
    with pytest.raises(UsageError, match='"log" or "step"'):
        safe_compute_loss(trainer, check="always")


def test_evaluation_is_left_alone(tmp_path, caplog):
    """An evaluation set without labels in one batch: nothing is said of it, nothing raised."""
    trainer = tiny.make_trainer(tmp_path, tiny.llama(), tiny.token_rows(8), eval_rows=tiny.token_rows(8, range(4)))
    wrapped(trainer, "trainer").evaluate()
    assert warnings_of(caplog) == []


def test_a_remark_that_fails_is_none():
    """And of an accumulated step without a guilty micro-batch each says which it is of."""
    attempt = Attempt(0, None, remarks=[lambda: Remark("a"), lambda: 1 / 0, lambda: Remark(""), lambda: Remark("b", True)])
    assert remarked(attempt, None) == Remark("micro-batch 0: a; micro-batch 3: b", names_terms=True)
    assert remarked(attempt, 3) == Remark("b", names_terms=True) and remarked(attempt, 1) == Remark("")


def test_facts_by_sample():
    """Counted with the shift, against a walk over the rows."""
    labels = torch.tensor([[1, -100, -100], [-100, 9, 2], [-100, 2, -100], [0, -1, -100]])
    logits = torch.zeros(4, 3, 4)
    logits[0, 0, 1] = NAN  # no label follows it
    logits[1, 0, 3] = math.inf
    logits[2, 0] = -math.inf
    logits[3, 0, 0] = -math.inf
    check = LossCheck.of(3, torch.tensor(1.0), {"logits": logits, "aux_loss": torch.tensor(2.0)}, labels, None, shift=True)
    facts = check.read()
    assert facts.terms == {"loss": 1.0, "aux_loss": 2.0}
    assert (facts.tokens, facts.outside, facts.without) == ((0, 2, 1, 1), (0, 1, 0, 1), [0])
    assert facts.wild == (0, 1, 1, 0)
    assert facts.said(alone=True) == (
        "1 of 4 samples have no supervised token (0), labels out of range in samples 1, 3, "
        "logits that are not finite in samples 1, 2"
    )
    assert facts.bad and not Facts({"loss": 1.0}, (0, 3)).bad and Facts({"loss": NAN}, (1, 1)).bad
    assert Facts({"loss": NAN}).said(alone=False) == "" and Facts({"loss": NAN}).said(alone=True) == "the loss is nan"
    assert "aux_loss is inf" in Facts({"loss": 1.0, "aux_loss": math.inf}).said(alone=True)


def test_what_is_known_of_a_model():
    """The size of its head, and whether it shifts labels; also through PEFT and through a wrapper of no kind."""
    peft = pytest.importorskip("peft")
    model = tiny.llama()
    assert vocabulary(model) == tiny.VOCABULARY and shifts_labels(model)
    lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert vocabulary(lora) == tiny.VOCABULARY and shifts_labels(lora)
    assert vocabulary(nn.Linear(2, 2)) is None and not shifts_labels(nn.Linear(2, 2))


RANKS = """
import os, sys, torch
import nanproof
from integrations import tiny
from test_safe_compute_loss import WithTerms, flagged, wrapped
trainer = tiny.make_trainer(sys.argv[1] + "/out", WithTerms(), flagged(48, bad=[21]), ddp_backend="gloo")
guard = nanproof.protect(wrapped(trainer, "trainer"))
trainer.train()
[incident] = guard.incidents
assert (incident.step, incident.rank) == (2, 1), incident
assert "; rank 1; of the terms aux_loss is nan, loss_dict.z is " in incident.message, incident
torch.distributed.barrier()
print("rank", os.environ["RANK"], "done", flush=True)
os._exit(0)
"""


def test_every_rank_says_what_the_guilty_one_saw(tmp_path):
    """Batch 5 of 4 rows is rank 1's of step 2. The run's folder is rank 0's, which saw nothing bad itself."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for done in forked.two_ranks_of(script, tmp_path):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        assert done.stdout.count("done") == 1


def test_trls_trainer(tmp_path, caplog):
    """SFTTrainer would run a second forward if it were asked for its outputs: it is not. A batch without a label has the loss 0
    there, which no guard refuses; it is said all the same."""
    pytest.importorskip("trl.trainer")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from integrations import tiny_trl

    forwards = []
    for name, safe in (("plain", False), ("safe", True)):
        trainer = tiny_trl.sft(tmp_path / name, bad_row=5)
        seen = tiny_trl.divide_by_zero_at_bad_tokens(trainer.model)
        nanproof.protect(wrapped(trainer, "trainer") if safe else trainer)
        trainer.train()
        forwards.append(seen)
    assert forwards[0] == forwards[1] and len(trainer.nanproof.incidents) == 1
    caplog.clear()
    trainer = tiny_trl.sft(tmp_path / "empty", max_steps=1)
    original = trainer.data_collator
    trainer.data_collator = lambda rows: {**original(rows), "labels": torch.full_like(original(rows)["labels"], -100)}
    nanproof.protect(wrapped(trainer, "trainer"))
    trainer.train()
    assert trainer.nanproof.refused_so_far == 0
    assert any(
        "no sample has a supervised token (0, 1, 2, 3); such samples teach nothing" in said for said in warnings_of(caplog)
    )
