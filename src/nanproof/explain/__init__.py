"""From a bad step to a named cause with a verified fix. Runs on failure only.

- `_examiner` serves the engine: it explains incidents and notices silent failures (`_silent`).
- `_diagnose` matches a `_case` against the catalogue, ranks the matches and tries their fixes; `_cause` is what an entry of
  the catalogue has to offer, and `_controls` rejects a fix that would help with another cause as well.
- `_graph` reads the graph of a loss. `_pause` keeps the garbage collector out of a diagnosis.
- `_known` decides which incidents are new; `_start` knows how large the weights were when the run began, `_growth` whether
  the updates blew them up since.
- `replay/` runs a step again; `lines/` makes that possible where the loss is computed in the loop.
- `locate/` finds the operation, sample and token; `causes/` is the catalogue;
  `bundle/` saves a bad step so that it can be replayed anywhere.

Nothing here changes the run: weights, buffers, gradients, optimizer and random state are restored. An exception inside a
diagnosis becomes a sentence in the incident.
"""
