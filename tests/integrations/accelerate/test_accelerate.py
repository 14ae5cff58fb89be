"""Pins that a raw Accelerate loop is guarded as it stands: a bad batch leaves no trace and is named with its cause, a healthy
run is the one it would have been."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanproof
from zoo.two_ranks import two_ranks

pytest.importorskip("accelerate.accelerator", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from nanproof import TrainingHalted, UnsupportedError, UsageError, call_again, read_incidents
from nanproof.explain.bundle._bundle import read_bundle
from nanproof.explain.lines._recorded import RootRecorder
from nanproof.integrations.accelerate._accelerator import protect_accelerator

STEPS, BAD, SAMPLE = 8, 4, 2


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process; every test begins without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Net(nn.Module):
    """Returns its loss and its output, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.body(x)).squeeze(-1)
        return {"loss": F.mse_loss(out, labels), "out": out}


def data(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)) for _ in range(count)]


def poisoned(batches: list[tuple[Tensor, Tensor]], at: int) -> list[tuple[Tensor, Tensor]]:
    x, y = batches[at]
    x = x.clone()
    x[SAMPLE, 3] = torch.nan
    return [*batches[:at], (x, y), *batches[at + 1 :]]


def train(
    batches: list[tuple[Tensor, Tensor]],
    protected: bool = True,
    accumulation: int = 1,
    clip: float | None = 1.0,
    precision: str = "no",
    outside: bool = False,
    rate: Any = lambda step: 1 / (1 + step),
    infinite: int = -1,
    optimizer: Any = torch.optim.AdamW,
    run_dir: Any = None,
    policy: nanproof.Policy | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any, Any, Any, list[float]]:
    """The loop that Accelerate's documentation shows."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision)
    model = Net()
    made = optimizer(model.parameters(), lr=1e-2, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, rate)
    model, made, schedule = accelerator.prepare(model, made, schedule)
    guard = protect_accelerator(accelerator, run_dir=run_dir, policy=policy) if protected else None
    norms = []
    for x, y in batches:
        with accelerator.accumulate(model):
            output = model(x, labels=y)
            loss = F.mse_loss(output["out"], y) if outside else output["loss"]
            if len(guard.history if guard else ()) == infinite:
                loss = loss + torch.inf
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            made.step()
            schedule.step()
            made.zero_grad()
    if accelerator.num_processes == 1:
        accelerator.end_training()  # it would take gloo down, which the other job still needs
    elif guard is not None:
        guard.close()
    return model, made, schedule, guard, norms


def state(model: nn.Module, optimizer: Any, schedule: Any) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{key} of {name}": torch.as_tensor(v).clone() for key, v in optimizer.state[p].items()}
    return {**found, "lr": torch.tensor(schedule.get_last_lr())}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        difference = (value.double() - other[name].double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:g}"


def test_an_unprotected_loop_dies() -> None:
    """The oracle of the others: one bad sample, and every weight is NaN."""
    model, *_ = train(poisoned(data(STEPS), BAD), protected=False)
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_bad_batch_leaves_no_trace(precision: str, clip: float | None, accumulation: int) -> None:
    """Weights, moments, step counts, schedule and dropout are those of a run that never saw the step of the bad batch, bit for
    bit; the incident says which step, which micro-batch, which sample, and why."""
    good = data(STEPS * accumulation)
    at = BAD * accumulation + accumulation - 1
    options = {"accumulation": accumulation, "clip": clip, "precision": precision}
    *saw, guard, norms = train(poisoned(good, at), **options)
    without = good[: BAD * accumulation] + good[(BAD + 1) * accumulation :]
    *never, _, _ = train(without, **options)
    assert_same(state(*saw), state(*never))
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (BAD, "nonfinite-loss", "skipped")
    assert incident.micro_batch == (1 if accumulation == 2 else None)
    assert incident.diagnosis is not None and incident.diagnosis.cause == "nonfinite-batch"
    assert incident.diagnosis.samples == (SAMPLE,)
    assert [r.action for r in guard.history].count("skipped") == 1 and len(guard.history) == STEPS
    if clip is not None:
        assert [r.grad_norm for r in guard.history] == pytest.approx(norms, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_late_verdicts(accumulation: int) -> None:
    """Where verdicts come two steps late, as on CUDA, the steps held behind the bad one are run again from their recorded calls,
    and the schedule gives back the advance that it should not have made."""
    good = data(STEPS * accumulation)
    at = BAD * accumulation
    options = {"accumulation": accumulation, "rate": lambda step: 1.0}
    *saw, guard, _ = train(poisoned(good, at), policy=nanproof.Policy(lag=2), **options)
    *never, _, _ = train(good[:at] + good[at + accumulation :], **options)
    assert_same(state(*saw), state(*never))
    assert [(i.step, i.kind) for i in guard.incidents] == [(BAD, "nonfinite-loss")]
    assert saw[2].scheduler.last_epoch == STEPS - 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_healthy_run_is_the_one_it_would_have_been(accumulation: int) -> None:
    """Bit for bit with the fused optimizer that the guard uses; with clipping to rounding."""
    batches = data(STEPS * accumulation)
    for clip, tolerance in ((None, 0.0), (0.5, 1e-6)):
        options = {"accumulation": accumulation, "clip": clip, "fused": True}
        *plain, _, expected = train(batches, protected=False, **options)
        *guarded, guard, norms = train(batches, **options)
        assert_same(state(*guarded), state(*plain), tolerance)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert guard.incidents == [] and guard.path == "device"
        assert {r.action for r in guard.history} == ({"stepped"} if clip is None else {"clipped"})


def test_a_loss_made_outside_of_the_model_is_refused_and_named() -> None:
    """The loop's own lines are run again: the step is refused as exactly, and explained as well."""
    good = data(STEPS)
    *saw, guard, _ = train(poisoned(good, BAD), outside=True)
    (incident,) = guard.incidents
    assert (incident.step, incident.kind) == (BAD, "nonfinite-loss")
    assert {name for name, _ in incident.culprits} >= {"body.0.weight", "head.weight"}
    found = incident.diagnosis
    assert (found.cause, found.verified, found.where) == ("nonfinite-batch", True, "batch['x']") and found.samples == (SAMPLE,)
    assert all(p.isfinite().all() for p in saw[0].parameters())
    assert saw[2].scheduler.last_epoch == STEPS - 1


