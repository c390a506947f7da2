"""One request to a server of models; whatever goes wrong with it is one sentence.

Requests go to the address that was typed and nowhere else: a redirect is told, not followed.
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

MAX_EVENT = 1 << 20
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
            if n_bytes > MAX_EVENT:
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
        if n_begun > MAX_EVENT:
            raise StreamError(tr("too long"))
    if n_begun:
        yield b"".join(begun)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StreamError(tr("no UTF-8")) from None


CONNECT_S: Final = 10.0
STALL_S: Final = 120.0
"""Seconds without a byte, pings included, after which an answer is given up."""

SHORT_S: Final = 15.0
"""Longest time in seconds of an answer that is no generation."""

MAX_BYTES: Final = 8 << 20
"""Largest size in bytes of an answer that does not come as a stream."""

MAX_ERROR: Final = 64 << 10
MAX_SAID: Final = 300
"""Bytes of an error's answer that are read, and characters of its sentence that are shown."""

ENCODING: Final = {"Accept-Encoding": "identity"}

for _name in ("httpx2", "httpcore2"):  # they log addresses
    logging.getLogger(_name).setLevel(logging.WARNING)


class Unreachable(EngineError):
    """Error of a server that does not answer, or has gone in the middle of an answer."""


class NoServer(Unreachable):
    """Error of a server to which there is no connection at all."""


class Connection:
    """Connection for one request, which another thread can end at any time.

    Args:
        address: server, to which alone the key goes.
        stall_s: seconds without a byte after which a stream fails.

    Attributes:
        key: API key; "" for none.
    """

    def __init__(self, address: RemoteAddress, key: str = "", stall_s: float = STALL_S) -> None:
        self._address, self.key, self._stall_s = address, key, stall_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_aborted = False

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._is_aborted

    def abort(self) -> None:
        """End the request: what waits for its answer raises `Cancelled`."""
        with self._lock:
            self._is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # also of one that is closed
                    # the base class's: that of TLS would wait for the other side
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def json(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON value at an address below the server's; with `body` it is posted.

        Raises:
            EngineError: there is none, or the server cannot be asked.
        """
        data = self.read(url, body)
        with self._sentences():
            return json.loads(data)

    def read(self, url: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return a short answer as a whole; see `json`."""
        timeout = httpx2.Timeout(SHORT_S, connect=CONNECT_S)
        until = time.monotonic() + SHORT_S
        with self._sentences(), self._open(url, body, timeout, "application/json") as response:
            return _whole(response, until)

    def events(self, url: str, body: Mapping[str, Any]) -> Generator[str]:
        """Post a request and yield the data of each event of its answer.

        A server that does not stream gives its whole answer as one.

        Raises:
            EngineError: the server cannot be asked, refuses, or sends what cannot be read.
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
                raise self._not_understood()

    @contextmanager
    def _open(
        self, url: str, body: Mapping[str, Any] | None, timeout: httpx2.Timeout, accepts: str
    ) -> Iterator[httpx2.Response]:
        """Send a request and check the status of its answer."""
        headers = {"User-Agent": f"tandem/{package_version()}", "Accept": accepts, **ENCODING}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        method, json_body = ("GET", None) if body is None else ("POST", dict(body))
        verify = _trusted() if url.startswith("https:") else False  # without TLS, that is unused
        with (
            httpx2.Client(
                timeout=timeout, headers=headers, follow_redirects=False, verify=verify
            ) as client,
            client.stream(method, url, json=json_body, extensions={"trace": self._note}) as found,
        ):
            self._check(found)
            yield found

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket of the connection, once there is one."""
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        with self._lock:
            self._socket = info["return_value"].get_extra_info("socket")
        if self._is_aborted:
            self.abort()

    def _check(self, response: httpx2.Response) -> None:
        """Raise the error of an answer that is none."""
        if response.has_redirect_location:
            goal = one_line(response.headers["location"].partition("?")[0], 80)
            raise EngineError(
                tr("{host} sends its requests on to {goal}.").format(
                    host=self._address.host, goal=goal
                ),
                tr("If you trust that address, enter it in place of the other."),
            )
        if response.status_code != 200:
            raise self._refusal(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._not_understood()

    def _refusal(self, response: httpx2.Response) -> EngineError:
        """Return the error of a status that is no success, with what the server says of it."""
        status, host = response.status_code, self._address.host
        said = self.cleaned(_said(response))
        if status in (401, 403):
            text = tr("{host} does not accept the key.") if self.key else tr("{host} wants a key.")
            hint = tr("Enter the key that belongs to this server.")
        elif status == 404:
            text = tr("{host} has no such model or address.")
            hint = tr("Check the address; the list of models shows what it has.")
        elif status == 429:
            text = tr("{host} asks to wait: too many requests, or a limit is used up.")
            hint = tr("Try it later.")
        elif status >= 500:
            text, hint = tr("{host} has a fault (status {status})."), tr("Try it later.")
        else:
            text, hint = tr("{host} refuses the request (status {status})."), ""
        return EngineError(
            f"{text.format(host=host, status=status)}{f' {said}' if said else ''}", hint
        )

    def cleaned(self, said: str) -> str:
        """Return what a server has said as one short line, without the key."""
        if self.key:
            said = said.replace(self.key, "…")
        return one_line(said, MAX_SAID)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn each failure into a sentence."""
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
            text, hint = tr("{host} does not answer."), tr("Check that it runs.")
            return NoServer(text.format(host=host), hint)
        if isinstance(error, httpx2.TimeoutException):
            text = tr("{host} has sent nothing for {n} s.")
            silent = f"{_read_s(error):.0f}"
            return Unreachable(text.format(host=host, n=silent), tr("Try it later."))
        if isinstance(error, httpx2.ConnectError):
            if "certificate" in str(error).lower():
                text = tr("{host} cannot prove who it is: its certificate is not valid here.")
                return EngineError(text.format(host=host), tr("Check the address."))
            if "ssl" in str(error).lower():
                text = tr("{host} does not speak TLS at this address.")
                return EngineError(text.format(host=host), tr("Check http and https."))
            text, hint = tr("{host} cannot be reached."), tr("Check that it runs.")
            return NoServer(text.format(host=host), hint)
        if isinstance(error, StreamError):
            text = tr("{host} has sent text that cannot be read ({why}).")
            return EngineError(text.format(host=host, why=error))
        if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError | OSError):
            text = tr("The connection to {host} was cut.")
            return Unreachable(text.format(host=host), tr("Check that it runs."))
        return self._not_understood()

    def _not_understood(self) -> EngineError:
        text = tr("The answer of {host} is not understood.").format(host=self._address.host)
        return EngineError(text, tr("Check that the address is one of OpenAI's interface."))


@cache
def _trusted() -> ssl.SSLContext:
    """Return how servers prove who they are; reading all authorities takes a moment."""
    return httpx2.create_ssl_context()


def _read_s(error: httpx2.TimeoutException) -> float:
    """Return the seconds after which a request was given up."""
    timeout = error.request.extensions.get("timeout") or {}
    return float(timeout.get("read") or STALL_S)


def _whole(response: httpx2.Response, until: float) -> bytes:
    """Return all bytes of an answer, which are few and come in time."""
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise StreamError(tr("too long"))
        if time.monotonic() > until:
            raise httpx2.ReadTimeout("", request=response.request)
    return bytes(data)


def _said(response: httpx2.Response) -> str:
    """Return the sentence of an error's answer; "" for none."""
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
    """Return the sentence of an error as servers write it; "" for none."""
    found = document
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found if isinstance(found, str) else ""
