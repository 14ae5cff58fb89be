"""Probes: perturb one batch, compare, and report what a training loop gets wrong without a NaN.

Each probe runs the step again with one thing changed, under the same random numbers, and looks at
what moved. Model, optimizer and random numbers are restored.

- `_contract` is what a probe is and returns; `_run` runs all of them in order.
- `_probing` is what a probe works with: forward passes, perturbed or not.
- `_recorder` notes what a forward pass does: embedding lookups, outputs, what the loss compares.
- `_tokens` reads a batch of tokens: next-token targets, packed documents, padding.
- `_sequence` probes the order of tokens: `causal-leak`, `packed-documents-mix`,
  `padding-changes-loss`.
- `_features` probes the padding of sequences of numbers: `padding-changes-loss`.
- `_samples` probes single samples: `samples-mixed`, `input-ignored`.
- `_inputs` probes whole input tensors: `input-ignored`.
- `_modes` compares training with evaluation: `train-eval-differ`, `random-in-eval`.
- `_accumulation` compares micro-batches with one large batch: `accumulation-not-averaged`.
- `_resume` saves and loads copies: `state-not-saved`.
"""
