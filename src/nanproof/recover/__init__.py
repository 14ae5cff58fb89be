"""From a named cause back to a healthy run: reading, checking and writing checkpoints.

A checkpoint may come from anywhere. Nothing here executes what it reads: a file that would need that is refused by name.
"""
