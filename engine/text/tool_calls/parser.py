"""Splits a streamed answer into its parts: thinking, content and calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby

from engine.text.tool_calls.call_reader import AnswerOver, CallEmitter, CallReader, Types
from engine.text.tool_calls.formats import AnswerFormat, AnswerRegion
from engine.text.tool_calls.marks import (
    AnswerMark,
    AnswerPartEvent,
    CallBegun,
    CallEnded,
    CallText,
    IncomingText,
    MalformedCall,
    PartText,
    Reading,
)

Watched = tuple[AnswerMark, AnswerRegion | None]
"""A mark that may come next, and the region that it opens or closes; None for noise."""


class AnswerParser:
    """Incremental parser for one answer.

    Whitespace next to a mark belongs to the mark. Text that only looks like a call is content; an
    incomplete call is emitted as far as possible, and its end event says that it is incomplete. If
    an answer is cut off, the possible beginning of a call or of a mark around calls is dropped,
    because clients take content for the model's answer, a call without a name cannot be emitted,
    and the finish reason says that the answer was cut off.

    An answer ends at a repetition of an earlier call, which is not emitted, because small models
    would repeat it up to their limit.

    Args:
        types: argument types of each available function; None if there are no functions, so that
            calls are content.
        prompt: end of the prompt, which may have opened thinking.
        hidden: spellings of control tokens, which are never content.
        is_single: whether the answer is over after its first complete call.

    Attributes:
        is_over: whether the rest of the answer is ignored, so that generation can stop.
    """

    def __init__(
        self, form: AnswerFormat, types: Types | None = None, prompt: str = "",
        hidden: Sequence[str] = (), *, is_single: bool = False,
    ) -> None:  # fmt: skip
        layout = form.layout
        self._form = form
        self._types: Types = types or {}
        self._source = IncomingText()
        self._events: list[AnswerPartEvent] = []
        self._calls_before: list[tuple[str, str]] = []
        self._is_single = is_single
        self.is_over = self._is_cut = False
        self._content = _PartEmitter(self._emit_content, layout.join)
        regions = [r for r in layout.regions if r.part != "call" or types is not None]
        self._openings = [(region.opening, region) for region in regions if region.opening]
        self._thoughts = {
            id(r): _PartEmitter(self._emit_thought, r.join)
            for r in regions
            if r.part == "reasoning"
        }
        noise = dict.fromkeys((*form.noise, *hidden))
        self._silent = set(hidden) - set(form.noise)
        self._hidden = [AnswerMark(text, is_text=True) for text in noise if text]
        self._noise = list(self._hidden)
        self._reader: CallReader | None = None
        if layout.calls:
            closings = [region.closing for region in regions if region.part == "call"]
            closing = closings[0] if closings else None
            self._reader = CallReader(self._source, layout.calls, closing, self._types)
        self._reading = self._run(self._open_in(prompt, regions))

    def feed(self, text: str) -> list[AnswerPartEvent]:
        """Add text and return the events that are certain now."""
        if text and not self.is_over:
            self._source.add(text)
            self._read()
        return self._drained()

    def end(self, *, is_cut: bool = False) -> list[AnswerPartEvent]:
        """Return the remaining events at the end of the text, which may be incomplete
        (`is_cut`)."""
        self._source.is_ended, self._is_cut = True, is_cut
        if not self.is_over:
            self._read()
        return self._drained()

    def _read(self) -> None:
        try:
            for _ in self._reading:
                if not self._source.is_ended:
                    return
        except AnswerOver:
            self.is_over = True

    def _drained(self) -> list[AnswerPartEvent]:
        events, self._events[:] = self._events[:], []
        return [_joined(list(group)) for _, group in groupby(events, _kind)]

    def _open_in(self, prompt: str, regions: Sequence[AnswerRegion]) -> AnswerRegion | None:
        tail = prompt.rstrip()[-200:]
        for region in regions:
            if region.part == "reasoning" and region.opening:
                matches = [*re.finditer(region.opening.pattern, tail)]
                if matches and matches[-1].end() == len(tail):
                    return region
        return None

    def _run(self, opened: AnswerRegion | None) -> Reading[None]:
        if opened is not None:
            yield from self._thought(opened)
        while (mark := (yield from self._next_mark(self._content, self._watched()))) is not None:
            match, region = mark
            if region is None and match[0] not in self._silent:
                self._content.mark()
                self._noise = list(self._hidden)
            elif region is None:
                pass
            elif region.part == "call":
                yield from self._calls(region, match)
            elif region.part == "reasoning":
                self._content.mark()
                yield from self._thought(region)
            else:
                self._content.mark()
                yield from self._said(region)
        self._content.end()

    def _watched(self) -> list[Watched]:
        noise: list[Watched] = [(mark, None) for mark in self._noise]
        return [*self._openings, *noise]

    def _thought(self, region: AnswerRegion) -> Reading[None]:
        emitter = self._thoughts[id(region)]
        emitter.mark()
        yield from self._inside(emitter, region)
        self._content.mark()

    def _said(self, region: AnswerRegion) -> Reading[None]:
        yield from self._inside(self._content, region)
        self._content.mark()

    def _inside(self, emitter: _PartEmitter, region: AnswerRegion) -> Reading[None]:
        watched: list[Watched] = [(mark, None) for mark in self._hidden]
        if region.closing:
            watched.insert(0, (region.closing, region))
        while (mark := (yield from self._next_mark(emitter, watched))) is not None:
            if mark[1] is not None:
                emitter.mark()
                return
        emitter.end()

    def _next_mark(
        self, emitter: _PartEmitter, watched: Sequence[Watched]
    ) -> Reading[tuple[re.Match[str], AnswerRegion | None] | None]:
        """Emit the text before the next mark, skip the mark and return it; None at the end."""
        source = self._source
        while True:
            best: tuple[re.Match[str], AnswerRegion | None] | None = None
            end = len(source.text)
            for mark, region in watched:
                is_whole = source.is_ended and not self._may_be_cut(region)
                match, held = mark.find(source.text, source.at, is_ended=is_whole)
                if self._is_too_late(region, match.start() if match else held):
                    continue
                end = min(end, held)
                if match and match[0] and (best is None or _is_before(match, best[0])):
                    best = match, region
            if best is not None and best[0].start() < end:
                emitter.add(source.text[source.at : best[0].start()])
                source.at = best[0].end()
                return best
            emitter.add(source.text[source.at : end])
            source.at = max(source.at, end)
            if source.is_ended:
                if source.at < len(source.text):
                    emitter.mark()
                    source.at = len(source.text)
                return None
            yield

    def _may_be_cut(self, region: AnswerRegion | None) -> bool:
        """Return whether an incomplete mark at the end is dropped.

        Marks of thinking are not, because thinking may be continued; nor are bare calls, which look
        like text.
        """
        is_thought = region is not None and region.part == "reasoning"
        return self._is_cut and not is_thought and not self._form.is_bare

    def _has_left_out(self, region: AnswerRegion) -> bool:
        if not (self._source.has_run_out and self._may_be_cut(region)):
            return False
        self._source.at = len(self._source.text)
        self._content.mark()
        return True

    def _is_too_late(self, region: AnswerRegion | None, place: int) -> bool:
        """Return whether a bare call is preceded by other text."""
        if region is None or region.part != "call" or not self._form.is_bare:
            return False
        before = self._source.text[self._source.at : place]
        return self._content.has_emitted or bool(before.strip())

    def _calls(self, region: AnswerRegion, match: re.Match[str]) -> Reading[None]:
        """Read the calls after an opening mark; if there are none, the mark is content."""
        source, calls = self._source, self._form.layout.calls
        name = match.groupdict().get("name", "")
        if self._form.is_bare and name not in self._types:
            self._content.add(self._visible(match[0]))
            return
        source.at = match.start()
        with ExitStack() as keeping:
            start = keeping.enter_context(source.kept())
            source.at += len(match[0])
            is_list = calls is not None and calls.kind == "list"
            if is_list:
                yield from source.skip_space()
                is_list = yield from source.starts("[")
            if not (yield from self._call(name, keeping)):
                if self._has_left_out(region):
                    return
                source.at = start + len(match[0])
                self._content.add(self._visible(match[0]))
                return
        self._has_left_out(region)
        if is_list:
            yield from self._more_calls(region)
        closing = [region.closing] if region.closing else []
        self._noise = [*self._hidden, *closing]

    def _more_calls(self, region: AnswerRegion) -> Reading[None]:
        source = self._source
        yield from source.skip_space()
        while (yield from source.starts(",")):
            with ExitStack() as keeping:
                start = keeping.enter_context(source.kept())
                if not (yield from self._call("", keeping)):
                    if not self._has_left_out(region):
                        source.at = start
                    return
            yield from source.skip_space()
        yield from source.starts("]")

    def _call(self, name: str, keeping: ExitStack) -> Reading[bool]:
        """Read a call; return whether there was one. If not, the position is undefined."""
        assert self._reader is not None, "formats with call marks define calls"
        emitter = CallEmitter(self._calls_before, self._events, keeping, is_single=self._is_single)
        self._source.has_run_out = False
        with suppress(MalformedCall):
            yield from self._reader.read(emitter, name)
        if emitter.has_begun:
            self._content.mark()
            emitter.break_off()
        return emitter.has_begun

    def _visible(self, text: str) -> str:
        for mark in self._hidden:
            text = re.sub(mark.pattern, "", text)
        return text

    def _emit_content(self, text: str) -> None:
        self._events.append(PartText("content", text))

    def _emit_thought(self, text: str) -> None:
        self._events.append(PartText("reasoning", text))


class _PartEmitter:
    """Emitter of one part's text, joined and without whitespace next to marks."""

    def __init__(self, emit: Callable[[str], None], join: str) -> None:
        self._emit, self._join = emit, join
        self._spaces, self._is_behind_mark = "", False
        self.has_emitted = False

    def add(self, text: str) -> None:
        """Emit text, but hold back trailing whitespace."""
        if self._is_behind_mark:
            text = text.lstrip()
            self._is_behind_mark = not text
            if text and self.has_emitted:
                text = self._join + text
        text = self._spaces + text
        visible = text.rstrip()
        self._spaces = text[len(visible) :]
        if visible:
            self._emit(visible)
            self.has_emitted = True

    def mark(self) -> None:
        """Drop the whitespace before and after a mark."""
        self._spaces, self._is_behind_mark = "", True

    def end(self) -> None:
        """Emit the whitespace that was held back."""
        if self._spaces:
            self._emit(self._spaces)
            self._spaces = ""


def _kind(event: AnswerPartEvent) -> tuple[str, object]:
    if isinstance(event, PartText):
        return "text", event.part
    return type(event).__name__, event.index


def _joined(events: Sequence[AnswerPartEvent]) -> AnswerPartEvent:
    first = events[0]
    if len(events) == 1 or isinstance(first, CallBegun | CallEnded):
        return first
    texts = (event.text for event in events if isinstance(event, PartText | CallText))
    return replace(first, text="".join(texts))


def _is_before(match: re.Match[str], other: re.Match[str]) -> bool:
    return (match.start(), -match.end()) < (other.start(), -other.end())
