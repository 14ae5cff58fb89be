"""Lines of words that matter: a skipped step, a warning of NaN, the exception that ended the program.

Strict on purpose. A log may hold prose and source code that speak of NaN; only the message of a known tool, a line that starts
like a log's, or one that names a step is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nanproof.logs._points import Note, Point

LONGEST = 300
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

_SIGNS = rb"\xe2\x9a\xa0(?:\xef\xb8\x8f)?|\xe2\x9d\x8c|\xf0\x9f\x9a\xa8"  # a warning sign, a cross, a light
_PREFIX = re.compile(
    rb"(?:\s|\*{2,6}|" + _SIGNS + rb"|\[[^\]]{0,80}\]:?|\([^)]{0,40}\)|[|>]|- "
    rb"|\d{4}[-/]\d\d[-/]\d\dT?|(?:\d\d[-/]){2}\d{4}|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?|[IWEF]\d{4}\b"
    rb"|\d{1,8}\b|(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTE)\b(?::[\w.]{1,60}:|:)?|\S{1,120}\.py:\d{1,6}:? ?"
    rb"|\w{1,30}Warning: |[\w.]{1,40} - "
    rb"|(?![\w.]{1,300}(?:Error|Exception|Interrupt|Exit|Failure):)"
    rb"(?:root|lightning|__main__|tensorflow|[\w]{1,30}(?:\.\w{1,30}){1,6}(?::\d{1,6})?)\s?[-:|]\s?)*"
)
_LEVEL = re.compile(rb"\b(?:WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^[WEF]\d{4}\b|\w{1,30}Warning: ")
_EXCEPTION = re.compile(
    rb"(?:[A-Za-z_]\w{0,60}\.){0,8}(?:[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Failure)|Exception)(?=: |:?\s*$)"
)
_GLUED = re.compile(rb"\)(?=(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception): )")
"""Between a line of code and the exception that was printed right behind it."""
_FRAME = re.compile(rb'File "[^"\r\n]{1,400}", line \d{1,7}, in ')
_CODE = re.compile(
    rb"\s*(?:if|elif|def|for|while|return|assert|print|raise|import|from|logger|log|self|with|class|warnings)\b[ (.:]"
    rb"|.*(?:torch\.|math\.|np\.|==|isnan|isinf|isfinite|\.any\(|%[sdf]\b|\{\w+[:}])"
)
_MARKUP = re.compile(rb"\s*(?:#|\*|-\s|>|\||\d{1,3}[.)]\s|`|<)")
_LAUNCHER = re.compile(rb"\S*ChildFailedError|subprocess\.CalledProcessError: ")
"""Only says that another process failed, which said why itself."""
_PROGRAM = re.compile(rb"[\w-]{1,30}: error: ")
_NUMBERED = re.compile(rb"! Rank (\d{1,6}) Skipping step")
"""DeepSpeed's messages name the rank in their words."""
_AFTER_WORDS = re.compile(rb"(?::\s+|>, |\d[smh]|instance of ')$")
"""What stands right before a message that another program quotes."""
_STEP = re.compile(rb"(?:global[_ ]step|step|iteration|iter|update|batch|@)\W{0,3}(\d{1,15})\b", re.I)

_OVERFLOW = re.compile(
    rb"OVERFLOW!|fp16 dynamic loss scale overflow!|Gradient overflow\.|(?<!No )(?<!no )Grad overflow on iteration"
    rb"|gradient overflow detected, "
    rb"|overflow detected, setting"
)
_NEW_SCALE = re.compile(
    rb"(?:reducing|reducing loss scale|setting loss scale) to:?\s*([\d.eE+-]+)|dynamic loss scale from \S+ to (\S+)"
    rb"|Grad scale is small: (\S+)"
)
_TRIED_SCALE = re.compile(rb"Attempted loss scale: ([\d.eE+-]+)")

