"""The incidents of a run in groups, which report, watch and doctor show alike."""

from __future__ import annotations

from nanproof.report._findings import recorded
from nanproof.report.folder._run import Run
from nanproof.report.folder._troubles import troubles
from report import made


def test_incidents_of_different_optimizers_are_apart(tmp_path):
    """`same_as` names a step of the same optimizer."""
    first = [made.incident_line(3, diagnosis=made.diagnosis()), made.incident_line(5, same_as=3)]
    second = [made.incident_line(3, diagnosis=made.diagnosis()), made.incident_line(9, same_as=3)]
    made.write_gan(tmp_path, first, second)
    found = troubles(Run(tmp_path).read())
    assert [(t.part.optimizer, [i.step for i in t.incidents], t.numbers) for t in found] == [
        ("SGD of Critic", [3, 5], (1, 2)),
        ("Adam of Generator", [3, 9], (3, 4)),
    ]
    assert {t.cause for t in found} == {"zero-denominator"} and found[1].origin_number == 3


def test_the_bundle_is_in_the_folder_of_its_optimizer(tmp_path):
    line = made.incident_line(3, bundle="elsewhere/incidents/step-000003-nonfinite-loss")
    made.write_gan(tmp_path, [line], [line])
    bundle = tmp_path / "optimizer-2" / "incidents" / "step-000003-nonfinite-loss"
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    assert [trouble.bundle for trouble in troubles(Run(tmp_path).read())] == [None, bundle]


def test_a_cause_that_is_not_known_is_shown_as_what_happened(tmp_path):
    made.write_gan(tmp_path, [made.incident_line(3, diagnosis=made.diagnosis(cause="unknown"))], [])
    (trouble,) = troubles(Run(tmp_path).read())
    assert trouble.cause == "nonfinite-loss"


def test_a_spike_is_a_note(tmp_path):
    made.write_gan(tmp_path, [made.incident_line(3, kind="spike", action="recorded")], [])
    (found,) = recorded(Run(tmp_path).read())
    assert found.severity == "note"
