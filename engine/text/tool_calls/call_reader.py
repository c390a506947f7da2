"""Reads function calls in the text of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from engine.text.tool_calls.formats import CallFormat
from engine.text.tool_calls.json_text import JsonReader, as_json, escaped, json_or_text
from engine.text.tool_calls.marks import (
    AnswerMark,
    AnswerPartEvent,
    CallBegun,
    CallEnded,
    CallText,
    IncomingText,
    MalformedCall,
    Reading,
)

Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Types of each function's arguments, by name."""

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class AnswerOver(Exception):
    """Signal that the rest of the answer is ignored."""


class CallEmitter:
    """Emitter of one call's events, which are delayed while the call may repeat an earlier one.

    Args:
        before: names and arguments of earlier calls; this one is appended.
        events: list that receives the events.
        keeping: context that keeps the text until it is known to be a call.
        is_single: whether the answer is over after this call.

    Attributes:
        has_begun: whether the text is known to be a call.
    """

    def __init__(
        self, before: list[tuple[str, str]], events: list[AnswerPartEvent], keeping: ExitStack, *,
        is_single: bool,
    ) -> None:  # fmt: skip
        self._before, self._events, self._keeping = before, events, keeping
        self._index, self._is_single = len(before), is_single
        self._name = self._arguments = ""
        self._held: list[AnswerPartEvent] = []
        self.has_begun = self._is_closed = False

    def begin(self, name: str) -> None:
        """Emit the name; reading can no longer go back before the call."""
        self._name = name
        self.has_begun = True
        self._keeping.close()
        self._emit(CallBegun(self._index, name))

    def add(self, text: str) -> None:
        """Emit a further piece of the arguments."""
        self._arguments += text
        self._emit(CallText(self._index, text))

    def end(self) -> None:
        """Emit the end of complete arguments.

        Raises:
            AnswerOver: the call repeats an earlier one, or only one call is allowed.
        """
        self._close(is_whole=True)
        if self._is_single:
            raise AnswerOver

    def break_off(self) -> None:
        """Emit the end of incomplete arguments, unless an end was already emitted.

        Raises:
            AnswerOver: the call breaks off like an earlier one.
        """
        if not self._is_closed:
            self._close(is_whole=False)

    def _emit(self, event: AnswerPartEvent) -> None:
        self._held.append(event)
        if not any(
            name == self._name and arguments.startswith(self._arguments)
            for name, arguments in self._before
        ):
            self._release()

    def _release(self) -> None:
        self._events += self._held
        self._held.clear()

    def _close(self, *, is_whole: bool) -> None:
        if (self._name, self._arguments) in self._before:
            raise AnswerOver
        self._release()
        self._events.append(CallEnded(self._index, is_whole))
        self._before.append((self._name, self._arguments))
        self._is_closed = True


