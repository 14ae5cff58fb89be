"""Three real failures, each reproduced four ways: as reported, with the published patch, under nanproof, and fixed.

- `units_sft`, `latent_dlm` and `vlm_grpo` are the three training systems; `commands` adds them to `nanproof recipe`.
- `comparison` shows several runs side by side, as JSON, Markdown and one HTML page.
- `arms`, `results` and `comparing` hold what the three share about settings, results and their comparison.
- `folders` keeps one arm per folder; `machine` chooses the device and makes runs reproducible; `progress` draws bars.
- `weights` downloads and checks the model file that `units_sft` trains.
- `library` is the only module that imports private modules of nanproof.

This is an application on top of the library, released with it. Public are the commands,
`nanproof_recipes.comparison`, and the few classes that `docs/recipes` shows.
"""

__version__ = "0.1.0"
