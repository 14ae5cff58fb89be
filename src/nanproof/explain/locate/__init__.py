"""Find where a bad value comes from: module, operation, source line, sample and token.

- `_locate` walks back from the bad loss or gradient through bad producers.
- `_calls` follows module calls; `_trace` follows the operations inside a guilty module.
- `_indices`, `_matrices` and `_uninitialised` look at lookups by id, at linear algebra, and at memory nobody wrote.
- `_writes` finds the operation that writes into the batch itself.
- `_logit_origin` does the same for a bad row of logits during generation.
"""
