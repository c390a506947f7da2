"""The pieces of a Markdown text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.chat.markdown.delimiters import Formula

if TYPE_CHECKING:
    from markdown_it.token import Token


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A run of text in one style.

    Attributes:
        href: http(s) URL, or "".
        note: label of the footnote to which the text refers, or "".
        formula: formula whose source is the text.
    """

    text: str
    bold: bool = False
    italic: bool = False
    code: bool = False
    strike: bool = False
    href: str = ""
    note: str = ""
    formula: Formula | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the run has no styling."""
        return not (
            self.bold or self.italic or self.code or self.strike or self.href or self.note
            or self.formula
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextLine:
    """A paragraph, heading or list item.

    Attributes:
        heading: level of the heading, 1 to 6; 0 for other lines.
        marker: bullet or number of the list item, such as "•" or "3."; "" for other lines.
        indent: number of enclosing lists.
        quote: number of enclosing block quotes.
        tight: whether the line has no gap before it.
        note: label of the footnote that contains the line; "" for other lines.
    """

    spans: tuple[TextSpan, ...]
    heading: int = 0
    marker: str = ""
    indent: int = 0
    quote: int = 0
    tight: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A code block; `language` is the word after the fence, if any."""

    text: str
    language: str = ""


Rows = tuple[tuple[tuple[TextSpan, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table: rows of cells, header first; `aligns` is "left", "center" or "right" per column."""

    rows: Rows
    aligns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line."""


@dataclass(frozen=True, slots=True)
class DisplayFormula:
    """A display formula; `indent` and `quote` are as in `TextLine`."""

    formula: Formula
    indent: int = 0
    quote: int = 0


Piece = TextLine | CodeBlock | Table | Rule | DisplayFormula


OPENED_SCHEMES = ("http", "https")
ADDRESS = re.compile(r"(?<![\w/.@-])(?:https?://|www\.)[^\s<>\"]+", re.IGNORECASE)
NOTE_LABEL = re.compile(r"\d{1,4}|[A-Za-z]\w{3,30}")
"""Pattern for footnote labels; others, such as `[^a-z]`, are more likely regular expressions."""


_BREAKS = {"softbreak", "hardbreak"}


def spans_of(tokens: list[Token]) -> tuple[TextSpan, ...]:
    """Return the styled runs of a paragraph, keeping its line breaks."""
    spans: list[TextSpan] = []
    style = TextSpan("")
    for token in tokens:
        name, _, event = token.type.rpartition("_")
        is_on = event == "open"
        if name in ("strong", "em", "s"):
            style = _switched(style, name, is_on)
        elif token.type == "link_open":
            style = replace(style, href=opened_address(str(token.attrGet("href") or "")))
        elif token.type == "link_close":
            style = replace(style, href="")
        elif token.type == "image":
            spans += _image(token, style)
        elif token.type == "formula":
            spans.append(replace(style, text=token.content, formula=token.meta["formula"]))
        elif token.type == "footnote_ref":
            spans.append(_reference(str(token.meta["label"]), style))
        elif token.type == "text":
            spans += _with_addresses(replace(style, text=token.content))
        elif token.type in _BREAKS:
            spans.append(replace(style, text="\n"))
        elif token.content:
            spans.append(replace(style, text=token.content, code=token.type == "code_inline"))
    return _joined(spans)


def _switched(style: TextSpan, name: str, is_on: bool) -> TextSpan:
    if name == "strong":
        return replace(style, bold=is_on)
    return replace(style, italic=is_on) if name == "em" else replace(style, strike=is_on)


def _joined(spans: list[TextSpan]) -> tuple[TextSpan, ...]:
    result: list[TextSpan] = []
    for span in spans:
        is_same = result and replace(result[-1], text="") == replace(span, text="")
        if is_same and span.formula is None:
            result[-1] = replace(span, text=result[-1].text + span.text)
        else:
            result.append(span)
    return tuple(result)


def _image(token: Token, style: TextSpan) -> list[TextSpan]:
    source = str(token.attrGet("src") or "")
    address = replace(style, text=source, href=style.href or opened_address(source))
    if not token.content:
        return [address]
    around = [replace(style, text=f"{token.content} ("), address, replace(style, text=")")]
    return around if source else [replace(style, text=token.content)]


def _reference(label: str, style: TextSpan) -> TextSpan:
    if NOTE_LABEL.fullmatch(label):
        return replace(style, text=label, note=label)
    return replace(style, text=f"[^{label}]")


def _with_addresses(span: TextSpan) -> list[TextSpan]:
    if span.href or ("://" not in span.text and "www." not in span.text.lower()):
        return [span] if span.text else []
    spans: list[TextSpan] = []
    done = 0
    for found in ADDRESS.finditer(span.text):
        address = _without_end(found[0])
        full = f"http://{address}" if address[:4].lower() == "www." else address
        if not opened_address(full) or not (urlsplit(full).hostname or "").strip("."):
            continue
        spans += [
            replace(span, text=span.text[done : found.start()]),
            replace(span, text=address, href=full),
        ]
        done = found.start() + len(address)
    return [s for s in (*spans, replace(span, text=span.text[done:])) if s.text]


def _without_end(address: str) -> str:
    while address:
        if address[-1] in "?!.,:;*_~'\"" or (
            address[-1] == ")" and address.count(")") > address.count("(")
        ):
            address = address[:-1]
        else:
            break
    return address


def opened_address(address: str) -> str:
    """Return `address` if a click may open it, else ""."""
    try:
        return address if urlsplit(address).scheme.lower() in OPENED_SCHEMES else ""
    except ValueError:
        return ""
