"""HTTP requests to model servers; every failure becomes an `EngineError`.

Redirects are reported, not followed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import httpx2

from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from engine import Cancelled, EngineError, one_line, package_version

MAX_EVENT = 1 << 20  # maximum bytes in a line and in an event
_ENDS = re.compile(rb"\r\n|\n|\r")


class StreamError(ValueError):
    """Invalid event stream; the message briefly says why."""


def event_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event; comments (pings) are skipped.

    Raises:
        StreamError: an event is too long or not UTF-8.
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
            if n_bytes > MAX_EVENT:
                raise StreamError(tr("too long"))
    if data:  # many servers omit the last empty line
        yield _text(b"\n".join(data))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    partial: list[bytes] = []  # pieces of the current line
    n_begun, was_cr = 0, False
    for chunk in chunks:
        first, *others = _ENDS.split(chunk[was_cr and chunk.startswith(b"\n") :])
        was_cr = chunk.endswith(b"\r") if chunk else was_cr
        partial.append(first)
        n_begun += len(first)
        for piece in others:
            yield b"".join(partial)
            partial, n_begun = [piece], len(piece)
        if n_begun > MAX_EVENT:
            raise StreamError(tr("too long"))
    if n_begun:
        yield b"".join(partial)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StreamError(tr("not UTF-8")) from None


CONNECT_S: Final = 10.0
STALL_S: Final = 120.0  # read timeout for streams in seconds; pings reset it
SHORT_S: Final = 15.0  # timeout in seconds for requests other than generations
MAX_BYTES: Final = 8 << 20  # maximum bytes in a response that is not a stream
MAX_ERROR: Final = 64 << 10
MAX_MESSAGE: Final = 300
"""Maximum bytes read from an error response, and characters shown from its message."""

ENCODING: Final = {"Accept-Encoding": "identity"}

for _name in ("httpx2", "httpcore2"):  # they log URLs
    logging.getLogger(_name).setLevel(logging.WARNING)


class Unreachable(EngineError):
    """The server does not respond, or the connection was lost."""


class NoServer(Unreachable):
    """No connection to the server could be made."""


class Connection:
    """Connection for one request; `abort` is thread-safe.

    Args:
        address: the server; the key is sent to no other server.
        stall_s: read timeout for streams.

    Attributes:
        key: API key, or "".
    """

    def __init__(self, address: RemoteAddress, key: str = "", stall_s: float = STALL_S) -> None:
        self._address, self.key, self._stall_s = address, key, stall_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_aborted = False

    def abort(self) -> None:
        """Abort the request; whichever method is waiting for it raises `Cancelled`."""
        with self._lock:
            self._is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it may already be closed
                    # the base class's method, since that of the TLS socket waits for the server
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def json(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON response from a URL; if `body` is given, post it.

        Raises:
            EngineError: the request failed or the response is not JSON.
        """
        data = self.read(url, body)
        with self._sentences():
            return json.loads(data)

    def read(self, url: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return a short response; see `json`."""
        timeout = httpx2.Timeout(SHORT_S, connect=CONNECT_S)
        until = time.monotonic() + SHORT_S
        with self._sentences(), self._open(url, body, timeout, "application/json") as response:
            return _whole(response, until)

    def events(self, url: str, body: Mapping[str, Any]) -> Generator[str]:
        """Post a request and yield each event's data; a JSON response counts as one event.

        Raises:
            EngineError: the request failed or the response is invalid.
        """
        timeout = httpx2.Timeout(self._stall_s, connect=CONNECT_S)
        with self._sentences(), self._open(url, body, timeout, "text/event-stream") as response:
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "application/json":
                until = time.monotonic() + self._stall_s
                yield _whole(response, until).decode("utf-8")
            elif kind in ("text/event-stream", ""):
                yield from event_data(response.iter_raw())
            else:
                raise not_understood(self._address.host)

    @contextmanager
    def _open(
        self, url: str, body: Mapping[str, Any] | None, timeout: httpx2.Timeout, accepts: str
    ) -> Iterator[httpx2.Response]:
        headers = {"User-Agent": f"tandem/{package_version()}", "Accept": accepts, **ENCODING}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        method, json_body = ("GET", None) if body is None else ("POST", dict(body))
        verify = _trusted() if url.startswith("https:") else False  # creating it takes a moment
        with (
            httpx2.Client(
                timeout=timeout, headers=headers, follow_redirects=False, verify=verify
            ) as client,
            client.stream(method, url, json=json_body, extensions={"trace": self._trace}) as reply,
        ):
            self._check(reply)
            yield reply

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        with self._lock:
            self._socket = info["return_value"].get_extra_info("socket")
        if self._is_aborted:
            self.abort()

    def _check(self, response: httpx2.Response) -> None:
        if response.has_redirect_location:
            goal = one_line(response.headers["location"].partition("?")[0], 80)
            text = tr("{host} redirects to {goal}.").format(host=self._address.host, goal=goal)
            raise EngineError(text, tr("If you trust that address, enter it instead."))
        if response.status_code != 200:
            raise self._refusal(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise not_understood(self._address.host)

    def _refusal(self, response: httpx2.Response) -> EngineError:
        status, host = response.status_code, self._address.host
        message = self.cleaned(_error_message(response))
        if status in (401, 403):
            text = tr("{host} requires an API key.")
            if self.key:
                text = tr("{host} rejected the API key.")
            hint = tr("Enter the API key of this server.")
        elif status == 404:
            text = tr("{host} has no such model or endpoint.")
            hint = tr("Check the address and the list of models.")
        elif status == 429:
            text = tr("{host} is rate-limiting requests, or your quota is used up.")
            hint = tr("Try again later.")
        elif status >= 500:
            text, hint = tr("{host} returned error {status}."), tr("Try again later.")
        else:
            text, hint = tr("{host} rejected the request (status {status})."), ""
        return EngineError(
            f"{text.format(host=host, status=status)}{f' {message}' if message else ''}", hint
        )

    def cleaned(self, message: str) -> str:
        """Return a server's message as one short line without the key."""
        if self.key:
            message = message.replace(self.key, "…")
        return one_line(message, MAX_MESSAGE)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        host = self._address.host
        try:
            yield
        except EngineError:
            if self._is_aborted:
                raise Cancelled("The request") from None
            raise
        except (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError, RecursionError) as error:
            if self._is_aborted:
                raise Cancelled("The request") from None
            raise self._sentence(error, host) from None

    def _sentence(self, error: Exception, host: str) -> EngineError:
        if isinstance(error, httpx2.ConnectTimeout):
            text, hint = tr("{host} does not respond."), tr("Check that the server is running.")
            return NoServer(text.format(host=host), hint)
        if isinstance(error, httpx2.TimeoutException):
            text = tr("{host} has sent nothing for {n} s.")
            silent = f"{_read_s(error):.0f}"
            return Unreachable(text.format(host=host, n=silent), tr("Try again later."))
        if isinstance(error, httpx2.ConnectError):
            if "certificate" in str(error).lower():
                text = tr("The TLS certificate of {host} is not trusted.")
                return EngineError(text.format(host=host), tr("Check the address."))
            if "ssl" in str(error).lower():
                text = tr("{host} does not use TLS at this address.")
                return EngineError(text.format(host=host), tr("Try http instead."))
            text, hint = tr("{host} cannot be reached."), tr("Check that the server is running.")
            return NoServer(text.format(host=host), hint)
        if isinstance(error, StreamError):
            text = tr("{host} sent an invalid response ({why}).")
            return EngineError(text.format(host=host, why=error))
        if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError | OSError):
            text = tr("The connection to {host} was lost.")
            return Unreachable(text.format(host=host), tr("Check that the server is running."))
        return not_understood(self._address.host)


def not_understood(host: str) -> EngineError:
    """Return the error for a response that does not follow OpenAI's protocol."""
    text = tr("{host} sent an unexpected response.").format(host=host)
    return EngineError(text, tr("Check that the server is OpenAI-compatible."))


@cache
def _trusted() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


def _read_s(error: httpx2.TimeoutException) -> float:
    timeout = error.request.extensions.get("timeout") or {}
    return float(timeout.get("read") or STALL_S)


def _whole(response: httpx2.Response, until: float) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise StreamError(tr("too long"))
        if time.monotonic() > until:
            raise httpx2.ReadTimeout("", request=response.request)
    return bytes(data)


def _error_message(response: httpx2.Response) -> str:
    data = bytearray()
    until = time.monotonic() + SHORT_S
    try:
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > MAX_ERROR or time.monotonic() > until:
                return ""
        return error_text(json.loads(data))
    except (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError, RecursionError):
        return ""


def error_text(document: object) -> str:
    """Return the message in a JSON error, or ""."""
    for name in ("error", "message", "detail"):
        if isinstance(document, dict) and name in document:
            document = document[name]
    return document if isinstance(document, str) else ""
