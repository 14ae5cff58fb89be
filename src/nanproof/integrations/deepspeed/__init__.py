"""DeepSpeed: an engine's steps are judged before they are taken, at any ZeRO stage.

- `_engine` protects a DeepSpeed engine; `_zero` knows where each ZeRO optimizer keeps its gradients.
"""
