"""GRPO that samples from a model that breaks: rows end, teach nothing and are said; healthy runs are the same bit for bit."""

from __future__ import annotations

import math
import os

import pytest
import torch
from transformers import TrainerCallback

pytest.importorskip("trl.trainer")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from integrations import tiny_trl as tiny
from nanproof import Policy, TrainingHalted, protect, read_steps
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.trl._sampling import Sampling

NAN = math.nan
REWARDS = (1.0, 2.5, 4.0, 8.0)


def by_row(completions, **_):
    """A reward that says which row it was."""
    return [REWARDS[i % 4] for i in range(len(completions))]


def breaking(folder, at, rows=(1,), start=None, **kwargs):
    """A trainer whose model gives NaN for some rows at the calls of `at`, when it samples."""
    trainer = tiny.grpo(folder, reward=by_row, start=start, **{"max_steps": 2, **kwargs})
    calls = iter(range(10_000))

    def hook(_module, _args, out):
        if not torch.is_grad_enabled() and next(calls) in at:
            out = out.clone()
            out[list(rows)] = NAN
        return out

    trainer.model.get_output_embeddings().register_forward_hook(hook)
    return trainer


def advantages_without(row):
    """Of one group of four, a loop over the other three; TRL's epsilon."""
    left = [r for i, r in enumerate(REWARDS) if i != row]
    mean = sum(left) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in left) / 2)
    return [0.0 if i == row else (r - mean) / (std + 1e-4) for i, r in enumerate(REWARDS)]


def with_lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize("start", [None, with_lora], ids=["whole", "lora"])
def test_a_row_that_cannot_be_sampled_teaches_nothing(start, tmp_path, monkeypatch):
    """Stock TRL dies. Protected: the row is masked, its group's advantages are those of the other three, and it is said."""
    if start is None:
        with pytest.raises(RuntimeError, match="probability tensor"):
            breaking(tmp_path / "plain", at={2}).train()
    trainer = breaking(tmp_path / "run", at={2}, start=start() if start else None, max_steps=1)
    batches = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batches.append(batch) or batch)
    guard = protect(trainer)
    trainer.train()
    (batch,), (incident,) = batches, guard.incidents
    assert (incident.step, incident.kind, incident.action, incident.diagnosis.samples) == (0, "generation", "recorded", (1,))
    assert "1 of 4 completions" in incident.message and "position 2: NaN" in incident.message
    assert batch["completion_mask"].sum(1).bool().tolist() == [True, False, True, True]
    assert batch["advantages"].tolist() == pytest.approx(advantages_without(1), rel=1e-5) and batch["advantages"][1] == 0
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert batch["completion_ids"][1, 2:].tolist()[0] == tiny.TOKENIZER.eos_token_id
    (logs, _) = trainer.state.log_history
    assert {name: logs[f"nanproof/generation/{name}"] for name in ("bad_rows", "nan_rows", "inf_rows", "generations")} == {
        "bad_rows": 1, "nan_rows": 1, "inf_rows": 0, "generations": 1,
    }  # fmt: skip
    assert logs["nanproof/rl/reward_nonfinite"] == 0 and logs["nanproof/rl/masked_overflow"] == 0
    (record,) = read_steps(tmp_path / "run" / "nanproof")
    assert dict(record.counters)["generation/bad_rows"] == 1 and guard.history[0].counters == record.counters
    assert tiny.finite(trainer) and guard.refused_so_far == 0
    inner = trainer.model.get_base_model() if start else trainer.model
    assert "generate" not in vars(trainer.model) and "generate" not in vars(inner) and not inner._forward_pre_hooks
    assert "_generate_single_turn" not in vars(trainer) and guard.counters == []


def test_a_row_that_was_left_out_is_no_masked_overflow(tmp_path):
    """Its tokens are NaN in the old policy as well. That is the same fault once more, and not that of a loss that masks late."""
    trainer = breaking(tmp_path, at=range(10_000), max_steps=1, num_iterations=2)
    scored = trainer._get_per_token_logps_and_entropies

    def row_1_is_nan_again(model, *args, **kwargs):
        log_probs, *rest = scored(model, *args, **kwargs)
        if not torch.is_grad_enabled():
            log_probs = log_probs.clone()
            log_probs[1] = NAN
        return (log_probs, *rest)

    trainer._get_per_token_logps_and_entropies = row_1_is_nan_again
    guard = protect(trainer)
    trainer.train()
    assert [incident.kind for incident in guard.incidents] == ["generation"]
    assert tiny.logged(trainer, "nanproof/rl/masked_overflow") == [0] and tiny.finite(trainer)


