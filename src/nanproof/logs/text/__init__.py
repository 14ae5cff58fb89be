"""Plain text logs: whatever a training loop, a progress bar or a launcher printed.

- `_text` yields points and notes; `_layouts` makes lines of one shape fast.
- `_columns` reads tables, `_records` blocks with one value a line, `_forms` lines whose numbers have no names.
- `_names` knows what other programs call a loss or a learning rate; `_values` how they write a number.
- `_places` finds the step of a line. `_notes` recognises skipped steps, warnings and exceptions.
- `_programs` tells from signs which framework wrote a log.
"""
