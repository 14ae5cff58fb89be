"""vlm-grpo: a vision-language model trained by GRPO to describe a marked region, which crashed while sampling.

- `arms` defines the arms; `running` trains and tests them, each in its own folder; `results` stores what was measured.
- `models` builds or loads the model; `patches` holds the published fix, as written.
- `comparing` runs every arm, `claims` checks what they show, and `apart` trains several arms at a time.
- `smoke` runs a few steps before a long run; `faults` injects a NaN or an Inf into one of them.
- `data/` draws the scenes, `train/` holds the warm start and the GRPO loops.
"""
