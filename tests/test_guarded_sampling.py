"""Sampling in a loop of one's own: bad rows are incidents of the guard, counted in its records, and capped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from nanproof import Guard, GuardedSampling, Policy, TrainingHalted, UsageError, read_incidents, read_steps
from zoo.two_ranks import two_ranks

EOS = 1


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, eos_token_id=EOS, pad_token_id=0, bos_token_id=None))
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = EOS, 0
    return made


def loss_of(model, batch):
    logits = model(batch["ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


class Run:
    """A loop: sample four rows, settle, step. `spoil` names, by generation, the rows whose logits are NaN."""

    def __init__(self, folder, spoil, **policy):
        self.model, self.spoil, self.generation = model(), spoil, -1
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard = Guard(self.model, optimizer, loss_fn=loss_of, policy=Policy(**policy), run_dir=folder)
        self.sampling = GuardedSampling(self.guard)
        self.model.lm_head.register_forward_hook(self._hook)

    def _hook(self, module, args, out):
        rows = self.spoil.get(self.generation, ()) if not torch.is_grad_enabled() else ()
        if rows:
            out = out.clone()
            out[list(rows)] = math.nan
        return out

    def step_alone(self):
        """What was sampled, without a step."""
        self.generation += 1
        prompt = torch.full((4, 3), 5)
        self.model.generate(prompt, max_new_tokens=3, do_sample=True, logits_processor=[self.sampling.processor])
        return self.sampling.settle().tolist()

    def step(self):
        valid = self.step_alone()
        if not self.sampling.went_back:
            self.guard.train_step({"ids": torch.arange(12).view(2, 6) + 2})
        return valid


def test_a_bad_row_is_an_incident_and_is_counted_in_the_records(tmp_path):
    run = Run(tmp_path, {1: (2,)})
    with run.guard, run.sampling:
        assert [run.step() for _ in range(3)] == [[True] * 4, [True, True, False, True], [True] * 4]
    [incident] = read_incidents(tmp_path / "incidents.jsonl")
    assert (incident.kind, incident.action, incident.step) == ("generation", "recorded", 1)
    assert "1 of 4 completions could not be sampled (row 2); row 2 of generation 1, position 0: NaN" in incident.message
    assert incident.message.endswith("these rows end there") and incident.diagnosis.samples == (2,)
    counted = [dict(record.counters)["generation/bad_rows"] for record in read_steps(tmp_path / "steps.jsonl")]
    assert counted == [0, 1, 1]
    assert not run.guard.counters


def test_weights_that_are_nan_halt_the_run_at_once(tmp_path):
    """No row can be sampled, and there is nothing to go back to."""
    run = Run(tmp_path, {})
    with run.guard, run.sampling:
        run.step()
        with torch.no_grad():
            run.model.model.layers[0].mlp.up_proj.weight[3] = math.nan
        with pytest.raises(TrainingHalted, match="no row of a generation could be sampled") as halted:
            run.step()
    found = halted.value.incident.diagnosis
    assert found.cause == "nonfinite-weights-mid-run" and found.where == "model.layers.0.mlp.up_proj.weight"


def test_with_a_snapshot_the_run_goes_back_and_no_row_is_valid(tmp_path):
    run = Run(tmp_path, {}, snapshot_every=1)
    with run.guard, run.sampling:
        for _ in range(3):
            run.step()
        with torch.no_grad():
            run.model.model.layers[0].mlp.up_proj.weight[3] = math.nan
        assert run.step() == [False] * 4
        assert all(bool(p.isfinite().all()) for p in run.model.parameters()) and run.guard.next_step <= 3
        assert run.step() == [True] * 4
    assert run.guard.incidents[0].action in ("rewound", "rolled-back")


def test_too_many_generations_in_a_row_are_the_end_of_it(tmp_path):
    run = Run(tmp_path, dict.fromkeys(range(10), (0,)), max_consecutive_skips=2)
    with run.guard, run.sampling:
        assert [run.step()[0] for _ in range(2)] == [False, False]
        with pytest.raises(TrainingHalted, match="3 generations in a row had rows that could not be sampled"):
            run.step()


def test_settling_twice_says_it_once(tmp_path):
    run = Run(tmp_path, {0: (1,)})
    with run.guard, run.sampling:
        first = run.step()
        assert run.sampling.settle().tolist() == first == [True, False, True, True]
        assert len(run.guard.incidents) == 1 and not run.sampling.went_back


def of_two_ranks(rank, folder):
    """Rank 1 has a bad row; then every row of it is bad, and rank 0 is healthy; both halt at the cap."""
    run = Run(Path(folder) / str(rank), {0: (2,), 1: range(4)} if rank else {}, max_consecutive_skips=1)
    with run.guard, run.sampling:
        valid = run.step_alone()
        try:
            run.step_alone()
        except TrainingHalted as error:
            halted = str(error).partition(".")[0]
    told = [(i.step, i.action, i.message.partition(";")[0]) for i in run.guard.incidents]
    return {"valid": valid, "halted": halted, "told": told}


def test_two_ranks_say_and_decide_the_same(tmp_path):
    [(zero, one)] = two_ranks(("test_guarded_sampling:of_two_ranks", (str(tmp_path),), {}))
    assert zero["valid"] == [True] * 4 and one["valid"] == [True, True, False, True]
    assert (
        zero["told"]
        == one["told"]
        == [
            [0, "recorded", "1 of 8 completions could not be sampled (row 6)"],
            [0, "halted", "4 of 8 completions could not be sampled (rows 4, 5, 6, 7)"],
        ]
    )
    assert (
        zero["halted"] == one["halted"] == "2 generations in a row had rows that could not be sampled (max_consecutive_skips=1)"
    )


def test_settling_before_sampling_is_refused(tmp_path):
    run = Run(tmp_path, {})
    with run.guard, run.sampling, pytest.raises(UsageError, match="nothing was sampled yet"):
        run.sampling.settle()
