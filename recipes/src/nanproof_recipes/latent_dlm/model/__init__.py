"""The network of latent-dlm and its two diffusion processes.

- `model` is the MMDiT, a transformer with a text stream and a latent stream.
- `diffusion` masks text, adds noise to latents, and computes the loss; `sampling` draws from a trained model.
"""