def test_norms_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop asks for the norm and then the guard does: one pass over the gradients a step."""
    passes = []
    plain = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: (passes.append(a[1]), plain(*a, **k))[1])
    train(data(STEPS))
    assert passes.count(2) == STEPS


def test_gradients_written_after_the_norm_are_judged_as_they_are() -> None:
    """A loop that writes into a gradient between clipping and stepping is judged on what it wrote."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := Net(), torch.optim.AdamW(model.parameters()))
    guard = protect_accelerator(accelerator, policy=nanproof.Policy(diagnose="never"))
    x, y = data(1)[0]
    accelerator.backward(model(x, labels=y)["loss"])
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    model.head.bias.grad[0] = torch.inf
    optimizer.step()
    (incident,) = guard.incidents
    assert incident.culprits[0][0] == "head.bias" and all(p.isfinite().all() for p in model.parameters())
    guard.close()


def test_clipping_a_part_or_by_value_keeps_the_evidence() -> None:
    """Clipped in place as Accelerate does it, but an Inf is not made a number of, nor a neighbour's gradient a NaN."""

    def made(protected: bool) -> tuple[Any, nn.Module, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
        guard = protect_accelerator(accelerator, policy=nanproof.Policy(diagnose="never")) if protected else None
        torch.manual_seed(1)
        x, y = data(1)[0]
        accelerator.backward(model(x, labels=y)["loss"])
        return accelerator, model, (optimizer, guard)

    plain, guarded = made(False), made(True)
    norms = []
    for accelerator, model, _ in (plain, guarded):
        norms.append(float(accelerator.clip_grad_norm_(model.head.parameters(), 0.01)))
        accelerator.clip_grad_norm_(model.body.parameters(), 0.02, norm_type=1)
        accelerator.clip_grad_value_(model.parameters(), 0.003)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for p, q in zip(plain[1].parameters(), guarded[1].parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=0)

    accelerator, model, (optimizer, guard) = guarded
    model.head.bias.grad[0] = torch.inf
    accelerator.clip_grad_norm_(model.head.parameters(), 0.01)
    accelerator.clip_grad_value_(model.parameters(), 0.003)
    assert model.head.weight.grad.isfinite().all() and model.head.bias.grad.isinf().all()
    optimizer.step()
    assert [name for name, _ in guard.incidents[0].culprits] == ["head.bias"]
    guard.close()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["value", "hand"])
def test_gradients_that_the_loop_changes_are_not_asked_for_again(how: str, accumulation: int) -> None:
    """With late verdicts the run is the one that never saw the bad batch. (Steps behind it were run again without clipping by
    value, and without what the loop itself did to its gradients.)"""

    def run(batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = Net()
        model.body[1].p = 0.0
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, fused=True))
        guard = protect_accelerator(accelerator, policy=nanproof.Policy(lag=2))
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, labels=y)["loss"])
                if how == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                else:
                    for p in model.parameters():
                        p.grad.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        guard.close()
        return [p.detach().clone() for p in model.parameters()]

    batches = data(STEPS * accumulation)
    first = BAD * accumulation
    seen, never = run(poisoned(batches, first)), run([*batches[:first], *batches[first + accumulation :]])
    assert all(torch.equal(a, b) for a, b in zip(seen, never, strict=True))


