"""Which incidents are diagnosed: each that is unlike every one diagnosed before, as far as the run's time allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import nanproof
from nanproof import Diagnosis, Incident, Policy
from nanproof.explain import _diagnose as diagnosing
from nanproof.explain import _known as knowing
from nanproof.explain._known import BadData, Known, fingerprint

NAN, INF = math.nan, math.inf
FINE, LOG, BAD_X, BAD_Y, BAD_Z = "fine", "log", "x", "y", "z"


class Stage(nn.Module):
    """Takes the logarithm of 0 where it is told to."""

    def __init__(self, name):
        super().__init__()
        self.name, self.layer = name, nn.Linear(4, 4)

    def forward(self, x, at):
        x = self.layer(x)
        if at == "root" and self.name == "first":
            return (x.detach().abs() * -1 + 0 * x).sqrt()
        return x + torch.log(torch.zeros_like(x) if at == self.name else torch.ones_like(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Stage("first"), Stage("second"), nn.Linear(4, 1)

    def forward(self, x, at):
        return self.head(self.second(self.first(x, at), at))


def loss_fn(model, batch):
    total = batch["x"] + batch["y"] + batch["z"]
    loss = model(total, batch["at"]).square().mean()
    if batch["at"] == "divide":
        loss = loss * (loss - loss) / (loss - loss)
    return loss + torch.log(torch.zeros(())) if batch["at"] == LOG else loss


def batch_of(fault, g):
    batch = {name: torch.randn(6, 4, generator=g) for name in (BAD_X, BAD_Y, BAD_Z)}
    if fault[0] in batch:
        batch[fault[0]][int(fault[1:] or 1), 2] = NAN
    return {**batch, "at": fault}


def run(faults, **policy):
    """One step a fault; its incidents."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Model()
    made = nanproof.Policy(max_skip_rate=1.0, max_consecutive_skips=100, **policy)
    with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn=loss_fn, policy=made) as guard:
        for fault in faults:
            guard.train_step(batch_of(fault, g))
    return guard.incidents


def told(incidents):
    return [(i.step, None if i.diagnosis is None else i.diagnosis.cause, i.same_as) for i in incidents]


@pytest.fixture
def examined(monkeypatch):
    """The kinds of the cases that were explained, in order."""
    seen, explain = [], diagnosing.explain
    monkeypatch.setattr(diagnosing, "explain", lambda case: (seen.append(case.kind), explain(case))[1])
    return seen


# -- which are new -------------------------------------------------------------------------------------------------------------


def test_two_faults_of_one_kind_are_both_diagnosed(examined):
    """A NaN in the data, then the logarithm of 0; each that comes again is as the first of its sort."""
    found = run([FINE, BAD_X, FINE, LOG, FINE, BAD_X, LOG])
    assert {i.kind for i in found} == {"nonfinite-loss"}
    assert told(found) == [(1, "nonfinite-batch", None), (3, "log-of-zero", None), (5, None, 1), (6, None, 3)]
    assert len(examined) == 2


def test_faults_that_look_alike_and_begin_in_different_modules_are_both_diagnosed(examined):
    """What is known for free is the same for both; where they begin is not."""
    found = run([FINE, "first", FINE, "second", "first", "second"])
    free = {fingerprint(i) for i in found}
    assert len(free) == 1
    assert told(found) == [(1, "log-of-zero", None), (3, "log-of-zero", None), (4, None, 1), (5, None, 3)]
    assert [i.diagnosis.where for i in found[:2]] == ["first", "second"]
    assert len(examined) == 2


def test_a_repeat_says_so_in_words():
    _, again = run([BAD_X, BAD_X])
    assert again.diagnosis is None and again.same_as == 0 and str(again).endswith("; as at step 0")


