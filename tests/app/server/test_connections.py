"""Connections: strangers that hold them keep nobody from being answered, and end no answer."""

import errno
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from app.server.settings import ServerSettings
from app.server.web import server as web_server
from tests.app.server.test_limits import ENDLESS, asking, wait_until
from tests.helpers.served import EngineOnThread, Served

WAIT_S = 30.0


def connect(served: Served, sent: bytes = b"") -> socket.socket:
    """Return a connection that has sent some bytes."""
    split = urlsplit(served.address)
    connection = socket.create_connection((split.hostname, split.port), WAIT_S)
    connection.sendall(sent)
    return connection


def ask_health(served: Served) -> httpx2.Response:
    """Return the answer to a client with a connection of its own."""
    return httpx2.get(f"{served.address}/health", trust_env=False, timeout=WAIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection."""
    connection.setblocking(False)
    try:
        while connection.recv(10_000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost:",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    ],
    ids=["silent", "half a head", "idle", "half a body"],
)
@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS", "MAX_PER_ADDRESS"])
def test_the_oldest_connection_that_does_nothing_makes_room(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch, sent: bytes, limit: str
) -> None:
    monkeypatch.setattr(web_server, limit, 4)
    with Served(demo_engine) as server, ExitStack() as stack, asking(server, ENDLESS) as answer:
        wait_until(lambda: server.context.admission.n_running == 1)
        strangers = [stack.enter_context(connect(server, sent)) for _ in range(6)]
        assert ask_health(server).status_code == 200
        wait_until(lambda: sum(map(is_closed, strangers)) >= 3)
        assert server.context.admission.n_running == 1
        assert answer.recv(1000), "the answer goes on"


def test_where_all_connections_are_of_use_a_further_one_is_told(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "MAX_PER_ADDRESS", 1)
    with Served(demo_engine) as server, asking(server, ENDLESS):
        wait_until(lambda: server.context.admission.n_running == 1)
        refused = ask_health(server)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        message = refused.json()["error"]["message"]
        assert message.startswith("There are more than 1 connections from your address.")


def test_idle_connections_are_closed_sooner_where_there_are_many(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "CROWDED_IDLE_S", 0.05)
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 3)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with Served(demo_engine) as server, connect(server), connect(server, request) as connection:
        while connection.recv(10_000):
            pass


def test_a_client_that_reads_no_answer_is_left(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "UNREAD_S", 0.1)
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with Served(demo_engine) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request * 300)
        request_log = server.context.request_log
        wait_until(lambda: bool(request_log.ended))
        wait_until(lambda: not request_log.running)


class FullListener(socket.socket):
    """A listening socket whose process may open no more files for a while."""

    n_tried = 0
    is_full = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.is_full:
            return super().accept()
        self.n_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_files_connections_wait_quietly(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[FullListener] = []
    monkeypatch.setattr(web_server, "listen", partial(listen_full, web_server.listen, made))
    monkeypatch.setattr(web_server, "NO_FILES_S", 0.01)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with caplog.at_level(logging.WARNING), Served(demo_engine) as server, connect(server) as silent:
        assert ask_health(server).status_code == 200, "the one before was taken as well"
        (listener,) = made
        listener.is_full = True
        with connect(server, request) as waiting:
            assert silent.recv(1) == b"", "it makes room"
            wait_until(lambda: listener.n_tried > 5)
            assert listener.n_tried < 50
            listener.is_full = False
            assert b" 200 " in waiting.recv(1000).partition(b"\r\n")[0]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["new connections have to wait: Too many open files"]


def listen_full(
    listen: Callable[[ServerSettings], socket.socket], made: list[FullListener],
    settings: ServerSettings,
) -> socket.socket:  # fmt: skip
    """Return a listener as the server makes it, of the class above."""
    sock = listen(settings)
    made.append(FullListener(fileno=sock.detach()))
    made[0].setblocking(False)
    return made[0]
