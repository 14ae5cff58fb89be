"""What a story shows, worst first. Silence about a healthy run counts as much as finding what is wrong.

- `_findings` asks each judge; `_finding` is one answer, with causes and next steps.
- `_nonfinite`, `_parts` (of a loss), `_hidden` (a NaN shown as 0.0), `_scaling`, `_schedule` (skipped steps), `_levels`
  (absurd losses), `_shape`, `_standstill` and `_crashes` each know one kind of trouble. `_numbers` has robust statistics.
"""
