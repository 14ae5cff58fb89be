"""83 trainings made from public issues by somebody who had not seen the code, with expectations fixed before any run.

`index.json` says what went wrong in each, at which step and sample, and which threads report it; `cases/` holds one file each,
as people write them: `build(fixed)` returns a dictionary of model, optimizer, loss_fn, batches and settings, and `fixed=True`
removes the fault and nothing else. `python -m zoo.reported` scores the guard on all of them (three minutes on one core).
"""
