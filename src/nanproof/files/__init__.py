"""Files of a run that are not plain lines, for whoever writes or reads them. No torch.

- `_blocks` is the format of `norms.bin`, and the rule by which it is thinned.
- `_parts` finds the earlier parts of `steps.jsonl`.
"""
