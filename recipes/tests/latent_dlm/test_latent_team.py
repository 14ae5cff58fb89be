"""latent-dlm on two ranks (gloo), with DDP and with FSDP2: they refuse the same step, measure the same numbers, go on together,
and see different samples, in another order every epoch."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from latent_toys import FRESH, lines, prepared, small
from once import made_once

pytest.importorskip("diffusers")

from nanproof import UsageError
from nanproof_recipes.latent_dlm.arms import BROKEN, FIXED, GUARDED
from nanproof_recipes.latent_dlm.running import Studio
from nanproof_recipes.latent_dlm.train import training
from nanproof_recipes.latent_dlm.train.stepping import LOG, forever
from nanproof_recipes.latent_dlm.train.team import Team, team
from nanproof_recipes.latent_dlm.train.training import damaged, train
from zoo.two_ranks import two_ranks

ARMS = {"fixed": FIXED, "guarded": GUARDED, "broken": BROKEN, "fresh": FRESH, "whole": replace(BROKEN, damaged=False)}
CHANGES = {
    "training__steps": 12,
    "training__checkpoint_every": 3,
    "training__eval_every": 6,
    "modes__unconditional": 0.7,
    "modes__text_to_latent": 0.3,
    "modes__latent_to_text": 0.0,
}


def member(rank: int) -> Team:
    return Team(rank, 2, torch.device("cpu"))


def trained(rank, kind, arm, folder, stop=None, **changes):
    """One run; the words and numbers of it."""
    config = small(**CHANGES | {"training__parallel": kind} | changes)
    Path(folder).mkdir(exist_ok=True)
    met = []

    def look(model):
        def note(module, given):
            if module.training and torch.is_grad_enabled():
                met.append(float(given[1].abs().amax()) > 1e15)

        model.register_forward_pre_hook(note)

    def tick(done, said):
        if done == stop:
            raise KeyboardInterrupt

    warnings.simplefilter("error", FutureWarning)  # of torch, about what the recipe asks of it
    try:
        result = train(config, ARMS[arm], prepared(config, 160), Path(folder), member(rank), tick=tick, prepare=look)
    except KeyboardInterrupt:
        return {}
    weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double() for p in result.model.parameters()]
    return {
        "wrapped": type(result.model).__name__,
        "ending": result.ending,
        "skipped": result.skipped,
        "nonfinite": result.nonfinite,
        "tensors": result.tensors,
        "tokens": result.tokens,
        "measured": {name: str(value) for name, value in result.measured.to_json().items()},
        "notes": [note for note in result.notes if note.startswith(("data", "went"))],
        "met": [i for i, found in enumerate(met) if found],
        "incidents": [[i.step, i.action, i.rank, i.message] for i in result.incidents],
        "sums": [float(w.sum()) for w in weights],
        "sharded": sum(hasattr(p, "full_tensor") for p in result.model.parameters()),
    }


def stopped(rank, kind, folder):
    """Stopped after 8 steps, then run again; and without a break."""
    trained(rank, kind, "fresh", folder, stop=8)
    torch.distributed.barrier()
    again = trained(rank, kind, "fresh", folder)
    torch.distributed.barrier()
    return [again, trained(rank, kind, "fresh", folder + "-calm")]


def orders(rank, wrapped):
    """Samples by epoch, as a plain loop sees them or one whose loader the guard has wrapped."""
    config = small(training__train_batch_size=2)
    data = prepared(config, 24)
    pairs, said = damaged(data.train, config, FIXED, member(rank))
    loader = training._loader(data.train, config, member(rank))
    if wrapped:
        from nanproof.recover.data._loaders import wrap
        from nanproof.recover.data._quarantine import Quarantine

        loader = wrap(loader, Quarantine(None), even=True)
    batches = forever(loader)
    rows = {tuple(row): i for i, row in enumerate(data.train.ids.tolist())}
    seen = [rows[tuple(row)] for _ in range(18) for row in next(batches)["ids"].tolist()]
    bad = [i for i in range(24) if pairs.latents[i].abs().amax() > 1e15]
    return {"epochs": [seen[:12], seen[12:24], seen[24:]], "bad": bad, "said": said}


def refused(rank, out):
    """The folder is a file: only the first rank finds that out."""
    config = small()
    studio = Studio(Path(out), config, team=member(rank))
    studio._data = prepared(config)
    try:
        studio.run(FRESH)
    except (OSError, UsageError) as error:
        return [type(error).__name__, str(error)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All of it in one pair of processes, once a test run: starting them takes longest."""
    folder, _ = made_once(tmp_path_factory, "team", run_all)
    return folder, pickle.loads((folder / "results").read_bytes())


def run_all(folder):
    jobs = {}
    for kind in ("ddp", "fsdp2"):
        for arm in ("fixed", "broken", "whole"):
            jobs[kind, arm] = ("test_latent_team:trained", (kind, arm, str(folder / f"{kind}-{arm}")), {})
        jobs[kind, "stopped"] = ("test_latent_team:stopped", (kind, str(folder / f"{kind}-stopped")), {})
    for term in ("text_loss", "latent_loss"):
        arguments = ("ddp", "fresh", str(folder / f"ddp-{term}"))
        jobs["ddp", term] = ("test_latent_team:trained", arguments, {f"loss__{term}_weight": 0.0, "training__steps": 4})
    jobs["ddp", "guarded"] = ("test_latent_team:trained", ("ddp", "guarded", str(folder / "ddp-guarded")), {})
    jobs["plain", "orders"] = ("test_latent_team:orders", (False,), {})
    jobs["wrapped", "orders"] = ("test_latent_team:orders", (True,), {})
    (folder / "file").write_text("")
    jobs["refused"] = ("test_latent_team:refused", (str(folder / "file"),), {})
    results = two_ranks(*jobs.values(), timeout=60)
    (folder / "results").write_bytes(pickle.dumps(dict(zip(jobs, results, strict=True))))


