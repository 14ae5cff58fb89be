"""Which lines of words are notes, and which are not."""

# ruff: noqa: E501  # lines of logs are long

from __future__ import annotations

import io

import pytest

from nanproof.logs._points import NOTES, Note, Point, singly
from nanproof.logs.read import _files as files
from nanproof.logs.text._notes import clean
from nanproof.logs.text._text import TextReader

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    loss = 0\n'
DEEPSPEED = "[2024-01-01 10:00:00,123] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! "


def items(text: str) -> list[Point | Note]:
    return list(singly(TextReader().read(files.blocks(files.unpacked(io.BytesIO(text.encode()))))))


KNOWN = [
    ("overflow", DEEPSPEED + "Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", None, 32768.0),
    ("overflow", DEEPSPEED + "Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1", None, 65536.0),
    ("overflow", DEEPSPEED + "Skipping step. Gradients are non-finite, weights were not updated.", None, None),
    ("overflow", "[2024-01-01 10:00:00,123] [INFO] [fused_optimizer.py:413:_update_scale] Grad overflow on iteration 5", 5.0, None),
    ("overflow", "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0", None, 32768.0),
    ("overflow", "| WARNING: overflow detected, setting loss scale to: 0.25", None, 0.25),
    ("overflow", "2020-01-01 10:00:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0", None, 64.0),
    ("nan-warning", "NaN gradient detected at step 92261", 92261.0, None),
    ("nan-warning", "Warning: NaN gradient detected at step 42", 42.0, None),
    ("nan-warning", "WARNING:root:loss is nan", None, None),
    ("nan-warning", "2024-01-01 10:00:00,000 - train - ERROR - non-finite gradients in 3 parameters", None, None),
    ("nan-warning", "Loss is nan, stopping training", None, None),
    ("nan-warning", "ERROR:tensorflow:Model diverged with loss = NaN.", None, None),
    ("nan-warning", "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", None, None),
    ("unscale-fp16", "ValueError: Attempting to unscale FP16 gradients.", None, None),
    ("bad-probabilities", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", None, None),
    ("nonpositive-std", "RuntimeError: normal expects all elements of std >= 0.0", None, None),
    ("nonpositive-std", "ValueError: Expected parameter scale (Tensor of shape (8, 2)) of distribution Normal(loc: torch.Size([8, 2]), scale: torch.Size([8, 2])) to satisfy the constraint GreaterThan(lower_bound=0.0), but found invalid values:", None, None),
    ("bad-parameter", "ValueError: Expected parameter logits (Tensor of shape (8, 4)) of distribution Categorical(logits: torch.Size([8, 4])) to satisfy the constraint IndependentConstraint(Real(), 1), but found invalid values:", None, None),
    ("nan-warning", "RuntimeError:  [!] NaN loss with decoder_loss.", None, None),
    ("nan-warning", "***WARNING*** the loss of batch 12 is nan", 12.0, None),
    ("nan-warning", "INFO:tensorflow:Error reported to Coordinator: <class 'tf.errors.InvalidArgumentError'>, LossTensor is inf or nan. : Tensor had NaN values", None, None),
    ("nan-warning", "LossTensor is inf or nan. : Tensor had NaN values", None, None),
    ("nan-warning", "2024-01-01 10:00:00,000 (e2e_asr:88) WARNING: loss (=250000064.000000) is not correct", None, None),
    ("device-assert", "RuntimeError: CUDA error: device-side assert triggered", None, None),
    ("device-assert", "/pytorch/aten/src/ATen/native/hip/Loss.hip:242: nll_loss: Device-side assertion `t >= 0` failed.", None, None),
    ("scale-at-minimum", "2024-01-01 10:00:00,018 WARNING [optim.py:487] (0/2) Grad scale is small: 0.0", None, None),
    ("out-of-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", None, None),
    ("out-of-memory", "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the step tasks have been OOM Killed.", None, None),
    ("scale-at-minimum", "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", None, None),
    ("scale-at-minimum", "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", None, None),
    ("error", "Fatal Python error: Segmentation fault", None, None),
    ("error", "slurmstepd: error: *** STEP 12.0 ON node7 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***", None, None),
    ("nan-warning", "Loss in not finite. Skip this training step.", None, None),
    ("nan-warning", "tensorflow.python.framework.errors_impl.InvalidArgumentError: Found Inf or NaN in the gradient. : Tensor had NaN values", None, None),
    ("resumed", "Resuming training from out", None, None),
    ("resumed", "INFO:trainer:  Continuing training from global step 500", 500.0, None),
    ("resumed", "  successfully loaded checkpoint from ckpts [ t 0, p 0 ] at iteration 2000", 2000.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "line", "step", "scale"), KNOWN)
def test_known_messages(kind, line, step, scale):
    found = items(f"something else\n{line}\n")
    assert found[0] == Note(kind, " ".join(line.split()), 2, step)
    assert [item.values for item in found[1:]] == ([] if scale is None else [{"scale": scale}])


def test_all_kinds_are_tried():
    assert {kind for kind, *_ in KNOWN} == set(NOTES)


PROSE = [
    "## NaN gradients at step 100 and what to do about them",
    "- The loss is NaN at step 40 when fp16 is on",
    "> at step 5 the gradient is nan",
    "    if torch.isnan(loss): print(f'NaN loss at step {step}')",
    'logger.warning("NaN loss at step %d", step)',
    "The RuntimeError: probability tensor contains either `inf`, `nan` or element < 0 means that the logits are bad.",
    "[2024-01-01 10:00:00,123] [INFO] [fused_optimizer.py:421] No Grad overflow for 1000 iterations",
    "fp16 training can cause gradient overflow to inf/NaN",
    "nanoseconds per gradient at step 5",
    "INFO:root:gradient information at step 5",
    '{"cause": "nonfinite-loss", "step": 412, "loss": "gone"}',
    "Loading checkpoint shards: 100%|##########| 2/2 [00:00<00:00, 5it/s]",
    "An error occurred, then another error, and all was well",
    "We resumed the discussion of the loss",
]


@pytest.mark.parametrize("line", PROSE)
def test_prose_and_code_are_no_notes(line):
    assert items(line) == []


def test_a_traceback_is_its_last_line():
    (note,) = items(TRACEBACK + "KeyError: 'loss'\n")
    assert note == Note("error", "KeyError: 'loss'", 4)
    (note,) = items(TRACEBACK + "my.module.OddFailure\n".replace("Failure", "Error"))
    assert note.text == "my.module.OddError"
    assert items("KeyError: 'loss'\n") == []  # nothing says that it ended the program
    launcher = TRACEBACK + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert [note.text for note in items(TRACEBACK + "KeyError: 'loss'\n" + launcher)] == ["KeyError: 'loss'"]


def test_a_traceback_that_ends_at_its_raise():
    """Pasted without the exception itself: what was about to be raised is the note, where the traceback begins."""
    cut = "step 3 loss 2.5\n" + TRACEBACK + "    raise ValueError('loss is not finite')\n"
    note = items(cut)[1]
    assert (note.kind, note.line) == ("nan-warning", 2)
    whole = items(cut + "ValueError: loss is not finite\n")
    assert [item.kind for item in whole[1:]] == ["nan-warning"] and whole[1].line == 6


def test_each_rank_says_the_same_once():
    text = "".join(
        f"[rank{rank}]: {line}" for rank in range(4) for line in [*TRACEBACK.splitlines(True), "ValueError: no loss\n"]
    )
    (note,) = items(text)
    assert note.kind == "error"
    overflow = (
        "".join(f"[rank{rank}]: Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8.0\n" for rank in (0, 1))
        * 3
    )
    assert [item.kind for item in items(overflow) if isinstance(item, Note)] == ["overflow"] * 3


def test_what_is_shown_steers_no_terminal():
    (note,) = items("WARNING: loss is nan \x1b]0;title\x07 \x1b[2J \u202e reversed " + "x" * 200 + "\n")
    assert not any(ord(c) < 32 or c == "\u202e" for c in note.text)
    assert len(clean(b"y" * 100_000)) == 300


def test_the_scale_that_fp16_falls_to():
    """DeepSpeed's older optimizers say it in a second line."""
    text = "[2024-01-01 10:00:00,123] [INFO] [fused_optimizer.py:414:_update_scale] Reducing dynamic loss scale from 65536.0 to 32768.0\n"
    assert [item.values for item in items(text)] == [{"scale": 32768.0}]
