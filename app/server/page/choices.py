"""What a person has chosen about the server, and its address."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.core.settings import Settings
from app.core.translation import tr
from engine import EngineError, one_line

if TYPE_CHECKING:
    pass


HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
"""Addresses to listen on: for this machine alone, and for all that can reach it."""


ANY_PAGE = "*"


@dataclass(frozen=True, slots=True)
class ServerChoices:
    """What a person has chosen about the server.

    Attributes:
        port: port to listen on.
        is_on_network: whether other machines can reach it.
        needs_key: whether clients must know a key; always so on a network.
        pages: origins of web pages that may ask; empty for none.
    """

    port: int
    is_on_network: bool
    needs_key: bool
    pages: tuple[str, ...]

    @property
    def host(self) -> str:
        """The address to listen on."""
        return EVERYWHERE if self.is_on_network else HERE


def choices_of(settings: Settings) -> ServerChoices:
    """Return what the settings say about the server."""
    is_on_network = settings.server_on_network
    return ServerChoices(
        settings.server_port,
        is_on_network,
        is_on_network or settings.server_needs_key,
        settings.server_pages if settings.server_for_pages else (),
    )


def read_pages(text: str) -> tuple[str, ...]:
    """Return the origins in a text, divided by commas or spaces.

    Raises:
        EngineError: one of them is no origin.
    """
    return tuple(dict.fromkeys(_origin(word) for word in re.split(r"[\s,;]+", text) if word))


def pages_text(pages: Sequence[str]) -> str:
    """Return origins as a person would type them."""
    return ", ".join(pages)


def _origin(word: str) -> str:
    """Return an origin as browsers send it: without a path, in small letters."""
    if word == ANY_PAGE:
        return word
    try:
        parts = urlsplit(word)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and (parts.port is None or parts.port > 0) and "@" not in parts.netloc
    except ValueError:
        is_good = False
    if not is_good:
        text = tr("“{word}” is not the address of a web page.").format(word=one_line(word, 60))
        raise EngineError(text, tr("Write it as https://example.org or http://localhost:3000."))
    usual = {"http": 80, "https": 443}[parts.scheme]
    port = "" if parts.port in (None, usual) else f":{parts.port}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{port}"


ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody's, kept for examples, to which nothing is sent."""


def own_address() -> str:
    """Return the address of this machine in its network; its name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ANYWHERE)  # chooses a network card; sends nothing
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()
