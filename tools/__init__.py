"""What makes the documents: tables from measured results, pages from docstrings, pictures from real runs.

`python -m tools.tables` writes them all but the pictures; `make pictures` makes those.
"""
