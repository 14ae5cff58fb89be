"""units-sft: a small language model fine-tuned to convert units, whose training ended in NaN with an accuracy of 0.

- `arms` defines the arms; `workshop` trains and tests them, each in its own folder; `results` stores what was measured.
- `models` loads a language model; `training` fine-tunes it with LoRA; `patches` holds the published fixes, as written.
- `asking` generates replies; `scoring` decides which are right; `rejection` trains on the model's own right answers.
- `comparing` runs every arm and checks the claims. `data/` makes the questions.
"""
