"""TRL's SFT, DPO and GRPO trainers as they are, and protected: runs of a few steps on tiny models."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("trl.trainer")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from integrations import tiny_trl as tiny
from integrations.tiny_trl import BAD, TOOL
from nanproof import UnsupportedError, protect
from nanproof.integrations._patches import Patches
from nanproof.integrations.transformers import GradientMonitorCallback
from nanproof.integrations.trl._grpo import Window, check_grpo, extend_grpo
from nanproof.numerics.rl import Signals

NAN, INF = math.nan, math.inf
BUILD = {"sft": tiny.sft, "dpo": tiny.dpo}


def broken(build, folder, **kwargs):
    """A trainer whose model divides by 0 at one token of its data; and the guilty rows of each forward."""
    trainer = build(folder, **kwargs)
    return trainer, tiny.divide_by_zero_at_bad_tokens(trainer.model)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_token_that_breaks_the_loss(kind, tmp_path):
    """Unprotected, the weights are NaN from that step on while the log says a loss of 0. Protected, one step is left out."""
    trainer, seen = broken(BUILD[kind], tmp_path / "plain", bad_row=5)
    trainer.train()
    (step,) = [i for i, rows in enumerate(seen) if rows]
    assert not tiny.finite(trainer)
    assert tiny.logged(trainer, "loss")[step:] == [0.0] * (6 - step)
    guarded, again = broken(BUILD[kind], tmp_path / "guarded", bad_row=5)
    guard = protect(guarded)
    guarded.train()
    assert tiny.finite(guarded)
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (step, "nonfinite-loss", "skipped")
    assert incident.diagnosis.cause == "zero-denominator" and list(incident.diagnosis.samples) == seen[step]
    assert len(again) > 6, "the bad step was run again to find out"
    losses = tiny.logged(guarded, "loss")
    assert all(math.isfinite(x) for i, x in enumerate(losses) if i != step) and math.isnan(losses[step])
    # What TRL counts while it computes a loss is counted once, however often the guard ran the step again.
    assert tiny.logged(guarded, "num_tokens") == tiny.logged(trainer, "num_tokens")
    assert tiny.logged(guarded, "entropy")[:step] == pytest.approx(tiny.logged(trainer, "entropy")[:step], rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_callback_alone_guards_a_trainer_of_trl(kind, tmp_path):
    """As `protect` does, bit for bit: SFT, DPO, and GRPO with its sampling. With `observe_only` the run ends as a plain one."""
    settings = {"shuffle_dataset": False} if kind == "grpo" else {}
    build = {**BUILD, "grpo": tiny.grpo}[kind]

    def trained(name, *callbacks, guarded=False):
        trainer = build(tmp_path / name, max_steps=3, **settings)
        for callback in callbacks:
            trainer.add_callback(callback)
        if guarded:
            protect(trainer)
        torch.manual_seed(2)
        trainer.train()
        return trainer

    def equal(a, b):
        return all(torch.equal(x, y) for x, y in zip(tiny.weights(a).values(), tiny.weights(b).values(), strict=True))

    monitor = GradientMonitorCallback()
    alone = trained("alone", monitor)
    assert equal(alone, trained("protected", guarded=True)) and monitor.guard is alone.nanproof and monitor.last.step == 2
    assert any(key.startswith("nanproof/rl/") for log in alone.state.log_history for key in log) is (kind == "grpo")
    observer = GradientMonitorCallback(observe_only=True)
    assert equal(trained("observed", observer), trained("plain")) and observer.last.step == 2 and not observer.guard.incidents


def test_grpo_goes_on_where_sampling_would_have_crashed(tmp_path):
    """Stock: NaN weights, and the next completion cannot be sampled. Protected: the step is left out, the run goes on."""
    kwargs = {"bad_row": 7, "shuffle_dataset": False, "per_device_train_batch_size": 8}
    trainer, seen = broken(tiny.grpo, tmp_path / "plain", **kwargs)
    with pytest.raises(RuntimeError, match="probability tensor"):
        trainer.train()
    assert len(seen) == 4 and len(seen[3]) == 4 and not tiny.finite(trainer)
    guarded, _ = broken(tiny.grpo, tmp_path / "guarded", **kwargs)
    guard = protect(guarded)
    guarded.train()
    assert tiny.finite(guarded) and guarded.state.global_step == 6
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (3, "nonfinite-loss", "skipped")
    assert incident.diagnosis.cause == "zero-denominator" and list(incident.diagnosis.samples) == seen[3]
    assert tiny.logged(guarded, "nanproof/rl/nonfinite_batches") == [0, 0, 0, 1, 0, 0]
    assert len(tiny.logged(guarded, "nanproof/rl/entropy")) == 5


# -- tokens that do not count ----------------------------------------------------------------------------------------------------


def answers(prompts, trainer):
    """A rollout with a tool: what the tool said is not the policy's. Row 0 has a token that the sampler could not score."""
    spoken = [[5, TOOL, 1], [5, 7, TOOL, 8, 1], [9, TOOL, TOOL, 6, 4, 1], [12, 1]]
    said = [spoken[i % 4] for i in range(len(prompts))]
    scores = [[-3.0 - 0.1 * j for j in range(len(ids))] for ids in said]
    scores[0][0], scores[1][2] = NAN, -INF
    return {
        "prompt_ids": [tiny.TOKENIZER(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": said,
        "logprobs": scores,
        "env_mask": [[int(token != TOOL) for token in ids] for ids in said],
    }


def by_length(completions, **_):
    return [float(len(text.split())) for text in completions]


def with_tool(folder, fall=0.0, **kwargs):
    """GRPO against a reference, with a tool in its completions. `fall`: how far the policy's log-probability of what the tool
    says has fallen below the reference's."""
    start = tiny.model()
    with torch.no_grad():
        start.model.embed_tokens.weight[:, 0] = 10.0  # after the norm this is 4 for every token: a bias for the head
    start.config._name_or_path = str(folder / "start")  # where TRL looks for the reference
    start.save_pretrained(folder / "start")
    made = {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo", **kwargs}
    trainer = tiny.grpo(folder / "run", start=start, rollout=answers, reward=by_length, **made)
    with torch.no_grad():
        trainer.model.lm_head.weight[TOOL, 0] -= fall / 4
    return trainer


def spoiled(folder, who):
    """A run whose policy, reference or old policy is far off at what a tool said, and nowhere else."""
    trainer = with_tool(folder, fall=120.0 if who == "policy" else 0.0, max_steps=2)
    if who == "reference":
        with torch.no_grad():
            trainer.ref_model.lm_head.weight[TOOL, 0] = -INF

    def scored(original, inputs):
        batch = original(inputs)
        batch["old_per_token_logps"][batch["tool_mask"] == 0] = NAN
        return batch

    if who == "old":
        Patches().wrap(trainer, "_generate_and_score_completions", scored)
    return trainer


@pytest.mark.parametrize("who", ["policy", "reference", "old"])
def test_a_token_that_does_not_count_cannot_break_the_loss(who, tmp_path):
    """Log-probabilities of what a tool said: fallen by 120, or -inf, or NaN. Stock TRL: NaN at once. Protected: nothing, and it
    is said once."""
    trainer = spoiled(tmp_path / "plain", who)
    trainer.train()
    assert not tiny.finite(trainer) and tiny.logged(trainer, "loss") == [0.0] * 2
    guarded = spoiled(tmp_path / "guarded", who)
    guard = protect(guarded)
    guarded.train()
    assert tiny.finite(guarded) and guard.refused_so_far == 0
    assert all(math.isfinite(x) for key in ("loss", "kl", "grad_norm") for x in tiny.logged(guarded, key))
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (0, "nonfinite-loss", "recorded")
    assert (incident.diagnosis.cause, incident.diagnosis.verified) == ("exp-overflow", True)
    assert f"largest log-ratio is {120 if who == 'policy' else 'inf'}." in incident.message
    assert tiny.logged(guarded, "nanproof/rl/masked_overflow") == [4, 4] and "4 tokens" in incident.message


@pytest.mark.parametrize(
    ("loss_type", "level"), [("grpo", "token"), ("dapo", "sequence"), ("cispo", "token"), ("vespo", "token")]
)
def test_where_nothing_overflows_the_run_is_the_same_bit_for_bit(loss_type, level, tmp_path):
    kwargs = {"loss_type": loss_type, "importance_sampling_level": level, "max_steps": 2}
    kwargs |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    plain = with_tool(tmp_path / "plain", **kwargs)
    plain.train()
    extended = with_tool(tmp_path / "extended", **kwargs)
    extend_grpo(extended, Patches(), lambda: False)
    extended.train()
    mine, stock = tiny.weights(extended), tiny.weights(plain)
    assert all(torch.equal(mine[name], stock[name]) for name in stock)
    for one, other in zip(extended.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
        assert {k: v for k, v in one.items() if "nanproof" not in k and k != "step_time"} == {
            k: v for k, v in other.items() if k != "step_time"
        }


class Recording:
    """What a GRPOTrainer computed its losses from, as TRL itself computes it."""

    def __init__(self, trainer):
        self.batches, self._trainer = [], trainer
        patches = Patches()
        patches.wrap(trainer, "_compute_loss", self._loss)
        patches.wrap(trainer, "_get_per_token_logps_and_entropies", self._log_probs)

    def _loss(self, original, model, inputs):
        self.batches.append({"inputs": inputs})
        return original(model, inputs)

    def _log_probs(self, original, *args, **kwargs):
        found = original(*args, **kwargs)
        if torch.is_grad_enabled():
            self.batches[-1].update(new=found[0].detach().clone(), entropy=found[1].detach().clone())
        return found


def tokens(batch):
    """Rows of dicts, one for every token that counts."""
    inputs, new = batch["inputs"], batch["new"]
    mask = inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]
    columns = {
        "new": new,
        "old": inputs.get("old_per_token_logps", new),
        "ref": inputs.get("ref_per_token_logps", new),
        "sampler": inputs.get("sampling_per_token_logps", new),
        "entropy": batch["entropy"],
    }
    return [
        [{k: float(v[i, j]) for k, v in columns.items()} for j in range(mask.shape[1]) if mask[i, j]]
        for i in range(mask.shape[0])
    ]


def recorded(folder, **kwargs):
    """A run with the extension, and what went into its losses."""
    trainer = with_tool(folder, **kwargs)
    record = Recording(trainer)
    extend_grpo(trainer, Patches(), lambda: False)
    trainer.train()
    return trainer, record.batches


def test_the_loss_is_that_of_the_tokens_that_count(tmp_path):
    """Against a loop over them, in a run whose other tokens would overflow."""
    trainer, batches = recorded(tmp_path, fall=120, max_steps=4)
    for batch, found in zip(batches, tiny.logged(trainer, "loss"), strict=True):
        sequences = []
        for row, advantage in zip(tokens(batch), batch["inputs"]["advantages"].tolist(), strict=True):
            terms = []
            for t in row:
                r, d = math.exp(t["new"] - t["old"]), t["ref"] - t["new"]
                gain = min(r * advantage, min(max(r, 0.8), 1.2) * advantage)
                terms.append(-gain + 0.1 * (math.exp(d) - d - 1) * (r if trainer.args.use_bias_correction_kl else 1.0))
            sequences.append(sum(terms) / len(terms))
        assert found == pytest.approx(sum(sequences) / len(sequences), abs=1e-6)


# -- signals ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_signals_of_tokens_are_those_of_a_loop(level, tmp_path):
    """Over windows of two steps: the largest of the largest, the mean of the means."""
    trainer, batches = recorded(tmp_path, max_steps=4, logging_steps=2, importance_sampling_level=level)
    assert len(batches) == 4
    for at in (0, 2):
        ratios, divergences, means, entropies, gaps, bad = [], [], [], [], [], 0
        for batch in batches[at : at + 2]:
            rows = tokens(batch)
            flat = [t for row in rows for t in row]
            changes = [[t["new"] - t["old"] for t in row] for row in rows]
            if level == "sequence":
                changes = [[sum(row) / len(row)] for row in changes]
            ratios += [math.exp(x) for row in changes for x in row]
            k3 = [math.exp(t["ref"] - t["new"]) - (t["ref"] - t["new"]) - 1 for t in flat]
            divergences += k3
            means.append(sum(k3) / len(k3))
            entropies.append(sum(t["entropy"] for t in flat) / len(flat))
            if not any(math.isnan(t["sampler"]) for t in flat):
                gaps += [math.exp(t["old"] - t["sampler"]) for t in flat]
            bad += sum(not math.isfinite(t["sampler"]) for t in flat)
        wanted = {"ratio_max": max(ratios), "ratio_min": min(ratios), "kl_max": max(divergences), "kl_mean": sum(means) / 2}
        wanted |= {"entropy": sum(entropies) / 2, "sampler_nonfinite": bad}
        if gaps:
            wanted |= {"sampler_ratio_max": max(gaps), "sampler_ratio_min": min(gaps)}
        logs = trainer.state.log_history[at // 2]
        found = {name: logs[f"nanproof/rl/{name}"] for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert logs["nanproof/rl/sampler_nonfinite"] == 2, "row 0 of one generation, trained on twice"


def test_the_signals_of_rewards_are_those_of_a_loop(tmp_path):
    """Completions that the model sampled itself; rewards of two functions, one of which at times has nothing to say."""
    calls = []

    def sampled(completions, **_):
        calls.append([[float(text.count("w1"))] for text in completions])
        return [row[0] for row in calls[-1]]

    def partly(completions, **_):
        said = [None if text.startswith("w2") else float("w3" in text) for text in completions]
        for row, x in zip(calls[-1], said, strict=True):
            row.append(0.0 if x is None else x)
        return said

    kwargs = {"per_device_train_batch_size": 8, "num_generations": 2, "reward_weights": [1.0, 0.5], "max_steps": 4}
    trainer = tiny.grpo(tmp_path, reward=[sampled, partly], **kwargs)
    extend_grpo(trainer, Patches(), lambda: False)
    trainer.train()
    assert len(calls) == 4
    shares = []
    for rows, logs in zip(calls, trainer.state.log_history, strict=False):
        rewards = [a + 0.5 * b for a, b in rows]
        groups = [rewards[i : i + 2] for i in range(0, 8, 2)]
        spreads = [abs(a - b) / math.sqrt(2) for a, b in groups]
        shares.append(sum(a == b for a, b in groups) / 4)
        assert logs["nanproof/rl/group_std_mean"] == pytest.approx(sum(spreads) / 4)
        assert logs["nanproof/rl/group_std_min"] == pytest.approx(min(spreads))
        assert logs["nanproof/rl/zero_advantage_share"] == shares[-1]
        assert logs["nanproof/rl/reward_nonfinite"] == 0
        assert logs["nanproof/rl/ratio_max"] == 1.0, "on policy"
    assert any(share > 0 for share in shares)
    assert not any(key.startswith("nanproof") for key in trainer.state.log_history[-1]), "the summary has no batch of its own"


def test_evaluation_neither_logs_signals_nor_takes_those_of_training(tmp_path):
    kwargs = {"max_steps": 4, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = tiny.grpo(tmp_path, evaluate=2, **kwargs)
    extend_grpo(trainer, Patches(), lambda: False)
    trainer.train()
    history = trainer.state.log_history
    assert all("nanproof/rl/entropy" not in logs for logs in history if "eval_loss" in logs)
    assert len(tiny.logged(trainer, "nanproof/rl/entropy")) == 1 and len(tiny.logged(trainer, "eval_loss")) == 2


def test_a_token_that_counts_and_overflows_is_refused_and_not_hidden(tmp_path):
    """The policy's own word has become 120 less likely than under the reference: the KL is Inf, and stays Inf."""
    trainer = with_tool(tmp_path, max_steps=2)
    with torch.no_grad():
        trainer.model.lm_head.weight[5, 0] -= 30.0
    guard = protect(trainer)
    before = tiny.weights(trainer)
    trainer.train()
    assert [(i.step, i.kind) for i in guard.incidents] == [(0, "nonfinite-loss"), (1, "nonfinite-loss")]
    assert (guard.incidents[0].diagnosis.cause, guard.incidents[0].diagnosis.op) == ("exp-overflow", "exp")
    assert all(torch.equal(before[name], w) for name, w in tiny.weights(trainer).items())
    assert tiny.logged(trainer, "nanproof/rl/kl_max") == [INF, INF]
    assert tiny.logged(trainer, "nanproof/rl/kl_mean") == []
    assert tiny.logged(trainer, "nanproof/rl/nonfinite_batches") == [1, 1]


# -- the parts -------------------------------------------------------------------------------------------------------------------


def test_a_window_against_a_loop():
    """Largest and least pass over NaN and keep Inf; means pass over both; a signal that was never a number is not said."""
    window = Window()
    values = [1.0, NAN, INF, 3.0]
    for x in values:
        t = torch.tensor(x)
        window.add(Signals(ratio_max=t, ratio_min=t, kl_mean=t, entropy=torch.tensor(NAN), sampler_nonfinite=torch.tensor(2)))
    wanted = {"ratio_max": INF, "ratio_min": 1.0, "kl_mean": 2.0, "sampler_nonfinite": 8.0, "nonfinite_batches": 4.0}
    assert window.read() == wanted
    assert window.read() == {}


class NoHostReads(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_signals_are_gathered_without_waiting_for_the_device():
    window, x, mask = Window(), torch.randn(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    with NoHostReads():
        for _ in range(2):
            window.add(Signals.of_tokens(x, mask, old=x + 1, ref=x - 1, sampler=x, entropy=x.abs()))
            window.add(Signals.of_rewards(torch.randn(6), 3))
        with pytest.raises(AssertionError, match="waits"):
            x.sum().item()
    assert len(window.read()) == 14


def test_a_version_of_trl_without_the_names_is_refused(tmp_path, caplog):
    """A clear error, before anything is replaced; and a warning where a kernel computes the loss out of reach."""
    trainer = tiny.grpo(tmp_path)
    check_grpo(trainer)
    check_grpo(object())
    assert caplog.text == ""
    older = copy.copy(trainer)
    older.args, older.compute_liger_loss = copy.copy(trainer.args), lambda: None
    older.args.use_liger_kernel = True
    check_grpo(older)
    assert "masked tokens are left as they are" in caplog.text
    trainer._compute_loss = lambda model, batch, extra: None
    with pytest.raises(UnsupportedError, match=r"GRPOTrainer._compute_loss takes \(model, batch\)"):
        extend_grpo(trainer, Patches(), lambda: False)
    trainer._compute_loss = None
    with pytest.raises(UnsupportedError, match="is missing"):
        protect(trainer)


def test_signals_that_cannot_be_computed_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    """Said once; masked tokens are looked after all the same."""
    monkeypatch.setattr(Signals, "of_tokens", lambda *_, **__: 1 / 0)
    trainer = with_tool(tmp_path, fall=120)
    extend_grpo(trainer, Patches(), lambda: False)
    trainer.train()
    assert tiny.finite(trainer) and caplog.text.count("cannot be computed here: ZeroDivisionError") == 1
    assert not any(key.startswith("nanproof/rl") for logs in trainer.state.log_history for key in logs)


def test_a_trainer_of_another_kind_is_left_alone(tmp_path):
    trainer = tiny.sft(tmp_path)
    before = dict(vars(trainer))
    extend_grpo(trainer, Patches(), lambda: False)
    assert vars(trainer) == before and tiny.TOKENIZER.convert_tokens_to_ids("w28") == BAD