def test_a_resumed_schedule_does_not_wait_for_steps_of_before() -> None:
    """Refused steps that a loaded state knows of are counted, and were waited for in their own time."""
    *_, first, _ = train(poisoned(data(STEPS), BAD))
    state = first.state_dict()
    assert first.refused_in_all == 1
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    guard = protect_accelerator(accelerator, policy=nanproof.Policy(lag=2))
    guard.load_state_dict(state)
    for x, y in data(6):
        accelerator.backward(model(x, labels=y)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    guard.close()
    assert schedule.scheduler.last_epoch == 6
    assert (guard.refused_so_far, guard.refused_in_all) == (0, 1)


def test_too_many_refused_steps_halt_the_loop() -> None:
    batches = data(STEPS)
    for at in range(3, STEPS):
        batches = poisoned(batches, at)
    with pytest.raises(TrainingHalted) as halted:
        train(batches, policy=nanproof.Policy(max_consecutive_skips=2, diagnose="never"))
    assert halted.value.incident.step == 5


def test_records_and_a_bundle_that_can_be_run_again(tmp_path: Any) -> None:
    """The run's folder holds the incident, and its bundle runs again with the recorded call as the loss function."""
    *_, guard, _ = train(poisoned(data(STEPS), BAD), run_dir=tmp_path)
    (found,) = read_incidents(tmp_path)
    assert found.step == BAD and found.bundle is not None and found.bundle == guard.incidents[0].bundle
    (batch,) = read_bundle(tmp_path / found.bundle).batches
    assert call_again(Net(), batch).isnan()
    batch["args"][0][SAMPLE, 3] = 0.0
    assert call_again(Net(), batch).isfinite()


def test_after_close_the_loop_goes_on_unguarded() -> None:
    """Closing gives the loop its own calls back."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    guard = protect_accelerator(accelerator)
    x, y = data(1)[0]
    for _ in range(2):
        accelerator.backward(model(x, labels=y)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        guard.close()
    assert len(guard.history) == 1


def test_a_schedule_made_after_protecting_works() -> None:
    """torch wraps optimizer.step when a schedule is made, whatever stands there by then."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    guard = protect_accelerator(accelerator)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x, y = data(1)[0]
    accelerator.backward(model(x, labels=y)["loss"])
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    assert len(guard.history) == 1 and optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    guard.close()


def test_what_cannot_be_guarded_is_said() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"after accelerator\.prepare"):
        protect_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    with protect_accelerator(accelerator):
        with pytest.raises(UsageError, match="protect an accelerator once"):
            protect_accelerator(accelerator)
        with pytest.raises(UsageError, match=r"accelerator\.backward\(loss\)"):
            optimizer.step()
        x, y = data(1)[0]
        accelerator.backward(model(x, labels=y)["loss"])
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(lambda: None)


def ranks_train(rank: int, protected: bool, fault: str = "input") -> dict[str, Any]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    batches = data(STEPS * 2, seed=rank + 1)
    if rank == 1 and fault == "input":
        batches = poisoned(batches, BAD * 2)
    infinite = BAD if rank == 1 and fault == "loss" else -1
    model, _, schedule, guard, _ = train(batches, protected=protected, accumulation=2, infinite=infinite)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return {
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "sums": [p.double().sum().item() for p in model.parameters()],
        "epoch": schedule.scheduler.last_epoch,
        "wrapped": type(model).__name__,
        "incidents": [] if guard is None else [[i.step, i.kind, i.rank, i.micro_batch] for i in guard.incidents],
        "samples": [] if guard is None else [i.diagnosis and i.diagnosis.samples for i in guard.incidents],
    }


def test_two_ranks() -> None:
    """DDP over gloo with accumulation: one rank's bad micro-batch is refused on both, which stay alike. The schedule advances
    once a rank and accepted step, as Accelerate has it."""
    jobs = [(False, "input"), (True, "input"), (True, "loss")]
    (dead, _), (first, second), infinite = two_ranks(*[("test_accelerate:ranks_train", job, {}) for job in jobs])
    assert first["wrapped"] == "DistributedDataParallel"
    assert not dead["finite"] and first["finite"] and second["finite"]
    assert first["sums"] == second["sums"]
    assert first["incidents"] == second["incidents"] == [[BAD, "nonfinite-loss", 1, 0]]
    assert first["samples"] == second["samples"] == [[SAMPLE]]
    assert first["epoch"] == 2 * (STEPS - 1)
    for run in infinite:
        assert run["incidents"] == [[BAD, "nonfinite-loss", 1, 0]], "an Inf loss whose gradients are finite is known to both"


def test_a_healthy_loop_calls_the_model_as_often_as_it_asks() -> None:
    """Its labels are its inputs moved by one, as they should be."""
    calls: list[int] = []

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.note = nn.Embedding(12, 8), nn.Linear(8, 12), calls.append

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            self.note(1)
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

    accelerator = Accelerator(cpu=True)
    made = Reader()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), 1e-2))
    guard = nanproof.protect(accelerator)
    for i in range(15):
        ids = torch.randint(0, 12, (4, 9), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        accelerator.backward(model(ids[:, :-1], ids[:, 1:]))
        optimizer.step()
    guard.close()
    assert (len(calls), guard.incidents) == (15, [])


def test_no_step_starts_from_random_numbers_of_the_step_before(monkeypatch):
    """They are noted for a micro-batch behind the first. The first one of the next step starts from that step's own."""
    seen = []
    source_of = RootRecorder.source_of
    monkeypatch.setattr(RootRecorder, "source_of", lambda self, *a, **k: (seen.append(self.random), source_of(self, *a, **k))[1])
    train(data(6), accumulation=2)
    assert [random is not None for random in seen] == [False, True] * 3
