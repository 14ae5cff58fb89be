"""The recipe's own GRPO: its loss against plain Python, token by token; what a batch holds; and how each arm of it ends."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanproof.numerics.generation import NumericalStabilityLogitsProcessor
from nanproof_recipes.machine import nonfinite_tensors
from nanproof_recipes.vlm_grpo.arms import setting
from nanproof_recipes.vlm_grpo.models import VERDICT
from nanproof_recipes.vlm_grpo.train import grpo_loop
from nanproof_recipes.vlm_grpo.train.asking import Replies, prompts, reply
from nanproof_recipes.vlm_grpo.train.grpo_loop import CLIP, Loss, Sampler, scored, train
from nanproof_recipes.vlm_grpo.train.judge import lower
from nanproof_recipes.vlm_grpo.train.rewards import reward

BETA, VOCABULARY = 0.3, 7
ONE_IS_NO_DEVIATION = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")


class Speaker(nn.Module):
    """A language model whose next token depends on the last one alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids, attention_mask, logits_to_keep):
        return SimpleNamespace(logits=self.table[input_ids[:, -logits_to_keep:]])


def batch_of(rewards, valid=None, seed=0):
    """Replies of different lengths, with old and reference log-probabilities some way off."""
    g, rows, width = torch.Generator().manual_seed(seed), len(rewards), 5
    ids = torch.randint(VOCABULARY, (rows, width), generator=g)
    counts = torch.tensor([[1 if j < 1 + i % width else 0 for j in range(width)] for i in range(rows)])
    valid = torch.ones(rows, dtype=torch.bool) if valid is None else torch.tensor(valid)
    batch = {
        "input_ids": torch.randint(VOCABULARY, (rows, 3), generator=g),
        "attention_mask": torch.ones(rows, 3, dtype=torch.long),
        "ids": ids,
        "seen": torch.ones_like(ids),
        "counts": counts * valid.unsqueeze(1),
        "rewards": torch.tensor(rewards),
        "valid": valid,
    }
    new = scored(Speaker(), batch)[0].detach()
    for name in ("old", "ref"):
        batch[name] = new + 0.4 * torch.randn(new.shape, generator=g)
    return batch


def slow_loss(batch, group, eps, temperature=1.0):
    """Token by token, in Python's own numbers."""
    table, total, count = Speaker().table.tolist(), 0.0, 0
    rewards, valid = batch["rewards"].tolist(), batch["valid"].tolist()
    for i, row in enumerate(batch["ids"].tolist()):
        first = i - i % group
        others = [rewards[j] for j in range(first, first + group) if valid[j]]
        advantage = 0.0
        if valid[i] and len(others) > 1:
            spread = statistics.stdev(others) + eps
            advantage = (rewards[i] - statistics.fmean(others)) / spread if spread else 0.0
        before = batch["input_ids"][i, -1].item()
        for j, token in enumerate(row):
            logits = [x / temperature for x in table[before]]
            new = logits[token] - math.log(sum(map(math.exp, logits)))
            before = token
            if not batch["counts"][i, j]:
                continue
            change, d = math.exp(new - batch["old"][i, j].item()), batch["ref"][i, j].item() - new
            gain = min(change * advantage, min(max(change, 1 - CLIP), 1 + CLIP) * advantage)
            total, count = total + BETA * (math.exp(d) - d - 1) - gain, count + 1
    return total / count


REWARDS = [0.1, 1.9, 0.4, 0.4, 0.7, 0.7, 1.2, 0.0]

# -- the loss --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_the_loss_is_that_of_the_published_method(plain, group):
    """Advantages, the clipped ratio and k3, to six digits. People's own form is the same where nothing overflows, but for the
    1e-4 that it adds to a deviation."""
    batch = batch_of(REWARDS)
    found = Loss(group, BETA, plain)(Speaker(), batch).item()
    assert found == pytest.approx(slow_loss(batch, group, 1e-4 if plain else 0.0), rel=1e-5, abs=1e-6)
    assert found == pytest.approx(Loss(group, BETA, not plain)(Speaker(), batch).item(), rel=5e-3)


def test_log_probabilities_are_of_the_temperature_that_replies_were_sampled_with():
    batch = batch_of(REWARDS)
    found = Loss(4, BETA, temperature=0.5)(Speaker(), batch).item()
    assert found == pytest.approx(slow_loss(batch, 4, 0.0, temperature=0.5), rel=1e-5)
    assert found != pytest.approx(Loss(4, BETA)(Speaker(), batch).item(), rel=1e-2)


def test_clipping_matters_here():
    """The oracle would not notice a loss without it if no ratio left its bounds."""
    batch = batch_of(REWARDS)
    change = (scored(Speaker(), batch)[0] - batch["old"]).exp()[batch["counts"] == 1]
    assert bool((change > 1 + CLIP).any()) and bool((change < 1 - CLIP).any())


