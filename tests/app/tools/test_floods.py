"""Servers that take too much of the machine: floods, endless and compressed answers, orphans."""

import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.tools import transports as floods
from app.tools.server_store import ToolLimits, ToolServer, ToolServerState
from tests.helpers.tool_hubs import plain_server, watched_hub

# of streams that the package leaves to be collected when a connection is lost
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PAUSELESS = "flood sent too many messages, so it was stopped."
LARGE = "flood sent a message of more than 8 MiB, so it was stopped."


@pytest.mark.parametrize("way", ["rubbish lines", "list_changed", "requests"])
def test_a_flood_of_messages_is_slowed_down_and_ended(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(floods, "FLOOD_S", 1.0)
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    state, cpu_s = _ended(plain_server("flood", f"flood={way}"))
    assert state.problem == PAUSELESS
    assert cpu_s < 20


def test_a_line_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    before = psutil.Process().memory_info().rss
    state, _ = _ended(plain_server("flood", "flood=line"))
    assert state.problem == LARGE
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_of_too_many_tools_the_first_are_listed() -> None:
    with watched_hub(ToolLimits(most_tools=100)) as hub:
        (state,) = hub.settled(plain_server(way="tools=50000"))
    assert (state.status, len(state.tools)) == ("ready", 100)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/endless", LARGE), ("/events", PAUSELESS),
        ("/gzip", "flood sends compressed responses although the request forbids them."),
    ],
)  # fmt: skip
def test_an_endless_answer_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.setattr(floods, "FLOOD_S", 0.5)
    monkeypatch.setattr("app.tools.transports.BYTES_AT_ONCE", 1 << 20)
    before = psutil.Process().memory_info().rss
    with _hostile_server() as address:
        state, _ = _ended(ToolServer("flood", url=address + path))
    assert state.problem == problem
    assert psutil.Process().memory_info().rss - before < 200 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="others have no reaper of orphans")
def test_children_in_sessions_of_their_own_are_ended(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with watched_hub() as hub:
        hub.settled(plain_server(way=f"setsid={noted}"))
        pids = json.loads(noted.read_text())
        assert len(pids) == 10
        for pid in pids:
            os.kill(pid, 0)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="others have no reaper of orphans")
def test_they_are_ended_if_the_program_dies(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with watched_hub() as hub:
        hub.settled(plain_server(way=f"setsid={noted}"))
        assert hub.call("plain__die").is_error
        hub.wait(lambda: hub.state("plain").status == "failed")
        pids = json.loads(noted.read_text())
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def _ended(server: ToolServer) -> tuple[ToolServerState, float]:
    """Return the state of a server that was ended, and what that took of this process's time."""
    start = time.process_time()
    with watched_hub(ToolLimits(start_s=60)) as hub:
        hub.hub.set_servers([server])
        hub.wait(lambda: hub.state(server.name).status == "failed")
        return hub.state(server.name), time.process_time() - start


class _Endless(BaseHTTPRequestHandler):
    """Answers that do not end, until the client goes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        is_stream = self.path == "/events"
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        if self.path == "/gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        piece = {"/endless": b'{"x": "' + b"x" * 65536, "/events": b": ping\n\n" * 8192}.get(
            self.path, gzip.compress(bytes(50 << 20))
        )
        try:
            while self.path != "/gzip":
                self.wfile.write(piece)
            self.wfile.write(piece)
        except OSError:
            pass

    do_GET = do_POST  # noqa: N815 names of the standard library

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def _hostile_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
