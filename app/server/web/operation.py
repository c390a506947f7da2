"""Operations of a server: path, request and handler in one declaration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.errors import error_document
from app.server.web.responses import ErrorShape

Act = Callable[[Desk, RequestRecord, Any], Awaitable[Response]]
"""What answers a request: its body as the operation's type, or the bare request if it has none."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP method of a path, with its request and its handler.

    Attributes:
        path: path as Starlette writes it.
        summary: what it does, in a sentence.
        takes: type of its body; None for none.
        streams: type of its answer where it comes bit by bit; "" if it never does.
        media_type: type of its answer where it is no JSON.
        shape: the document in which it tells refusals.
        has_pictures: whether its body may have pictures.
    """

    path: str
    summary: str
    act: Act
    takes: type | None = None
    streams: str = ""
    media_type: str = "application/json"
    shape: ErrorShape = error_document
    has_pictures: bool = False

    @property
    def method(self) -> str:
        """The HTTP method: POST where there is a body."""
        return "GET" if self.takes is None else "POST"
