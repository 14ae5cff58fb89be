"""The recipes at full size, on a GPU: `python -m benchmarks.recipes.latent_dlm`."""
