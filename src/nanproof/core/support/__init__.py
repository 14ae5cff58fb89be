"""Small parts that every room uses, none of which knows the engine.

- `_ranks`: who takes part in a distributed run, and what the ranks exchange.
- `_context`: random state, schedule and mode of a step, saved and restored.
- `_tree`: the tensors in a batch of any shape. `_inner`: the plain ones that a quantised tensor is made of.
- `_members`: the optimizers that one step is made of, with their groups, states and settings.
- `_casting`: change a weight's dtype in place.
- `_hooks`: hooks that belong to one model in one process.
- `_signals`: Ctrl-C held back while a step is taken or undone; requests to stop.
- `_files`: atomic writes and locks. `_index`: where the optimizers of a run keep their records.
- `_environment`: versions and device. `_checks`: bad arguments.
"""