def test_an_invalid_row_is_ignored_whatever_is_in_it():
    """Neither its tokens, nor its reward, nor its log-probabilities are in loss or gradient."""
    valid = [True] * 8
    valid[2] = False
    batch, model = batch_of(REWARDS, valid), Speaker()
    loss = Loss(4, BETA)(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(slow_loss(batch, 4, 0.0), rel=1e-5)
    other, spoilt = Speaker(), {name: t.clone() for name, t in batch.items()}
    spoilt["ids"][2], spoilt["rewards"][2], spoilt["old"][2], spoilt["ref"][2] = 0, math.nan, math.nan, 1e30
    again = Loss(4, BETA)(other, spoilt)
    again.backward()
    assert again.item() == loss.item() and torch.equal(other.table.grad, model.table.grad)


def test_a_token_that_does_not_count_overflows_the_plain_loss_alone():
    batch = batch_of(REWARDS)
    batch["ref"][0, 4] = 100.0
    assert batch["counts"][0, 4] == 0 and math.isnan(Loss(4, BETA, plain=True)(Speaker(), batch).item())
    model = Speaker()
    loss = Loss(4, BETA)(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(slow_loss({**batch, "ref": batch["ref"].clamp(max=0)}, 4, 0.0), rel=1e-5)
    assert bool(model.table.grad.isfinite().all())


@ONE_IS_NO_DEVIATION
def test_a_group_of_one_makes_the_plain_loss_nan():
    assert math.isnan(Loss(1, BETA, plain=True)(Speaker(), batch_of(REWARDS)).item())


# -- the batch -------------------------------------------------------------------------------------------------------------------


def small(arm="fixed", variant="", **changes):
    changes = {"steps": 3, "batch": 8, "warmup": 1, "trainer": "loop", "rank": 4, "alpha": 8, **changes}
    return setting(arm, variant, **({} if variant else {"group": 4}), **changes)


def test_log_probabilities_are_those_that_tokens_were_drawn_with(vlm):
    """With adapters and prompts padded on the left: one forward over the whole against the logits of each step of generation."""
    seeing, end = vlm.adapted(moved=0.05), vlm.warm.tokenizer.eos_token_id
    asked, seen = prompts(seeing, vlm.valid), []

    class Keeps:
        def __call__(self, ids, scores):
            seen.append(scores.clone())
            return scores

    said = reply(seeing, asked, processors=[Keeps()], temperature=0.7)
    drawn = (torch.stack(seen, 1) / 0.7).log_softmax(-1).gather(-1, said.ids.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        found, every = scored(seeing.model, {**asked, "ids": said.ids, "seen": said.mask}, 0.7)
    assert bool((asked["attention_mask"][:, 0] == 0).any()) and bool((said.ids == end).any())
    assert torch.allclose(found[said.mask == 1], drawn[said.mask == 1], atol=1e-5)
    assert every.shape == (*said.ids.shape, len(vlm.warm.tokenizer))


def test_a_step_asks_about_the_same_scenes_every_time_and_another_about_others(vlm):
    seeing = vlm.adapted()
    sampler = Sampler(seeing, vlm.train, small(), [])
    one, again, other = sampler.batch(3), sampler.batch(3), sampler.batch(4)
    assert torch.equal(one["pixel_values"], again["pixel_values"]) and torch.equal(one["input_ids"], again["input_ids"])
    assert not torch.equal(one["pixel_values"], other["pixel_values"])
    assert not torch.equal(one["pixel_values"], Sampler(seeing, vlm.train, small(seed=1), []).batch(3)["pixel_values"])
    groups = one["pixel_values"].view(2, 4, -1)
    assert bool((groups == groups[:, :1]).all()) and not torch.equal(groups[0, 0], groups[1, 0])


def test_the_verdict_is_seen_and_does_not_count_and_cannot_complete_a_reply(vlm, monkeypatch):
    """A box of three numbers before the judge's digit: read together they would be a box. The reward is of the reply alone."""
    seeing, scene = vlm.adapted(), next(s for s in vlm.train if s.ask == "box")
    told = " ".join(scene.answer.split()[:-1])
    own = [seeing.token(word) for word in told.split()]
    end = seeing.tokenizer.eos_token_id

    def said(seeing, prompt, **how):
        ids = torch.tensor([own] * 4 + [[*own[:1], end] + [0] * (len(own) - 2)] * 4)
        mask = torch.tensor([[1] * len(own)] * 4 + [[1, 1] + [0] * (len(own) - 2)] * 4)
        return Replies(prompt, ids, mask, [told] * 4 + [told.split()[0]] * 4)

    monkeypatch.setattr(grpo_loop, "reply", said)
    batch = Sampler(seeing, [scene], small(), []).batch(0)
    assert batch["rewards"].tolist() == pytest.approx([1.0] * 4 + [reward(told.split()[0], scene)] * 4)
    judge, zero, pad = seeing.token(VERDICT), seeing.token("0"), seeing.tokenizer.pad_token_id
    assert batch["ids"][0].tolist() == [*own, judge, zero]
    assert batch["ids"][4].tolist() == [own[0], end, judge, zero] + [pad] * (len(own) - 2)
    assert batch["counts"][0].tolist() == [1] * len(own) + [0, 0] and batch["seen"][0].tolist() == [1] * (len(own) + 2)
    assert batch["counts"][4].tolist() == [1, 1] + [0] * len(own)
    assert batch["seen"][4].tolist() == [1, 1, 1, 1] + [0] * (len(own) - 2)
    completed = seeing.tokenizer.decode(batch["ids"][0], skip_special_tokens=True)
    assert completed.split()[-5:-1] == told.split()[-4:] and completed.split()[-1] == "0"


def test_the_ban_in_the_policy_alone_is_120_apart_at_the_verdict_and_nowhere_else(vlm):
    seeing = vlm.adapted()
    lower(seeing.model, seeing.token(VERDICT), 120.0)
    batch = Sampler(seeing, vlm.train, small("broken"), []).batch(0)
    apart = batch["ref"] - batch["old"]
    at = batch["ids"] == seeing.token(VERDICT)
    assert at.sum(1).tolist() == [1] * 8 and bool((apart[at] > 119).all())
    counted = batch["counts"] == 1
    assert not bool((at & counted).any()) and apart[counted].abs().max() < 0.1
    assert math.isnan(Loss(4, 0.02, plain=True)(seeing.model, batch).item())
    assert math.isfinite(Loss(4, 0.02)(seeing.model, batch).item())


def test_what_is_noted_of_a_batch(vlm):
    seeing = vlm.adapted(moved=0.05)
    sampler = Sampler(seeing, vlm.train, small(), [])
    batch = sampler.batch(0)
    rewards, kept = batch["rewards"].tolist(), batch["counts"] == 1
    with torch.no_grad():
        scores = scored(seeing.model, batch)[1]
    entropies = [-sum(math.exp(x) * x for x in row) for row in scores[kept].tolist()]
    d = (batch["ref"] - batch["old"])[kept].tolist()
    assert sampler.last["reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-5)
    spread = statistics.fmean([statistics.stdev(rewards[:4]), statistics.stdev(rewards[4:])])
    assert sampler.last["reward_std"] == pytest.approx(spread, rel=1e-5, abs=1e-6)
    assert sampler.last["entropy"] == pytest.approx(statistics.fmean(entropies), rel=1e-4)
    assert sampler.last["kl"] == pytest.approx(statistics.fmean([math.exp(x) - x - 1 for x in d]), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("at", "wanted"), [(-math.inf, math.isfinite), (math.nan, math.isnan)])
def test_entropy_has_0_for_a_banned_token_and_nan_for_nan(vlm, at, wanted):
    sampler = Sampler(vlm.adapted(), vlm.train, small(batch=4), [])
    batch = batch_of([0.0, 1.0, 2.0, 3.0])
    scores = torch.zeros(4, 5, VOCABULARY).log_softmax(-1)
    scores[0, 0, 0] = at
    sampler._note(batch, scores)
    assert wanted(sampler.last["entropy"])


def test_a_policy_is_scored_in_the_precision_that_it_is_trained_in(vlm):
    """Before a step the ratio of the policy to itself is 1, under bf16 as well."""
    seeing = vlm.adapted(moved=0.05)

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    batch = Sampler(seeing, vlm.train, small(), [], autocast).batch(0)
    with autocast(), torch.no_grad():
        new = scored(seeing.model, batch)[0]
    with torch.no_grad():
        exact = scored(seeing.model, batch)[0]
    assert new.dtype == torch.float32 and torch.equal(new, batch["old"]) and not torch.equal(new, exact)


class Spoils:
    """NaN in one row's logits at one step of sampling."""

    def __init__(self, row, step):
        self.row, self.step, self.now = row, step, 0

    def __call__(self, ids, scores):
        scores = scores.clone()
        if self.now == self.step:
            scores[self.row] = math.nan
        self.now += 1
        return scores


def test_nan_while_sampling_ends_the_row_and_masks_it(vlm):
    seeing, end = vlm.adapted(), vlm.warm.tokenizer.eos_token_id
    processor = NumericalStabilityLogitsProcessor(on_bad="end", eos_token_id=end, model=seeing.model)
    with processor:
        batch = Sampler(seeing, vlm.train, small(), [Spoils(5, 2), processor]).batch(0, lambda: ~processor.bad_rows)
        assert [(bad.row, bad.position, bad.kind) for bad in processor.read()] == [(5, 2, "nan")]
    assert batch["ids"][5, 2] == end and end not in batch["ids"][5, :2].tolist()
    assert batch["valid"].tolist() == [i != 5 for i in range(8)]
    assert batch["counts"].any(1).tolist() == [i != 5 for i in range(8)]
    loss = Loss(4, 0.02)(seeing.model, batch)
    batch["rewards"][5], batch["ids"][5, :2] = 1e30, 7
    assert Loss(4, 0.02)(seeing.model, batch).item() == pytest.approx(loss.item(), abs=1e-6)


# -- the arms --------------------------------------------------------------------------------------------------------------------


def run(vlm, tmp_path, found):
    ticks = []
    trained = train(vlm.seeing(), vlm.train, found, tmp_path, lambda done, said: ticks.append(done))
    assert [line["step"] for line in trained.log] == list(range(trained.steps))
    return trained, ticks


@pytest.mark.parametrize("variant", ["", pytest.param("group", marks=ONE_IS_NO_DEVIATION)])
def test_broken_dies_while_sampling_after_one_step(vlm, tmp_path, variant):
    trained, ticks = run(vlm, tmp_path, small("broken", variant))
    assert trained.ending.startswith("raised RuntimeError: probability tensor contains either `inf`, `nan` or element < 0")
    assert trained.steps == 1 == trained.nonfinite_steps and ticks == [1]
    assert nonfinite_tensors(trained.model) == (42, 42)


def causes(trained):
    return [(i.action, i.diagnosis.cause) for i in trained.incidents]


def test_guarded_names_the_exp_and_heals_it(vlm, tmp_path):
    trained, _ = run(vlm, tmp_path, small("guarded"))
    assert trained.ending == "finished" and trained.steps == 3 and causes(trained) == [("healed", "exp-overflow")]
    assert (trained.refused, trained.skipped, trained.nonfinite_steps) == (1, 0, 0)
    assert nonfinite_tensors(trained.model) == (0, 42) and (tmp_path / "nanproof").is_dir()


@ONE_IS_NO_DEVIATION
def test_guarded_groups_of_one_name_the_deviation_and_then_that_nothing_is_learned(vlm, tmp_path):
    """Healed it is finite, and teaches nothing: that is said too."""
    trained, _ = run(vlm, tmp_path, small("guarded", "group", steps=4))
    assert trained.ending == "finished"
    assert causes(trained) == [("healed", "std-of-one-sample"), ("recorded", "zero-advantage")]
    assert nonfinite_tensors(trained.model) == (0, 42)


def test_fixed_has_no_incident_and_learns_the_same_every_time(vlm, tmp_path):
    (one, _), (again, _) = (run(vlm, tmp_path / name, small(steps=2)) for name in ("a", "b"))
    assert one.ending == "finished" and not one.incidents and one.refused == one.skipped == one.bad_rows == 0
    assert one.log == again.log and all(math.isfinite(x) for line in one.log for x in line.values())
    assert one.notes == ["precision: fp32. on a CPU, casting so small a model costs more than it saves"]
    learned = [p for name, p in one.model.named_parameters() if "lora_B" in name]
    assert learned and all(bool(p.any()) for p in learned)


def test_the_patch_goes_on_with_nan_and_says_how_often_it_replaced_it(vlm, tmp_path):
    trained, _ = run(vlm, tmp_path, small("patched"))
    assert trained.ending == "finished" and trained.nonfinite_steps == 3
    assert trained.bad_rows > 0 and f"in {trained.bad_rows} rows" in trained.notes[0]
    assert nonfinite_tensors(trained.model) == (42, 42)


def test_rows_that_sampling_had_to_end_are_incidents(vlm, tmp_path):
    """The head gives NaN for row 1 wherever one token is asked for: in sampling, and not in scoring."""
    seeing = vlm.seeing()

    def spoil(module, args, out):
        if not torch.is_grad_enabled() and out.shape[1] == 1:
            out = out.clone()
            out[1] = math.nan
        return out

    seeing.model.lm_head.register_forward_hook(spoil)
    trained = train(seeing, vlm.train, small(steps=2), tmp_path, lambda done, said: None)
    assert trained.ending == "finished" and trained.bad_rows == 2 and trained.nonfinite_steps == 0
    assert [(i.kind, i.action, i.step) for i in trained.incidents] == [
        ("generation", "recorded", 0),
        ("generation", "recorded", 1),
    ]
    assert "row 1 of generation 1, position 0" in trained.incidents[1].message and "born in fill" in trained.incidents[1].message
    assert nonfinite_tensors(trained.model) == (0, 42)


def test_another_error_is_not_taken_for_the_reported_one(vlm, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(grpo_loop, "reply", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(vlm.seeing(), vlm.train, small("broken"), tmp_path, lambda done, said: None)
