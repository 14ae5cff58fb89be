"""A training that is killed at every possible moment, and whose checkpoints are damaged.

`worker` is one life of it; `campaign` kills it; `damage` spoils its files and its disk; `ranks` kills one rank of two.
`trainer` kills a Trainer of transformers; `trainer_worker` is one life of that.
"""
