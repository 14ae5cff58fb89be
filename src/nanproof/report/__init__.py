"""A run's folder, shown: as one HTML file, or as text for an issue. No torch.

- `_html` writes the page, `_markdown` the text; `_out` puts a file in place, completely or not at all.
- `_findings` says what a run recorded about itself, for `nanproof doctor`.
- `folder/` reads a run's folder; `page/` prepares what the page shows.
"""
