"""Back to a healthy run: good states in memory and on the disk, the data's side of it, salvage, and fixes applied to the run.

A checkpoint may come from anywhere. Nothing here executes what it reads: a file that would need that is refused by name.
"""
