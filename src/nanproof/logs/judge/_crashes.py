"""Errors that ended a run, as its log quotes them."""

from __future__ import annotations

from collections.abc import Iterator

from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, RUN, SCAN, Finding, Likely

CRASHES: dict[str, tuple[str, str, tuple[Likely, ...], tuple[str, ...]]] = {
    "bad-probabilities": (
        "bad-probabilities",
        "torch.multinomial was given NaN or Inf: the logits were not finite before they were sampled from. A softmax does not "
        "overflow by itself, so a weight, an input or a logits processor made them.",
        (
            Likely("An earlier step with a NaN gradient was taken, and the weights are NaN", "nonfinite-batch"),
            Likely("exp of a log-ratio or a KL term overflows, on masked tokens too: Inf times 0 is NaN", "exp-overflow"),
            Likely("Logits over a tiny temperature overflow", "temperature-overflow"),
        ),
        (SCAN, RUN, CHECK),
    ),
    "bad-parameter": (
        "bad-probabilities",
        "A distribution was given a parameter that is NaN or Inf. The network had already produced an output that is not finite.",
        (
            Likely("An earlier step with a NaN gradient was taken, and the weights are NaN", "nonfinite-batch"),
            Likely("An observation or a reward is NaN or Inf", "nonfinite-batch"),
            Likely("The policy's update overflows, such as exp of a log-ratio", "exp-overflow"),
        ),
        (SCAN, RUN, CHECK),
    ),
    "nonpositive-std": (
        "bad-probabilities",
        "A normal distribution was given a standard deviation that is NaN or below 0. In reinforcement learning it is a "
        "parameter of the policy.",
        (
            Likely("The weights have been NaN since an earlier step, and so are their outputs", "nonfinite-batch"),
            Likely("The standard deviation is learned without exp or softplus, and a step took it below 0", "nonpositive-std"),
            Likely("A reward or an observation is NaN or Inf", "nonfinite-batch"),
        ),
        (SCAN, RUN, CHECK),
    ),
    "device-assert": (
        "device-assert",
        "An assertion failed on the device. Most often an index is out of range: a label or a token id beyond the vocabulary.",
        (
            Likely("A label or a token id is not below the number of classes or rows", "ids-out-of-range"),
            Likely("Sampling was given NaN: on a GPU that is an assertion too", "nonfinite-batch"),
        ),
        (CHECK, "CUDA_LAUNCH_BLOCKING=1 python train.py    # the real line of the error"),
    ),
    "unscale-fp16": (
        "unscale-fp16",
        "GradScaler refuses gradients in fp16: the trainable weights are fp16 themselves.",
        (Likely("The model was loaded in fp16; GradScaler needs fp32 weights and autocast", "fp16-weights-with-grad-scaler"),),
        (CHECK, "from_pretrained(..., dtype=torch.float32)    # and bf16=True or fp16=True for autocast"),
    ),
    "out-of-memory": (
        "out-of-memory",
        "The device ran out of memory.",
        (Likely("Batch or sequence too large; activations, logits of a large vocabulary, or a leak of graphs"),),
        ("smaller batches with accumulation, gradient checkpointing, torch.cuda.memory_summary()",),
    ),
    "error": ("crash", "The program raised an error.", (), ()),
}


def crashes(segment: Segment) -> Iterator[Finding]:
    """Yield the errors of a log. If one error caused another, yield the specific one."""
    exact = [kind for kind in CRASHES if kind in segment.notes and kind != "error"]
    for kind in exact or [kind for kind in ("error",) if kind in segment.notes]:
        name, said, causes, commands = CRASHES[kind]
        noted = segment.notes[kind]
        note = noted.first[0]
        went_on = segment.points > noted.last_order + 1
        interrupted = note.text.startswith("KeyboardInterrupt")
        severity = "note" if interrupted else "warning" if went_on else "failure"
        said = f'{said} Line {note.line}: "{note.text}"'
        if went_on:
            said += ". The log goes on after it."
        yield Finding(kind=name, severity=severity, place=noted.place, said=said, causes=causes, commands=commands)
