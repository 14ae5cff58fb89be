"""What makes the documents: tables from measured results, pages from docstrings, pictures from real runs.

- `tables` fills the marked tables and writes the pages that `cause_pages`, `reference_api` and `reference_cli` make;
  `snippets` finds the code that pages quote. `generation_tables`, `latent_tables` and `vlm_tables` are parts of it.
- `results` reads and writes the figures; `said` and `zoo_table` record what nanproof and other tools say about every case.
- `optimizers` surveys the optimizers in `optimizer_list` with the checks in `optimizer_checks`, and writes docs/optimizers.md.
- `pictures` and `watched` make the pictures; `mkdocs_hook` builds the site.

`python -m tools.tables` writes everything but the pictures and docs/optimizers.md: those come from `make pictures` and
`make optimizers`.
"""