@pytest.mark.parametrize("ops", [("first", "root"), ("log", "divide")])
def test_two_operations_of_one_place_are_two_faults(ops):
    """In one module, and in the loss function: the module alone does not tell them apart."""
    found = run([ops[0], ops[1], ops[0], ops[1]])
    assert [i.same_as for i in found] == [None, None, 0, 1]
    assert found[0].diagnosis.cause == "log-of-zero" and found[1].diagnosis.cause != "log-of-zero"


def test_a_repeat_names_its_own_samples(caplog):
    """The cause is the same; the sample need not be."""
    first, again = run([BAD_X, "x3"])
    assert (first.bad_samples, again.bad_samples, again.same_as) == ((1,), (3,), 0)
    assert "as at step 0, once more; not finite: sample 3 of the batch" in caplog.text


def test_a_batch_that_cannot_be_looked_at_is_no_reason_to_die():
    """torch cannot tell whether a float8 is finite."""
    model = nn.Linear(4, 1)
    scale = torch.ones(1).to(torch.float8_e4m3fn)
    loss = lambda model, batch: (model(batch["x"]) * batch["s"].float()).mean()  # noqa: E731
    with nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=loss) as guard:
        for value in (1.0, NAN, 1.0):
            guard.train_step({"x": torch.full((2, 4), value), "s": scale})
    assert [(i.step, i.bad_samples) for i in guard.incidents] == [(1, (0, 1))] and torch.isfinite(model.weight).all()


@pytest.mark.parametrize("failures", [1, 2])
def test_an_unknown_cause_uses_nothing_up(failures, monkeypatch):
    """The diagnosis fails at first. The next incident like it is examined again, and the one after that refers to that one."""
    calls, explain = [], diagnosing.explain

    def fails_at_first(case):
        calls.append(case.kind)
        if len(calls) <= failures:
            raise RuntimeError("no luck")
        return explain(case)

    monkeypatch.setattr(diagnosing, "explain", fails_at_first)
    found = run([BAD_X] * (failures + 2))
    # What names nothing is told once.
    unknown = [(0, "unknown", None), (1, None, None)][:failures]
    assert told(found) == [*unknown, (failures, "nonfinite-batch", None), (failures + 1, None, failures)]
    assert len(calls) == failures + 1


@pytest.mark.parametrize(("when", "causes"), [("always", ["nonfinite-batch"] * 3), ("never", [None] * 3)])
def test_always_and_never(when, causes, examined):
    found = run([BAD_X] * 3, diagnose=when)
    assert told(found) == [(i, cause, None) for i, cause in enumerate(causes)]
    assert len(examined) == (3 if when == "always" else 0)


# -- what it may cost ----------------------------------------------------------------------------------------------------------

DIFFERENT = [BAD_X, BAD_Y, BAD_Z, LOG]


def test_the_first_are_made_whatever_they_cost(monkeypatch):
    """With no share of the time at all: the first two, then none. What was diagnosed can still be referred to."""
    monkeypatch.setattr(knowing, "ALWAYS", 2)
    found = run([*DIFFERENT, BAD_X, BAD_Z], diagnose_share=0.0)
    expected = [(0, "nonfinite-batch", None), (1, "nonfinite-batch", None), (2, None, None), (3, None, None)]
    assert told(found) == [*expected, (4, None, 0), (5, None, None)]


def test_without_a_limit_that_bites_all_of_them_are_made(monkeypatch):
    monkeypatch.setattr(knowing, "ALWAYS", 2)
    found = run(DIFFERENT, diagnose_share=1.0)
    assert [i.diagnosis is not None for i in found] == [True] * 4


def test_always_ignores_the_share(monkeypatch):
    monkeypatch.setattr(knowing, "ALWAYS", 0)
    found = run([*DIFFERENT, BAD_X], diagnose="always", diagnose_share=0.0)
    assert all(i.diagnosis is not None and i.same_as is None for i in found) and len(found) == 5


def test_repeats_use_up_nothing():
    """However often one fault comes, a later one is not taken for it, and is diagnosed."""
    found = run([*["first"] * 10, "second", BAD_X])
    assert told(found)[:10] == [(0, "log-of-zero", None), *((i, None, 0) for i in range(1, 10))]
    assert told(found)[10:] == [(10, "log-of-zero", None), (11, "nonfinite-batch", None)]


