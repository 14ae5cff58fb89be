"""Pins that a DeepSpeed engine on two ranks (gloo, CPU) never takes a bad step, whatever its ZeRO stage and precision: weights,
fp32 masters, moments and schedule stay as they were, on both ranks, and the incident names step, rank, parameters and cause."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.two_ranks import two_ranks

pytestmark = pytest.mark.skipif(  # a folder of these tests has that name too, without a loader
    getattr(importlib.util.find_spec("deepspeed"), "loader", None) is None, reason="deepspeed is not installed"
)

STEPS, BAD, SAMPLE = 6, 3, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)).squeeze(-1), labels)


def train(
    rank: int,
    stage: int,
    precision: str = "fp32",
    fault: str = "input",
    protected: bool = True,
    accumulation: int = 1,
    clip: float = 0.5,
    check: bool = True,
    extra: dict[str, Any] | None = None,
    caps: int | None = None,
    spikes: bool = False,
    observe: Any = None,
) -> dict[str, Any]:
    """An ordinary loop over an engine; the fault is rank 1's, in the last micro-batch of one step. "left out" is the loop that
    never comes to that step, the oracle of the others."""
    # No shared-memory kernels, which are what DeepSpeed compiles when it starts on a CPU.
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    import deepspeed
    import deepspeed.ops

    from nanproof import Observe, Policy, TrainingHalted
    from nanproof.integrations.deepspeed._engine import protect_engine

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    for key, value in (extra or {}).items():
        config[key] = {**config.get(key, {}), **value}
    if precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": check}
    if precision == "fp16":
        # DeepSpeed asks for a CPU with fp16 units; torch computes it on any.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step)),
    )
    policy = Policy() if caps is None else Policy(max_consecutive_skips=caps, diagnose="never")
    if spikes:
        policy = Policy(on_spike="skip", warmup_steps=2)
    guard = protect_engine(engine, policy=policy, observe=observe and Observe(modules=observe, every=2)) if protected else None
    tops: list[dict[str, float]] = [{}]
    for name in ("body.0", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: tops[-1].update({name: float(out.abs().max())})
        )
    generator = torch.Generator().manual_seed(rank)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    norms, halted = [], None
    try:
        for step in range(STEPS):
            tops.append({})
            for micro in range(accumulation):
                x, y = torch.randn(4, 8, generator=generator), torch.randn(4, generator=generator)
                if fault == "left out" and step == BAD:
                    continue
                bad = rank == 1 and micro == accumulation - 1 and (step == BAD if caps is None else step >= BAD)
                if bad and fault == "input":
                    x[SAMPLE, 3] = torch.nan
                loss = engine(x.to(dtype), labels=y.to(dtype))
                if bad and fault == "spike":
                    loss = loss * 1e5
                if bad and fault == "loss":
                    loss = loss + torch.inf
                if bad and fault == "gradient":
                    loss = loss + (model.head.bias - model.head.bias.detach()).abs().sqrt().sum()
                engine.backward(loss)
                engine.step()
            if engine.get_global_grad_norm() is not None and not (fault == "left out" and step == BAD):
                norms.append(float(engine.get_global_grad_norm()))
    except TrainingHalted as error:
        halted = str(error)
    path = "" if guard is None else guard.path
    if guard is not None:
        guard.close()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if stage == 3:
        # What DeepSpeed keeps is padded with whatever was in memory; these leave that out.
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        kept = [safe_get_full_fp32_param(p) for p in model.parameters()]
        moments = [safe_get_full_optimizer_state(p, key) for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    else:
        kept = [p for group in inner.param_groups for p in group["params"]]
        moments = [v for p in kept for v in inner.state[p].values()]
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = [p.detach().float().clone() for p in model.parameters()]
    return {
        "weights": [w.flatten().tolist() for w in weights],
        "masters": [p.detach().float().flatten().tolist() for p in kept],
        "moments": [v.detach().float().flatten().tolist() for v in moments],
        "finite": all(bool(w.isfinite().all()) for w in weights),
        "lr": engine.get_lr(),
        "norms": norms,
        "halted": halted,
        "path": path,
        "skipped": engine.skipped_steps,
        "scale": float(getattr(engine.optimizer, "loss_scale", None) or 1.0),
        "incidents": [
            {
                "what": [i.step, i.kind, i.action, i.rank, i.micro_batch],
                "culprits": [name for name, _ in i.culprits],
                "cause": None if i.diagnosis is None else [i.diagnosis.cause, i.diagnosis.samples],
            }
            for i in (guard.incidents if guard else [])
        ],
        "tops": tops[1:],
        "observed": [r.observed and [r.observed.by_site, sorted(r.observed.gradients)] for r in (guard.history if guard else [])],
        "records": [[r.step, r.action, r.grad_norm] for r in (guard.history if guard else [])],
    }


STATE = ("weights", "masters", "moments", "lr")
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
SETUPS: dict[str, dict[str, Any]] = {
    "no ZeRO": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 1, bf16, unchecked": {"stage": 1, "precision": "bf16", "check": False, "accumulation": 2},
    "bf16 with fp32 gradients": {"stage": 1, "precision": "bf16", "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "ZeRO 2, offloaded": {"stage": 2, "precision": "bf16", "extra": OFFLOAD},
    "ZeRO 2": {"stage": 2, "clip": 0.0},
    "ZeRO 3": {"stage": 3, "precision": "bf16", "accumulation": 2},
}
UNCHECKED = ("no ZeRO", "ZeRO 1, bf16, unchecked")
"""Where DeepSpeed 0.19 itself lets NaN gradients through."""
VARIANTS: dict[str, dict[str, Any]] = {
    "saw": {},
    "never": {"fault": "left out"},
    "healthy": {"fault": "none"},
    "plain": {"fault": "none", "protected": False},
}
EXTRAS: dict[str, dict[str, Any]] = {
    **{f"dead: {name}": {**SETUPS[name], "protected": False} for name in UNCHECKED},
    "loss": {"stage": 2, "fault": "loss"},
    "loss, unprotected": {"stage": 2, "fault": "loss", "protected": False},
    "gradient": {"stage": 2, "fault": "gradient"},
    "gradient, cut up": {"stage": 3, "fault": "gradient"},
    "caps": {"stage": 1, "caps": 1},
    "fp16": {"stage": 1, "precision": "fp16"},
    "fp16, healthy": {"stage": 2, "precision": "fp16", "fault": "none"},
    "fp16, plain": {"stage": 2, "precision": "fp16", "fault": "none", "protected": False},
    "spike": {"stage": 1, "fault": "spike", "spikes": True},
    **{f"observed: {n}": {**SETUPS[n], "fault": "none", "observe": ["body.0", "head"]} for n in ("no ZeRO", "ZeRO 2", "ZeRO 3")},
}


@pytest.fixture(scope="module")
def runs() -> dict[Any, tuple[dict[str, Any], dict[str, Any]]]:
    """All runs, in one pair of processes: starting those takes longer than the runs."""
    asked: dict[Any, dict[str, Any]] = {(s, v): {**SETUPS[s], **VARIANTS[v]} for s in SETUPS for v in VARIANTS}
    asked |= EXTRAS  # type: ignore[arg-type]
    jobs = [("test_deepspeed:train", (), options) for options in asked.values()]
    jobs += [("test_deepspeed:wrong_calls", (), {}), ("integrations.test_loss_terms:engine", (), {})]
    jobs += [("test_deepspeed:sampled", (), {})]
    return dict(zip([*asked, "wrong calls", "terms", "sampled"], two_ranks(*jobs, timeout=100), strict=True))


def sampled(rank: int) -> dict[str, Any]:
    """Rows that cannot be sampled, under an engine; and what every protected run has."""
    import deepspeed

    from nanproof import GuardedSampling
    from nanproof.integrations.deepspeed._engine import protect_engine

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    run = protect_engine(engine)
    sampling = GuardedSampling(run, eos_token_id=1)
    ids = torch.full((3, 2), 4)
    for generation in range(2):
        logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(generation))
        if generation and rank == 1:
            logits[2] = torch.nan
        sampling.processor.start()
        sampling.processor(ids, logits)
        valid = sampling.settle().tolist()
        with run.engine.evaluating():
            pass
        engine.backward(engine(torch.randn(2, 4)).square().mean())
        engine.step()
    run.close()
    return {
        "valid": valid,
        "late": run.late,
        "incidents": [[i.step, i.kind, i.action, len(i.diagnosis.samples)] for i in run.incidents if i.diagnosis],
        "counted": [dict(record.counters).get("generation/bad_rows") for record in run.history],
    }


def wrong_calls(rank: int) -> list[str]:
    """What is said to calls that cannot be right."""
    from types import SimpleNamespace

    from nanproof import NanproofError
    from nanproof.integrations.deepspeed._engine import protect_engine

    said = []
    fake: Any
    for fake, options in (
        (SimpleNamespace(optimizer=None), {}),
        (SimpleNamespace(optimizer=None), {"checkpoints": object()}),
        (SimpleNamespace(optimizer=None, train_schedule=None), {}),
    ):
        try:
            protect_engine(fake, **options)
        except NanproofError as error:
            said.append(str(error))
    return said


def largest_difference(one: Any, other: Any) -> float:
    if isinstance(one, list):
        return max((largest_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_bad_batch_leaves_no_trace(runs: Any, setup: str) -> None:
    """Bit for bit the run that never came to that step, on both ranks, and the incident says what it was."""
    for saw, never in zip(runs[setup, "saw"], runs[setup, "never"], strict=True):
        assert all(saw[part] == never[part] for part in STATE)
        assert saw["finite"] and saw["skipped"] == 1
        (incident,) = saw["incidents"]
        micro_batch = 1 if SETUPS[setup].get("accumulation") == 2 else None
        assert incident["what"] == [BAD, "nonfinite-loss", "skipped", 1, micro_batch]
        assert set(incident["culprits"]) >= {"body.0.weight", "head.weight"}
        assert incident["cause"] == (None if setup == "ZeRO 3" else ["nonfinite-batch", [SAMPLE]])
        assert [r[1] for r in saw["records"]].index("skipped") == BAD and len(saw["records"]) == STEPS
    first, second = runs[setup, "saw"]
    assert first["weights"] == second["weights"] and first["incidents"] == second["incidents"]
    assert first["path"] == "host: DeepSpeed owns the optimizer"


@pytest.mark.parametrize("setup", UNCHECKED)
def test_without_the_guard_the_weights_are_nan(runs: Any, setup: str) -> None:
    for dead in runs[f"dead: {setup}"]:
        assert not dead["finite"]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_healthy_run_is_the_one_it_would_have_been(runs: Any, setup: str) -> None:
    """To the rounding of the norm that the clipping divides by; without clipping bit for bit."""
    for healthy, plain in zip(runs[setup, "healthy"], runs[setup, "plain"], strict=True):
        allowed = 0.0 if SETUPS[setup].get("clip") == 0.0 else 1e-7
        assert max(largest_difference(healthy[part], plain[part]) for part in STATE) <= allowed
        assert healthy["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        if plain["norms"]:
            assert [r[2] for r in healthy["records"]] == pytest.approx(plain["norms"], rel=1e-5)
        assert healthy["incidents"] == [] and healthy["skipped"] == 0


def test_a_bad_loss_with_finite_gradients_is_refused(runs: Any) -> None:
    """DeepSpeed does not look at the loss; one rank's Inf is known to both."""
    assert all(plain["skipped"] == 0 for plain in runs["loss, unprotected"])
    for run in runs["loss"]:
        assert run["incidents"][0]["what"] == [BAD, "nonfinite-loss", "skipped", 1, None]
        assert run["incidents"][0]["culprits"] == [] and run["skipped"] == 1


