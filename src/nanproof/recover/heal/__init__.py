"""Verified fixes, applied to a running training and undone if they do not hold.

- `_healer` applies a fix and watches it.
- `_remedies` holds the fixes: each can be applied, undone, and written down as plain data.
"""