_KNOWN = (
    (
        "scale-at-minimum",
        re.compile(
            rb"Current loss scale already at minimum|Minimum loss scale reached|grad_scale is too small"
            rb"|Grad scale is small: 0\.0$"
        ),
    ),
    ("unscale-fp16", re.compile(rb"Attempting to unscale FP16 gradients")),
    ("bad-probabilities", re.compile(rb"probability tensor contains either `?inf`?, `?nan`? or element < 0")),
    (
        "nonpositive-std",
        re.compile(
            rb"normal expects all elements of std >= 0|normal expects std >= 0"
            rb"|Expected parameter scale .{1,200}to satisfy the constraint GreaterThan|The parameter scale has invalid values"
        ),
    ),
    (
        "bad-parameter",
        re.compile(rb"Expected parameter (?:loc|logits|probs) .{1,200}to satisfy the constraint .{1,80}but found"),
    ),
    (
        "device-assert",
        re.compile(rb"device-side assert triggered|\S{1,300}\.(?:cuh?|hip):\d{1,6}: .{0,300}[Aa]ssertion .{1,200}failed"),
    ),
    (
        "out-of-memory",
        re.compile(rb"CUDA out of memory|OutOfMemoryError|out of memory\. Tried|oom_kill event|Out of memory: Killed"),
    ),
    (
        "error",
        re.compile(rb"Fatal Python error: |terminate called after throwing an instance of|\*\*\* \S+ \S+ ON .* CANCELLED AT "),
    ),
    (
        "nan-warning",
        re.compile(
            rb"Loss is -?(?:nan|NaN|inf)\b|LossTensor is inf or nan|loss \(=\S{1,40}\) is not correct"
            rb"|The loss returned in `training_step` is|Detected nan and/or inf values in"
            rb"|Function '\w{1,60}' returned nan values in its|found (?:NaN|Inf) in local|Unexpected result (?:nan|inf)"
            rb"|for gradients from `parameters` is non-finite|Invalid loss, terminating training|Model diverged with loss = NaN"
            rb"|Loss became infinite or NaN at|NaN or Inf found in input tensor"
            rb"|Monitored metric \S{1,80} = (?:nan|inf|-inf) is not finite|Encountered NaN|\S{0,80}EncounteredNaNError"
            rb"|NaN detected in (?:output|input) of|The training criterion is not a number|NaN was detected"
            rb"|Invalid value \((?:nan|inf)\) encountered in"
            rb"|step \d{1,12}: (?:nonfinite-(?:loss|gradient|weight)|gradient-norm-overflow),"
        ),
    ),
)
_RESUMED = re.compile(
    rb"resum(?:ing|ed) (?:training |run )?(?:from|at)\b|continuing training from global step"
    rb"|restored all states from the checkpoint"
    rb"|successfully loaded checkpoint .{1,300} at iteration [1-9]"
    rb"|loaded checkpoint .{1,300} @ [1-9]\d{0,12} updates|loading the checkpoint at step [1-9]",
    re.I,
)
_NOT_FINITE = re.compile(rb"(?<![\w-])(?:nans?|infs?|infinite|infinity|non-?finite|not finite)(?![\w(])", re.I)
_HARMLESS = re.compile(
    rb"\b(?:no|without)(?: any)? (?:nan|inf)s?\b(?:/(?:nan|inf))?|(?:^|[:,\]] ?)0 nan\b"
    rb"|\b(?:best|lowest|initial)\b[\w :=/-]{0,20}?\binf\b|\b(?:from|is initially) -?inf(?:inity)?\b|\(was -?inf\)"
    rb"|\b(?:max_\w*norm|clip\w*|best\w*|min\w*)[ =:]{1,3}-?inf\b|-?inf -{1,2}>"
    rb"|\b(?:nan|inf)s?(?:_count)?\s?[:=]\s?0\b|\bnan (?:targets?|labels?)\b",
    re.I,
)
"""Words about NaN that say that there is none, or that nothing was measured yet."""
_THINGS = re.compile(rb"loss|grad|norm\b|weight|param|logit|activation|matrix|prediction", re.I)


_MESSAGES = (
    *(b"overflow", b"loss scale", b"scale is ", b"unscale fp16", b"probability tensor", b"device-side assert", b"out of memory"),
    *(b"outofmemory", b"oom_kill", b"invalid loss", b"fatal python error", b"terminate called", b" cancelled at "),
    *(b"is not correct", b"normal expects", b"expected parameter", b"invalid values", b"assertion"),
)
_MARKS = (
    *_MESSAGES,
    b"error",
    b"exception",
    b"nan",
    b"inf",
    b"finite",
    b"resum",
    b"loaded checkpoint",
    b"the checkpoint",
    b"continuing t",
)
"""In small letters: outside of a traceback, a line without any of these is no note."""
_GIVES_UP = re.compile(
    rb"(?:(?:the |train(?:ing)? |total )?loss|gradients?|grad(?:ient)? norm)\b[\w :=]{0,30}?"
    rb"(?<![\w-])(?:nans?|infs?|infinite|non-?finite|not finite)\b"
    rb".{0,40}\b(?:skip|stop|terminat|abort|ignor|discard|exit|break)",
    re.I,
)
"""A short message of a loop's own: "Loss is not finite. Skip this training step."."""
_ONCE = {
    *("error", "out-of-memory", "device-assert", "unscale-fp16", "bad-probabilities", "bad-parameter", "nonpositive-std"),
    "scale-at-minimum",
}