@pytest.mark.parametrize("name", ["gradient", "gradient, cut up"])
def test_the_one_bad_parameter_is_named(runs: Any, name: str) -> None:
    """Through the partition: it may lie on the other rank."""
    for run in runs[name]:
        assert run["incidents"][0]["what"][:3] == [BAD, "nonfinite-gradient", "skipped"]
        assert run["incidents"][0]["culprits"] == ["head.bias"]


def test_the_loss_scale_is_left_to_deepspeed(runs: Any) -> None:
    """Overflows that calibrate it are skipped as without the guard, and are no incidents. A NaN loss among them is one, of the
    rank that had it, and is not held against the scale."""
    for healthy, plain, bad in zip(runs["fp16, healthy"], runs["fp16, plain"], runs["fp16"], strict=True):
        assert healthy["skipped"] == plain["skipped"] == STEPS - 1 and healthy["scale"] == plain["scale"] == 2.0**15
        assert healthy["incidents"] == []
        assert [i["what"] for i in bad["incidents"]] == [[BAD, "nonfinite-loss", "skipped", 1, None]]
        assert bad["incidents"][0]["cause"] == ["nonfinite-batch", [SAMPLE]]
        assert bad["skipped"] == STEPS and bad["scale"] == 2.0**15


def test_a_spike_is_refused_where_that_is_asked_for(runs: Any) -> None:
    for run in runs["spike"]:
        assert [i["what"][:3] for i in run["incidents"]] == [[BAD, "spike", "skipped"]]
        assert run["skipped"] == 1


