"""Advice that fits the program: boosting has no batches, TensorFlow no guard of ours, and only a Trainer can be protected."""

from __future__ import annotations

from dataclasses import replace

from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import PROTECT, RUN, SLOWER, UNFILTER, Finding, Likely

NUMERIC = ("nan", "inf", "eval-nan", "divergence", "plateau", "overfit", "spike")
CHECK_NUMERICS = "tf.debugging.enable_check_numerics()    # names the operation that makes the first NaN or Inf"
FOREIGN = {
    "tensorflow": (CHECK_NUMERICS, "tf.keras.callbacks.TerminateOnNaN()    # stops at the first NaN"),
    "jax": ("jax.config.update('jax_debug_nans', True)    # raises at the operation that makes the first NaN",),
    "paddle": ("FLAGS_check_nan_inf=1 python train.py    # names the operator that makes the first NaN or Inf",),
    "chainer": ("chainer.set_debug(True)    # raises where the first NaN appears",),
    "caffe": ("debug_info: true    # in the solver's file: prints the mean of each blob and gradient",),
    "mxnet": (),
    "mlx": (),
    "darknet": (),
    "lua": (),
}
"""Frameworks that are not PyTorch, with their own means of finding the first NaN."""
BOOSTING = (
    Likely("The learning rate (eta, shrinkage) is too high for this objective", "learning-rate-too-high"),
    Likely("Labels or weights that the objective cannot handle, such as 0 under a logarithm"),
    Likely("A custom objective or metric divides by 0, or has the wrong sign"),
)
OVERFITTED = (Likely("More rounds than the data supports, or trees with too many leaves"),)


def fitted(finding: Finding, segment: Segment) -> Finding:
    """Return a finding with the advice that the program can follow."""
    shown = segment.settings
    if shown.get("rounds"):
        return _for_boosting(finding) if finding.kind in NUMERIC else finding
    if shown.get("transformers"):
        return replace(finding, commands=tuple(dict.fromkeys(PROTECT if c == RUN else c for c in finding.commands)))
    foreign = next((name for name in FOREIGN if shown.get(name)), None)
    if foreign is not None and not shown.get("torch"):
        kept = tuple(command for command in finding.commands if command == SLOWER)
        return replace(finding, commands=kept + FOREIGN[foreign])
    commands = finding.commands if UNFILTER in finding.commands else (RUN if c == PROTECT else c for c in finding.commands)
    return replace(finding, commands=tuple(dict.fromkeys(commands)))


def _for_boosting(finding: Finding) -> Finding:
    """Return a finding with the advice for boosting, which has no batches, weights or checkpoints."""
    if finding.kind == "overfit":
        command = "early stopping on the evaluation metric, fewer leaves, more regularisation    # the first things to try"
        return replace(finding, causes=OVERFITTED, commands=(command,))
    command = "a tenth of the learning rate, and the range of labels and sample weights    # the first things to look at"
    return replace(finding, causes=BOOSTING, commands=(command,))
