"""The data of latent-dlm: windows of text, and latents computed from them.

- `corpus` reads text as bytes and cuts it into windows; `docstrings` makes the text that ships.
- `latents` computes the latents of a window; `dataset` pairs both for a data loader.
"""