class CallReader:
    """Reader of calls in one format, up to `closing`; `types` maps functions to their argument
    types."""

    def __init__(
        self, source: IncomingText, form: CallFormat, closing: AnswerMark | None, types: Types
    ) -> None:
        self._source, self._form, self._closing, self._types = source, form, closing, types
        self._json = JsonReader(source, form.dialect)

    def read(self, emitter: CallEmitter, name: str) -> Reading[None]:
        """Read one call after its mark, or an item of a list.

        Args:
            name: name in the mark; "" if the format has the name inside the call.

        Raises:
            MalformedCall: the call breaks off or is not one; its emitted arguments are incomplete
                unless `emitter.end` was called.
        """
        if self._form.kind == "tags":
            emitter.begin(name)
            yield from self._tags(emitter.add, self._types.get(name, {}))
            emitter.end()
        elif self._form.kind == "arguments":
            if (yield from self._source.skip_space()) != "{":
                raise MalformedCall
            emitter.begin(name)
            yield from self._json.object(emitter.add)
            emitter.end()
        else:
            yield from self._named_object(emitter)

    def _named_object(self, emitter: CallEmitter) -> Reading[None]:
        source = self._source
        name, arguments = "", ""
        yield from source.skip_space()
        yield from source.expect("{")
        is_begun = False
        while (yield from source.skip_space()) != "}":
            key = yield from self._json.key()
            yield from self._json.colon()
            if key in _NAMES and not name:
                name = yield from self._json.string()
            elif key in _ARGUMENTS and name and not is_begun:
                yield from self._arguments_of(emitter, name)
                is_begun = True
            elif key in _ARGUMENTS and not is_begun:
                arguments = yield from self._collected()
            else:
                yield from self._json.value(lambda _: None)
            yield from source.skip_space()
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("}")
        if not name:
            raise MalformedCall
        if not is_begun:
            emitter.begin(name)
            emitter.add(arguments or "{}")
            emitter.end()

    def _arguments_of(self, emitter: CallEmitter, name: str) -> Reading[None]:
        """Read and emit arguments; objects are streamed."""
        if (yield from self._source.skip_space()) == "{":
            emitter.begin(name)
            yield from self._json.object(emitter.add)
        else:
            arguments = yield from self._collected()
            emitter.begin(name)
            emitter.add(arguments)
        emitter.end()

    def _collected(self) -> Reading[str]:
        """Read complete arguments; they may be an object in quotes, or null."""
        char = yield from self._source.skip_space()
        pieces: list[str] = []
        if char != '"':
            yield from self._json.value(pieces.append)
            text = "".join(pieces)
        else:
            text = (yield from self._json.string()).strip()
        if text in ("", "null"):
            return "{}"
        if not as_json(text, ("object",)).startswith("{"):
            raise MalformedCall
        return text

    def _tags(
        self, emit: Callable[[str], None], types: Mapping[str, tuple[str, ...]]
    ) -> Reading[None]:
        """Read arguments in tags, up to the mark after the call, which is not consumed."""
        opening, closing, comma = self._form.value_opening, self._closing, ""
        assert opening is not None, "formats with tags define them"
        assert closing is not None, "only the closing mark shows that no argument is missing"
        emit("{")
        while (tag := (yield from self._tag(opening))) is not None:
            emit(f'{comma}"{escaped(tag["key"])}": ')
            comma = ", "
            is_text = tag.groupdict().get("is_text") == "true"
            known = ("string",) if is_text else types.get(tag["key"], ())
            yield from self._tag_value(emit, known)
        if (yield from self._next(closing, is_taken=False)) is None:
            raise MalformedCall
        emit("}")

    def _tag(self, opening: AnswerMark) -> Reading[re.Match[str] | None]:
        yield from self._source.skip_space()
        return (yield from self._next(opening, is_taken=True))

    def _next(self, mark: AnswerMark, *, is_taken: bool) -> Reading[re.Match[str] | None]:
        source = self._source
        while True:
            match, held = mark.find(source.text, source.at, is_ended=source.is_ended)
            if match and match.start() == source.at:
                source.at = match.end() if is_taken else source.at
                return match
            if source.is_ended and mark.find(source.text, source.at)[1] == source.at:
                source.has_run_out = True
            if held > source.at or source.is_ended:
                return None
            yield

    def _tag_value(self, emit: Callable[[str], None], types: tuple[str, ...]) -> Reading[None]:
        """Read a value up to its closing mark; strings are streamed."""
        has_json = self._form.has_json_values and not types
        if has_json or set(types) - {"string"}:
            pieces: list[str] = []
            yield from self._raw_value(pieces.append)
            text = "".join(pieces)
            emit(json_or_text(text) if has_json else as_json(text, types))
            return
        emit('"')
        yield from self._raw_value(lambda text: emit(escaped(text)))
        emit('"')

    def _raw_value(self, emit: Callable[[str], None]) -> Reading[None]:
        source, closing = self._source, self._form.value_closing
        assert closing is not None, "formats with tags define them"
        while True:
            match, held = closing.find(source.text, source.at)
            end = match.start() if match else held
            if end > source.at:
                emit(source.text[source.at : end])
                source.at = end
            if match:
                source.at = match.end()
                return
            if source.is_ended:  # the possible beginning of a mark is not part of the value
                source.at = len(source.text)
                source.has_run_out = True
                raise MalformedCall
            yield
