"""The network of latent-dlm, its two diffusion processes, and how samples are drawn from them."""
