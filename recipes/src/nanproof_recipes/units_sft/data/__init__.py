"""The data of units-sft: `units` and their factors, `questions` about them, `samples` as tokens with masked prompts."""
