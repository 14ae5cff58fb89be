"""Compare several runs of one experiment: the setting of each arm, how it ended, what was measured, and which claims hold.

- `comparison` defines the data, with `write` and `read`.
- `text` renders it as a terminal table and as Markdown; `page` as one HTML file, with the charts from `curves`.

Nothing here imports torch. The HTML page opens from disk, fetches nothing, and escapes all text.
"""

from __future__ import annotations

from nanproof_recipes.comparison.comparison import Arm, Check, Column, Comparison, read, rich_table, write

__all__ = ["Arm", "Check", "Column", "Comparison", "read", "rich_table", "write"]
