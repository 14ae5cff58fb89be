"""The summary of `nanproof run`: incidents that are alike are told once, and only those."""

from __future__ import annotations

import pytest

from nanproof import Diagnosis, Incident
from nanproof.integrations.script._summary import Guarded

FOUND = Diagnosis(cause="zero-denominator", confidence=0.9, where="loss_fn", fix="Add an epsilon.", verified=True)


def incident(step, action="skipped", **more):
    return Incident(step=step, kind="nonfinite-loss", action=action, message="the loss is nan", **more)


def told(*incidents):
    """The lines about incidents."""
    guarded = Guarded(
        "AdamW", "", "host", "verdicts read on the host", True, 60, len(incidents), 0, incidents, (), None, 0.0, 0.0, 0.0
    )
    return guarded.lines()[1:]


def test_those_like_an_earlier_one_are_told_with_it():
    first = incident(39, diagnosis=FOUND, bundle="run/incidents/step-000039-nonfinite-loss")
    later = [incident(step, same_as=39) for step in (41, 42, 43, 50)]
    halted = incident(51, "halted", same_as=39, cap="max_consecutive_skips", cap_count=11)
    cap = "11 steps in a row were refused (max_consecutive_skips)"
    assert told(first, *later, halted) == [
        "  step 39: nonfinite-loss, skipped. the loss is nan",
        "    cause: zero-denominator (fix verified on the replay), in loss_fn. Add an epsilon.",
        "    as at step 39, 4 more times: steps 41-43, 50",
        "    bundle: run/incidents/step-000039-nonfinite-loss",
        f"  step 51: nonfinite-loss, halted. the loss is nan; {cap}; as at step 39",
    ]


def test_those_that_were_not_diagnosed_are_counted_and_not_called_like_another():
    lines = told(incident(39, diagnosis=FOUND), incident(41), incident(42), incident(43, same_as=39))
    assert lines[2:] == [
        "    as at step 39, once more: step 43",
        "  step 41: nonfinite-loss, skipped. the loss is nan",
        "    1 more not diagnosed: step 42",
    ]
    assert told(incident(41)) == ["  step 41: nonfinite-loss, skipped. the loss is nan"]


def test_those_that_were_diagnosed_alike_are_one_group():
    """As with `--diagnose always`."""
    both = incident(1, diagnosis=FOUND), incident(2, diagnosis=FOUND)
    other = incident(3, diagnosis=Diagnosis(cause="zero-denominator", confidence=0.9, where="elsewhere"))
    lines = told(*both, other)
    assert lines[2:4] == ["    as at step 1, once more: step 2", "  step 3: nonfinite-loss, skipped. the loss is nan"]


def test_a_halt_is_told_in_the_first_line():
    guarded = Guarded(
        "AdamW",
        "Net",
        "host",
        "verdicts read on the host",
        True,
        5,
        2,
        0,
        (incident(3), incident(4, "halted")),
        (),
        None,
        0,
        0,
        0,
    )
    assert guarded.lines()[0] == "AdamW of Net: 5 steps, 2 refused, halted at step 4 (verdicts read on the host)"
    assert guarded.to_json()["halted"] == 4


@pytest.mark.parametrize("action", ["healed", "salvaged", "rewound"])
def test_what_was_done_is_told(action):
    fields = {
        "healed": {"remedy": "a divisor of 0 is taken as 1"},
        "salvaged": {"left_out": (3,)},
        "rewound": {"restored_step": 30, "restored_from": "memory", "attempt": 1},
    }
    done = {
        "healed": "healed: a divisor of 0 is taken as 1",
        "salvaged": "took the step without sample 3 of the batch",
        "rewound": "went back to step 30 from memory (attempt 1)",
    }
    assert told(incident(4, action, **fields[action])) == [f"  step 4: nonfinite-loss, {action}. the loss is nan; {done[action]}"]


def test_one_whose_first_is_not_in_the_list_says_what_it_is_like():
    """A run that was resumed: the first was in an earlier process."""
    lines = told(incident(60, same_as=39), incident(61, same_as=39), incident(70, same_as=12))
    assert lines == [
        "  step 60: nonfinite-loss, skipped. the loss is nan; as at step 39",
        "    as at step 39, once more: step 61",
        "  step 70: nonfinite-loss, skipped. the loss is nan; as at step 12",
    ]
