"""A server of files on this machine that can do all that servers and networks do wrong."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR
from urllib.parse import urlsplit

CHUNK = 16 << 10


@dataclass
class Asked:
    """A request that has arrived."""

    host: str
    path: str
    query: str
    start: int | None
    end: int | None
    token: str


@dataclass
class Mischief:
    """What is wrong with an answer.

    Attributes:
        status: status in place of 206.
        headers: further headers, or others.
        cut_after: bytes of the body after which the connection is cut; None for none.
        stall_after: bytes after which nothing comes any more.
        pause_s: pause after each chunk.
        ignores_range: whether to send the whole file with status 200.
        body: bytes in place of those of the file.
        length: Content-Length in place of the right one.
        content_range: Content-Range in place of the right one.
        location: where to redirect to.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    stall_after: int | None = None
    pause_s: float = 0.0
    ignores_range: bool = False
    body: bytes | None = None
    length: int | None = None
    content_range: str | None = None
    location: str = ""


Plan = Callable[[Asked], Mischief | None]


class HostileServer(ThreadingHTTPServer):
    """Server of `files` by path; `plan` says what goes wrong with each request.

    Attributes:
        asked: all requests so far.
        replies: functions for paths that are no files, such as those of an API.
    """

    daemon_threads = False  # closing waits for all of them

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.replies: dict[str, Callable[[Asked], tuple[int, dict[str, str], bytes]]] = {}
        self.plan: Plan = lambda _: None
        self.asked: list[Asked] = []
        self.ended = threading.Event()
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients that hang up are part of the tests."""

    def close(self) -> None:
        self.ended.set()
        self.shutdown()
        with self.lock:  # clients keep them open for a next request, which never comes
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(SHUT_RDWR)
        self.server_close()


@contextmanager
def hostile_server() -> Iterator[HostileServer]:
    """Run a server until the end of the block."""
    server = HostileServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5.0  # for the next request of a connection
    server: HostileServer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        with suppress(OSError):  # the last bytes, for which nobody may be there
            super().finish()

    def do_GET(self) -> None:
        server = self.server
        split = urlsplit(self.path)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        asked = Asked(
            self.headers.get("host", ""), split.path, split.query,
            int(match[1]) if match else None,
            int(match[2]) + 1 if match else None, self.headers.get("authorization", ""),
        )  # fmt: skip
        with server.lock:
            server.asked.append(asked)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self._answer(asked, match)
        finally:
            with server.lock:
                server.at_once -= 1

    def _answer(self, asked: Asked, match: re.Match[str] | None) -> None:
        server = self.server
        reply = server.replies.get(asked.path)
        wrong = server.plan(asked) or Mischief()
        if wrong.location:
            self._send(302, {"Location": wrong.location, "Content-Length": "0"}, b"", wrong)
        elif wrong.status:
            body = wrong.body or b""
            headers = {"Content-Length": str(len(body)), **wrong.headers}
            self._send(wrong.status, headers, body, wrong)
        elif reply is not None:
            status, headers, body = reply(asked)
            self._send(status, {"Content-Length": str(len(body)), **headers}, body, wrong)
        elif asked.path not in server.files:
            self._send(404, {"Content-Length": "0"}, b"", wrong)
        else:
            self._send_file(server.files[asked.path], match, wrong)

    def _send_file(self, data: bytes, match: re.Match[str] | None, wrong: Mischief) -> None:
        whole = memoryview(data)  # slices of it are no copies
        start, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(whole))
        headers = {}
        if match is None or wrong.ignores_range:
            status, body = 200, whole
        elif start >= len(whole):
            self._send(416, {"Content-Length": "0"}, b"", wrong)
            return
        else:
            status, body = 206, whole[start:end]
            shown = f"bytes {start}-{start + len(body) - 1}/{len(whole)}"
            headers["Content-Range"] = wrong.content_range or shown
        body = body if wrong.body is None else memoryview(wrong.body)
        headers["Content-Length"] = str(len(body) if wrong.length is None else wrong.length)
        self._send(status, headers | wrong.headers, body, wrong)

    def _send(
        self, status: int, headers: dict[str, str], body: bytes | memoryview, wrong: Mischief
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(body), CHUNK):
            chunk = body[start : start + CHUNK]
            if wrong.cut_after is not None and start + len(chunk) > wrong.cut_after:
                self.wfile.write(chunk[: max(wrong.cut_after - start, 0)])
                self.wfile.flush()
                self.connection.shutdown(SHUT_RDWR)
                return
            if wrong.stall_after is not None and start >= wrong.stall_after:
                self.server.ended.wait(60)
                self.close_connection = True
                return
            self.wfile.write(chunk)
            if wrong.pause_s:
                time.sleep(wrong.pause_s)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
