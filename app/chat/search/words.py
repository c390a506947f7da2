"""The words of a search, when a text has them, and the piece of it that is shown.

A text is compared *folded*: without case, accents of Latin, Greek and Cyrillic letters, and line
breaks. A word is found anywhere, also inside another one; words in quotes are found as they stand.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from engine import printable

MAX_WORDS: Final = 16
"""Largest number of words of a search; others are left out."""

LONGEST_WORD: Final = 200
"""Largest number of characters of a folded word; what follows is left out."""

BEFORE, AFTER = 36, 150
"""Numbers of characters of a snippet before and after the place that was found."""

CHUNK: Final = 4000
"""Number of characters that are looked at in one go for a snippet."""

_WORD = re.compile(r'"([^"]*)"?|([^\s"]+)')
_QUOTES = str.maketrans("“”„«»", '"' * 5)
_ACCENTS = re.compile("[\u0300-\u036f]")
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f]+")
_MARKUP: Final = (
    (re.compile(r"(?<!\w)(\*{1,3}|_{1,3}|~~)(?=\S)(.+?)(?<=\S)\1(?!\w)"), r"\2"),  # emphasis
    (re.compile(r"(?m)^[ \t]*(#{1,6} |> |[-*] \[[ x]\] |[-*] )"), ""),
    (re.compile(r"(?m)^[ \t]*\|?[ \t]*:?-{2,}[-:| \t]*$"), ""),  # the line below a table's head
    (re.compile(r"(?m)(?<=\s)\|(?=\s)|^\||\|$"), " "),
    (re.compile(r"`+|\${2}|\\[()\[\]]|\[\^\w+\]"), ""),
)
"""Signs of Markdown, and what stands for them in a line of plain text."""

_HALVES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of a text in one line.

    Attributes:
        marks: places of the words that were found, as (start, end) in `text`.
    """

    text: str
    marks: tuple[tuple[int, int], ...] = ()


def folded(text: str) -> str:
    """Return a text in the form in which texts are compared, in one line."""
    return _BLANKS.sub(" ", _folded(text)).strip()


def parse_words(typed: str) -> tuple[str, ...]:
    """Return the folded words and phrases of a search, each of which a chat has to have."""
    found: dict[str, None] = {}
    for match in _WORD.finditer(typed.translate(_QUOTES)):
        word = folded(match[1] if match[2] is None else match[2])[:LONGEST_WORD].strip()
        if word:
            found[word] = None
    return tuple(found)[:MAX_WORDS]


def snippet(text: str, words: tuple[str, ...]) -> Snippet:
    """Return the piece around the first word that is found, or else the beginning."""
    start = _first_place(text, words)
    begin = max(0, start - BEFORE)
    if begin and (space := text.find(" ", begin, start)) >= 0:
        begin = space + 1
    piece = text[begin : start + AFTER]
    shown = _without_markup(piece)
    if not _marks(shown, words):  # the words are markup
        shown = piece
    shown = printable(" ".join(shown.split()))
    if begin:
        shown = f"…{shown}"
    if start + AFTER < len(text):
        shown += "…"
    return Snippet(shown, _marks(shown, words))


def marked(text: str, words: tuple[str, ...]) -> Snippet:
    """Return a whole text, such as a title, with its marks."""
    shown = printable(" ".join(text.split()))
    return Snippet(shown, _marks(shown, words))


def _without_markup(text: str) -> str:
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFKD", _HALVES.sub("\ufffd", text)).casefold()
    return _ACCENTS.sub("", unicodedata.normalize("NFKD", plain))


def _first_place(text: str, words: tuple[str, ...]) -> int:
    """Return the offset of the first word that is found; 0 without any."""
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK + LONGEST_WORD]
        if any(word in folded(chunk) for word in words):
            line, places = _with_places(chunk)
            found = (line.find(word) for word in words)
            first = min((at for at in found if at >= 0), default=-1)
            if first >= 0:
                return start + places[first]
    return 0


def _marks(text: str, words: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return the places of all words, joined where they touch."""
    line, places = _with_places(text)
    found: list[tuple[int, int]] = []
    for word in words:
        at = line.find(word)
        while at >= 0:
            found.append((places[at], places[at + len(word) - 1] + 1))
            at = line.find(word, at + len(word))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)


def _with_places(text: str) -> tuple[str, list[int]]:
    """Return a text folded, and for each of its characters the offset of the original one."""
    parts: list[str] = []
    places: list[int] = []
    for offset, character in enumerate(text):
        for plain in _BLANKS.sub(" ", _folded(character)):
            if plain == " " and (not parts or parts[-1] == " "):
                continue
            parts.append(plain)
            places.append(offset)
    return "".join(parts), places
