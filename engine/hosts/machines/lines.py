"""Lines of JSON between two machines that know the same token, and the handshake before them.

The token itself is never sent. Each side sends a random number and proves by HMAC-SHA256 that it
knows the token; a key made of token and numbers then signs every line, with its number. So nobody
else can join or add a line. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.errors import EngineError
from engine.util.sanitize import one_line

PROTOCOL = 1
"""Version of what machines say to each other."""

MAX_LINE = 1 << 16
"""Largest number of bytes of a line."""

HANDSHAKE_S = 5.0
"""Seconds within which a handshake must be over."""

BEAT_S = 0.5
"""Seconds between two signs of life."""

MAX_SILENT = 6
"""Number of turns of `BEAT_S` without a line after which the other machine counts as lost. They
are counted, not timed: this process may have stood still itself."""

SILENT = "What answers there says nothing: it is busy with other connections, or not Tandem."
SILENT_HINT = "Try again, and look at what else connects to that port."

MIN_TOKEN = 8
"""Least number of characters of a token."""


class LineError(EngineError):
    """Error of a machine that says something wrong, or does not know the token."""


class SilentError(LineError):
    """Error of a machine that says nothing, as it may have too many connections."""


class Lines:
    """A connection between two machines after the handshake; several threads may send.

    Args:
        sock: the connection.
        key: key of both sides for this connection.
        is_leader: whether this is the side of machine 0.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_leader: bool) -> None:
        self._sock, self._key = sock, key
        self._names = (b"0", b"1") if is_leader else (b"1", b"0")
        self._n_sent = self._n_received = 0
        self._unread = b""
        self._lock = threading.Lock()
        self.own_address: str = sock.getsockname()[0]
        self.peer_address: str = sock.getpeername()[0]

    def send(self, kind: str, **values: Any) -> None:
        """Send a line.

        Raises:
            OSError: the other machine is gone, or takes nothing.
        """
        text = json.dumps({"kind": kind, **values}).encode()
        with self._lock:
            mac = self._mac(self._names[0], self._n_sent, text)
            self._n_sent += 1
            self._sock.sendall(mac + b" " + text + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line; None if there is none within the time.

        Raises:
            LineError: what arrived is not signed, or no line.
            OSError: the other machine is gone.
        """
        line = self._line(timeout_s)
        if line is None:
            return None
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._names[1], self._n_received, text)):
            raise LineError("A line came from somebody who does not know the token.")
        self._n_received += 1
        found = _object(text)
        if not isinstance(found.get("kind"), str):
            raise LineError("A line of another kind than expected came.")
        return found

    def alive(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that come, with signs of life both ways; end when there are none.

        Raises:
            LineError, OSError: see `receive`.
        """
        n_silent, due = 0, 0.0
        while n_silent < MAX_SILENT:
            if time.monotonic() >= due:
                self.send("beat")
                due = time.monotonic() + BEAT_S
            found = self.receive(BEAT_S)
            n_silent = n_silent + 1 if found is None else 0
            if found is not None and found["kind"] != "beat":
                yield found

    def _mac(self, name: bytes, number: int, text: bytes) -> bytes:
        return _hmac(self._key, name, str(number).encode(), text)

    def _line(self, timeout_s: float) -> bytes | None:
        """Return the next line without its end; None if there is none within the time."""
        self._sock.settimeout(timeout_s)
        while b"\n" not in self._unread:
            try:
                found = self._sock.recv(4096)
            except TimeoutError:
                return None
            if not found:
                raise ConnectionResetError("it has closed the connection")
            self._unread += found
            if len(self._unread) > MAX_LINE:
                raise LineError("A line is too long.")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """Close the connection; whoever waits for a line gets an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def lead(sock: socket.socket, token: str) -> Lines:
    """Return the lines to a machine that wants to join, once it has proven to know the token.

    Raises:
        LineError: it does not; it is told so.
        OSError: it is gone.
    """
    sock.settimeout(HANDSHAKE_S)
    until = time.monotonic() + HANDSHAKE_S
    mine = secrets.token_hex(16).encode()
    _send(sock, {"tandem": PROTOCOL, "nonce": mine.decode()})
    answer = _object(_plain_line(sock, until))
    theirs = _text(answer, "nonce")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(token, b"join", mine, theirs)):
        why = "The token is wrong."
        _send(sock, {"refused": why})
        raise LineError(why)
    _send(sock, {"proof": _proof(token, b"lead", mine, theirs).decode()})
    return Lines(sock, _hmac(token.encode(), b"lines", mine, theirs), is_leader=True)


def join(sock: socket.socket, token: str) -> Lines:
    """Return the lines to machine 0, once both have proven to know the token.

    Raises:
        SilentError: the other one says nothing.
        LineError: one of them does not, or the other one is no Tandem or of another version.
        OSError: it is gone.
    """
    sock.settimeout(HANDSHAKE_S)
    until = time.monotonic() + HANDSHAKE_S
    try:
        greeting = _object(_plain_line(sock, until))
    except ConnectionResetError:
        raise SilentError(SILENT, SILENT_HINT) from None
    if "tandem" not in greeting:
        raise LineError("What answers there is not `tandem serve --nodes`.")
    if greeting["tandem"] != PROTOCOL:
        raise LineError("The server is of another version of Tandem.", "Install the same version.")
    theirs, mine = _text(greeting, "nonce"), secrets.token_hex(16).encode()
    proof = _proof(token, b"join", theirs, mine)
    _send(sock, {"nonce": mine.decode(), "proof": proof.decode()})
    answer = _object(_plain_line(sock, until))
    if "refused" in answer:
        why = one_line(str(answer["refused"]), 300)
        raise LineError(why, "Give the token that the server shows.")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(token, b"lead", theirs, mine)):
        raise LineError("What answers there does not know the token.")
    return Lines(sock, _hmac(token.encode(), b"lines", theirs, mine), is_leader=False)


def check_token(token: str) -> str:
    """Return a token that is long enough.

    Raises:
        EngineError: it is too short.
    """
    if len(token) < MIN_TOKEN:
        raise EngineError(f"A token needs {MIN_TOKEN} characters or more.")
    return token


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of parts as hexadecimal digits; no two lists of parts have the same."""
    joined = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, joined, hashlib.sha256).hexdigest().encode()


def _proof(token: str, side: bytes, leaders: bytes, joiners: bytes) -> bytes:
    return _hmac(token.encode(), side, leaders, joiners)


def _text(found: dict[str, Any], name: str) -> bytes:
    value = found.get(name)
    if not isinstance(value, str) or len(value) > 200 or not value.isascii():
        raise LineError("What answers there is not Tandem.")
    return value.encode()


def _send(sock: socket.socket, value: dict[str, Any]) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")


def _plain_line(sock: socket.socket, until: float) -> bytes:
    """Return a line of the handshake; byte by byte, as signed ones may follow it at once.

    Args:
        until: end of the handshake, by `time.monotonic`.
    """
    line = b""
    while not line.endswith(b"\n"):
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            found = sock.recv(1)
        except TimeoutError:
            if not line:
                raise SilentError(SILENT, SILENT_HINT) from None
            raise LineError("What answers there is not Tandem, or does not answer.") from None
        if not found and not line:
            raise SilentError(SILENT, SILENT_HINT)
        if not found or len(line) > 1000:
            raise LineError("What answers there is not Tandem.")
        line += found
    return line


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LineError("What answers there is not Tandem.")
    return found
