"""`nanproof watch`: a live run, in the terminal, line by line, or in a browser. No torch.

- `_runs` reads the runs and hands out frozen views of them; `_words` says what is shown of a run.
- Terminal: `_app`, `_widgets`, `_table`, `_charts`, and `_plot`, which draws curves in characters.
- Elsewhere: `_plain` prints lines or JSON; `_serve` and `_web` serve pages.
"""
