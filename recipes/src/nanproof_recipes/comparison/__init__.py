"""Compare several runs of one experiment: what each arm was, how it ended, what was measured, and what that was to show.

- `comparison` is the data, with `write` and `read`; `text` makes tables and Markdown; `page` one HTML file; `curves` its charts.

No torch. The HTML page opens from disk, fetches nothing, and escapes all text.
"""

from __future__ import annotations

from nanproof_recipes.comparison.comparison import Arm, Check, Column, Comparison, read, rich_table, write

__all__ = ["Arm", "Check", "Column", "Comparison", "read", "rich_table", "write"]
