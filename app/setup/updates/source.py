"""The request for the newest release: a short answer, soon, or none. Knows no Qt."""

from __future__ import annotations

import logging
import time
from typing import Final

import httpx2

from app.core.translation import tr
from app.setup.updates.release import Release, parse_release
from engine import EngineError, one_line

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
