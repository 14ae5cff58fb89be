"""A training that is killed at every possible moment, and whose checkpoints are damaged.

`worker` is one life of it; `campaign` kills it; `damage` spoils its files and its disk; `ranks` kills one rank of two.
"""