@pytest.mark.parametrize(("kind", "arm"), [("ddp", "fixed"), ("fsdp2", "fixed"), ("ddp", "guarded")])
def test_both_ranks_refuse_the_same_step_and_the_guilty_one_is_named(kind, arm, ran):
    folder, results = ran
    zero, one = results[kind, arm]
    at = int(12 * 0.4)
    assert zero["notes"] == one["notes"] and f"it is met at step {at}" in zero["notes"][0]
    assert zero["met"][0] == at  # replays may meet it again
    for result in (zero, one):
        assert (result["ending"], result["skipped"], result["nonfinite"]) == ("finished", 1, 0)
        ((step, action, rank, message),) = result["incidents"]
        assert (step, action, rank) == (at, "skipped", 0) and "latent_loss" in message
    assert zero["sums"] == one["sums"] and zero["measured"] == one["measured"]
    log = [line for line in lines(folder / f"{kind}-{arm}" / LOG) if "loss" in line]
    assert [line["step"] for line in log] == list(range(12)) and zero["tokens"] == 12 * 2 * 4 * 18


@pytest.mark.parametrize("term", ["text_loss", "latent_loss"])
def test_a_term_of_weight_0_leaves_parameters_without_gradient_which_ddp_is_told(term, ran):
    for result in ran[1]["ddp", term]:
        assert result["ending"] == "finished" and result["skipped"] == 0 and result["incidents"] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_parallel_says_how_the_work_is_shared(kind, ran):
    zero = ran[1][kind, "fixed"][0]
    if kind == "ddp":
        assert zero["wrapped"] == "DistributedDataParallel" and zero["sharded"] == 0
    else:
        assert zero["wrapped"] == "FSDPMMDiT" and zero["sharded"] == zero["tensors"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_stopped_run_goes_on_with_both_ranks_and_ends_as_if_it_had_not_been(kind, ran):
    for again, calm in ran[1][kind, "stopped"]:
        assert any(note.startswith("went on from the checkpoint of step") for note in again["notes"])
        assert again["sums"] == calm["sums"] and again["measured"] == calm["measured"]
    folder = ran[0]
    logs = [lines(folder / f"{kind}-stopped{end}" / LOG) for end in ("", "-calm")]
    for log in logs:
        for line in log:
            line.pop("tokens_per_second", None)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_reported_loop_runs_on_two_ranks_as_well_as_it_can(kind, ran):
    """Its weights are NaN on both after the damaged sample, and it keeps them: whole ones, of all ranks."""
    from safetensors.torch import load_file

    folder, results = ran
    zero, one = results[kind, "broken"]
    assert zero["met"] == [4] and one["met"] == [] and zero["nonfinite"] > 0 and zero["ending"] == "finished"
    assert str(zero["sums"]) == str(one["sums"]) and zero["measured"] == one["measured"]
    zero, one = results[kind, "whole"]
    assert zero["nonfinite"] == one["nonfinite"] == 0 and zero["sums"] == one["sums"]
    kept = sorted((folder / f"{kind}-whole" / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08d}.safetensors" for step in (6, 9, 12)]
    assert [float(w.double().sum()) for w in load_file(kept[-1]).values()]
    assert sum(float(w.double().sum()) for w in load_file(kept[-1]).values()) == pytest.approx(sum(zero["sums"]), abs=1e-6)


def test_what_goes_wrong_on_the_first_rank_ends_the_other_too(ran):
    """A disk that is full, a folder that is a file: the other would wait for it in a collective until that times out."""
    zero, one = ran[1]["refused"]
    assert zero[0] == "NotADirectoryError" and one[0] == "UsageError" and "Not a directory" in one[1]


@pytest.mark.parametrize("how", ["plain", "wrapped"])
def test_ranks_see_different_samples_and_every_epoch_another_order(how, ran):
    """Also the first epoch is the one that the place of the damaged sample is counted in."""
    zero, one = ran[1][how, "orders"]
    for mine, yours in zip(zero["epochs"], one["epochs"], strict=True):
        assert not set(mine) & set(yours) and set(mine) | set(yours) == set(range(24))
    assert len({tuple(order) for order in zero["epochs"]}) == 3
    assert zero["bad"] == one["bad"] and len(zero["bad"]) == 1 and zero["said"] == one["said"]
    step = zero["epochs"][0].index(zero["bad"][0]) // 2
    assert f"sample {zero['bad'][0]} is damaged; it is met at step {step}" in zero["said"][0]


def test_one_process_is_a_team(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with team() as alone:
        assert (alone.rank, alone.world, alone.leads) == (0, 1, True) and alone.share({"a": 1}) == {"a": 1}
        numbers = torch.tensor([1.0, 2.0])
        assert torch.equal(alone.sum(numbers), numbers)
