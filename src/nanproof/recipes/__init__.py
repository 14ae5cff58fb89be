"""Whole training systems on top of the library, each in four arms: broken as it was reported, patched as people tried to mend it,
guarded by nanproof, and fixed.
"""
