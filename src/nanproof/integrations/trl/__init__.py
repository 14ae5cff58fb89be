"""TRL. Its trainers are transformers' Trainers; this adds what GRPOTrainer needs.

- `_grpo` protects its loop; `_sampling` guards its generation; `_masked` reports what masked tokens would have done.
"""
