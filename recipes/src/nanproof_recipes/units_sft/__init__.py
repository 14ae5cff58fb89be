"""units-sft: a small language model learns to convert units, or learns nothing, depending on how it is trained."""