def test_the_share_is_of_the_time_of_the_run(monkeypatch):
    """10 s of diagnoses fit into 5 % of 200 s, not of 199 s."""
    now = [0.0]
    monkeypatch.setattr("nanproof.explain._known.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(knowing, "ALWAYS", 0)
    known = Known(Policy(diagnose_share=0.05))
    with pytest.raises(ZeroDivisionError), known.timed():  # one that fails has cost its time too
        now[0] = 10.0
        raise ZeroDivisionError
    now[0] = 199.0
    assert not known.affordable
    now[0] = 200.0
    assert known.affordable


# -- fingerprints --------------------------------------------------------------------------------------------------------------

PLAIN = {"step": 3, "kind": "nonfinite-loss", "action": "skipped", "loss": NAN, "culprits": (("a", NAN), ("b", NAN))}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "nonfinite-gradient"},
        {"rank": 1},
        {"loss": INF},
        {"loss": -INF},
        {"loss": 1.0},
        {"loss": None},
        {"culprits": (("a", NAN),)},
        {"culprits": ()},
        {"terms": (("kl", NAN), ("mse", 1.0))},
    ],
    ids=str,
)
def test_what_makes_two_incidents_differ(change):
    assert fingerprint(Incident(**PLAIN)) != fingerprint(Incident(**(PLAIN | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"step": 99},
        {"action": "halted"},
        {"grad_norm": 1.0},
        {"culprits": (("a", INF), ("b", NAN))},
        {"message": "in other words"},
        {"terms": (("mse", 1.0),)},
        {"cap": "max_skip_rate", "cap_count": 3},
    ],
    ids=str,
)
def test_what_does_not(change):
    assert fingerprint(Incident(**PLAIN)) == fingerprint(Incident(**(PLAIN | change)))


def test_of_what_is_finite_only_the_first_culprit_counts():
    """The order of the others by size is chance."""
    spike = {"step": 3, "kind": "spike", "action": "clipped", "loss": 9.0}
    one, other, third = (
        fingerprint(Incident(**spike, culprits=tuple((name, 1.0) for name in names))) for names in ("abc", "acb", "bac")
    )
    assert one == other != third


def test_bad_data_is_named():
    data = BadData.of([{"x": torch.ones(2), "y": torch.tensor([1.0, INF])}, [torch.tensor([NAN])]])
    assert len(data.names) == 2 and data.samples == (0, 1)
    harmless = [torch.ones(2), torch.tensor([1]), torch.empty(0), torch.eye(2).to_sparse() * NAN, "text"]
    assert BadData.of([harmless]) == BadData()


def test_what_was_learned():
    """By fingerprint and origin; what names nothing is not repeated, and uses nothing up."""
    known, like = Known(Policy()), ("a",)
    named, unknown = Diagnosis(cause="log-of-zero", confidence=1.0), Diagnosis(cause="unknown", confidence=0.0)

    def diagnosed(step, found, origin="", **how):
        incident = Incident(step=step, kind="nonfinite-loss", action="skipped")
        made = known.diagnose(incident, like, lambda: (found, origin), origin=lambda: origin, **how)
        return made.diagnosis, made.same_as

    assert [diagnosed(step, found)[0] for step, found in enumerate([unknown, unknown, None])] == [unknown, None, None]
    assert known.like(like) == {}
    assert [diagnosed(step, named, origin) for step, origin in [(4, "head"), (5, "head"), (6, "tail")]] == [
        (named, None),
        (None, 4),
        (named, None),
    ]
    assert known.like(like) == {"head": 4, "tail": 6} and known.like(("b",)) == {}
    assert diagnosed(7, unknown, "elsewhere") == (unknown, None)  # news again, after one that was named
    assert diagnosed(8, named, "head", every=True) == (named, 4)
