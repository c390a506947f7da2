"""The handshake before machines compute together: who does not know the token joins nothing."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import EngineError
from engine.hosts.machines.interfaces import parse_address
from engine.hosts.machines.joining import difference
from engine.hosts.machines.lines import LineError, Lines, check_token, join, lead

TOKEN = "a long token"


def both(
    leader: Callable[[socket.socket], Any], joiner: Callable[[socket.socket], Any]
) -> tuple[Any, Any]:
    """Return what two sides of a connection return or raise."""
    ours, theirs = socket.socketpair()
    found: dict[int, Any] = {}

    def run(number: int, side: Callable[[socket.socket], Any], sock: socket.socket) -> None:
        try:
            found[number] = side(sock)
        except (EngineError, OSError) as error:
            found[number] = error
        if not isinstance(found[number], Lines):
            sock.close()

    other = threading.Thread(target=run, args=(1, joiner, theirs))
    other.start()
    run(0, leader, ours)
    other.join(20)
    return found[0], found[1]


class Tap:
    """A connection that keeps what was sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.sent = sock, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.sock.sendall(data)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have connections without addresses do."""
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("here", 1), raising=False)
    monkeypatch.setattr(socket.socket, "getpeername", lambda self: ("there", 1), raising=False)


def test_lines_cross_both_ways_and_the_token_never_does() -> None:
    taps: list[Tap] = []

    def tapped(sock: socket.socket) -> Any:
        taps.append(Tap(sock))
        return taps[-1]

    leader, joiner = both(lambda s: lead(tapped(s), TOKEN), lambda s: join(tapped(s), TOKEN))
    leader.send("start", port=7)
    joiner.send("fault", why="x")
    assert joiner.receive(5) == {"kind": "start", "port": 7}
    assert leader.receive(5) == {"kind": "fault", "why": "x"}
    assert joiner.receive(0.01) is None
    assert all(tap.sent and TOKEN.encode() not in tap.sent for tap in taps)
    leader.close()
    with pytest.raises(OSError, match="closed"):
        joiner.receive(5)
    joiner.close()


def test_a_wrong_token_is_told_on_both_sides() -> None:
    leader, joiner = both(lambda s: lead(s, TOKEN), lambda s: join(s, "another one"))
    assert isinstance(leader, LineError)
    assert isinstance(joiner, LineError)
    assert str(joiner) == "The token is wrong."


def test_a_leader_that_does_not_know_the_token_is_left() -> None:
    def false_leader(sock: socket.socket) -> None:
        sock.sendall(b'{"tandem": 1, "nonce": "00"}\n')
        sock.recv(1000)
        sock.sendall(json.dumps({"proof": "0" * 64}).encode() + b"\n")

    _, joiner = both(false_leader, lambda s: join(s, TOKEN))
    assert "does not know the token" in str(joiner)


@pytest.mark.parametrize("line", [b"HTTP/1.1 400 Bad Request\r\n", b"{}\n", b"[1]\n", b"x" * 2000])
def test_what_is_no_tandem_is_told(line: bytes) -> None:
    _, joiner = both(lambda s: s.sendall(line), lambda s: join(s, TOKEN))
    assert isinstance(joiner, LineError)


@pytest.mark.parametrize("nonce", [r"\ud800", "\u00e9", "0" * 300])
def test_a_stranger_that_sends_odd_letters_is_refused(nonce: str) -> None:
    line = f'{{"nonce": "{nonce}", "proof": "0"}}\n'.encode()

    def stranger(sock: socket.socket) -> str:
        sock.sendall(line)
        return sock.makefile().read()

    leader, _ = both(lambda s: lead(s, TOKEN), stranger)
    assert isinstance(leader, LineError)


def test_a_handshake_ends_though_letters_go_on_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hosts.machines.lines.HANDSHAKE_S", 0.1)

    def dribble(sock: socket.socket) -> int:
        for n in range(2000):
            time.sleep(0.05)
            try:
                sock.sendall(b" ")
            except OSError:
                return n
        return 2000

    leader, n_sent = both(lambda s: lead(s, TOKEN), dribble)
    assert isinstance(leader, LineError)
    assert n_sent < 1000


def test_another_protocol_is_told() -> None:
    _, joiner = both(
        lambda s: s.sendall(b'{"tandem": 99, "nonce": "00"}\n'), lambda s: join(s, TOKEN)
    )
    assert "another version of Tandem" in str(joiner)


def test_a_line_that_was_changed_or_repeated_is_refused() -> None:
    leader, joiner = both(lambda s: lead(s, TOKEN), lambda s: join(s, TOKEN))
    tap = Tap(leader._sock)
    leader._sock = tap
    leader.send("beat")
    assert joiner.receive(5) == {"kind": "beat"}
    tap.sock.sendall(tap.sent)
    with pytest.raises(LineError, match="invalid signature"):
        joiner.receive(5)
    for lines in (leader, joiner):
        assert isinstance(lines, Lines)
        lines.close()


def test_silence_ends_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hosts.machines.lines.BEAT_S", 0.01)
    leader, joiner = both(lambda s: lead(s, TOKEN), lambda s: join(s, TOKEN))
    assert list(joiner.alive()) == []
    leader.close()
    joiner.close()


def test_other_versions_are_named() -> None:
    ours = {"Tandem": "1.0", "PyTorch": "2.13.0", "byte order": "little"}
    assert not difference(ours, dict(ours))
    theirs = {**ours, "PyTorch": "2.12.1"}
    assert difference(ours, theirs) == "It has PyTorch 2.12.1, but this machine has 2.13.0."


def test_addresses_are_read() -> None:
    assert parse_address("10.0.0.1:5", 7) == ("10.0.0.1", 5)
    assert parse_address("box", 7) == ("box", 7)
    assert parse_address("[fe80::1]:5", 7) == ("fe80::1", 5)
    assert parse_address("::1", 7) == ("::1", 7)
    for wrong in ("", ":5", "a:b", "a:70000"):
        with pytest.raises(EngineError):
            parse_address(wrong, 7)
    with pytest.raises(EngineError, match="characters"):
        check_token("short")
