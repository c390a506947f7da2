"""Reads calls of functions in the text of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.text.tool_calls.formats import CallForm
from engine.text.tool_calls.json_text import JsonReader, as_json, escaped, json_or_text
from engine.text.tool_calls.marks import AnswerMark, BrokenForm, IncomingText, Reading

Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Types of the arguments of each function, by their names."""

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class CallTeller(Protocol):
    """Receiver of one call."""

    def begin(self, name: str) -> None:
        """Receive the name of the function, whose arguments follow."""
        ...

    def add(self, text: str) -> None:
        """Receive more of the arguments."""
        ...

    def end(self) -> None:
        """Note that the arguments are whole."""
        ...


class CallReader:
    """Reader of the calls of one form.

    Args:
        closing: mark behind a call; None where there is none.
        types: types of the arguments of the functions that may be called.
    """

    def __init__(
        self, source: IncomingText, form: CallForm, closing: AnswerMark | None, types: Types
    ) -> None:
        self._source, self._form, self._closing, self._types = source, form, closing, types
        self._json = JsonReader(source, form.dialect)

    def read(self, teller: CallTeller, name: str) -> Reading[None]:
        """Read one call behind its mark, or an item of a list.

        Args:
            name: name in the mark; "" for a form whose calls name their function inside.

        Raises:
            BrokenForm: the call breaks off or is none; what was told of its arguments is unclosed
                unless `teller.end` was called.
        """
        if self._form.kind == "tags":
            teller.begin(name)
            yield from self._tags(teller.add, self._types.get(name, {}))
            teller.end()
        elif self._form.kind == "arguments":
            if (yield from self._source.skip_space()) != "{":
                raise BrokenForm
            teller.begin(name)
            yield from self._json.object(teller.add)
            teller.end()
        else:
            yield from self._named_object(teller)

    def _named_object(self, teller: CallTeller) -> Reading[None]:
        """Read an object with a name and arguments, in any order."""
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
                yield from self._told(teller, name)
                is_begun = True
            elif key in _ARGUMENTS and not is_begun:
                arguments = yield from self._collected()
            else:
                yield from self._json.value(_ignored)
            yield from source.skip_space()
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("}")
        if not name:
            raise BrokenForm
        if not is_begun:
            teller.begin(name)
            teller.add(arguments or "{}")
            teller.end()

    def _told(self, teller: CallTeller, name: str) -> Reading[None]:
        """Tell a call whose arguments come next; an object is told as it comes."""
        if (yield from self._source.skip_space()) == "{":
            teller.begin(name)
            yield from self._json.object(teller.add)
        else:
            arguments = yield from self._collected()
            teller.begin(name)
            teller.add(arguments)
        teller.end()

    def _collected(self) -> Reading[str]:
        """Read arguments whole; they may be the text of an object in quotes, or null."""
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
            raise BrokenForm
        return text

    def _tags(
        self, tell: Callable[[str], None], types: Mapping[str, tuple[str, ...]]
    ) -> Reading[None]:
        """Read arguments in tags, up to the mark behind the call, which stays."""
        opening, closing, comma = self._form.value_opening, self._closing, ""
        assert opening is not None, "a form with tags names them"
        assert closing is not None, "only the closing mark says that no argument is missing"
        tell("{")
        while (tag := (yield from self._tag(opening))) is not None:
            tell(f'{comma}"{escaped(tag["key"])}": ')
            comma = ", "
            is_text = tag.groupdict().get("is_text") == "true"
            known = ("string",) if is_text else types.get(tag["key"], ())
            yield from self._tag_value(tell, known)
        if (yield from self._next(closing, is_taken=False)) is None:
            raise BrokenForm
        tell("}")

    def _tag(self, opening: AnswerMark) -> Reading[re.Match[str] | None]:
        """Skip the mark before a value and return it, with the argument's name; None for none."""
        yield from self._source.skip_space()
        return (yield from self._next(opening, is_taken=True))

    def _next(self, mark: AnswerMark, *, is_taken: bool) -> Reading[re.Match[str] | None]:
        """Return a mark if it comes next, and go behind it if it is to be taken."""
        source = self._source
        while True:
            found, held = mark.find(source.text, source.at, is_ended=source.is_ended)
            if found and found.start() == source.at:
                source.at = found.end() if is_taken else source.at
                return found
            if source.is_ended and mark.find(source.text, source.at)[1] == source.at:
                source.has_run_out = True
            if held > source.at or source.is_ended:
                return None
            yield

    def _tag_value(self, tell: Callable[[str], None], types: tuple[str, ...]) -> Reading[None]:
        """Read a value up to its closing mark; a string is told as it comes."""
        has_json = self._form.has_json_values and not types
        if has_json or set(types) - {"string"}:
            pieces: list[str] = []
            yield from self._raw_value(pieces.append)
            text = "".join(pieces)
            tell(json_or_text(text) if has_json else as_json(text, types))
            return
        tell('"')
        yield from self._raw_value(lambda text: tell(escaped(text)))
        tell('"')

    def _raw_value(self, tell: Callable[[str], None]) -> Reading[None]:
        source, closing = self._source, self._form.value_closing
        assert closing is not None, "a form with tags names them"
        while True:
            found, held = closing.find(source.text, source.at)
            end = found.start() if found else held
            if end > source.at:
                tell(source.text[source.at : end])
                source.at = end
            if found:
                source.at = found.end()
                return
            if source.is_ended:  # what may have begun the mark is no more of the value
                source.at = len(source.text)
                source.has_run_out = True
                raise BrokenForm
            yield


def _ignored(text: str) -> None:
    """Ignore a piece of a call."""
