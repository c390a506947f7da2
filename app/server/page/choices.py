"""The server settings in the window, and this machine's address."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from app.core.settings import Settings
from app.core.translation import tr
from engine import EngineError, one_line

HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
"""Addresses to listen on: only loopback, or all interfaces."""


ANY_PAGE = "*"


@dataclass(frozen=True, slots=True)
class ServerChoices:
    """The server's settings.

    Attributes:
        port: port to listen on.
        is_on_network: whether other machines can connect.
        needs_key: whether clients need a key; always true on a network.
        pages: web page origins to allow.
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
    """Return the server's settings."""
    is_on_network = settings.server_on_network
    return ServerChoices(
        settings.server_port,
        is_on_network,
        is_on_network or settings.server_needs_key,
        settings.server_pages if settings.server_for_pages else (),
    )


def read_pages(text: str) -> tuple[str, ...]:
    """Parse a list of origins separated by commas, semicolons or spaces.

    Raises:
        EngineError: an origin is invalid.
    """
    return tuple(dict.fromkeys(_origin(word) for word in re.split(r"[\s,;]+", text) if word))


def pages_text(pages: Sequence[str]) -> str:
    """Format a list of origins for editing."""
    return ", ".join(pages)


def _origin(word: str) -> str:
    if word == ANY_PAGE:
        return word
    try:
        parts = urlsplit(word)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and (parts.port is None or parts.port > 0) and "@" not in parts.netloc
    except ValueError:
        is_good = False
    if not is_good:
        text = tr("“{word}” is not a valid web page origin.").format(word=one_line(word, 60))
        raise EngineError(text, tr("Use a format like https://example.org."))
    usual = {"http": 80, "https": 443}[parts.scheme]
    port = "" if parts.port in (None, usual) else f":{parts.port}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{port}"


ANYWHERE = ("192.0.2.1", 9)  # reserved address (RFC 5737); nothing is sent to it


def own_address() -> str:
    """Return this machine's network address, or its host name if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ANYWHERE)  # selects a network interface; sends nothing
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()
