"""Data about the newest release; no Qt and no HTTP."""

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

ADDRESS_FILE: Final = Path(__file__).resolve().parents[3] / "resources" / "release-address.txt"
"""File with the address for release checks; packagers may add this file."""


@dataclass(frozen=True, slots=True)
class Release:
    """A published release: version, download page (https) and release notes (plain text)."""

    version: str
    page: str
    news: str = ""

    def kept(self) -> dict[str, str]:
        """Return the release as data for `read_release` that can be saved as JSON."""
        return {"version": self.version, "page": self.page, "news": self.news}


def parse_release(data: bytes) -> Release:
    """Parse the release in a server's response.

    Raises:
        EngineError: the response is invalid.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise _invalid() from None
    return read_release(values)


def read_release(values: object) -> Release:
    """Read a release from JSON data.

    Raises:
        EngineError: the data is invalid.
    """
    if not isinstance(values, Mapping):
        raise _invalid()
    version, page, news = (values.get(name, "") for name in ("version", "page", "news"))
    if not (isinstance(version, str) and isinstance(page, str) and isinstance(news, str)):
        raise _invalid()
    parsed = _version(version)
    if parsed is None or parsed.local or not is_web_page(page):
        raise _invalid()
    text = printable(news[: MAX_NEWS + 1]).strip()
    if len(text) > MAX_NEWS:
        text = f"{text[:MAX_NEWS]}…"
    return Release(str(parsed), page, text)


def is_newer(version: str, own: str) -> bool:
    """Return whether `version` is newer than `own`; prereleases count only if `own` is one."""
    theirs, ours = _version(version), _version(own)
    if theirs is None or ours is None:
        return False
    return theirs > ours and (ours.is_prerelease or not theirs.is_prerelease)


def is_web_page(address: str) -> bool:
    """Return whether an address is a plain https URL that is safe to open in a browser."""
    if not address.isascii() or not address.isprintable() or len(address) > MAX_PAGE:
        return False
    try:
        split = urlsplit(address)
        _ = split.port  # raises if invalid
    except ValueError:
        return False
    is_plain = "@" not in split.netloc and " " not in address and "\\" not in address
    return split.scheme == "https" and bool(split.hostname) and is_plain


def bundled_address() -> str:
    """Return the bundled address for release checks, or ""."""
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


def _invalid() -> EngineError:
    return EngineError(
        tr("The release information is not valid."), tr("Check the address in the settings.")
    )
