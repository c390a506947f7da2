"""The newest release: what a server says of it. Knows no Qt, and imports no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from app.core.translation import tr
from engine import EngineError, printable

MAX_VERSION: Final = 40


MAX_PAGE: Final = 300


MAX_NEWS: Final = 8000
"""Largest number of characters of what is told about a release."""


ADDRESS_FILE: Final = Path(__file__).resolve().parents[3] / "resources" / "release-address.txt"
"""File with the address to ask, which whoever builds packages may add."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release that somebody has published.

    Attributes:
        page: https address to download it from by hand.
        news: what is new, as plain text; may be empty.
    """

    version: str
    page: str
    news: str = ""

    def kept(self) -> dict[str, str]:
        """Return what `read_release` makes the same release of."""
        return {"version": self.version, "page": self.page, "news": self.news}


def parse_release(data: bytes) -> Release:
    """Return the release that a server's answer tells of.

    Raises:
        EngineError: the answer is not understood.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise _not_understood() from None
    return read_release(values)


def read_release(values: object) -> Release:
    """Return a release from JSON data.

    Raises:
        EngineError: it is none.
    """
    if not isinstance(values, Mapping):
        raise _not_understood()
    version, page, news = (values.get(name, "") for name in ("version", "page", "news"))
    if not (isinstance(version, str) and isinstance(page, str) and isinstance(news, str)):
        raise _not_understood()
    found = _version(version)
    if found is None or found.local or not is_web_page(page):
        raise _not_understood()
    text = printable(news[: MAX_NEWS + 1]).strip()
    if len(text) > MAX_NEWS:
        text = f"{text[:MAX_NEWS]}…"
    return Release(str(found), page, text)


def is_newer(version: str, own: str) -> bool:
    """Return whether a version comes after another one; trial versions only for those of trials."""
    theirs, ours = _version(version), _version(own)
    if theirs is None or ours is None:
        return False
    return theirs > ours and (ours.is_prerelease or not theirs.is_prerelease)


def is_web_page(address: str) -> bool:
    """Return whether a browser may be sent to an address: https, and nothing odd in it."""
    if not address.isascii() or not address.isprintable() or len(address) > MAX_PAGE:
        return False
    try:
        split = urlsplit(address)
        _ = split.port  # raises on rubbish
    except ValueError:
        return False
    is_plain = "@" not in split.netloc and " " not in address and "\\" not in address
    return split.scheme == "https" and bool(split.hostname) and is_plain


def bundled_address() -> str:
    """Return the address that came with this Tandem; "" for none."""
    try:
        return ADDRESS_FILE.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _version(text: str) -> Version | None:
    if len(text) > MAX_VERSION:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _not_understood() -> EngineError:
    return EngineError(
        tr("The answer about releases is not understood."), tr("Check the address in the settings.")
    )
