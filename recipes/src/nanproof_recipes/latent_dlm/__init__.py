"""latent-dlm: one model learns text by masked diffusion and latents by DDPM, and goes NaN or does not, by how it is trained."""