def test_too_many_refused_steps_halt_both_ranks(runs: Any) -> None:
    for run in runs["caps"]:
        assert "max_consecutive_skips=1" in run["halted"]
        assert [i["what"][:3] for i in run["incidents"]] == [
            [BAD, "nonfinite-loss", "skipped"],
            [BAD + 1, "nonfinite-loss", "halted"],
        ]
        assert run["finite"]


def test_what_cannot_be_guarded_is_said(runs: Any) -> None:
    none, checkpoints, pipeline = runs["wrong calls"][0]
    assert "has no optimizer" in none
    assert "engine.save_checkpoint" in checkpoints
    assert "PipelineEngine" in pipeline


@pytest.mark.parametrize("setup", ["no ZeRO", "ZeRO 2", "ZeRO 3"])
def test_what_is_observed_is_what_hooks_see(runs: Any, setup: str) -> None:
    """Each rank its own outputs, at every step, and their gradients on full looks; the run is the same, bit for bit."""
    for rank in (0, 1):
        run, healthy = runs[f"observed: {setup}"][rank], runs[setup, "healthy"][rank]
        assert all(run[name] == healthy[name] for name in STATE)
        assert healthy["observed"] == [None] * STEPS
        for step, (by_site, gradients) in enumerate(run["observed"]):
            if SETUPS[setup].get("accumulation", 1) == 1:
                assert by_site == pytest.approx(run["tops"][step], rel=1e-5)
            assert by_site.keys() == {"body.0", "head"} and bool(gradients) == (step % 2 == 0)
    assert runs[f"observed: {setup}"][0]["tops"] != runs[f"observed: {setup}"][1]["tops"]


def test_rows_that_cannot_be_sampled_are_incidents_of_the_engines_run(runs: Any) -> None:
    """It has an engine as every run has. (Its guard died at the first bad row.)"""
    zero, one = runs["sampled"]
    assert zero["valid"] == [True] * 3 and one["valid"] == [True, True, False]
    assert zero["incidents"] == one["incidents"] == [[1, "generation", "recorded", 1]]
    assert one["counted"] == [0, 1] and zero["counted"] == [0, 0] and not zero["late"]


def test_the_terms_of_a_loss_are_told_on_both_ranks(runs: Any) -> None:
    """As with every other framework, in test_loss_terms."""
    from integrations.test_loss_terms import BAD as STEP
    from integrations.test_loss_terms import NAMES

    (zero, zero_terms), (one, one_terms) = runs["terms"]
    [[step, kind, rank, micro, message, terms]] = one
    assert (step, kind, rank, micro) == (STEP, "nonfinite-loss", 1, 1)
    assert "; of the terms latent_loss is inf, text_loss is " in message and [name for name, _ in terms] == NAMES
    assert zero[0][5] == terms and "of the terms latent_loss is inf" in zero[0][4]
    assert zero_terms == one_terms == [NAMES] * 4
