"""latent-dlm: a diffusion language model that learns text by unmasking and latents by DDPM, and whose loss turned NaN.

- `config` reads and checks the settings; the YAML files that ship are in `configs/`.
- `arms` defines the four arms; `running` trains them, each in its own folder; `results` stores what was measured.
- `comparing` runs every arm and checks the claims; `showing` draws samples to look at.
- `data/` holds text and latents, `model/` the network and its diffusion, `train/` the training loops.
"""
