"""`nanproof doctor`: read the logs of any framework, and say what went wrong, when and why. No torch, no framework.

- `_points` is what a reader yields; `_story` collects it in bounded memory; `_curve` is one metric of it.
- `read/` opens files and knows the formats; `text/` reads plain text; `judge/` finds what is wrong.
"""
