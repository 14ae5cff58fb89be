"""Three real failures, each reproduced four ways: as reported, with the published patch, under nanproof, and fixed.

- `latent_dlm`, `units_sft`, `vlm_grpo`: the systems. `commands`: what they add to `nanproof recipe`.
- `comparison`: arms side by side, as JSON, Markdown and one HTML page.

This is an application on top of the library, released with it. Only the commands and `nanproof_recipes.comparison` are
public. `library` lists what it uses of nanproof besides the public names.
"""

__version__ = "0.1.0"
