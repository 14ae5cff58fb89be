"""What a run writes into its folder while it trains. The training thread hands records over; one thread of its own writes them.

- `_writer` takes records from a queue, makes lines of them and writes them in batches.
- `_lines` is a file of lines that outlives a full disk; `_steps` is `steps.jsonl`, in parts of bounded size.
- `_norms` is `norms.bin`, thinned to a budget.
"""
