"""Lines that have numbers without names, or names that are not words: darknet, YOLO, fastai's bar, and boosting."""

from __future__ import annotations

import re
from collections.abc import Callable

from nanproof.logs._points import worst_score
from nanproof.logs.text._names import COARSE, TERM, Found, meaning
from nanproof.logs.text._values import ANY, parse

Pairs = list[tuple[Found, float]]

STEP, EPOCH = Found("step", COARSE), Found("epoch", 0)
LOSS, EVALUATION = Found("loss", 0, "loss"), Found("eval_loss", 0, "loss")
NORM = Found("grad_norm", 0, "Grad Norm")

_PIPES = rb"ner|tagger|parser|textcat(?:_multilabel)?|tok2vec|transformer|spancat|senter|morphologizer|entity_linker"
_SPACY = re.compile(
    rb"(?:.{0,60}\blosse?s?\W{1,3}(?=\{)|\s{0,9}(?:\d{1,9}:? )?(?=\{['\"](?:" + _PIPES + rb")['\"]:))\{([^{}]{3,400})\}\s*", re.I
)
_ITEM = re.compile(rb"['\"]([A-Za-z][\w -]{0,30})['\"]:\s?(" + ANY + rb")(?=,|$)")
_DARKNET = re.compile(rb"\s{0,9}(\d{1,9}): (" + ANY + rb"), (" + ANY + rb") avg(?: loss)?, (" + ANY + rb") rate")
_YOLO = re.compile(rb"\s{0,20}(\d{1,6})/\d{1,6}\s+[\d.]+[GM]((?:\s+" + ANY + rb"){3,8})\s*(?::|$)")
_FASTAI = re.compile(rb"\s{0,9}[\d.]+% \[\d+/\d+ [\d:]+<[\d:]+ (" + ANY + rb")\]")
_FASTAI_ROW = re.compile(rb"\s{0,9}\[(\d{1,9}), (" + ANY + rb"), (" + ANY + rb")(?:, " + ANY + rb"){0,9}, '[\d:]{4,9}'\]\s*")
_TUTORIAL = re.compile(rb"\s{0,9}(\d{1,9}) \d{1,3}% \(\d{1,9}m \d{1,2}s\) (" + ANY + rb")(?: |$)")
_TUTORIAL_2 = re.compile(rb"\s{0,9}\d{1,9}m \d{1,2}s \(- \d{1,9}m \d{1,2}s\) \((\d{1,9}) \d{1,3}%\) (" + ANY + rb")\s*")
_TENSOR = re.compile(rb"\s{0,9}tensor\((" + ANY + rb")(?:,\s{0,9}(?:device|dtype|grad_fn|requires_grad)=[^()]{0,60})*\)\s*")
_TAGGED = re.compile(rb"([A-Za-z][\w-]{0,40}/[\w./-]{1,40}) (" + ANY + rb") (\d{1,12})\s*")
_CAFFE = re.compile(
    rb".{0,80}\b(Train|Test) net output #\d{1,3}: (\S{1,60}) = (" + ANY + rb")( \(\* \S{1,20} = \S{1,20} loss\))?\s*"
)
_MARIAN = re.compile(rb".{0,40}\bEp\. (\d{1,6}) : Up\. (\d{1,9}) : Sen\. [\d,]{1,20} : Cost (" + ANY + rb")(?: |$)")
_PIX2PIX = re.compile(
    rb"\s{0,9}\(epoch: (\d{1,6}), iters: (\d{1,9})(?:, \w{1,20}: [\d.]{1,20}){0,3}\)"
    rb"((?: [A-Za-z]\w{0,30}: " + ANY + rb"){1,20})\s*",
    re.I,
)
_DL4J = re.compile(rb"\bScore at iteration (\d{1,12}) is (" + ANY + rb")(?=\s|$)")
_TACOTRON = re.compile(rb"\W{0,6}train loss (\d{1,9}) (" + ANY + rb")\*{0,3} grad norm (" + ANY + rb")(?= |$)", re.I)
_LOSSES = re.compile(rb".{0,40}\[epoch (\d{1,9})/\d{1,9}, batch (\d{1,9})/\d{1,9}\] \[losses: ([^][]{3,400})\]\s*", re.I)
_WORD = re.compile(rb"([A-Za-z]\w{0,30}) (" + ANY + rb")(?=,|$)")
_COLUMN = re.compile(rb"(?:^|\n)\s{0,9}(\d{1,9})[:,]?[ \t]{1,3}(" + ANY + rb")\s*$")
_VITS = re.compile(rb".{0,80}?\[((?:" + ANY + rb", ){3,12})(\d{1,9}), (\d[\d.e-]{0,30})\]\s*")
_NAMED = re.compile(rb"(\w+): (\S+)")
_CATBOOST = re.compile(rb"(\d{1,9}):\s+learn: (" + ANY + rb")(?:\s+test: (" + ANY + rb"))?\s.{0,200}total:")
_ROUND = re.compile(rb"\s{0,9}(?:\[[\d:. /-]+\]\s{0,3})?\[(\d{1,9})\]:?(?:#011|\s)")
_ON_DATA = re.compile(rb"([A-Za-z][\w. ]{0,40}?)(?:'s |-)([\w@.-]{1,40}?)\s?:\s{0,4}(" + ANY + rb")(?:\+" + ANY + rb")?(?![\w.])")


