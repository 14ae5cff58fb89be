"""What becomes of a step, as a table: every rule, the order in which the rules are tried, and what holds whatever is known."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import Policy
from nanproof.core._decide import Accept, Decision, GoBack, Halt, RunAgain, Salvage, Situation, Skip, Trouble, decide

AT, SINCE = 40, 37
FIX, ROWS, CAP = "a divisor of 0 is taken as 1", (2, 5), "max_consecutive_skips"
BACK = {"may_go_back": True}
FIXED = {"remedy": FIX}
ROWS_KNOWN = {"samples": ROWS}
CAPPED = {"cap": CAP}
BROKEN = {"state_broken": True}
HALTS = {"at_cap": "halt"}
RECORDS = {"on_divergence": "record"}
HEALS = {"heal": True}

BEFORE_IT = GoBack(AT - 1, AT - 1, AT, blame_data=False)
"""A broken state: what broke it came before the step, and the data is not to blame."""
ITS_DATA = GoBack(SINCE, SINCE, AT, blame_data=True)
"""The cap: back to before the first refusal, without the data."""


def situation(trouble, *known):
    """What is known of trouble that began at `SINCE` and lasts until `AT`."""
    facts = {}
    for part in known:
        facts |= part
    return Situation(trouble=trouble, step=AT, since=SINCE, **facts)


ROWS_OF_THE_TABLE = [
    # trouble, what is known, the policy where it is not the default, the decision
    # -- a refused step: what repairs the run, then what saves the step, then the cap
    ("step", [], {}, Skip()),
    ("step", [BACK], {}, Skip()),
    ("step", [BACK], HALTS, Skip()),
    ("step", [FIXED], {}, RunAgain(FIX)),
    ("step", [FIXED, ROWS_KNOWN], {}, RunAgain(FIX)),
    ("step", [FIXED, CAPPED], {}, RunAgain(FIX)),
    ("step", [FIXED, ROWS_KNOWN, CAPPED, BACK], {}, RunAgain(FIX)),
    ("step", [FIXED, CAPPED, BACK], HALTS, RunAgain(FIX)),
    ("step", [ROWS_KNOWN], {}, Salvage(ROWS)),
    ("step", [{"samples": ()}], {}, Salvage(())),
    ("step", [ROWS_KNOWN, CAPPED], {}, Salvage(ROWS)),
    ("step", [ROWS_KNOWN, CAPPED, BACK], {}, Salvage(ROWS)),
    ("step", [ROWS_KNOWN, CAPPED, BACK], HALTS, Salvage(ROWS)),
    ("step", [CAPPED, BACK], {}, ITS_DATA),
    ("step", [CAPPED, BACK], HEALS, ITS_DATA),
    ("step", [CAPPED, BACK], RECORDS, ITS_DATA),
    ("step", [CAPPED], {}, Halt(CAP)),
    ("step", [CAPPED, BACK], HALTS, Halt(CAP)),
    ("step", [{"cap": "max_skip_rate"}], {}, Halt("max_skip_rate")),
    # -- a refused step over a state that was broken before it: back at once, cap or not; nothing can be saved of the step
    ("step", [BROKEN, BACK], {}, BEFORE_IT),
    ("step", [BROKEN, BACK, FIXED], {}, BEFORE_IT),
    ("step", [BROKEN, BACK, FIXED, ROWS_KNOWN, CAPPED], {}, BEFORE_IT),
    ("step", [BROKEN, BACK, CAPPED], {}, BEFORE_IT),
    ("step", [BROKEN, FIXED], {}, RunAgain(FIX)),
    ("step", [BROKEN, BACK, FIXED], HALTS, RunAgain(FIX)),
    ("step", [BROKEN, FIXED, CAPPED], {}, RunAgain(FIX)),
    ("step", [BROKEN, ROWS_KNOWN], {}, Skip()),
    ("step", [BROKEN, BACK, ROWS_KNOWN], HALTS, Skip()),
    ("step", [BROKEN], {}, Skip()),
    ("step", [BROKEN, CAPPED], {}, Halt(CAP)),
    ("step", [BROKEN, CAPPED, ROWS_KNOWN], {}, Halt(CAP)),
    ("step", [BROKEN, BACK, CAPPED], HALTS, Halt(CAP)),
    # -- a loss that grows without end: `at_cap` has no say in it
    ("divergence", [BACK], {}, ITS_DATA),
    ("divergence", [BACK], HALTS, ITS_DATA),
    ("divergence", [BACK], HEALS, replace(ITS_DATA, blame_data=False)),
    ("divergence", [BACK, FIXED], HEALS, replace(ITS_DATA, blame_data=False)),
    ("divergence", [], {}, Accept()),
    ("divergence", [FIXED], HEALS, RunAgain(FIX)),
    ("divergence", [BACK], RECORDS, Accept()),
    ("divergence", [BACK, FIXED], RECORDS | HEALS, RunAgain(FIX)),
    # -- a copy of the state that is not finite
    ("state", [BACK], {}, GoBack(AT, 0, AT, blame_data=False)),
    ("state", [BACK, {"has_good": True}], {}, GoBack(AT, 0, AT, blame_data=False)),
    ("state", [], {}, Accept()),
    ("state", [{"has_good": True}], {}, Accept()),
    ("state", [BACK, {"has_good": True}], HALTS, Halt("broken-state")),
    ("state", [{"has_good": True}], HALTS, Halt("broken-state")),
    ("state", [BACK], HALTS, Accept()),  # it was never good: the run has to find that out by itself
    # -- rows that could not be sampled
    ("generation", [BACK], {}, Accept()),
    ("generation", [CAPPED, BACK], {}, GoBack(AT, AT, AT, blame_data=False)),
    ("generation", [CAPPED], {}, Halt(CAP)),
    ("generation", [CAPPED, BACK], HALTS, Halt(CAP)),
    ("generation", [{"cap": "no-healthy-row"}], {}, Halt("no-healthy-row")),
    # -- what was accepted, or is the user's to deal with: only a fix changes anything
    *[(trouble, [BACK], {}, Accept()) for trouble in ("none", "finding", "signal", "exception")],
    *[(trouble, [BACK], HALTS, Accept()) for trouble in ("none", "finding", "signal", "exception")],
    *[(trouble, [BACK, FIXED], HEALS, RunAgain(FIX)) for trouble in ("finding", "signal", "exception")],
    # -- the run went back because of this as often as it may: nothing else is tried
    *[(trouble, [BACK, FIXED, {"exhausted": True}], HEALS, Halt("max_rollbacks")) for trouble in get_args(Trouble)],
    ("step", [ROWS_KNOWN, {"exhausted": True}], {}, Halt("max_rollbacks")),
    ("step", [CAPPED, {"exhausted": True}], HALTS, Halt("max_rollbacks")),
]


def named(row):
    trouble, known, policy, _ = row
    facts = [f"{name}={value}" for part in known for name, value in part.items() if name != "remedy"]
    facts += ["fix"] * any("remedy" in part for part in known)
    return f"{trouble}: {', '.join(facts) or 'nothing'}; {', '.join(map(str, policy.values())) or 'default'}"


@pytest.mark.parametrize("row", ROWS_OF_THE_TABLE, ids=named)
def test_the_table(row):
    trouble, known, policy, expected = row
    assert decide(situation(trouble, *known), Policy(**policy)) == expected


def test_the_table_has_every_trouble_and_every_decision():
    assert {row[0] for row in ROWS_OF_THE_TABLE} == set(get_args(Trouble))
    assert {type(row[3]) for row in ROWS_OF_THE_TABLE} == set(get_args(Decision))
    assert len(set(map(named, ROWS_OF_THE_TABLE))) == len(ROWS_OF_THE_TABLE)


def struck(s, decision):
    """The situation after a decision could not be carried out, as the engine strikes its means."""
    match decision:
        case RunAgain():
            return replace(s, remedy=None)
        case Salvage():
            return replace(s, samples=None)
        case GoBack():
            return replace(s, may_go_back=False)
    return None


@pytest.mark.parametrize(
    ("known", "policy", "tried"),
    [
        ([BACK, FIXED, ROWS_KNOWN, CAPPED], {}, [RunAgain, Salvage, GoBack, Halt]),
        ([BACK, FIXED, ROWS_KNOWN], {}, [RunAgain, Salvage, Skip]),
        ([BACK, FIXED, ROWS_KNOWN, CAPPED], HALTS, [RunAgain, Salvage, Halt]),
        ([BROKEN, BACK, FIXED, ROWS_KNOWN, CAPPED], {}, [GoBack, RunAgain, Halt]),
        ([BROKEN, BACK, FIXED, ROWS_KNOWN], {}, [GoBack, RunAgain, Skip]),
    ],
)
def test_the_order_in_which_things_are_tried(known, policy, tried):
    s, found = situation("step", *known), []
    while s is not None:
        decision = decide(s, Policy(**policy))
        found.append(type(decision))
        s = struck(s, decision)
    assert found == tried


# -- whatever is known ---------------------------------------------------------------------------------------------------------

steps = st.integers(0, 10**6)
situations = st.builds(
    Situation,
    trouble=st.sampled_from(get_args(Trouble)),
    step=steps,
    since=steps,
    state_broken=st.booleans(),
    remedy=st.none() | st.just(FIX),
    samples=st.none() | st.lists(st.integers(0, 64), max_size=3).map(tuple),
    cap=st.sampled_from([None, "max_consecutive_skips", "max_skip_rate", "no-healthy-row"]),
    may_go_back=st.booleans(),
    has_good=st.booleans(),
    exhausted=st.booleans(),
)
policies = st.builds(
    Policy,
    at_cap=st.sampled_from(["rollback", "halt"]),
    on_divergence=st.sampled_from(["rollback", "record"]),
    heal=st.booleans(),
)


@settings(max_examples=1500)
@given(situations, policies)
def test_what_holds_whatever_is_known(s, policy):
    before = asdict(s), asdict(policy)
    decision = decide(s, policy)
    assert isinstance(decision, get_args(Decision))  # total
    assert decide(s, policy) == decision and (asdict(s), asdict(policy)) == before  # pure
    assert type(decision).__dataclass_params__.frozen

    refused, halts = s.trouble == "step", isinstance(decision, Halt)
    if s.exhausted:
        assert decision == Halt("max_rollbacks")
    if halts:  # it has a reason that was given to it
        assert decision.cap in {"max_rollbacks" if s.exhausted else s.cap, s.cap, "broken-state"} - {None}
        assert s.exhausted or s.cap is not None or (s.trouble == "state" and s.has_good and policy.at_cap == "halt")
    if isinstance(decision, Skip):
        assert refused and s.cap is None and s.remedy is None
        assert s.samples is None or s.state_broken
    if isinstance(decision, Accept):
        assert not refused and s.remedy is None
    if isinstance(decision, Salvage):
        assert refused and not s.state_broken and s.samples is not None and decision.samples == s.samples
    if isinstance(decision, RunAgain):
        assert s.remedy is not None and decision.remedy == s.remedy
    if isinstance(decision, GoBack):
        assert s.may_go_back and not s.exhausted
        assert (policy.on_divergence if s.trouble == "divergence" else policy.at_cap) == "rollback"
        assert s.trouble in ("step", "divergence", "state", "generation")
        assert s.cap is not None or s.state_broken or s.trouble in ("divergence", "state")
        assert decision.until == s.step
        assert not (decision.blame_data and ((s.state_broken and refused) or s.trouble in ("state", "generation")))
        assert not (decision.blame_data and s.trouble == "divergence" and policy.heal)
    if refused and s.cap is not None:
        assert not isinstance(decision, (Skip, Accept))


@settings(max_examples=500)
@given(situations, policies)
def test_it_comes_to_an_end(s, policy):
    """Where nothing works, each means is tried once, and what is left can always be carried out."""
    found = []
    while s is not None:
        found.append(type(decide(s, policy)))
        s = struck(s, decide(s, policy))
    assert len(set(found)) == len(found) and found[-1] in (Accept, Skip, Halt)
