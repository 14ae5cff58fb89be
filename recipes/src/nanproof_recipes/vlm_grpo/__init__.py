"""Reinforcement learning of a vision-language model that describes a region of an image, and died while it sampled."""