class Notes:
    """Judges one line after another; remembers whether a traceback is being printed."""

    def __init__(self) -> None:
        self._until = 0  # the traceback that is being printed ends before this line
        self._opened = 0
        """Where the last traceback began."""
        self._raising: Note | None = None
        self._warned = 0
        """The line of the last warning of NaN."""
        self._ranks: dict[str, bytes | None] = {}
        self._said: set[str] = set()
        self.ended = 0
        """The line of an exception that counts only if it is the last line of the log."""
        self._end: Note | None = None

    def in_traceback(self, text: bytes, line: int) -> bool:
        """Whether this line is source code that a traceback shows."""
        return line < self._until and text[:2].isspace()

    def of(self, text: bytes, low: bytes, line: int, rank: bytes | None, before: bytes = b"") -> Iterator[Note | Point]:
        """A note, and a point if the message names a new loss scale. `before` is the text above the line."""
        if b"raceback (most recent call last)" in text:
            self._until, self._opened = line + 400, line
            return
        if line >= self._until and not any(mark in low for mark in _MARKS):
            return
        glued = _GLUED.search(text) if b"rror: " in text or b"xception: " in text else None
        text = text if glued is None else text[glued.end() :]
        kind = self._kind(text, low, line, glued is not None, before)
        if kind == "nan-warning":
            self._warned = line
        if text.lstrip().startswith(b"raise ") and line < self._until and _NOT_FINITE.search(text):
            self._raising = Note("nan-warning", clean(text), self._opened)
        elif kind is not None or _EXCEPTION.match(text) is not None:
            self._raising = None
        if kind is None and _EXCEPTION.match(text) is not None and not _LAUNCHER.match(text):
            self.ended, self._end = line, Note("error", clean(text), line)
        if kind is None:
            return
        self._end = None
        if kind in _ONCE:
            self._until = 0
            if (said := clean(text)) not in self._said and len(self._said) < 100:  # each rank says the same
                self._said.add(said)
                yield Note(kind, said, line)
            return
        numbered = _NUMBERED.search(text) if kind == "overflow" else None
        rank = rank if numbered is None else numbered[1]
        if self._ranks.setdefault(kind, rank) not in (rank, None):
            return
        scale = _NEW_SCALE.search(text) or _TRIED_SCALE.search(text) if kind in ("overflow", "scale") else None
        step = _STEP.search(text) if kind in ("overflow", "nan-warning", "resumed") else None
        at = float(step[1]) if step is not None else None
        if kind != "scale":
            yield Note(kind, clean(text), line, at)
        value = next((group for group in scale.groups() if group), None) if scale is not None else None
        if value is not None:
            try:
                yield Point({"scale": float(value.rstrip(b".,"))}, at, None, line)
            except ValueError:
                return

    def at_the_end(self, alone: bool) -> Iterator[Note]:
        """The exception in the last line of the log, where it has not been given yet, if nothing stands around it; what the last
        traceback was about to raise, if its exception was not pasted."""
        if self._end is not None and alone:
            yield self._end
        if self._raising is not None and self._warned < self._raising.line:
            yield self._raising

    def _kind(self, text: bytes, low: bytes, line: int, glued: bool, before: bytes) -> str | None:
        resumed = _RESUMED.search(text) is not None if b"checkpoint" in low or b"resum" in low or b"continuing" in low else False
        finite = _NOT_FINITE.search(text) is None
        raised = glued or line < self._until or (b"rror" in text and _FRAME.search(before) is not None)
        if finite and not resumed and not raised and not any(mark in low for mark in _MESSAGES):
            return None  # the prefix is not worth a look
        message = without_prefix(text)
        prefix = len(text) - len(message)
        if b"overflow" in low and (_OVERFLOW.match(message) or b"OVERFLOW! " in message[:60]):
            return "overflow"
        exception = _EXCEPTION.match(message)
        level = _LEVEL.search(text, 0, min(prefix + 1, 400)) is not None
        for kind, pattern in _KNOWN:
            found = pattern.search(message, 0, 1200)
            if found is None:
                continue
            quoted = kind == "nan-warning" and _AFTER_WORDS.search(message, max(0, found.start() - 20), found.start()) is not None
            if exception is not None or level or quoted or found.start() == 0 or _PROGRAM.match(message):
                return kind
        scaled = b"dynamic loss scale from" in low or b"grad scale is small" in low
        if scaled and prefix and _NEW_SCALE.search(message) is not None:
            return "scale"
        if exception is not None and not finite and (raised or _THINGS.search(message)):
            return "nan-warning"  # NaN is what it complains of
        if exception is not None and raised and not _LAUNCHER.match(message):
            return "error"
        if resumed and _RESUMED.match(message):
            return "resumed"
        return "nan-warning" if not finite and self._warns(text, message, level) else None

    @staticmethod
    def _warns(text: bytes, message: bytes, level: bool) -> bool:
        if len(message) > LONGEST or message[:1] == b"{" or not _THINGS.search(message):
            return False
        if not _NOT_FINITE.search(_HARMLESS.sub(b" ", text)):
            return False
        if _CODE.match(message) or (_MARKUP.match(text) and not level) or text[:4] == b"    ":
            return False
        if len(message.split()) > 20:
            return level
        return level or _STEP.search(message) is not None or _GIVES_UP.match(message) is not None


def without_prefix(text: bytes) -> bytes:
    """A line without what a logger put before the message: time, level, name, rank."""
    prefix = _PREFIX.match(text)
    return text if prefix is None else text[prefix.end() :]


def clean(text: bytes) -> str:
    """A line as it may be shown: no colours, no control characters, not too long."""
    said = _CONTROL.sub(" ", text[: 8 * LONGEST].decode("utf-8", "replace"))
    return " ".join(said.split())[:LONGEST]
