"""What the report says of a run, as plain data: the page embeds it, a live page fetches it.

- `_contents` is all of it; `_cards` the incidents; `_grids` the heat maps; `_terms` the loss terms.
- `_catalogue` reads what happens, by cause, from the catalogue's docstrings.
"""
