"""The engine: everything that happens to a training step, whoever runs the loop.

- `_engine` runs a step: judge, decide, carry out, tell. `_contracts` says what it expects of the other rooms.
- `_decide` is a pure function from what is known to one decision; `_caps` counts refused steps.
- `_under_way` holds the steps that are not judged yet, and goes back before a bad one.
- `_inquest` and `_evidence` find out what a refused step was.
- `_stopping` knows whether a signal asked the run to stop.
- `_tell`, `_telemetry`, `_counters` turn verdicts into records, incidents, the journal and log lines.
- `journal/` writes a run's files, in a thread of its own.
- `judge/` is the device side of a step; `fast/` makes it cheap. `support/` holds the small parts that every room uses.

On the healthy path nothing here makes the host wait for the device.
"""
