"""Server-sent events: the lines of a stream, whose size nobody can be trusted with.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from app.core.translation import tr

MOST_EVENT = 1 << 20
"""Largest number of bytes of a line, and of an event."""

_ENDS = re.compile(rb"\r\n|\n|\r")


class StreamError(ValueError):
    """An event that cannot be read; its text says why, in a few words."""


def event_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each event; comments, which servers send as pings, are left out.

    Raises:
        StreamError: an event is too long, or no UTF-8.
    """
    data: list[bytes] = []
    n_bytes = 0
    for line in _lines(chunks):
        if not line:
            if data:
                yield _text(b"\n".join(data))
            data, n_bytes = [], 0
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
            n_bytes += len(value)
            if n_bytes > MOST_EVENT:
                raise StreamError(tr("too long"))
    if data:  # many servers close without the last empty line
        yield _text(b"\n".join(data))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, without their ends."""
    begun: list[bytes] = []  # pieces of a line whose end has not come
    n_begun, was_cr = 0, False
    for chunk in chunks:
        first, *others = _ENDS.split(chunk[was_cr and chunk.startswith(b"\n") :])
        was_cr = chunk.endswith(b"\r") if chunk else was_cr
        begun.append(first)
        n_begun += len(first)
        for piece in others:
            yield b"".join(begun)
            begun, n_begun = [piece], len(piece)
        if n_begun > MOST_EVENT:
            raise StreamError(tr("too long"))
    if n_begun:
        yield b"".join(begun)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StreamError(tr("no UTF-8")) from None
