"""Splitting of long texts into portions that are parsed and shown one by one, from either end.

As top-level blocks are independent, the end of a text can be shown before the rest is parsed.
Finding the blocks takes a tenth as long as parsing them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from app.chat.markdown.parsing import TopBlock, normal, parse, top_blocks
from app.chat.markdown.pieces import CodeBlock, Piece, Table

MAX_SCANNED: Final = 10_000
"""Characters scanned for blocks in one step, unless a block is longer."""

MAX_PARSED: Final = 1_500
"""Characters of prose parsed in one step, unless a block is longer."""

MAX_PROSE: Final = 12_000
"""Maximum characters of prose in one portion."""

MAX_LINES, MAX_ROWS = 250, 20
"""Maximum numbers of code lines and table rows in one step."""

MAX_PIECES: Final = 40
"""Maximum number of pieces shown in one step."""

CODE, TABLE = ("fence", "code_block"), "table_open"


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a text whose views belong together: prose, a code block or a table.

    Attributes:
        sources: source to parse in each step; each part of a table includes the table's header.
        start: offset of the first source in the text.
        is_one: whether the portion is a single piece that grows with each step.
    """

    sources: tuple[str, ...]
    start: int
    is_one: bool = False

    def steps(self) -> Iterator[Sequence[Piece]]:
        """Return the pieces to show in each step."""
        first, *rest = self.sources
        pieces = parse(first)
        one = pieces[0] if self.is_one and len(pieces) == 1 else None
        if isinstance(one, CodeBlock):
            yield from ([version] for version in _versions(one))
            return
        yield from batched(pieces)
        for source in rest:
            pieces = parse(source)
            if isinstance(one, Table):
                (more,) = (piece for piece in pieces if isinstance(piece, Table))
                one = replace(one, rows=one.rows + more.rows[1:])
                pieces = [one]
            yield from batched(pieces)


def batched(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Return pieces in small batches, as a long list or quotation is parsed in one step."""
    return (pieces[n : n + MAX_PIECES] for n in range(0, max(1, len(pieces)), MAX_PIECES))


def portions(text: str) -> Generator[None, None, list[Portion]]:
    """Return a text's portions; yield after each step to let other events run."""
    text = normal(text)
    blocks: list[TopBlock] = []
    at, size = 0, MAX_SCANNED
    while at < len(text):
        end = text.find("\n", at + size) + 1 or len(text)
        found = top_blocks(text[at:end])
        if end < len(text):
            if len(found) < 2:
                size *= 2
                yield
                continue
            end = at + found.pop().start  # the last block may continue
        blocks += [replace(b, start=at + b.start, end=at + b.end) for b in found]
        at, size = end, MAX_SCANNED
        yield
    return _grouped(text, blocks)


def _grouped(text: str, blocks: list[TopBlock]) -> list[Portion]:
    result: list[Portion] = []
    prose: list[TopBlock] = []
    for block in blocks:
        is_prose = block.kind not in (*CODE, TABLE)
        if prose and (not is_prose or block.end - prose[0].start > MAX_PROSE):
            result.append(_prose(text, prose))
            prose = []
        if is_prose:
            prose.append(block)
        else:
            source = text[block.start : block.end]
            sources = _table_sources(source) if block.kind == TABLE else (source,)
            result.append(Portion(sources, block.start, is_one=True))
    return [*result, _prose(text, prose)] if prose else result


def _prose(text: str, blocks: list[TopBlock]) -> Portion:
    sources: list[str] = []
    start = blocks[0].start
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if following is None or following.end - start > MAX_PARSED:
            sources.append(text[start : block.end])
            start = following.start if following else start
    return Portion(tuple(sources), blocks[0].start)


def _table_sources(source: str) -> tuple[str, ...]:
    lines = source.rstrip("\n").split("\n")
    head, rows = lines[:2], lines[2:]
    starts = range(0, max(1, len(rows)), MAX_ROWS)
    return tuple("\n".join([*head, *rows[n : n + MAX_ROWS]]) for n in starts)


def _versions(code: CodeBlock) -> Iterator[CodeBlock]:
    at = -1
    while True:
        for _ in range(MAX_LINES):
            if (at := code.text.find("\n", at + 1)) < 0:
                yield code
                return
        yield replace(code, text=code.text[:at])
