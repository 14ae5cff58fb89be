"""Points and notes in plain text: whatever a training loop, a progress bar or a launcher printed.

Most lines of a log say nothing about the run. So a block of bytes is first searched for a few words; only the lines that have
one are looked at. Of those, each `name: number` whose name is known counts (see `_names`).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise

from nanproof.logs._points import Batch, Item, Note, Point, Sign
from nanproof.logs.text._columns import Columns
from nanproof.logs.text._forms import nameless, second_column
from nanproof.logs.text._layouts import MOST, TRIES, Layout, Span, rounded_away
from nanproof.logs.text._names import COARSE, TERM, Collector, Found, is_step, meaning
from nanproof.logs.text._notes import Notes, clean, without_prefix
from nanproof.logs.text._places import BAR, Places, after_bar, first_bar, last_bar, last_drawn
from nanproof.logs.text._programs import programs
from nanproof.logs.text._records import Record, is_value, records, unfinished
from nanproof.logs.text._values import ANY, parse, plain

WORDS = tuple(
    b"loss|grad|step=|nan|finite|error|exception|overflow|raceback|assertion|resum|checkpoint|continuing training".split(b"|")
)
"""A line without one of these, in any case, is not looked at."""
RARE_WORDS = tuple(
    b"xent|entropy|ppl|perplex|mse| avg|g  |'s |-auc:|learn: |% (|tensor(|'ner'|'textcat| net output #| : cost |(epoch: "
    b"|score at iteration".split(b"|")
)
"""The same, of logs whose lines with values have none of those. Not searched for once `SURE` points were read without them."""
SURE = 64
LONGEST = 1 << 15
"""Of a longer line only the start is looked at."""
MOST_PAIRS = 100
"""Of a line that has more names and values, the rest is left."""
LOOKS = 200
"""Lines in which a sign of the framework is searched for."""
NEAR = 800
"""How far from a line a progress bar may stand that belongs to it."""

_BOXED = rb"(?:(?:tf\.)?[tT]ensor|[aA]rray|np\.float\d\d)\("
_PAIR = re.compile(
    rb"(?<![\w./@-])([A-Za-z_][\w./@-]*)(?:\s?\([^()]{0,24}\))?[\"'\]]{0,2}"
    rb"(\s{0,12}[:=]\s{0,12}(?:" + _BOXED + rb")?| " + _BOXED + rb"| is |\s{1,12})"
    rb"[\"'\[(]{0,2}\s{0,4}("
    + ANY
    + rb")(?:(?<=[nN])\.?\d{1,8}|(?<=[fF])\.0)?(?:\s{0,8}/\s{0,8}(\d{1,15}))?(?:(?!\w|\.\w|-\d)|(?=[A-Z][a-z]{3}))"
)
_SENTENCE = re.compile(rb"(?:^|[.\]}] )$")
"""What stands before a sentence that a program writes: "... Loss is 6.91. Current learning rate is ..."."""
_NUMBERED = re.compile(rb"[\d_]")
_BETWEEN = re.compile(rb"\s*[/|,;]\s*")
_BEFORE = re.compile(rb"([A-Za-z][\w/]*(?: [A-Za-z][\w/]*){0,2}) $")
_RANK_AFTER = re.compile(rb"[\s,|(\[]rank[\s:=]{0,2}(\d{1,6})[)\]]?\s*$", re.I)
_RANK = re.compile(rb"^\[[A-Za-z_-][\w-]{0,30}?(\d{1,6})\]:\s?")
_EVALUATION = re.compile(
    rb"(?<![\w/.-])(?:cv(?= batch)|valid|validation|validating|eval|evaluation|evaluating|val|test|testing)(?![\w/.-])", re.I
)
_BEFORE_ALONE = re.compile(
    rb"\s*\{[\"']|(?:[\s\d:|,\[\]-]|\b(?:train|training|val|validation|eval|test|set|average|avg|mean|running|current|total|batch|end)\b)*",
    re.I,
)
_TITLE = re.compile(rb"\s*(?!(?:the|a|an|my|our|this|that|with|and|expected)\b)[A-Za-z][\w-]{0,20} ", re.I)
"""A word before the name of a value that has a line for itself: "TD loss: 4.7"."""
_METRIC = (b"loss", b"grad", b"gnorm", b"xent", b"step=", b"ppl", b"perplex", b"mse", b"entropy", b"si-snr", b"err_", b"nan")
_REWARDS = re.compile(rb"\breward(?!s/)|advantage|policy[ _]loss|rollout|completion_len|ep_rew|episod|\breturns?\b")
_SETTINGS = frozenset(b"best min max clip initial target minimum maximum total last lowest episode".split())
_LAST_WORDS = frozenset(
    b"loss losses norm lr rate scale total value train curr step steps iter iteration iterations skipped epoch ep updates"
    b" update".split()
)


class TextReader:
    """Reads one log from its start to its end."""

    def __init__(self) -> None:
        self._names = Collector()
        self._places = Places()
        self._notes = Notes()
        self._found: dict[bytes, Found | None] = {}
        self._matches: list[tuple[Found, re.Match[bytes]]] = []
        self._layouts: list[Layout] = []
        self._known: dict[str, int] = {}
        self._tries = 0
        self._line = 1
        self._read = 0
        """Points, to be sure of what kind of log this is."""
        self._read_before = 0
        """Points before an exception that may have ended the program."""
        self._rare = False
        """Some of them were of lines that have none of `WORDS`."""
        self._looks = LOOKS
        self._programs: set[str] = set()
        self._rank: bytes | None = None
        self._last: Point | None = None
        self._after = b""
        """What stands after the last point, in part."""
        self._before = b""
        """The end of what was read, in part."""
        self._held: Point | None = None
        """Not given out yet: a progress bar that follows may say which step it was."""
        self._held_total = 0
        """Steps of the bar before it."""
        self._inline: tuple[int, int] | None = None
        """The bar in its own line, before it."""
        self._drawn: Point | None = None
        """From a progress bar, which may be drawn again with newer values before it moves on."""
        self._is_drawn = False
        self._total: int | None = None
        """Steps of the run, from its bar."""
        self._columns: Columns | None = None
        """Of a table whose rows are being read."""
        self._table_end = 0
        self._column = b""
        """The last line with a step and a NaN and nothing else."""

    def read(self, blocks: Iterable[bytes]) -> Iterator[Item]:
        rest = b""
        for block in blocks:
            data = rest + (block.replace(b"\r\n", b"\n") if b"\r\n" in block else block)
            whole = data.rfind(b"\n") + 1
            cut = len(data) if len(data) - whole > LONGEST else unfinished(data[:whole])
            yield from self.feed(data[:cut])
            rest = data[cut:]
        yield from self.feed(rest if rest.endswith(b"\n") or not rest else rest + b"\n")
        yield from self.finish()

    def finish(self) -> Iterator[Point | Note]:
        yield from self._release()
        alone = self._read > 0 and self._read == self._read_before and not (self._before + self._after).strip()
        yield from self._notes.at_the_end(alone)

    def feed(self, data: bytes, line: int | None = None) -> Iterator[Item]:
        """Goes through whole lines; the first is `line`, or the one after what was read before."""
        self._line = self._line if line is None else line
        size = len(data)
        bare_returns = b"\r" in data
        counted = 0
        done = 0
        if self._columns is not None:
            yield from self._table(data, done, counted)
            done = self._table_end
        if self._expects_layouts():  # lines that are all alike need no search
            self._line += data.count(b"\n", counted, done)
            counted = done
            for batch, end in self._batches(data, done):
                yield batch
                counted = done = end
        taken = done
        """Where the last line ended that had something."""
        plain_until = 0
        """Up to here there are values that do not make a record."""
        if done == counted == size:
            return
        low = data.lower()
        words = WORDS if self._read >= SURE and not self._rare else (*WORDS, *RARE_WORDS)
        places = [size if at < 0 else at for at in (low.find(word, done) for word in words)]
        while (at := min(places)) < size:
            newline = data.rfind(b"\n", done, at)
            start = newline + 1 if newline >= 0 else done
            end = data.find(b"\n", at)
            end = size if end < 0 else end
            self._line += data.count(b"\n", counted, start)
            counted = start
            if bare_returns:
                start = max(start, data.rfind(b"\r", start, at) + 1)
                back = data.find(b"\r", at, end)
                end = end if back < 0 else back
            self._pass_over(data, done, start)
            after = start
            if self._expects_layouts():
                for batch, end_of_batch in self._batches(data, start):
                    yield batch
                    counted = after = end_of_batch
            for point, match in self._repeated(data, after):
                waits = point is not None and point.step is None and b"{" in match[0]
                if self._is_drawn or waits or not self._expects_layouts():
                    yield from self._give(point, match[0]) if point is not None else ()
                elif point is not None and not self._again(point):
                    yield point
                counted = after = match.end()
            found: list[Record] = []
            begin = last = start
            if after == start >= plain_until and is_value(data[start:end]):
                found, begin, last = records(data, taken, start)
                plain_until = last
            if found:
                yield from self._records(data, found, begin, start)
                taken = end = max(end, last)
            elif after == start:
                stop = min(end, start + LONGEST)
                for item in self._one(data[start:stop], low[start:stop]):
                    yield item
                    taken = end
                if self._columns is not None and data[end : end + 1] == b"\n":
                    yield from self._table(data, end + 1, counted)
                    end = max(end, self._table_end - 1)
            else:
                taken = end = after - 1
            done = end
            for index, place in enumerate(places):
                if place < end:
                    place = low.find(words[index], end)
                    places[index] = size if place < 0 else place
        self._pass_over(data, done, size)
        self._line += data.count(b"\n", counted)

    def _expects_layouts(self) -> bool:
        """Whether nothing is held back that a line in between could belong to."""
        return self._held is None and self._drawn is None

    def _batches(self, data: bytes, at: int) -> Iterator[tuple[Batch, int]]:
        """Lines from here on that are like one that was understood before, as long as their steps rise; where each batch ends."""
        layouts = self._layouts
        while (layout := next((known for known in layouts if known.match(data, at) is not None), None)) is not None:
            found = layout.batch(data, at, self._line)
            if found is None:
                return
            batch, at = found
            steps = batch.steps
            known = None if self._last is None else self._last.step
            rises = (known is None or known < steps[0]) and all(map(operator.lt, steps, islice(steps, 1, None)))
            if not rises or not self._places.passes(steps, batch.epochs):
                layout.refuse(data, at)
                return
            self._line += len(steps)
            self._read += len(steps)
            self._last = batch.last
            self._after = self._before = b""
            yield batch, at

    def _records(self, data: bytes, found: list[Record], begin: int, start: int) -> Iterator[Point | Note]:
        """One point of each record. Its line is that of the first value that is not finite, else of its first metric."""
        yield from self._release()
        first = self._line - data.count(b"\n", begin, start)
        for record in found:
            metrics = [i for i, (name, _) in enumerate(record.pairs) if name.role not in ("step", "epoch")]
            if not metrics:
                continue
            bad = (i for i in metrics if not math.isfinite(record.pairs[i][1]))
            point = self._names.point(record.pairs, first + record.lines[next(bad, metrics[0])])
            if point is not None and is_step(point):
                point = replace(point, settings=record.settings)
                if not self._again(point):
                    yield point

    def _repeated(self, data: bytes, at: int) -> Iterator[tuple[Point | None, re.Match[bytes]]]:
        """Lines from here on that are like one that was understood before."""
        layouts = self._layouts
        match: re.Match[bytes] | None = None
        while True:
            for layout in layouts:
                match = layout.match(data, at)
                if match is not None:
                    break
            if match is None:
                return
            if layout is not layouts[0]:
                layouts.remove(layout)
                layouts.insert(0, layout)
            point: Point | None
            point = layout.point(match, self._line)
            self._is_drawn = layout.total is not None
            if layout.total is not None:
                point = self._places.in_bar(layout.count(match), layout.total, point, dict(layout.settings))
            else:
                point = self._places.going_on(point)
            self._line += data[match.end() - 1] == 10
            yield point, match
            at = match.end()
            match = None

    def _table(self, data: bytes, at: int, counted: int) -> Iterator[Point | Note]:
        """The rows of a table, from the start of one; `_table_end` is the place after them. A row that was drawn again and again
        counts once, as it was at last."""
        line = self._line + data.count(b"\n", counted, at)
        while self._columns is not None and at < len(data):
            end = data.find(b"\n", at)
            if end < 0:
                at = len(data)  # a bar that is being drawn
                break
            text = plain(data[max(at, end - LONGEST) : end].rstrip(b"\r").rpartition(b"\r")[2])
            pairs = self._columns.row(text)
            if pairs is None:
                self._columns = None
                break
            point = self._names.point(pairs, line) if pairs else None
            self._rare = True
            if point is not None and is_step(point) and not self._again(point):
                yield replace(point, settings=self._columns.settings)
            at, line = end + 1, line + 1
        self._table_end = min(at, len(data))

    def _pass_over(self, data: bytes, start: int, end: int) -> None:
        """Keep the text around points: progress bars appear there."""
        if len(self._after) < NEAR:
            self._after += data[start : min(end, start + NEAR)]
        self._before = (self._before + data[max(start, end - NEAR) : end])[-NEAR:]

    def _one(self, text: bytes, low: bytes) -> Iterator[Point | Note | Sign]:
        """What a line says, after what it shows of the framework that wrote it."""
        if self._looks:
            self._looks -= 1
            shown = {*programs(self._before), *programs(text)} - self._programs
            if shown:
                self._programs |= shown
                yield from map(Sign, sorted(shown))
        yield from self._said(text, low)

    def _said(self, text: bytes, low: bytes) -> Iterator[Point | Note]:
        rank = _RANK.match(text)
        raw = text
        if rank is not None:
            text, low = text[rank.end() :], low[rank.end() :]
        elif b"rank" in low:
            rank = _RANK_AFTER.search(text)
        others = rank is not None and self._rank is not None and rank[1] != self._rank
        if (shown := plain(text)) is not text:
            text, low = shown, shown.lower()
        line, who = self._line, None if rank is None else rank[1]
        said = after_bar(text)
        noted = list(self._notes.of(text[said:], low[said:], line, who, self._before)) if said else []
        if noted:  # a message that was printed where a bar had been drawn
            text, low = text[:said], low[:said]
            bar = last_bar(text)
            if bar is not None:
                noted = [item if item.step is not None else replace(item, step=float(bar[0])) for item in noted]
        drawn = last_drawn(text) if b"%|" in text else 0
        point = None if others or self._notes.in_traceback(text, line) else self._point(text[drawn:], low[drawn:])
        if noted:
            if point is not None:
                yield from self._give(point, text)
            yield from self._release()
            yield from noted
            return
        if point is None:
            if self._held is not None:
                self._after += text[: max(0, NEAR - len(self._after))]  # a traceback may start where the bar ends
            for found in self._notes.of(text, low, line, who, self._before):
                yield from self._release()
                yield found
                noted.append(found)
            if self._notes.ended == line:
                self._read_before, self._before, self._after = self._read, b"", b""
            self._columns = None if noted or others or not (b"loss" in low or b"rmse" in low) else Columns.of(text)
            return
        if rank is not None:
            self._rank = rank[1]
        self._rare = self._rare or not any(word in low for word in WORDS)
        if raw.endswith(text) and not drawn:
            self._learn(raw, text, point)
        yield from self._give(point if self._is_drawn else self._places.going_on(point), text)

    # -- one line ----------------------------------------------------------------------------------------------------------

    def _point(self, text: bytes, low: bytes) -> Point | None:
        """What the line says, None if that is nothing."""
        self._matches = []
        self._is_drawn = False
        above = (self._before[-80:], self._column) if b"nan" in low else ()
        if pairs := next(filter(None, (second_column(text, row) for row in above)), None):
            self._column = text
            return self._names.point(pairs, self._line)
        if (found := nameless(text, low)) is not None:
            if b"best iteration" in self._before[-60:].lower():
                return None  # said once more
            point = self._names.point(found[0], self._line)
            self._rare = True
            return None if point is None else replace(point, settings=found[1])
        if not any(word in low for word in _METRIC):
            return None
        pairs, settings, strong = self._pairs(text, low)
        if not pairs or (b"train_runtime" in low and b"grad_norm" not in low and b"learning_rate" not in low):
            return None
        point = self._names.point(pairs, self._line)
        if (
            point is not None
            and point.values.get("lr") == 0
            and any(found.role == "lr" and rounded_away(match[3]) for found, match in self._matches)
        ):
            point = replace(point, values={name: value for name, value in point.values.items() if name != "lr"})
        if point is None:
            return None
        if point.step is None:
            placed, self._is_drawn = self._places.of(text, self._before, point, settings)
            if placed is None:
                return None
            point = placed
        if b"skipped iterations" in low:
            point = replace(point, skipped_in_all=False)
        scale_alone = "scale" in point.values and b"[Rank " in text  # DeepSpeed's
        headed = point.epoch is not None and all(found.role != "epoch" for found, _ in pairs)
        if not (is_step(point) or scale_alone) or (len(pairs) == 1 and point.step is None and not _alone(text, strong or headed)):
            return None
        if not strong and point.step is None and point.epoch is None:
            return None
        if any(found.role == "grad_norm" and match[3] == b"0.00" for found, match in self._matches):
            settings["coarse_norm"] = 1.0
        if _REWARDS.search(low):
            settings["rewards"] = 1.0
        values = point.values
        if (
            "loss" not in values
            and "lr" in values
            and ("scale" in values or "grad_norm" in values)
            and "loss" in self._names.best
        ):
            point = replace(point, loss_missing=True)  # Megatron prints no loss that is NaN
        return replace(point, settings=settings) if settings else point

    def _pairs(self, text: bytes, low: bytes) -> tuple[list[tuple[Found, float]], dict[str, float], bool]:
        """Names and values; what was planned; whether one of them has more than a space between name and value."""
        pairs: list[tuple[Found, float]] = []
        settings: dict[str, float] = {}
        strong = False
        evaluation: int | None = None  # where a word says that this is of an evaluation
        for match in _PAIR.finditer(text):
            word, separator, value, total = match.groups()
            found = self._meaning(word)
            start = match.start()
            if separator == b" is " and not _SENTENCE.search(text, max(0, start - 4), start):
                continue
            if text[start - 1 : start] == b" " and text[start - 2 : start - 1].isalpha() and word.lower() in _LAST_WORDS:
                found = self._phrase(word, text[max(0, start - 32) : start], found, separator)
            if found is None:
                if word != b"val" or b"loss train" not in low:
                    continue
                found = Found("eval_loss", 0, "val")
            role, rank, name = found
            if role == "step" and (text[match.end() : match.end() + 1] == b"%" or not parse(value).is_integer()):
                continue  # a bar: "Steps:   4%|"; or a time: "Batch (t): 0.512"
            if role == "loss" and word.lower() in (b"loss", b"value", b"ppl", b"perplexity"):
                if evaluation is None:
                    said = _EVALUATION.search(text)
                    evaluation = len(text) if said is None else said.start()
                found = Found("eval_loss" if evaluation < start else "loss", rank, name)
            elif total is not None and role in ("step", "epoch"):
                settings["steps" if role == "step" else "epochs"] = float(total)
            strong = strong or not (separator.isspace() or separator == b" is ")
            pairs.append((found, parse(value)))
            self._matches.append((found, match))
            if len(pairs) == MOST_PAIRS:
                break
        if not strong:  # "loss 0.5 / acc 0.9"
            ends = ((a.end(), b.start()) for (_, a), (_, b) in pairwise(self._matches))
            strong = any(_BETWEEN.fullmatch(text, *between) for between in ends)
        return pairs, settings, strong

    def _learn(self, raw: bytes, text: bytes, point: Point) -> None:
        """Build a layout from a line that was parsed by its names alone."""
        if self._known != self._names.best:
            self._known = dict(self._names.best)
            self._layouts.clear()
        chosen = self._names.chosen(tuple(found for found, _ in self._matches))
        if not self._matches or point.loss_missing:
            return
        if any(found.role == "nan_count" and parse(match[3]) for found, match in self._matches):
            return  # a note goes with it
        bar = BAR.search(raw) if self._is_drawn else None
        if bar is None and b"%|" in raw:
            return
        if self._tries == TRIES or len(raw) > 2000 or (bar is None and _from_above(point, chosen)):
            return
        self._tries += 1
        offset = len(raw) - len(text)
        counted = {role: self._matches[index][1] for role, index in chosen.items() if role != "nan_count"}
        spans = [Span(offset + match.start(3), offset + match.end(3), role) for role, match in counted.items()]
        fixed = [(0, offset)]
        for (role, _, _), match in self._matches:
            fixed += [(offset + match.start(), offset + match.start(3)), (offset + match.start(4), offset + match.end(4))]
            fixed += [(offset + match.start(3), offset + match.end(3))] if role == "nan_count" else []
        self._layouts = [Layout(raw, spans, fixed, point, bar), *self._layouts[: MOST - 1]]

    def _meaning(self, name: bytes) -> Found | None:
        try:
            return self._found[name]
        except KeyError:
            if len(name) > 80:
                return None
            if len(self._found) > 4096:
                self._found.clear()
            found = self._found[name] = meaning(name.decode("utf-8", "replace"))
            return found

    def _phrase(self, word: bytes, before: bytes, found: Found | None, separator: bytes) -> Found | None:
        """A name of several words, the longest that is known. A word before it that belongs to no name makes it prose, unless
        a colon follows."""
        match = _BEFORE.search(before)
        if match is None:
            return found
        words = match[1].split(b" ")
        if any(other.lower() in _SETTINGS for other in words):
            return None
        if found is not None and found.role in ("step", "epoch"):
            return found
        part = None
        for count in range(len(words)):
            longer = self._meaning(b" ".join([*words[count:], word]))
            if longer is not None and longer.rank < 2 * COARSE:
                if not longer.role.startswith(TERM):
                    return longer
                part = part or longer
        if part is not None:
            return part
        if word.lower() == b"loss" and _NUMBERED.search(words[-1]):  # "mtp_1 loss"
            name = f"{words[-1].decode('ascii', 'replace')} loss"
            return Found(TERM + name, 0, name)
        return None if separator.isspace() or word.lower() in (b"norm", b"scale") else found

    # -- giving out --------------------------------------------------------------------------------------------------------

    def _give(self, point: Point, text: bytes) -> Iterator[Point | Note]:
        waits = point.step is None and b"{" in text
        inline = last_bar(text[: text.find(b"{")]) if waits else None
        bar = inline or (last_bar(self._before) if waits else None)
        if self._is_drawn and self._drawn is not None and self._drawn.step == point.step:
            self._drawn = point
            return
        yield from self._release(crowded=waits and bar is None)
        self._after = self._before = b""
        if self._is_drawn:
            self._drawn = point
            return
        if self._again(point):
            return
        if bar is not None:
            self._held, self._held_total, self._inline = point, bar[1], inline
            return
        yield point
        if b"number of nan iterations:" in text and not re.search(rb"number of nan iterations:\s+0\b", text):
            yield Note("nan-warning", clean(text), point.line, point.step)

    def _again(self, point: Point) -> bool:
        """Whether this is the last point once more: a bar that was drawn again, or another rank."""
        self._read += 1
        last, self._last = self._last, point
        if last is None or point.step is None or point.step != last.step:
            return False
        return repr((point.values, point.terms)) == repr((last.values, last.terms))  # NaN is the same as NaN here

    def _release(self, crowded: bool = False) -> Iterator[Point | Note]:
        """The point that was held back, with the step of the bar that was drawn anew after it, or of the one in its own line.
        Where output was buffered there is no bar before or none after, and the step stays unknown."""
        held, drawn = self._held, self._drawn
        self._held = self._drawn = None
        if drawn is not None and not self._again(drawn):
            yield drawn
        if held is not None:
            bar = first_bar(self._after, self._total or ("loss" in held.values and self._held_total) or None)
            if bar is None and not crowded and "loss" in held.values and self._total in (None, self._held_total):
                bar = self._inline
            if bar is not None:
                self._total = bar[1]
                held = replace(held, step=float(bar[0]), settings={**held.settings, "steps": float(bar[1])})
            yield held


def _from_above(point: Point, chosen: dict[str, int]) -> bool:
    """Whether the step or the epoch stands somewhere else than in a pair of the line itself."""
    return ("step" not in chosen and point.step is not None) or ("epoch" not in chosen and point.epoch is not None)


def _alone(text: bytes, strong: bool) -> bool:
    """Whether one value without anything else may be a step: a line that starts with it, no code and no sentence."""
    said = without_prefix(text)
    pair = _PAIR.search(said)
    if pair is None or not strong or len(said) > 200 or (text[:1].isspace() and b" = " in text) or b"`" in said:
        return False
    if _BEFORE_ALONE.fullmatch(said, 0, pair.start()) is not None:
        return True
    return not said[pair.end() :].strip() and _TITLE.fullmatch(said, 0, pair.start()) is not None
