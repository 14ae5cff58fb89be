"""What latent-dlm learns: windows of text, and the latents made from them.

- `corpus` finds the text, by default the shipped docstrings (`docstrings` makes that file); `dataset` cuts windows.
- `latents` turns a window into latents.
"""
