"""Numerics for your own code: losses, sampling and precision that stay finite where the usual formulas do not.

- `losses`: cross entropy and mean square over what counts. `rl`: pieces of a policy-gradient loss.
- `generation`: sampling that survives a broken model, and reports it. `precision`: which dtype to train in, and why.
- Private parts of `generation`: `_logit_rows` and `_temperature`.

They change no value that counts: a non-finite number at a position that takes part in the loss stays non-finite.
"""