def _darknet(text: bytes) -> Pairs | None:
    match = _DARKNET.match(text)
    if match is None:
        return None
    step, loss, mean, rate = map(parse, match.groups())
    return [(STEP, step), (LOSS, loss), (Found(TERM + "avg", 0, "avg"), mean), (Found("lr", 0, "rate"), rate)]


def _yolo(text: bytes) -> Pairs | None:
    """A row of a table whose header was not pasted: the columns after the memory are parts of the loss."""
    match = _YOLO.match(text)
    if match is None:
        return None
    first, second, third = map(parse, match[2].split()[:3])
    parts = [(Found(TERM + name, 0, name), value) for name, value in (("second loss", second), ("third loss", third))]
    return [(EPOCH, float(match[1])), (Found("loss", 2 * COARSE, "first loss"), first), *parts]


def _fastai(text: bytes) -> Pairs | None:
    match = _FASTAI.match(text)
    return None if match is None else [(Found("loss", 1, "smooth loss"), parse(match[1]))]


def _fastai_row(text: bytes) -> Pairs | None:
    """fastai without a bar: epoch, loss, validation loss, metrics, time."""
    match = _FASTAI_ROW.fullmatch(text)
    if match is None:
        return None
    return [(EPOCH, float(match[1])), (LOSS, parse(match[2])), (EVALUATION, parse(match[3]))]


def _tutorial(text: bytes) -> Pairs | None:
    """The tutorials of PyTorch on names and on translation: step, share, time and loss without a name."""
    match = _TUTORIAL.match(text) or _TUTORIAL_2.fullmatch(text)
    return None if match is None else [(STEP, float(match[1])), (LOSS, parse(match[2]))]


def _tensor(text: bytes) -> Pairs | None:
    """A tensor that was printed alone. Only whether it is NaN or Inf counts: nothing says what it is."""
    match = _TENSOR.fullmatch(text)
    return None if match is None else [(Found(TERM + "the printed tensor", 0, "the printed tensor"), parse(match[1]))]


def _tagged(text: bytes) -> Pairs | None:
    """`losses/q1_loss 64.05 193000`: a tag, its value and the step."""
    match = _TAGGED.fullmatch(text)
    found = None if match is None else meaning(match[1].decode("ascii", "replace"))
    return None if match is None or found is None else [(STEP, float(match[3])), (found, parse(match[2]))]


def _spacy(text: bytes) -> Pairs | None:
    """`Losses {'ner': 12.3, 'tagger': nan}`: the first is taken for the loss."""
    match = _SPACY.fullmatch(text)
    items = [] if match is None else [(name.decode("ascii") + " loss", parse(value)) for name, value in _ITEM.findall(match[1])]
    return [(Found("loss", 2 * COARSE, name), value) for name, value in items] or None


def _caffe(text: bytes) -> Pairs | None:
    """`Train net output #1: loss_bbox = 0.1 (* 2 = 0.2 loss)`: a part of the loss, or a score. Another line has the step."""
    match = _CAFFE.match(text)
    if match is None:
        return None
    name, value = match[2].decode("ascii", "replace"), parse(match[3])
    if match[4] is None or match[1] == b"Test":
        found = meaning(f"{match[1].decode()} {name}")
        return None if found is None else [(found, value)]
    return [(Found(TERM + name, 0, name), value)]


def _marian(text: bytes) -> Pairs | None:
    match = _MARIAN.match(text)
    if match is None:
        return None
    return [(EPOCH, float(match[1])), (STEP, float(match[2])), (LOSS._replace(name="Cost"), parse(match[3]))]


def _pix2pix(text: bytes) -> Pairs | None:
    """`(epoch: 1, iters: 100, time: 0.3, data: 0.1) D_A: 0.2 G_A: 0.4`: all that follow the brackets are losses."""
    match = _PIX2PIX.fullmatch(text)
    if match is None:
        return None
    losses = [(name.decode("ascii"), parse(value)) for name, value in _NAMED.findall(match[3])]
    parts = [(Found(TERM + name, 0, f"{name} loss"), value) for name, value in losses]
    return [(EPOCH, float(match[1])), (Found("step", 2 * COARSE + 1), float(match[2])), *parts]


def _tacotron(text: bytes) -> Pairs | None:
    """`Train loss 20 1.93 Grad Norm 0.81`: the first number is the step."""
    match = _TACOTRON.match(text)
    if match is None:
        return None
    return [(STEP, float(match[1])), (LOSS._replace(name="Train loss"), parse(match[2])), (NORM, parse(match[3]))]


