"""The cases: trainings that fail in a known way, each with a healthy twin. Tests and benchmarks share them.

- `registry` is the list; the nine files `*_cases` fill it, one family each.
- `plain` runs a case in a plain loop, `guarded` under the guard; `healing` judges whether a run ends healthy.
- `reported/`: failures from public issues, written and judged by somebody who had not seen the code.
- `healthy`: trainings that must stay quiet, `architectures` among them.
- `faults`: random faults in random places, with an independent oracle.
- `forecast/`: runs that fail slowly. `kills/`: a training that is killed, and whose checkpoints are damaged.
- `llama` is the model of the benchmarks; `many_tensors` has thousands of small parameters, and faults.
- `two_ranks` runs functions on two ranks of this machine.

`python -m zoo.faults`, `zoo.healing`, `zoo.healthy`, `zoo.kills` and `zoo.reported` run whole campaigns.
"""
