"""Good states of a run, in memory and on disk.

- `_state` names everything a run consists of; `_snapshots` copies it in memory.
- `_plainly` turns what odd optimizers keep into plain values, and back.
- `_store` keeps checkpoints on disk, each complete or absent; `_saver` has them written in the background.
- `_writer` starts the process that writes them and tells it what to do, through `_pipe`; `_apart` is that process; `_shared` is
  the memory that both have.
- `_sealed` marks a checkpoint as good and checks that it is still what was written.
"""
