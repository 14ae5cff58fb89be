"""The data of units-sft.

- `units` defines the units and their exact factors; `questions` makes questions and answers about them.
- `samples` turns a question into tokens with a masked prompt.
"""
