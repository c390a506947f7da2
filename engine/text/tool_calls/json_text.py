"""Reads JSON that is still coming, and what models write in its place, as valid JSON.

What is told is the beginning of a valid JSON text at any time. Where the text breaks off or is no
JSON, readers raise `BrokenForm` and leave it unclosed, so that nobody takes it for the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.text.tool_calls.source import BrokenForm, IncomingText, Reading

Tell = Callable[[str], None]
"""Receiver of a piece of JSON."""

MAX_DEPTH = 64
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write, too
_LITERALS |= {word: word for word in _LITERALS.values()}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUMBER_LETTERS = "+-.eE0123456789"
_STRING_END = re.compile(r'["\\]')
_HEX = "0123456789abcdefABCDEF"
_SHORT_ESCAPES = '"\\/bfnrt'


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model's values differ from JSON.

    Attributes:
        has_bare_keys: whether keys of objects may stand without quotes.
        quotes: pairs of texts around strings, which know no escapes, beside JSON's own quotes.
    """

    has_bare_keys: bool = False
    quotes: tuple[tuple[str, str], ...] = ()


JSON = Dialect()


def escaped(text: str) -> str:
    """Return text as it stands inside the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonReader:
    """Reader of values of one source."""

    def __init__(self, source: IncomingText, dialect: Dialect = JSON) -> None:
        self._source, self._dialect = source, dialect

    def value(self, tell: Tell, depth: int = 0) -> Reading[None]:
        """Read a value of any kind, and tell it as JSON."""
        source = self._source
        char = yield from source.skip_space()
        if depth > MAX_DEPTH:
            raise BrokenForm
        if char == "{":
            yield from self.object(tell, depth)
        elif char == "[":
            yield from self._list(tell, depth)
        elif (closing := (yield from self._quote())) is not None:
            yield from self._string(tell, closing)
        else:
            yield from self._plain(tell)

    def object(self, tell: Tell, depth: int = 0) -> Reading[None]:
        """Read an object, and tell it as JSON."""
        source = self._source
        yield from source.expect("{")
        tell("{")
        comma = ""
        while (yield from source.skip_space()) != "}":
            key = yield from self.key()
            yield from self.colon()
            tell(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.value(tell, depth + 1)
            yield from source.skip_space()
            comma = ", "
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("}")
        tell("}")

    def key(self) -> Reading[str]:
        """Read a key of an object."""
        yield from self._source.skip_space()
        closing = yield from self._quote()
        if closing is not None:
            return (yield from self._collected(closing))
        if not self._dialect.has_bare_keys:
            raise BrokenForm
        key = ""
        while (char := (yield from self._source.peek())) and (char.isalnum() or char in "_-.$"):
            key += char
            self._source.at += 1
        if not key:
            raise BrokenForm
        return key

    def colon(self) -> Reading[None]:
        """Skip the colon after a key."""
        yield from self._source.skip_space()
        yield from self._source.expect(":")

    def string(self) -> Reading[str]:
        """Read a string."""
        yield from self._source.skip_space()
        closing = yield from self._quote()
        if closing is None:
            raise BrokenForm
        return (yield from self._collected(closing))

    def _list(self, tell: Tell, depth: int) -> Reading[None]:
        source = self._source
        yield from source.expect("[")
        tell("[")
        comma = ""

        def item(text: str) -> None:
            nonlocal comma
            tell(comma + text)
            comma = ""

        while (yield from source.skip_space()) != "]":
            yield from self.value(item, depth + 1)
            yield from source.skip_space()
            comma = ", "
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("]")
        tell("]")

    def _quote(self) -> Reading[str | None]:
        """Skip an opening quote and return the one that closes it; None where there is none."""
        for opening, closing in (*self._dialect.quotes, ('"', '"')):
            if (yield from self._source.starts(opening)):
                return closing
        return None

    def _collected(self, closing: str) -> Reading[str]:
        pieces: list[str] = []
        yield from self._string(pieces.append, closing)
        text = str(json.loads("".join(pieces)))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _string(self, tell: Tell, closing: str) -> Reading[None]:
        """Read a string behind its opening quote."""
        source = self._source
        tell('"')
        while not (yield from source.starts(closing)):
            char = yield from source.peek()
            if not char:
                raise BrokenForm
            if char == "\\" and closing == '"':
                tell((yield from self._escape()))
                continue
            source.at += 1
            if closing == '"':
                char += self._plain_run()
            tell(escaped(char))
        tell('"')

    def _plain_run(self) -> str:
        """Return what has come already up to the next quote or backslash."""
        source = self._source
        end = _STRING_END.search(source.text, source.at)
        run = source.text[source.at : end.start() if end else len(source.text)]
        source.at += len(run)
        return run

    def _escape(self) -> Reading[str]:
        """Read an escape whole; one that JSON does not know is its character behind a backslash."""
        source = self._source
        source.at += 1
        char = yield from source.peek()
        if not char:
            raise BrokenForm
        source.at += 1
        if char != "u":
            return "\\" + char if char in _SHORT_ESCAPES else "\\\\" + escaped(char)
        digits = ""
        while len(digits) < 4 and (char := (yield from source.peek())) and char in _HEX:
            digits += char
            source.at += 1
        return "\\u" + digits if len(digits) == 4 else "\\\\u" + digits

    def _plain(self, tell: Tell) -> Reading[None]:
        """Read a number, true, false or null whole."""
        source = self._source
        start = source.at
        with source.kept():
            word = ""
            while (char := (yield from source.peek())) and (
                char in _NUMBER_LETTERS or char.isalpha()
            ):
                word += char
                source.at += 1
            if not (word in _LITERALS or _NUMBER.fullmatch(word)):
                source.at = start
                raise BrokenForm
        tell(_LITERALS.get(word, word))
