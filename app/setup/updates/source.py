"""The request for the newest release: a short answer, soon, or none. Knows no Qt."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
from packaging.version import InvalidVersion, Version

from app.core.translation import tr
from engine import EngineError, one_line, printable

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


MAX_BYTES: Final = 64 << 10
MAX_HOPS: Final = 3
READ_S: Final = 5.0
"""Longest wait in seconds for any byte."""

LIMIT_S: Final = 10.0
"""Longest time in seconds that an answer may take as a whole."""

LOCAL: Final = {"127.0.0.1", "localhost", "::1"}

for _name in ("httpx2", "httpcore2"):  # they log addresses
    logging.getLogger(_name).setLevel(logging.WARNING)


def fetch_release(address: str, limit_s: float = LIMIT_S) -> Release:
    """Return the release that an address tells of.

    Nothing is sent but the request itself: no version, no cookie, no name.

    Raises:
        EngineError: the address cannot be used or asked, or its answer is not understood.
    """
    try:
        at = httpx2.URL(address.strip())
    except (httpx2.InvalidURL, ValueError):
        raise _unusable(address) from None
    try:
        return _fetch(at, limit_s)
    except httpx2.InvalidURL:
        raise _unusable(address) from None
    except httpx2.TimeoutException:
        raise _no_answer(at) from None
    except (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError, ImportError):
        # the last two of proxies that are set for this computer, and not understood
        raise EngineError(
            tr("{host} cannot be reached.").format(host=_host(at)),
            tr("Check the connection to the internet."),
        ) from None


def _fetch(at: httpx2.URL, limit_s: float) -> Release:
    timeout = httpx2.Timeout(min(READ_S, limit_s))
    headers = {"User-Agent": "tandem", "Accept": "application/json", "Accept-Encoding": "identity"}
    with httpx2.Client(timeout=timeout, headers=headers) as client:
        until = time.monotonic() + limit_s
        for _ in range(MAX_HOPS + 1):
            _check_address(at)
            with client.stream("GET", at, follow_redirects=False) as response:
                if not response.has_redirect_location:
                    return parse_release(_body(response, until))
                at = _next(at, response)
            if time.monotonic() > until:
                raise _no_answer(at)
    raise EngineError(tr("The server redirects again and again."), tr("Try it later."))


def _check_address(at: httpx2.URL) -> None:
    """Raise the error of an address that is not asked."""
    is_private = at.scheme == "https" or (at.scheme == "http" and at.host in LOCAL)
    if not is_private or not at.host or at.userinfo:
        raise _unusable(str(at.copy_with(query=None)))


def _next(at: httpx2.URL, response: httpx2.Response) -> httpx2.URL:
    """Return where an answer leads to."""
    goal = at.join(response.headers["location"])
    if at.scheme == "https" and goal.scheme != "https":
        raise EngineError(tr("The server redirects to an address without encryption."))
    return goal


def _body(response: httpx2.Response, until: float) -> bytes:
    """Return the bytes of an answer, which are few and come in time."""
    if response.status_code != 200:
        raise EngineError(
            tr("{host} answers with status {status}.").format(
                host=_host(response.request.url), status=response.status_code
            ),
            tr("Try it later."),
        )
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise EngineError(
                tr("The answer about releases is too long."),
                tr("Check the address in the settings."),
            )
        if time.monotonic() > until:
            raise _no_answer(response.request.url)
    return bytes(data)


def _host(at: httpx2.URL) -> str:
    return one_line(at.host, 60)


def _no_answer(at: httpx2.URL) -> EngineError:
    return EngineError(tr("{host} does not answer.").format(host=_host(at)), tr("Try it later."))


def _unusable(address: str) -> EngineError:
    return EngineError(
        tr("“{url}” cannot be asked about releases.").format(url=one_line(address, 80)),
        tr("Enter an address that begins with https:// in the settings."),
    )