def test_a_healthy_run_is_the_same_bit_for_bit(tmp_path):
    """Same seed, same weights, and nothing is reported."""
    kwargs = {"reward": by_row, "max_steps": 3, "max_grad_norm": 0.0}
    plain = tiny.grpo(tmp_path / "plain", **kwargs)
    plain.train()
    guarded = tiny.grpo(tmp_path / "guarded", **kwargs)
    guard = protect(guarded, policy=Policy(switch_to_fused=False))
    guarded.train()
    mine, stock = tiny.weights(guarded), tiny.weights(plain)
    assert all(torch.equal(mine[name], stock[name]) for name in stock)
    assert guard.incidents == [] and tiny.logged(guarded, "nanproof/generation/bad_rows") == [0, 0, 0]
    assert tiny.logged(guarded, "nanproof/rl/masked_overflow") == [0, 0, 0]


class Spoil(TrainerCallback):
    """Something writes NaN into a weight, once."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 2 and not getattr(self, "done", False):
            self.done = True
            model.model.norm.weight.data[3] = NAN


def test_a_model_that_is_broken_throughout_goes_back_or_halts(tmp_path):
    """No row can be sampled: the guard goes to its last good state and samples again from there; without one it halts."""
    trainer = tiny.grpo(tmp_path / "back", max_steps=4)
    trainer.add_callback(Spoil())
    guard = protect(trainer, policy=Policy(snapshot_every=1))
    trainer.train()
    (incident,) = guard.incidents
    assert (incident.kind, incident.action, incident.step) == ("generation", "rewound", 2)
    assert incident.diagnosis.cause == "nonfinite-weights-mid-run" and incident.diagnosis.where == "model.norm.weight"
    assert tiny.finite(trainer) and trainer.state.global_step == 4 and guard.accepted_so_far == 4

    trainer = tiny.grpo(tmp_path / "halt", max_steps=4)
    trainer.add_callback(Spoil())
    protect(trainer)
    with pytest.raises(TrainingHalted, match=r"no row of a generation could be sampled.*nonfinite-weights-mid-run") as halted:
        trainer.train()
    assert halted.value.incident.action == "halted" and trainer.state.global_step == 2


def test_leaving_rows_out_is_capped(tmp_path):
    """One bad row in every generation: two are tolerated in a row, the third halts the run."""
    trainer = breaking(tmp_path, at=range(10_000), max_steps=6, max_completion_length=2)
    guard = protect(trainer, policy=Policy(max_consecutive_skips=2, at_cap="halt"))
    with pytest.raises(TrainingHalted, match=r"3 generations in a row had rows that could not be sampled"):
        trainer.train()
    assert [incident.action for incident in guard.incidents] == ["recorded", "recorded", "halted"]
    assert trainer.state.global_step == 2


def test_a_trainer_that_samples_in_its_own_way_is_left_alone(tmp_path, caplog):
    """No call of `generate`: said once, and nothing is counted."""
    trainer = tiny.grpo(tmp_path, max_steps=2)
    trainer._generate_single_turn = lambda prompt_ids, images, multimodal_fields, *_: ([[5, 1]] * len(prompt_ids), None)
    guard = protect(trainer)
    trainer.train()
    assert caplog.text.count("samples in a way of its own") == 1 and guard.incidents == []
    assert tiny.logged(trainer, "nanproof/generation/tokens") == [] and guard.history[0].counters == ()


def test_bad_rows_of_later_turns_are_found_by_how_they_begin(tmp_path):
    """With tools only some rows take another turn. Two that cannot be told apart are both left out."""
    trainer, patches = tiny.grpo(tmp_path), Patches()
    trainer.tools = [len]
    sampling = Sampling(trainer, patches, ProtectedRun())
    prompts, said = [[3], [3], [4], [3]], [[7, 1], [8, 1], [7, 1], [7, 1]]
    sampling._note([False, True, False, False], prompts, said)
    sampling._note([False, True], [[4, 7, 1, 30, 9], [3, 7, 1, 30]], [[5, 1], [1]])
    assert sampling._bad == [True, True, False, True]
    rewards, valid = sampling.unscored(torch.ones(4, 1))
    assert valid.tolist() == [False, False, True, False] and rewards[2] == 1 and rewards.isnan().sum() == 3
    sampling._note([True], [[9, 9]], [[1]])
    assert sampling._bad == [True] * 4, "one that begins as none of them does"
    sampling._bad = [False, True]
    assert not sampling.unscored(torch.ones(4, 1))[1].any(), "rows that were sampled in other numbers than are trained on"
    sampling._bad = None
    assert sampling.unscored(torch.ones(4, 1))[1] is None
    patches.undo()
