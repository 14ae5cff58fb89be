"""Numerics that other code can use as they are: pieces of losses that stay finite where the usual way of writing them does not.

They change no value that counts: a non-finite number at a position that takes part in the loss stays non-finite.
"""
