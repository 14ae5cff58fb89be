"""Logs that `nanproof doctor` is scored on. Their expectations were fixed before it was run on them.

- `excerpts/` and `index.json`: excerpts in the forms that people paste into public threads, written without sight of the code.
- `simulated`: logs of simulated runs, healthy and failing, in 15 formats.

`python -m zoo.logs --save` scores both.
"""