def _vits(text: bytes) -> Pairs | None:
    """`INFO [nan, nan, 2.1, 31.5, 20, 0.0002]`: losses, the step and the learning rate."""
    match = _VITS.fullmatch(text)
    if match is None:
        return None
    losses = [parse(value) for value in match[1].split(b", ")[:-1]]
    parts = [(Found(TERM + f"loss {i}", 0, f"loss {i}"), value) for i, value in enumerate(losses, 1)]
    return [(STEP, float(match[2])), (Found("lr", 0, "the last of the list"), parse(match[3])), *parts]


def _losses(text: bytes) -> Pairs | None:
    """`[Epoch 0/30, Batch 3/13] [Losses: x 0.1, conf 0.7, total 1.9]`: parts by their names, and their total."""
    match = _LOSSES.fullmatch(text)
    if match is None:
        return None
    items = [(name.decode("ascii"), parse(value)) for name, value in _WORD.findall(match[3])]
    parts = [(Found(TERM + f"{name} loss", 0, f"{name} loss"), value) for name, value in items if name != "total"]
    total = [(Found("loss", 1, "total"), value) for name, value in items if name == "total"]
    return [(EPOCH, float(match[1])), (STEP, float(match[2])), *total, *parts]


def second_column(text: bytes, before: bytes) -> Pairs | None:
    """`76980 nan` below `76970 2.54`: a step and its loss, as `print(step, loss.item())` writes them."""
    match, above = _COLUMN.fullmatch(text), _COLUMN.search(before)
    if match is None or above is None or int(above[1]) >= int(match[1]) or parse(match[2]) == parse(match[2]):
        return None
    return [(STEP, float(match[1])), (LOSS._replace(name="the second column"), parse(match[2]))]


def _dl4j(text: bytes) -> Pairs | None:
    """`ScoreIterationListener - Score at iteration 20 is 1.93`."""
    match = _DL4J.search(text)
    return None if match is None else [(STEP, float(match[1])), (LOSS._replace(name="Score"), parse(match[2]))]


def _catboost(text: bytes) -> Pairs | None:
    match = _CATBOOST.match(text)
    if match is None:
        return None
    tested = [] if match[3] is None else [(EVALUATION._replace(name="test"), parse(match[3]))]
    return [(STEP, float(match[1])), (LOSS._replace(name="learn"), parse(match[2])), *tested]


def _named(found: Found | None, name: str) -> Found | None:
    if found is None:
        return None
    return found._replace(role=TERM + name if found.role.startswith(TERM) else found.role, name=name)


def _boosting(text: bytes) -> Pairs | None:
    """`[7]  train's l2: 0.093  valid's l2: 0.099` and `[7]  train-rmse:0.093`. The data may have any name."""
    match = _ROUND.match(text)
    if match is None:
        return None
    pairs: Pairs = []
    for data, measure, value in _ON_DATA.findall(text.replace(b"#011", b"\t"), match.end() - 1):
        name = f"{data.decode('ascii', 'replace').strip()} {measure.decode('ascii', 'replace')}"
        found = meaning(name) or _named(meaning(f"train {measure.decode('ascii', 'replace')}"), name)
        found = found or (Found(TERM + name, 0, name) if worst_score(name) is None else None)
        pairs += [(found, parse(value))] if found is not None else []
    return [(STEP, float(match[1])), *pairs] if pairs else None


FORMS: tuple[tuple[bytes, Callable[[bytes], Pairs | None]], ...] = (
    (b" avg", _darknet),
    (b"g  ", _yolo),
    (b"% [", _fastai),
    (b", '", _fastai_row),
    (b"% (", _tutorial),
    (b"%) ", _tutorial),
    (b"tensor(", _tensor),
    (b"grad norm", _tacotron),
    (b"[losses: ", _losses),
    (b"nan, ", _vits),
    (b"loss ", _tagged),
    (b"loss", _spacy),
    (b"'ner'", _spacy),
    (b"'textcat", _spacy),
    (b" net output #", _caffe),
    (b" : cost ", _marian),
    (b"(epoch: ", _pix2pix),
    (b"score at iteration", _dl4j),
    (b"learn: ", _catboost),
    (b"]", _boosting),
)
"""Each with letters, in lower case, that every line of the form contains."""
ROUNDS = (_catboost, _boosting)


def nameless(text: bytes, low: bytes) -> tuple[Pairs, dict[str, float]] | None:
    """Names and values of such a line, and what it says of the run; None for other lines."""
    if text[:1] == b">":  # quoted
        text = text.lstrip(b"> ")
    for letters, read in FORMS:
        if letters in low and (pairs := read(text)) is not None:
            return pairs, {"rounds": 1.0} if read in ROUNDS else {}
    return None
