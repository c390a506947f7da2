"""The request for the newest release, with time and size limits; no Qt."""

from __future__ import annotations

import time
from typing import Final

import httpx2

from app.core.translation import tr
from app.models.downloads.transfer.source import LOCAL, redirect_target
from app.setup.updates.release import Release, parse_release
from engine import EngineError, one_line

MAX_BYTES: Final = 64 << 10
MAX_HOPS: Final = 3
READ_S: Final = 5.0  # timeout for the next byte, in seconds

LIMIT_S: Final = 10.0  # time limit for the whole request, in seconds


def fetch_release(address: str, limit_s: float = LIMIT_S) -> Release:
    """Fetch the newest release from an address; sends no version, cookie or name.

    Raises:
        EngineError: the address or the response is invalid, or the request failed.
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
        # the last two are due to invalid proxy settings
        raise EngineError(
            tr("{host} cannot be reached.").format(host=_host(at)),
            tr("Check your internet connection."),
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
                at = redirect_target(at, response)
            if time.monotonic() > until:
                raise _no_answer(at)
    raise EngineError(tr("The server redirects too many times."), tr("Try again later."))


def _check_address(at: httpx2.URL) -> None:
    is_private = at.scheme == "https" or (at.scheme == "http" and at.host in LOCAL)
    if not is_private or not at.host or at.userinfo:
        raise _unusable(str(at.copy_with(query=None)))


def _body(response: httpx2.Response, until: float) -> bytes:
    if response.status_code != 200:
        raise EngineError(
            tr("{host} returned error {status}.").format(
                host=_host(response.request.url), status=response.status_code
            ),
            tr("Try again later."),
        )
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise EngineError(
                tr("The release information is too long."), tr("Check the address in the settings.")
            )
        if time.monotonic() > until:
            raise _no_answer(response.request.url)
    return bytes(data)


def _host(at: httpx2.URL) -> str:
    return one_line(at.host, 60)


def _no_answer(at: httpx2.URL) -> EngineError:
    return EngineError(
        tr("{host} does not respond.").format(host=_host(at)), tr("Try again later.")
    )


def _unusable(address: str) -> EngineError:
    return EngineError(
        tr("“{url}” cannot be used for release checks.").format(url=one_line(address, 80)),
        tr("Enter an address starting with https:// in the settings."),
    )
