"""Signed lines of JSON between two machines that share a token, and the handshake before them.

The token itself is never sent. Each side sends a nonce and proves by HMAC-SHA256 that it knows the
token; a key derived from the token and the nonces then signs every line together with its index, so
others can neither join nor insert lines. Nothing is encrypted.
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

from engine.errors import EngineError, Sentence
from engine.util.sanitize import one_line

PROTOCOL = 1
"""Version of the protocol."""

MAX_LINE = 1 << 16
"""Maximum size of a line, in bytes."""

HANDSHAKE_S = 5.0
"""Timeout for a handshake, in seconds."""

BEAT_S = 0.5
"""Seconds between two heartbeats."""

MAX_SILENT = 6
"""Number of waits of `BEAT_S` without a line after which the other machine counts as lost. They are
counted, not timed, because this process may itself have been suspended."""

SILENT = Sentence(
    "The server there is silent: it is busy with other connections, or is not Tandem."
)
SILENT_HINT = Sentence("Try again, and check which programs connect to that port.")
NOT_TANDEM = Sentence("The server there is not Tandem.")

MIN_TOKEN = 8
"""Minimum number of characters in a token."""


class LineError(EngineError):
    """Error for a machine that sends an invalid line or does not know the token."""


class SilentError(LineError):
    """Error for a machine that sends nothing, possibly because it has too many connections."""


class Lines:
    """A connection between two machines after the handshake; several threads may send.

    Args:
        sock: the connection.
        key: both sides' key for this connection.
        is_leader: whether this is machine 0's side.
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
            OSError: the other machine is gone or receives nothing.
        """
        text = json.dumps({"kind": kind, **values}).encode()
        with self._lock:
            mac = self._mac(self._names[0], self._n_sent, text)
            self._n_sent += 1
            self._sock.sendall(mac + b" " + text + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line; None after the timeout.

        Raises:
            LineError: the received bytes are not a correctly signed line.
            OSError: the other machine is gone.
        """
        line = self._line(timeout_s)
        if line is None:
            return None
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._names[1], self._n_received, text)):
            raise LineError("A line with an invalid signature was received.")
        self._n_received += 1
        found = _object(text)
        if not isinstance(found.get("kind"), str):
            raise LineError("An unexpected kind of line was received.")
        return found

    def alive(self) -> Iterator[dict[str, Any]]:
        """Yield received lines, with heartbeats in both directions, until none arrive.

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
        """Close the connection; a waiting `receive` gets an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def lead(sock: socket.socket, token: str) -> Lines:
    """Return the lines to a joining machine after it has proven that it knows the token.

    Raises:
        LineError: it does not know the token, and is refused.
        OSError: it is gone.
    """
    sock.settimeout(HANDSHAKE_S)
    until = time.monotonic() + HANDSHAKE_S
    mine = secrets.token_hex(16).encode()
    _send(sock, {"tandem": PROTOCOL, "nonce": mine.decode()})
    reply = _object(_plain_line(sock, until))
    theirs = _text(reply, "nonce")
    if not hmac.compare_digest(_text(reply, "proof"), _proof(token, b"join", mine, theirs)):
        why = Sentence("The token is wrong.")
        _send(sock, {"refused": why})
        raise LineError(why)
    _send(sock, {"proof": _proof(token, b"lead", mine, theirs).decode()})
    return Lines(sock, _hmac(token.encode(), b"lines", mine, theirs), is_leader=True)


def join(sock: socket.socket, token: str) -> Lines:
    """Return the lines to machine 0 after both have proven that they know the token.

    Raises:
        SilentError: machine 0 sends nothing.
        LineError: a proof fails, or machine 0 does not run this version of Tandem.
        OSError: machine 0 is gone.
    """
    sock.settimeout(HANDSHAKE_S)
    until = time.monotonic() + HANDSHAKE_S
    try:
        greeting = _object(_plain_line(sock, until))
    except ConnectionResetError:
        raise SilentError(SILENT, SILENT_HINT) from None
    if "tandem" not in greeting:
        raise LineError("The server there is not `tandem serve --nodes`.")
    if greeting["tandem"] != PROTOCOL:
        raise LineError("The server runs another version of Tandem.", "Install the same version.")
    theirs, mine = _text(greeting, "nonce"), secrets.token_hex(16).encode()
    proof = _proof(token, b"join", theirs, mine)
    _send(sock, {"nonce": mine.decode(), "proof": proof.decode()})
    reply = _object(_plain_line(sock, until))
    if "refused" in reply:
        why = one_line(str(reply["refused"]), 300)
        raise LineError(why, "Use the token that the server shows.")
    if not hmac.compare_digest(_text(reply, "proof"), _proof(token, b"lead", theirs, mine)):
        raise LineError("The server there does not know the token.")
    return Lines(sock, _hmac(token.encode(), b"lines", theirs, mine), is_leader=False)


def check_token(token: str) -> str:
    """Return the token if it is long enough.

    Raises:
        EngineError: the token is too short.
    """
    if len(token) < MIN_TOKEN:
        raise EngineError("A token needs at least {n} characters.", n=MIN_TOKEN)
    return token


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """Return the parts' HMAC in hexadecimal; including lengths makes them unambiguous."""
    joined = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, joined, hashlib.sha256).hexdigest().encode()


def _proof(token: str, side: bytes, leaders: bytes, joiners: bytes) -> bytes:
    return _hmac(token.encode(), side, leaders, joiners)


def _text(found: dict[str, Any], name: str) -> bytes:
    value = found.get(name)
    if not isinstance(value, str) or len(value) > 200 or not value.isascii():
        raise LineError(NOT_TANDEM)
    return value.encode()


def _send(sock: socket.socket, value: dict[str, Any]) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")


def _plain_line(sock: socket.socket, until: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            found = sock.recv(1)
        except TimeoutError:
            if not line:
                raise SilentError(SILENT, SILENT_HINT) from None
            raise LineError("The server there is not Tandem, or does not respond.") from None
        if not found and not line:
            raise SilentError(SILENT, SILENT_HINT)
        if not found or len(line) > 1000:
            raise LineError(NOT_TANDEM)
        line += found
    return line


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LineError(NOT_TANDEM)
    return found
